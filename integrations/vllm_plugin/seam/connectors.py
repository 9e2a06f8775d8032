"""KV connectors: the blocks that they read from the cache and fill in it, and the bytes of a block.

No connector is asked by its name. The scheduler's half of each sends metadata to the worker's half
at every step; the kinds of metadata that name blocks are told apart by their fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeGuard

import attrs
import torch
from torch import Tensor

from ....audit import Key
from ....audit.checksum import block_checksums, block_pages, memory_order
from ....host_values import to_device
from ...serving.ledger.handed_blocks import Handed, Transfers
from .audited_requests import arrival_of, pair, tokens_of
from .engine_protocols import KVCacheConfig, SchedulerOutput
from .request_blocks import RequestBlocks
from .runner_protocols import (
    BlockList,
    ConnectorOutput,
    LooseBlocks,
    OffloadingJob,
    OffloadingJobs,
    Runner,
    RunnerV2,
    SlotTransfer,
    SlotTransfers,
)

if TYPE_CHECKING:
    from ....backends.audit.block_sums import BlockSums

#: Modules of the objects that the worker's half of a connector consists of.
_HOLDERS: Final = (
    "vllm.distributed.kv_transfer",
    "vllm.v1.kv_offload",
    "vllm.v1.simple_kv_offload",
)


def connector() -> object | None:
    """Return the worker's half of the engine's KV connector; None without any."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def adopt(before: KVCacheConfig, after: KVCacheConfig) -> int:
    """Give the worker's half of the engine's KV connectors the configuration with spare blocks.

    A connector gets the caches' configuration before kvtxn adds blocks to it, and some compute
    addresses from it: the layers of most layouts lie further apart with the blocks. The scheduler's
    half has a copy of its own, so it never hands the blocks out. Replaced is every attribute that
    is ``before``, in the connector and the objects that it consists of.

    Returns:
        The number of attributes that held ``before`` and now hold ``after``.
    """
    todo, seen, told = [connector()], set[int](), 0
    while todo:
        each = todo.pop()
        if id(each) in seen or not hasattr(each, "__dict__"):
            continue
        seen.add(id(each))
        for name, value in list(vars(each).items()):
            if value is before:
                setattr(each, name, after)
                told += 1
            elif isinstance(value, list | tuple):
                todo.extend(value)
            elif type(value).__module__.startswith(_HOLDERS):
                todo.append(value)
    return told


def transfers(runner: Runner, requests: RequestBlocks, metadata: object) -> Transfers:
    """Return the blocks that a connector stores and loads in a step, read from its metadata.

    Blocks that are loaded without a request's name are of one that still waits, which the connector
    names when its rows have come. ``opaque`` is set if some part of the metadata is of a connector
    that kvtxn cannot read. What ``flushed`` returns is left out.

    Args:
        runner: the worker's runner.
        requests: those that it was told of, and their blocks.
        metadata: of the connector, or of several in one.
    """
    found = Transfers([], [], [], opaque=False)
    for number, part in enumerate(_parts(metadata)):
        if _has_jobs(part):
            early = _early(part)
            for job_id, job in part.store_jobs.items():
                if job_id not in early:
                    found.stores.extend(
                        _job(runner, requests, number, job, job.src_spec, job.dst_spec)
                    )
            for job in part.load_jobs.values():
                found.loads.extend(_job(runner, requests, number, job, job.dst_spec, job.src_spec))
        elif _has_blocks(part):
            found.stores.extend(_loose(requests, part.store_gpu_blocks))
            found.nameless.extend(map(int, part.load_gpu_blocks))
        elif _names_slots(part):
            for each in part.requests:
                into = found.stores if each.is_store else found.loads
                into.extend(_slots(runner, requests, each))
        else:
            found = attrs.evolve(found, opaque=True)
    return found


def flushed(runner: Runner, requests: RequestBlocks, metadata: object) -> list[Handed]:
    """Return the blocks that a connector stores before a step begins, read from its metadata.

    ``runner`` and ``requests`` are as for ``transfers``.
    """
    return [
        each
        for number, part in enumerate(_parts(metadata))
        if _has_jobs(part) and (early := _early(part))
        for job_id, job in part.store_jobs.items()
        if job_id in early
        for each in _job(runner, requests, number, job, job.src_spec, job.dst_spec)
    ]


def _early(jobs: OffloadingJobs) -> Collection[object]:
    """Return the numbers of the jobs that are stored before the step begins."""
    return getattr(jobs, "jobs_to_flush", None) or ()


def _parts(metadata: object) -> Iterator[object]:
    """Yield the metadata of each connector, from those of several in one; nothing for None."""
    several = getattr(metadata, "metadata", None)
    if isinstance(several, Sequence):
        for part in several:
            yield from _parts(part)
    elif metadata is not None:
        yield metadata


def _has_jobs(part: object) -> TypeGuard[OffloadingJobs]:
    """Tell whether metadata have offloading jobs, which store or load blocks by group."""
    return hasattr(part, "store_jobs") and hasattr(part, "load_jobs")


def _has_blocks(part: object) -> TypeGuard[LooseBlocks]:
    """Tell whether metadata name the blocks to store without their requests."""
    return hasattr(part, "store_gpu_blocks")


def _names_slots(part: object) -> TypeGuard[SlotTransfers]:
    """Tell whether metadata have a list of requests, each with its tokens and slots."""
    requests = getattr(part, "requests", None)
    fields = ("token_ids", "slot_mapping", "is_store")
    return isinstance(requests, list) and all(
        hasattr(each, field) for each in requests for field in fields
    )


def _job(
    runner: Runner,
    requests: RequestBlocks,
    part: int,
    job: OffloadingJob,
    spec: BlockList,
    store: object,
) -> Iterator[Handed]:
    """Yield the blocks of an offloading job, in runs of columns without a gap, group by group.

    The job says which column the first block of a group has. Blocks that the store has already, and
    those that nobody could load from there, are left out in between. Blocks have keys if the store
    names one place for each, and nothing but kvtxn's engine fills it.

    Args:
        runner: the worker's runner.
        requests: by which the columns of blocks are found.
        part: the number of the connector, which makes its keys differ from those of others.
        job: vLLM's.
        spec: the job's blocks in the KV cache.
        store: its places in the store.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

    groups = range(len(spec.group_sizes))
    chosen = getattr(config, "get_offloading_group_ids", None)  # a later release leaves some out
    numbers = groups if chosen is None else chosen(runner.kv_cache_config)
    blocks, at = [int(block) for block in spec.block_ids], 0
    places = [int(place) for place in getattr(store, "block_ids", ())]
    transfer = runner.vllm_config.kv_transfer_config
    alone = transfer is None or not _has_tiers(transfer.kv_connector_extra_config)
    keys = [(part, place) for place in places] if alone and len(places) == len(blocks) else None
    for number, size, begin in zip(numbers, spec.group_sizes, spec.block_indices, strict=True):
        if size:
            name, columns = str(job.req_id), [int(begin)]
            for block in blocks[at + 1 : at + size]:
                columns.append(requests.column(name, number, block, columns[-1]))
            for run in _runs(columns):
                these = slice(at + run.start, at + run.stop)
                own = None if keys is None else keys[these]
                first = columns[run.start]
                yield Handed(f"group.{number}", blocks[these], first, name, keys=own)
        at += size


def _runs(columns: Sequence[int]) -> Iterator[range]:
    """Yield the places of columns that follow each other without a gap."""
    begin = 0
    for at in range(1, len(columns) + 1):
        if at == len(columns) or columns[at] != columns[at - 1] + 1:
            yield range(begin, at)
            begin = at


def _has_tiers(settings: object) -> bool:
    """Tell whether a connector's settings name ``secondary_tiers``, at any depth.

    Such a tier fills the connector's memory, too.
    """
    if isinstance(settings, Mapping):
        return bool(settings.get("secondary_tiers")) or any(map(_has_tiers, settings.values()))
    return isinstance(settings, list | tuple) and any(map(_has_tiers, settings))


def _loose(requests: RequestBlocks, blocks: Iterable[int]) -> Iterator[Handed]:
    """Yield blocks with their owners, in runs of columns; those of nobody are left out."""
    found = sorted(requests.owned({*map(int, blocks)}))
    begin = 0
    for at, (name, group, column, _) in enumerate(found, 1):
        if at == len(found) or found[at][:3] != (name, group, column + 1):
            these = [block for *_, block in found[begin:at]]
            yield Handed(f"group.{group}", these, found[begin][2], name)
            begin = at


def _slots(runner: Runner, requests: RequestBlocks, each: SlotTransfer) -> Iterator[Handed]:
    """Yield the blocks of a list of slots of the first group, which begin at a request's first row.

    The request is the owner of the last block; nothing is yielded if that is nobody's. Such blocks
    are stored in a folder that engines may share. If the list's tokens are not the request's, the
    blocks come with a request that has them.
    """
    size = int(runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
    blocks = [int(slot) // size for slot in each.slot_mapping[::size]]
    owner = requests.owner(blocks[-1]) if blocks else None
    came = None if owner is None else requests.content(owner[0])
    if owner is None or came is None:
        return
    tokens = [int(token) for token in each.token_ids]
    same = tokens_of(came)[: len(tokens)] == tokens
    other = None if same else arrival_of(runner, came, owner[0], tokens, 0, ())
    yield Handed("group.0", blocks, 0, owner[0], other)


def hear(requests: RequestBlocks, scheduler_output: SchedulerOutput) -> None:
    """Bring a runner's requests and their blocks up to date; call it once for each step.

    Blocks that a connector fills in the step belong to nobody until their request comes.
    """
    filled: list[int] = []
    for part in _parts(metadata_of(scheduler_output)):
        if _has_jobs(part):
            for job in part.load_jobs.values():
                filled.extend(int(block) for block in job.dst_spec.block_ids)
        elif _has_blocks(part):
            filled.extend(part.load_gpu_blocks)
    requests.hear(scheduler_output, filled)


def overwritten(scheduler_output: SchedulerOutput) -> list[int]:
    """Return the blocks that a runner fills with zeros or copies as it takes over a step.

    That is before it tells of the requests that get them; some are nobody's again by then.
    """
    zeroed = scheduler_output.new_block_ids_to_zero or ()
    copies = scheduler_output.kv_cache_block_copies or ()
    return [*map(int, zeroed), *(pair(copy)[1] for copy in copies)]


def metadata_of(scheduler_output: SchedulerOutput) -> object:
    """Return the metadata that the scheduler's half of the connector sends in a step, or None."""
    return scheduler_output.kv_connector_metadata


def came(results: ConnectorOutput) -> set[str]:
    """Return the names of requests whose rows have come, by a connector's output of a step."""
    return set(results.finished_recving or ())


def of_runner(runner: RunnerV2) -> object:
    """Return the object through which the V2 runner calls its connector."""
    return runner.kv_connector


def block_layout(runner: Runner, group: str) -> list[object]:
    """Return all that the order and the meaning of a block's bytes depend on, as JSON can hold it.

    That is the group, the cache's format, and each cache's dtype, shape and order of a block. It
    does not depend on the number of blocks, which differs with the memory that an engine has.
    """
    blocks = runner.kv_cache_config.num_blocks
    shapes: list[object] = [group, str(runner.cache_config.cache_dtype)]
    for cache in _caches(runner, group):
        block = cache.movedim(_block_dimension(cache, blocks), 0)[0]
        shapes.append([str(cache.dtype), [*block.shape], memory_order(block)])
    return shapes


def _caches(runner: Runner, group: str) -> list[Tensor]:
    """Return the caches of a group's layers, in vLLM's order; all of a layer that has several."""
    layers = runner.compilation_config.static_forward_context
    caches: list[Tensor] = []
    number = int(group.partition(".")[2])
    for name in runner.kv_cache_config.kv_cache_groups[number].layer_names:
        cache = layers[name].kv_cache
        caches.extend([cache] if isinstance(cache, Tensor) else cache)
    return caches


def _block_dimension(cache: Tensor, blocks: int) -> int:
    """Return the dimension of a cache, 0 or 1, in which its blocks lie."""
    return 0 if cache.shape[0] == blocks else 1


class BlockBytes:
    """The bytes of blocks, in all layers of a group.

    Args:
        runner: has the caches.
        key: the engine's key.
    """

    def __init__(self, runner: Runner, key: Key) -> None:
        self._runner: Final = runner
        self._key: Final = key
        self._known: dict[str, tuple[list[Tensor], list[Tensor], BlockSums | None]] = {}

    def checksums(self, group: str, blocks: Sequence[int]) -> Tensor:
        """Return a hash of the bytes of each block, in all layers of the group; does not wait.

        Returns:
            int64 ``[len(blocks), 2]`` on the device, see ``kvtxn.audit.checksum.block_checksums``.
        """
        _, pages, sums = self._of_group(group)
        some = to_device(blocks, pages[0].device, torch.int64)
        return block_checksums(self._key, pages, some) if sums is None else sums.of(some)

    def _of_group(self, group: str) -> tuple[list[Tensor], list[Tensor], BlockSums | None]:
        """Return a group's caches, their bytes, and a GPU's sums of them; None for those of torch.

        Found anew where the runner has other caches than at the last call.
        """
        caches, known = _caches(self._runner, group), self._known.get(group)
        if known is None or [*map(id, known[0])] != [*map(id, caches)]:
            number = self._runner.kv_cache_config.num_blocks
            pages = [
                page
                for cache in caches
                for page in block_pages(cache, _block_dimension(cache, number))
            ]
            known = self._known[group] = caches, pages, _kernel(self._key, pages)
        return known


def _kernel(key: Key, pages: Sequence[Tensor]) -> BlockSums | None:
    """Make the launch that sums blocks; None on a CPU, and for pages that it cannot sum."""
    if not pages[0].is_cuda:
        return None
    from ....backends.audit.block_sums import BlockSums

    return BlockSums(key, pages) if BlockSums.fits(pages) else None
