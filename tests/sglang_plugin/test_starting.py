"""AuditSettings, hook points and rules: what is refused, and with which sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from kvtxn.integrations.serving import audit_settings
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import doctor, plugin, starting, supported
from kvtxn.integrations.sglang_plugin.seam import engine_facts, hook_points
from kvtxn.integrations.sglang_plugin.seam.engine_facts import EngineFacts
from kvtxn.integrations.sglang_plugin.settings import ELSEWHERE, read_settings
from kvtxn.integrations.vllm_plugin.policy import settings as of_vllm
from toy_pools import WINDOW, MHATokenToKVPool
from toy_sglang import ToySglang
from toy_states import ToyHybrid

from kvtxn import ConfigError, KVTxnError
from kvtxn.doctor import LACKS

# -- settings --------------------------------------------------------------------------------


def test_settings_are_read():
    given = {"audit": "ledger", "on_violation": "raise", "stale": "alarm", "weights_every": 7}
    given |= {
        "audit": "bytes",
        "audit_every": 3,
        "record": True,
        "log_tokens": True,
        "required": True,
    }
    assert attrs.asdict(read_settings(json.dumps(given))) == given
    assert read_settings("{}") == AuditSettings()


def test_each_setting_of_the_plugin_for_vllm_works_or_says_why_not():
    """The same words in both engines."""
    theirs = {field.name for field in attrs.fields(of_vllm.PluginSettings)} - {"txn", "windows"}
    ours = {field.name for field in attrs.fields(AuditSettings)}
    assert theirs | {"policy"} == ours | ELSEWHERE.keys()
    for name in ours & {"audit", "on_violation", "stale"}:
        for value in getattr(audit_settings, {"audit": "AUDITS"}.get(name, name.upper())):
            try:
                found = read_settings(json.dumps({"audit": "ledger", name: value}))
                assert getattr(found, name) == value
            except ConfigError as error:
                assert f"{name} {value!r} does not work beside SGLang: " in str(error)  # noqa: PT017


WRONG = {
    "no JSON": ("audit", "expected a JSON object, got 'audit'"),
    "no object": ("[1]", "expected a JSON object"),
    "misspelled": ('{"audits": "ledger"}', "there is no setting 'audits'"),
    "of vLLM": ('{"policy": "auto"}', "policy does not work beside SGLang: kvtxn opens no windows"),
    "a value of vLLM": (
        '{"stale": "contain"}',
        "stale 'contain' does not work beside SGLang: its radix tree",
    ),
    "no bytes": (
        '{"audit": "ledger", "audit_every": 3}',
        "has no effect without an audit of bytes",
    ),
    "no audit": ('{"on_violation": "raise"}', "on_violation has no effect without an audit"),
    "no audit any more": ('{"audit": "off", "record": true}', "record has no effect without an"),
    "no value": (
        '{"on_violation": "stop"}',
        "expected one of 'log', 'raise', 'contain', got 'stop'",
    ),
    "no number": ('{"weights_every": 0}', "weights_every is not valid"),
    "no flag": ('{"record": "yes"}', "expected true or false, got 'yes'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_ends_the_start_with_a_sentence(monkeypatch, case):
    """SGLang would log an exception of a plug-in, and go on."""
    text, sentence = WRONG[case]
    monkeypatch.setenv(plugin.VARIABLE, text)
    with pytest.raises(SystemExit) as ended:
        plugin.register()
    assert sentence in str(ended.value)
    assert str(ended.value).startswith("kvtxn: KVTXN_SGLANG: ")


@pytest.mark.parametrize("text", ["", "{}", '{"audit": "off"}'])
def test_without_an_audit_nothing_is_hooked(monkeypatch, text):
    monkeypatch.setenv(plugin.VARIABLE, text)
    hooked = []
    monkeypatch.setattr(hook_points, "hook", hooked.append)
    plugin.register()
    assert hooked == []


def test_without_the_variable_nothing_heavy_is_imported():
    """Nor SGLang, nor the ledger."""
    code = "import sys, kvtxn.integrations.sglang_plugin as p; before = {*sys.modules}; "
    code += "p.register(); print(sorted({*sys.modules} - before), 'sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


# -- hook points -----------------------------------------------------------------------------

#: Signatures of SGLang 0.5.23, as its sources have them.
SOURCES = {
    "srt/model_executor/model_runner.py": "class ModelRunner:\n"
    "    def forward(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None,\n"
    "                reinit_attn_backend=False, split_forward_count=1): ...\n",
    "srt/managers/scheduler.py": "class Scheduler:\n"
    "    def __init__(self, server_args, port_args): ...\n"
    "    @stage('run')\n    def run_batch(self, batch, pp_proxy_tensors=None): ...\n"
    "    def flush_cache(self, empty_cache=True): ...\n"
    "    def process_batch_result(self, batch, result): ...\n"
    "    def get_next_batch_to_run(self, running_batch, last_batch): ...\n"
    "    def get_internal_state(self, recv_req): ...\n",
    "srt/managers/scheduler_components/weight_updater.py": "class SchedulerWeightUpdaterManager:\n"
    "    def flush_cache_after_weight_update(self, recv_req): ...\n",
    "srt/mem_cache/common.py": "def release_kv_cache(req, tree_cache, *, checkpoint): ...\n",
    "srt/managers/schedule_batch.py": "def retract_all(*, reqs, req_to_token_pool,\n"
    "    token_to_kv_pool_allocator, tree_cache, hisparse_coordinator, offload_kv=True): ...\n",
    "srt/disaggregation/utils.py": "def prepare_abort(req, error_message, status_code=None): ...\n",
    "srt/managers/scheduler_components/batch_result_processor.py": (
        "class SchedulerBatchResultProcessor:\n"
        "    def process_batch_result_decode(self, batch, result): ...\n"
    ),
    "srt/observability/req_time_stats.py": "class SchedulerReqTimeStats:\n"
    "    def set_wait_queue_entry_time(self, ts=None): ...\n",
    "srt/managers/tp_worker.py": "class TpModelWorker:\n"
    "    def forward_batch_generation(self, batch, forward_batch=None, pp_proxy_tensors=None,\n"
    "                                 is_verify=False, *, return_kv_loc_plan=False): ...\n",
}


@pytest.fixture
def release(tmp_path):
    """Writes a release of SGLang, as far as its hook points go."""

    def write(**changed) -> Path:
        for name, text in SOURCES.items():
            file = tmp_path / "sglang" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            stem = file.stem
            for old, new in changed.get(stem, {}).items():
                text = text.replace(old, new)
            file.write_text(text)
        hook_points._sources.cache_clear()
        return tmp_path / "sglang"

    return write


def test_the_hook_points_of_a_known_release_fit(release):
    where = release()
    assert hook_points.moved(where=where) == []
    assert hook_points.moved(hook_points.OPTIONAL, where) == []
    assert hook_points.moved(hook_points.CONTAINING, where) == []


MOVED = {
    "a method is gone": (
        {"scheduler": {"def run_batch": "def run_a_batch"}},
        "Scheduler.run_batch is gone",
    ),
    "a parameter is another": (
        {"model_runner": {"forward_batch,": "batch,"}},
        "ModelRunner.forward takes (batch, skip_attn_backend_init, pp_proxy_tensors, "
        "reinit_attn_backend, split_forward_count)",
    ),
    "a module is gone": ({"common": {"def release_kv_cache": "def free"}},
                         "common.release_kv_cache is gone"),
    "a file cannot be read": ({"tp_worker": {"class": "clas s"}},
                              "TpModelWorker.forward_batch_generation is gone"),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_a_hook_point_that_moved_is_named(release, case):
    changed, sentence = MOVED[case]
    assert hook_points.moved(where=release(**changed)) == [sentence]


def test_without_sglang_every_hook_point_is_gone(tmp_path):
    assert len(hook_points.moved(where=tmp_path)) == len(hook_points.HOOK_POINTS)


@pytest.mark.parametrize("required", [True, False])
def test_a_release_whose_hook_points_moved_is_left_alone(monkeypatch, release, caplog, required):
    """With one sentence, unless the user wants no engine without the audit."""
    where = release(scheduler={"def run_batch": "def run_a_batch"})
    monkeypatch.setattr(hook_points, "folder", lambda: where)
    monkeypatch.setattr(hook_points, "hook", lambda around: pytest.fail("hooked"))
    text = json.dumps({"audit": "ledger", "required": required})
    if required:
        with pytest.raises(SystemExit, match=r"Scheduler\.run_batch is gone"):
            starting.start(text)
        return
    starting.start(text)
    assert "Scheduler.run_batch is gone" in caplog.text
    assert "runs as if kvtxn were not there" in caplog.text


def test_a_known_release_is_hooked(monkeypatch, release):
    where, around = release(), {}
    monkeypatch.setattr(hook_points, "folder", lambda: where)
    monkeypatch.setattr(hook_points, "hook", around.update)
    starting.start('{"audit": "ledger"}')
    worker = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    expected = {*hook_points.HOOK_POINTS, *hook_points.OPTIONAL} - {worker}
    assert around.keys() == expected
    starting.start('{"audit": "ledger", "on_violation": "contain"}')
    assert around.keys() == {*expected, *[*hook_points.CONTAINING][:2]}


# -- which engines are watched ----------------------------------------------------------------

WINDOWS_OF = {
    "rows": "SWAKVPool",
    "inside": ("MHATokenToKVPool",) * 2,
    "slots": "SWATokenToKVPoolAllocator",
    "window": 127,
}

REFUSED = {
    "a CPU": (EngineFacts(device="cpu"), "'cpu' is not followed"),
    "windows of other rows": (
        EngineFacts(rows="SWAKVPool", inside=("MHATokenToKVPool", "DSATokenToKVPool")),
        "the rows of DSATokenToKVPool",
    ),
    "windows in one space": (
        EngineFacts(**WINDOWS_OF | {"slots": "TokenToKVPoolAllocator"}),
        "the slots of TokenToKVPoolAllocator are not known",
    ),
    "windows of unknown size in all layers": (
        EngineFacts(**WINDOWS_OF | {"slots": "PureSWATokenToKVPoolAllocator", "window": None}),
        "the size of the sliding windows is not known",
    ),
    "a pool of pools that does not say which": (
        EngineFacts(rows="HybridLinearKVPool"),
        "the rows of HybridLinearKVPool",
    ),
    "another pool": (EngineFacts(rows="DSATokenToKVPool"), "the rows of DSATokenToKVPool"),
    "another allocator": (EngineFacts(slots="Another"), "the slots of Another are not known"),
    "another table": (EngineFacts(table="Another"), "the table Another is not known"),
    "another drafter": (
        EngineFacts(algorithm="DFLASH"),
        "the drafts of DFLASH are not followed yet",
    ),
    "embeddings": (EngineFacts(samples=False), "samples no tokens"),
    "HiCache": (EngineFacts(settings=frozenset(["enable_hierarchical_cache"])), "HiCache"),
    "stages": (EngineFacts(settings=frozenset(["pp_size"])), "pipeline stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_that_is_not_watched(case):
    facts, sentence = REFUSED[case]
    assert sentence in str(supported.cannot_watch(facts))


@pytest.mark.parametrize("rows", ["MHATokenToKVPool", "MLATokenToKVPool"])
@pytest.mark.parametrize(
    ("algorithm", "topk", "trees"),
    [("NONE", 1, False), ("EAGLE", 1, False), ("EAGLE3", 4, True), ("NGRAM", 1, True)],
)
def test_an_engine_that_is_watched(rows, algorithm, topk, trees):
    facts = EngineFacts(rows=rows, algorithm=algorithm, topk=topk)
    assert supported.cannot_watch(facts) is None
    assert facts.trees == trees


HYBRID = {
    "rows": "HybridLinearKVPool",
    "inside": ("MHATokenToKVPool",),
    "slots": "TokenToKVPoolAllocator",
    "table": "HybridReqToTokenPool",
    "states": "GDNAttnBackend",
}
LEFT_OUT = {
    "none": ({}, {}),
    "chunks": ({"chunked": True}, {"group.1": "attention by chunks"}),
    "several": ({"windows": True}, {"group.1": "windows of several sizes"}),
    "unknown": ({"window": None}, {"group.1": "size of the sliding windows"}),
    "states": (HYBRID, {}),
    "Mamba-2": ({**HYBRID, "states": "Mamba2AttnBackend"}, {}),
    "other states": ({**HYBRID, "states": "Another"}, {"group.2": "states of Another are not"}),
    "states of a ring": (
        {**HYBRID, "settings": frozenset(["enable_linear_replayssm_spec"])},
        {"group.2": "states that a replay ring holds are not followed"},
    ),
    "drafts that adapt": (
        {**HYBRID, "settings": frozenset(["speculative_adaptive"])},
        {"group.2": "where the number of drafts adapts"},
    ),
    "copies of states": ({**HYBRID, "copies": True}, {"group.2": "in another format"}),
    "late slots": ({**HYBRID, "strategy": "extra_buffer_lazy"}, {"group.2": "during a step"}),
    "no commit": ({**HYBRID, "commits": False}, {"group.2": "out of the drafts'"}),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_groups_that_are_left_out_of_an_engine_that_is_watched(case):
    more, expected = LEFT_OUT[case]
    facts = EngineFacts(**WINDOWS_OF | more)
    assert supported.cannot_watch(facts) is None
    found = supported.left_out(facts)
    assert found.keys() == expected.keys()
    assert all(sentence in found[name] for name, sentence in expected.items())


def test_the_facts_of_a_hybrid():
    toy, names = ToyHybrid(drafts=3), frozenset(supported.STATE_SETTINGS)
    found = engine_facts.facts(toy, names)
    more = {"strategy": "extra_buffer", "window": WINDOW, "algorithm": "EAGLE"}
    assert found == EngineFacts(**HYBRID | more | {"device": "cpu"})
    toy.backend.linear_attn_backend.accept_lens_pool = torch.zeros(1)
    toy.server_args.enable_linear_replayssm_spec = True
    found = engine_facts.facts(toy, names)
    assert not found.commits
    assert found.settings == {"enable_linear_replayssm_spec"}


def test_the_facts_of_an_engine_with_windows():
    found = engine_facts.facts(ToySglang(kind="windows"), frozenset())
    assert found == EngineFacts(**{**WINDOWS_OF, "device": "cpu", "window": WINDOW})


def test_the_facts_of_an_engine():
    toy = ToySglang(drafts=3)
    names = frozenset(supported.SETTINGS)
    found = engine_facts.facts(toy, names)
    assert found == EngineFacts(device="cpu", algorithm="EAGLE", window=WINDOW)
    toy.server_args = SimpleNamespace(
        pp_size=2, dcp_size=1, disaggregation_mode="null", enable_lmcache=True, dllm_algorithm=None
    )
    assert engine_facts.facts(toy, names).settings == {"pp_size", "enable_lmcache"}


def test_the_rows_of_an_encoder_are_not_followed():
    """SGLang puts their slots in front of those of the tokens, whose positions begin at 0."""
    toy = ToySglang()
    toy.model_config.is_encoder_decoder = True
    found = attrs.evolve(engine_facts.facts(toy, frozenset()), device="cuda")
    assert "rows of an encoder" in supported.cannot_watch(found)


def test_facts_are_of_the_resolved_arguments():
    """Newer releases keep what the user has given as it is."""
    toy, resolved = ToySglang(drafts=3), {"speculative_eagle_topk": 4, "enable_dp_attention": True}
    toy.server_args = SimpleNamespace(
        speculative_eagle_topk=None, enable_dp_attention=False, resolved_dict=lambda: resolved
    )
    found = engine_facts.facts(toy, frozenset(supported.SETTINGS))
    assert (found.topk, found.trees, found.settings) == (4, True, {"enable_dp_attention"})


@pytest.mark.parametrize("required", [True, False])
def test_an_engine_that_cannot_be_watched_runs_as_it_is(caplog, required):
    """Its scheduler hears one sentence."""
    hooks = starting.Hooks(AuditSettings(audit="ledger", required=required))
    toy = ToySglang(hooks.around(), seed=3)
    if required:
        with pytest.raises(starting.RequiredError, match="'cpu' is not followed"):
            toy.serve(3)
        return
    toy.serve(3)
    assert len(toy.done) == 3
    assert hooks.report() is None
    assert len([each for each in caplog.messages if "audit_inactive" in each]) == 1


def without(name):
    """Take an attribute away from the forward's batch, as another release may."""
    return lambda batch: delattr(batch.forward_batch, name)


def shorter(batch):
    batch.forward_batch.seq_lens = batch.forward_batch.seq_lens[:-1]


def another_mode(batch):
    batch.forward_batch.forward_mode.name = "SPLIT_PREFILL"


def a_tree(batch):
    batch.forward_batch.spec_info.topk = 2


#: What ends the audit: a change of a step that decodes, and a part of the sentence that is logged.
ENDS = {
    "lengths of other requests": (shorter, "different numbers of requests or rows"),
    "a mode of another kind": (another_mode, "a step of an unknown kind has written rows"),
    "a tree that no setting tells of": (a_tree, "drafts form a tree"),
    "no names": (without("rids"), "rids"),
    "no mode": (without("forward_mode"), "forward_mode"),
    "no lengths": (without("seq_lens"), "seq_lens"),
    "no drafts": (without("spec_info"), "spec_info"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_step_that_nobody_understands_ends_the_audit_alone(hooks, caplog, case):
    """The scheduler goes on, and the log has one sentence; rows of such a step are unknown."""
    toy = ToySglang(hooks.around(), drafts=3, seed=3)
    change, why = ENDS[case]
    changed = []

    def fault(toy, batch):
        if not changed and toy.events["steps"] > 8 and batch.forward_batch.spec_info is not None:
            changed.append(change(batch))

    toy.fault = fault
    toy.serve(6)
    assert changed
    assert len(toy.done) == 6
    assert hooks.report()["counters"]["kvtxn_audit_active"] == 0
    (said,) = [each for each in map(str, caplog.messages) if "audit_inactive" in each]
    assert why in said


def test_a_result_of_another_kind_ends_the_audit_alone(hooks):
    toy = ToySglang(hooks.around(), drafts=3, seed=3)
    generate = toy.model_worker.forward_batch_generation

    def generates(batch, **more):
        result = generate(batch, **more)
        if toy.events["steps"] == 9:
            del result.delay_sample_func
        return result

    toy.model_worker.forward_batch_generation = generates
    toy.serve(6)
    assert len(toy.done) == 6
    assert hooks.report()["counters"]["kvtxn_audit_active"] == 0


def test_moves_that_are_told_in_another_way_end_the_audit_alone(hooks, monkeypatch):
    """The pool moves its rows as before."""
    own = MHATokenToKVPool.move_kv_cache
    monkeypatch.setattr(
        MHATokenToKVPool, "move_kv_cache", lambda pool, *slots, layers=None: own(pool, *slots)
    )
    toy = ToySglang(hooks.around(), drafts=5, trees=True, seed=3)
    pool, moved = toy.token_to_kv_pool_allocator.get_kvcache(), []

    def fault(toy, batch):
        if toy.events["steps"] > 9 and batch.moves is not None:
            target, source = batch.moves
            pool.move_kv_cache(target, source, layers=range(2))
            moved.append(batch)

    toy.fault = fault
    toy.serve(6)
    assert moved
    assert len(toy.done) == 6
    assert hooks.report()["counters"]["kvtxn_audit_active"] == 0


def test_an_error_of_the_forward_is_the_engines(hooks, monkeypatch):
    """It comes through, and the rows of that forward are nobody's."""
    toy = ToySglang(hooks.around(), seed=3)

    def fault(toy, batch):
        if toy.events["steps"] == 5:
            batch.forward_batch.fails = True

    toy.fault = fault
    with pytest.raises(ArithmeticError):
        toy.serve(6)
    assert hooks.report()["counters"]["kvtxn_audit_active"] == 1
    assert hooks.report()["violations"] == []


def test_a_wrong_row_ends_the_scheduler_if_the_user_asks_for_it(on_a_cpu):
    """With an error that names the row."""
    hooks = starting.Hooks(AuditSettings(audit="ledger", on_violation="raise"))
    toy = ToySglang(hooks.around(), seed=3)

    def fault(toy, batch):
        if toy.events["steps"] == 5:
            batch.forward_batch.out_cache_loc[0] = 0

    toy.fault = fault
    with pytest.raises(KVTxnError, match=r"audit: .* read slot"):
        toy.serve(30)


def test_the_state_of_a_scheduler_has_the_report(monkeypatch, hooks, release):
    """As ``/server_info`` shows it."""
    where = release()
    monkeypatch.setattr(hook_points, "folder", lambda: where)
    around = hooks.around()
    state = next(hook for name, hook in around.items() if name.endswith("get_internal_state"))
    toy = ToySglang(around, seed=3)
    toy.serve(3)
    output = state(lambda scheduler, request: SimpleNamespace(internal_state={"a": 1}), toy, None)
    assert output.internal_state["a"] == 1
    assert output.internal_state["kvtxn"]["counters"]["kvtxn_audit_active"] == 1
    json.dumps(output.internal_state)


# -- the doctor ------------------------------------------------------------------------------


def test_the_doctor_says_that_sglang_is_not_there(monkeypatch):
    monkeypatch.setattr(hook_points, "release", lambda: None)
    assert doctor.report(None) == {"version": "SGLang is not installed"}


def test_the_doctor_says_whether_the_hooks_fit(monkeypatch, release):
    """And what the settings come to."""
    where = release()
    monkeypatch.setattr(hook_points, "release", lambda: "0.5.23")
    monkeypatch.setattr(hook_points, "folder", lambda: where)
    found = doctor.report({"model": "of vLLM"})
    assert found["version"].startswith("0.5.23 (")
    assert found["hook points"] == "as expected"
    assert "can watch" in found["audit"]
    assert "is not set" in found["settings"]
    assert LACKS not in found
    monkeypatch.setenv(plugin.VARIABLE, '{"audits": "ledger"}')
    found = doctor.report(None)
    assert "there is no setting 'audits'" in found["settings"]
    assert found[LACKS] == ["a start, since the settings are not valid"]
    monkeypatch.setenv(plugin.VARIABLE, '{"audit": "ledger"}')
    found = doctor.report(None)
    assert "audit='ledger'" in found["settings"]
    assert LACKS not in found
    release(scheduler={"def flush_cache": "def flush", "def get_internal_state": "def state"})
    found = doctor.report(None)
    assert found["hook points"] == ["Scheduler.flush_cache is gone"]
    assert found["left out"] == ["Scheduler.get_internal_state is gone"]
    assert "cannot watch" in found["audit"]
    assert found[LACKS] == ["audit ledger"]
