"""Facts of an SGLang engine by which it can be watched or not, read from its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch

from ...serving.step import Room
from .pools import controller_of, is_of
from .protocols import Scheduler


@attrs.frozen
class EngineFacts:
    """The facts that the rules of ``supported`` look at.

    Attributes:
        device: the type of its device.
        samples: it generates tokens.
        rows: the class of the pool with the rows of K and V.
        inside: the classes of the pools that this one is made of, if it is.
        window: rows behind its own that a query of a layer with a sliding window sees; None
            without one.
        chunked: queries see the chunk that they are in, and no window.
        windows: layers have windows of several sizes, in further pools.
        slots: the class of the allocator of slots.
        table: the class of the table of requests.
        algorithm: of speculation; ``"NONE"`` without.
        topk: drafts that follow each draft; 1 is a chain.
        encodes: an encoder has rows in front of those of the tokens, as in Whisper.
        states: the class of the attention of recurrent layers; empty without any.
        commits: states are written by a commit that tells which.
        strategy: by which a hybrid keeps states for the tree.
        copies: a hybrid has states in a format of the tree's.
        host: what copies rows to the host and back does so by slots that are told.
        settings: the server's arguments, by name, that a rule names and that the user has set.
    """

    device: str = "cuda"
    samples: bool = True
    rows: str = "MHATokenToKVPool"
    inside: tuple[str, ...] = ()
    window: int | None = None
    chunked: bool = False
    windows: bool = False
    slots: str = "TokenToKVPoolAllocator"
    table: str = "ReqToTokenPool"
    algorithm: str = "NONE"
    topk: int = 1
    encodes: bool = False
    states: str = ""
    commits: bool = True
    strategy: str = ""
    copies: bool = False
    host: bool = False
    settings: frozenset[str] = frozenset()

    @property
    def trees(self) -> bool:
        """True if drafts form trees, whose accepted rows are moved to the front."""
        return self.algorithm == "NGRAM" or (self.algorithm != "NONE" and self.topk > 1)


def facts(scheduler: Scheduler, names: frozenset[str]) -> EngineFacts:
    """Return the facts of an engine; what a release does not have is read as not in use.

    Args:
        scheduler: its scheduler.
        names: the server's arguments that rules name.
    """
    args, allocator = _arguments(scheduler), scheduler.token_to_kv_pool_allocator
    config, pool = getattr(scheduler, "model_config", None), allocator.get_kvcache()
    runner = scheduler.tp_worker.model_runner
    within = (getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))
    window = getattr(runner, "sliding_window_size", None)
    tree, backend = getattr(scheduler, "tree_cache", None), getattr(runner, "attn_backend", None)
    linear = getattr(backend, "linear_attn_backend", None)
    several = getattr(tree, "supports_auxiliary_swa", None)
    return EngineFacts(
        device=torch.device(runner.device).type,
        samples=bool(scheduler.is_generation),
        rows=type(pool).__name__,
        inside=tuple(type(each).__name__ for each in within if each is not None),
        window=None if window is None else int(window),
        chunked=getattr(config, "attention_chunk_size", None) is not None,
        windows=several is not None and bool(several()),
        slots=type(allocator).__name__,
        table=type(scheduler.req_to_token_pool).__name__,
        algorithm=str(scheduler.spec_algorithm.name),
        topk=_number(args, "speculative_eagle_topk"),
        encodes=bool(getattr(config, "is_encoder_decoder", False)),
        states="" if linear is None else type(linear).__name__,
        commits=linear is None or _commits(backend),
        strategy=str(args.get("mamba_radix_cache_strategy") or ""),
        copies=getattr(scheduler.req_to_token_pool, "mamba_ckpt_pool", None) is not None,
        host=_tells_copies(scheduler),
        settings=frozenset(name for name in names if _is_set(args, name)),
    )


def _commits(backend: object) -> bool:
    """Tell whether states are written by the call that ``StateReader.follow`` hears.

    A backend that commits by a fused kernel makes no such call.
    """
    linear = getattr(backend, "linear_attn_backend", None)
    fused = getattr(linear, "accept_lens_pool", None) is not None
    return hasattr(backend, "update_mamba_state_after_mtp_verify") and not fused


def _tells_copies(scheduler: Scheduler) -> bool:
    """Tell whether HiCache's copies name the slots of each rank, as ``HostSlots`` hears them.

    False without HiCache, and where rows are spread over ranks.
    """
    controller = controller_of(scheduler)
    engine = getattr(controller, "l2_transfer_engine", None)
    if controller is None or engine is None or getattr(controller, "is_kv_sharded", False):
        return False
    rows = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rows = getattr(rows, "full_kv_pool", rows)
    entries = controller.mem_pool_host.entries
    alone = all(getattr(each.host_pool, "dcp_size", 1) == 1 for each in entries)
    return alone and any(is_of(each.device_pool, rows) for each in entries)


def is_hybrid(scheduler: Scheduler) -> bool:
    """Tell whether requests have recurrent states beside their rows."""
    return type(scheduler.req_to_token_pool).__name__ == "HybridReqToTokenPool"


def _arguments(scheduler: Scheduler) -> Mapping[str, object]:
    """Return the arguments of the server by name, as SGLang has resolved them; empty if unreadable.

    Not every release has all of them. Newer ones keep the user's own beside the resolved ones.
    """
    args = scheduler.server_args
    resolved = getattr(args, "resolved_dict", None)
    found = vars(args) if resolved is None else resolved()
    return found if isinstance(found, Mapping) else {}


def _number(args: Mapping[str, object], name: str) -> int:
    """Return an argument that is an int; 1 where it is not set, is 0 or is none."""
    value = args.get(name)
    return value if isinstance(value, int) and value else 1


def _is_set(args: Mapping[str, object], name: str) -> bool:
    """Tell whether an argument is in use: a size above 1, any other value that is not empty.

    None, False, "", "null" and "none" count as empty.
    """
    if name.endswith("_size"):
        return _number(args, name) > 1
    value = args.get(name)
    return value not in (None, False, "", "null", "none")


#: Arguments of the server by which, if they are set, weights change places while it serves.
_WEIGHTS_MOVE: Final = ("enable_eplb", "cpu_offload_gb", "offload_group_size")


def weights_move(scheduler: Scheduler) -> bool:
    """Tell whether weights change places while an engine serves, as experts or by offloading."""
    args = _arguments(scheduler)
    return any(_is_set(args, name) and args[name] not in (0, -1) for name in _WEIGHTS_MOVE)


def metrics_of(scheduler: Scheduler) -> tuple[str, int] | None:
    """Return a server's model name and the number of the scheduler's data-parallel group.

    None if the server has no metrics.
    """
    args = _arguments(scheduler)
    if not args.get("enable_metrics"):
        return None
    name = args.get("served_model_name") or args.get("model_path") or ""
    return str(name), int(getattr(scheduler, "dp_rank", None) or 0)


def most_drafts(scheduler: Scheduler) -> int:
    """Return the most drafts of a request in one step; 0 without speculation."""
    if scheduler.spec_algorithm.name == "NONE":
        return 0
    return max(_number(_arguments(scheduler), "speculative_num_draft_tokens") - 1, 0)


def room(scheduler: Scheduler) -> Room:
    """Return the sizes of an engine for a ledger, and whether its requests share rows.

    They do by a radix cache. There is a request per line of the table, the padding's included. A
    request may be as long as a line, and its drafts and one row lie behind.
    """
    lines, positions = scheduler.req_to_token_pool.req_to_token.shape
    caches = not _arguments(scheduler).get("disable_radix_cache")
    return Room(lines, positions + most_drafts(scheduler) + 1, caches_prefixes=caches)


def rank() -> int:
    """Return this process's rank among all; 0 if torch.distributed is not in use."""
    import torch.distributed as ranks

    return ranks.get_rank() if ranks.is_available() and ranks.is_initialized() else 0
