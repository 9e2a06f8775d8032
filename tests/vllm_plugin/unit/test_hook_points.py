"""The list of hook points names whatever of vLLM's the plug-in replaces, calls or imports."""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest
from building import ROOT
from kvtxn.integrations.serving.source_files import Sources
from kvtxn.integrations.vllm_plugin.policy import doctor, release_records, supported
from kvtxn.integrations.vllm_plugin.seam import (
    audited_requests,
    batches,
    layers,
    state_layers,
    workers,
)
from kvtxn.integrations.vllm_plugin.seam.hook_points import HOOK_POINTS, PLACES, places_of
from kvtxn.integrations.vllm_plugin.seam.hooks import check_methods

PLUGIN = ROOT / "integrations" / "vllm_plugin"
#: What benchmarks alone call: a release that lacks it serves all the same.
MEASURED = {PLUGIN / "seam" / "measuring.py"}
FILES = sorted(set(PLUGIN.rglob("*.py")) - MEASURED)
NAMES = [name for place in PLACES for name in HOOK_POINTS[place]]
WORDS = {word for name in NAMES for word in name.split(".")}
#: vLLM's public interface, and its switches by name, each asked for with a default.
PUBLIC = {
    *("vllm", "SamplingParams", "TokensPrompt", "RequestOutputKind", "current_platform", "envs"),
    *("EngineArgs", "AsyncEngineArgs", "StreamingInput", "RequestError", "register_backend"),
    *("OffloadingWorker", "TransferResult", "CPUOffloadingSpec", "CUDAGraphMode"),
}
#: Methods of ``KVConnectorBase_V1``, which connectors of other projects implement.
CONNECTORS = {
    *("bind_connector_metadata", "wait_for_save", "handle_preemptions", "get_finished"),
    *("get_block_ids_with_load_errors", "get_transfer_results"),
}
#: Functions without parameters, and classes of which only the type is looked at: the import fails
#: in a release without them.
IMPORTED = {
    *("get_forward_context", "get_tp_group", "get_pp_group", "get_kv_transfer_group"),
    *("has_kv_transfer_group", "is_conv_state_dim_first", "AttentionBackendEnum"),
    *("Attention", "MLAAttention", "AttentionSpec", "AttentionType", "FullAttentionSpec"),
}


def overridden(source):
    """Names of methods that run the method of the same name of a class above them.

    Left out are those of which a class of the same file is the one above: they are the project's.
    """
    found, tree = set(), ast.parse(source)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for each in classes.values():
        for method in methods_of(each):
            if not method.name.startswith("kvtxn") and runs_the_one_above(method):
                above = [classes.get(ast.unparse(base).partition("[")[0]) for base in each.bases]
                named = {own.name for base in above if base for own in methods_of(base)}
                found |= {method.name} - named
    return found


def methods_of(owner):
    return [node for node in owner.body if isinstance(node, ast.FunctionDef)]


def runs_the_one_above(method):
    """Whether a method has ``super().NAME``, NAME being its own."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == method.name
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "super"
        for node in ast.walk(method)
    )


def replaced(source):
    """Names of classes' methods that are replaced: ``replace_method(owner, "name", ...)``."""
    return {
        node.args[1].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "replace_method"
    }


def imported(source):
    """What a file imports from vLLM, by its own name there."""
    return {
        alias.name.rpartition(".")[2]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "vllm"
    }


def test_a_planted_hook_is_found():
    source = "class A:\n def step(self, x):\n  return super().step(x)\n def own(self): pass"
    assert overridden(source) == {"step"}
    source = "class B(A[int]):\n def step(self): super().step()\n def own(self): super().own()"
    assert overridden(f"class A:\n def step(self): pass\n{source}") == {"own"}
    assert replaced('replace_method(Wrapper, "init", make, "them")\nother(1, "it")') == {"init"}
    assert imported("def f():\n from vllm.a import b as c, d\n import vllm.e") == {"b", "d", "e"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PLUGIN).as_posix())
def test_what_a_file_hooks_or_imports_is_a_hook_point(path):
    source = path.read_text()
    methods = {name.rpartition(".")[2] for name in NAMES}
    assert overridden(source) <= methods | CONNECTORS
    assert replaced(source) <= methods
    assert imported(source) <= WORDS | PUBLIC | IMPORTED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PLUGIN).as_posix())
def test_no_file_of_the_plug_in_calls_what_is_measured(path):
    names = {alias.name for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
    assert not names & {path.stem for path in MEASURED}


def test_the_hooks_of_each_kind_are_seen():
    """The rules above would hold of files in which they find nothing."""
    everything = [path.read_text() for path in FILES]
    assert len(set().union(*map(overridden, everything))) > 15
    assert len(set().union(*map(imported, everything))) > 25
    assert {"__init__", "init_device"} == set().union(*map(replaced, everything))


def test_places_are_those_of_a_device():
    assert places_of("cpu") == ("all", "cpu", "states")
    assert places_of("cuda") == ("all", "gpu", "states", "states on gpu")
    assert set(places_of("xpu")) == set(PLACES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("release", release_records.load(), ids=lambda release: release.version)
def test_a_release_is_recorded_with_the_hooks_that_it_needs(release):
    """A new hook has to be recorded for every release: CONTRIBUTING.md says how."""
    lacks = set(NAMES) - set(release.hooks)
    known = {
        "vllm.v1.attention.backends.mla.amx_mla.AMXMLAImpl.do_kv_cache_update",  # since 0.29
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config.get_offloading_group_ids",
        "vllm.v1.worker.gpu.kv_connector.ActiveKVConnector.finalize_step",  # since 0.33
        "vllm.model_executor.layers.attention.mla_attention.MLAAttention.update_kv_cache",  # 0.31
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_mamba_state_copy_funcs",  # 0.29
        "vllm.v1.worker.gpu_worker.Worker.discard",  # 0.31
    }
    assert lacks <= known
    assert set(release.hooks) <= set(NAMES)


_WORKER = "vllm.v1.worker"
_V1 = f"{_WORKER}.gpu_model_runner.GPUModelRunner"
OVERRIDDEN = {
    _V1: batches.V1_METHODS | batches.V1_GPU_METHODS,
    f"{_WORKER}.gpu.model_runner.GPUModelRunner": batches.V2_METHODS,
    "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl": layers.ATTENTION_METHODS,
    "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl": layers.LATENT_METHODS,
}
#: Releases that have windows.
WITH_WINDOWS = [each for each in release_records.load() if "audit" not in each.checked]


@pytest.mark.parametrize("release", WITH_WINDOWS, ids=lambda release: release.version)
@pytest.mark.parametrize("owner", OVERRIDDEN)
def test_the_mixins_take_what_each_release_with_windows_passes(owner, release):
    """The parameters that mixins expect are those that were recorded of every such release."""
    hooks, methods = release.hooks, OVERRIDDEN[owner]
    told = {name: ", ".join(("self", *hooks[f"{owner}.{name}"].takes)) for name in methods}
    made = {name: eval(f"lambda {takes}: None") for name, takes in told.items()}
    assert check_methods(type("Recorded", (), made), methods) is None


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_release_is_as_it_was_recorded():
    version = Sources(workers.source_folder()).version_of("vllm")
    if version not in supported.RELEASES:
        pytest.skip(f"vLLM {version} was not checked")
    for device in ("cpu", "cuda"):
        if doctor.is_checked(version, device):
            found = doctor.compare(version, device)
            assert (found.version, found.moves) == (version, ())
            assert found.compared > 40


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_one_runner_stands_for_both():
    """The V1 runner on a CPU inherits what is recorded of the one on a GPU."""
    sources, cpu = Sources(workers.source_folder()), f"{_WORKER}.cpu_model_runner.CPUModelRunner"
    own = {name for name in batches.V1_METHODS if f"{cpu}.{name}" in NAMES}
    assert own == {"initialize_kv_cache"}
    for name in {
        *batches.V1_METHODS,
        *audited_requests.AUDITED_METHODS,
        *state_layers.METHODS,
    } - own:
        assert sources.find(f"{cpu}.{name}") == sources.find(f"{_V1}.{name}") is not None
