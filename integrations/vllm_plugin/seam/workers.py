"""vLLM's release, platform and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ....errors import KVTxnError
from . import Foreign
from .hooks import follow, precede, replace_method, shadow, when_imported

if TYPE_CHECKING:  # vLLM's processes that register kvtxn import no more than they need
    from .engine_protocols import VllmConfig, Worker, WorkerWrapper

# Names of the methods that kvtxn gives to vLLM's workers, called by ``collective_rpc``.
#: Returns a worker's counters.
SNAPSHOT: Final = "kvtxn_snapshot"
#: Returns what its audit found.
REPORT: Final = "kvtxn_audit_report"
#: Returns the life of every slot, if the audit records it.
RECORDING: Final = "kvtxn_audit_recording"
#: Returns the rows of earlier weights that each request has read.
AGES: Final = "kvtxn_audit_ages"
#: Tells its audit that weights have changed.
NEW_WEIGHTS: Final = {"target": "kvtxn_new_weights", "drafter": "kvtxn_new_draft_weights"}
#: All of them.
ANSWERS: Final = (SNAPSHOT, REPORT, RECORDING, AGES, *NEW_WEIGHTS.values())


def version() -> str:
    """Return vLLM's release, without a build suffix such as ``+cpu``."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def source_folder() -> Path:
    """Return the folder in which the installed package ``vllm`` lies; nothing is imported.

    Raises:
        KVTxnError: it is not installed.
    """
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise KVTxnError("vllm", "the package is not installed", hint="pip install vllm")
    return Path(found.origin).parent.parent


def device_type() -> str:
    """Return the type of the device that vLLM would run on here, such as "cpu" or "cuda"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def hook_workers(
    after_init_device: Callable[[WorkerWrapper], None],
    methods: Mapping[str, Callable[[WorkerWrapper], object]],
) -> Callable[[], None]:
    """Call a function in every worker once it has a model runner, and add methods for RPC.

    vLLM's module of workers is hooked once it is imported.

    Args:
        after_init_device: the function; what it raises ends the worker's start.
        methods: by name. The first parameter of each is the worker's wrapper.

    Returns:
        A function that undoes it.
    """

    def then(original: Callable[..., object]) -> Callable[..., object]:
        def init_device(self: WorkerWrapper, *args: Any, **kwargs: Any) -> object:
            result = original(self, *args, **kwargs)
            after_init_device(self)
            return result

        return init_device

    def hook(module: ModuleType) -> Callable[[], None]:
        Wrapper = module.WorkerWrapperBase
        undo_method = replace_method(Wrapper, "init_device", then, "workers")
        for name, method in methods.items():
            setattr(Wrapper, name, method)

        def undo() -> None:
            undo_method()
            for name in methods:
                delattr(Wrapper, name)

        return undo

    return when_imported("vllm.v1.worker.worker_base", hook)


def after_warm_up(wrapper: WorkerWrapper, then: Callable[[], None]) -> Callable[[], None]:
    """Call a function whenever a worker has warmed up.

    Under the V2 runner vLLM warms up with whole steps, drafts included, of requests that no user
    sent; vLLM's own counters leave these steps out.

    Returns:
        A function that undoes it.
    """
    return follow(wrapper.worker, "compile_or_warm_up_model", lambda _: then())


def around_sleep(
    wrapper: WorkerWrapper,
    *,
    asleep: Callable[[], None],
    lost: Callable[[], None],
    awake: Callable[[], None],
) -> Callable[[], None]:
    """Call functions whenever a worker on a GPU falls asleep and wakes up.

    Methods that the worker lacks are left out.

    Args:
        wrapper: the worker's wrapper.
        asleep: called before any memory is taken away.
        lost: called before the content of the KV cache is lost, by sleep or by itself.
        awake: called when all memory is back, but for the weights and the KV cache, maybe, and
            where the worker's own sleep raises: it may go on without waking up.

    Returns:
        A function that undoes it.
    """
    worker, undo = wrapper.worker, ExitStack()
    own: Any = getattr(worker, "sleep", None)

    def sleep(*args: Any, **kwargs: Any) -> object:
        asleep()
        lost()
        try:
            return own(*args, **kwargs)
        except BaseException:
            awake()
            raise

    def discard(tags: Sequence[str]) -> None:
        if "kv_cache" in tags:
            lost()

    if own is not None:
        undo.callback(shadow(worker, "sleep", sleep))
        undo.callback(follow(worker, "wake_up", lambda _: awake()))
    if hasattr(worker, "discard"):  # not every release has it
        undo.callback(precede(worker, "discard", discard))
    return undo.close


def less_cache_memory(wrapper: WorkerWrapper, rest: Callable[[int], int]) -> Callable[[], None]:
    """Make a worker size its KV cache by less than all the memory that it finds free.

    Args:
        wrapper: the worker's wrapper.
        rest: returns how many bytes of the free ones are for the cache.

    Returns:
        A function that undoes it.
    """
    worker = wrapper.worker
    own = worker.determine_available_memory

    def determine_available_memory() -> int:
        return rest(int(own()))

    return shadow(worker, "determine_available_memory", determine_available_memory)


def engine_config(wrapper: WorkerWrapper) -> VllmConfig:
    """Return a worker's ``VllmConfig``."""
    return wrapper.vllm_config


def additional_config(config: VllmConfig) -> object:
    """Return the user's ``additional_config`` of a ``VllmConfig``."""
    return config.additional_config


def replace_additional_config(config: VllmConfig, additional_config: object) -> None:
    """Set the ``additional_config`` of a ``VllmConfig`` of which nothing has started yet."""
    config.additional_config = additional_config


def runner_of(wrapper: WorkerWrapper) -> Foreign:
    """Return a worker's model runner."""
    return wrapper.worker.model_runner


def runner_of_worker(worker: Worker) -> Foreign:
    """Return the model runner of a worker itself, as functions called by RPC get it."""
    return worker.model_runner


def rank_of(wrapper: WorkerWrapper) -> int:
    """Return a worker's rank among the engine's."""
    return int(wrapper.rpc_rank)
