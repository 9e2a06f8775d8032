"""Faults of a connector that keeps blocks in memory: what it stores, and what it loads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from planting import Rig, around


def _worker(rig: Rig) -> Any:
    """Return the worker that copies blocks."""
    from kvtxn.integrations.vllm_plugin.seam import connectors

    return connectors.connector().connector_worker.worker


def _first_row(rig: Rig, request: str, spec: Any, number: int) -> tuple[int, int]:
    """Return the position and the slot of the first row of a block of a job."""
    return (int(spec.block_indices[0]) + number) * 32, int(spec.block_ids[number]) * 32


def _submitting(worker: Any, name: str, change: Callable[[Any, Any], None]) -> Any:
    """Let the worker's job be another than the one that it was given: copies of its two ends."""
    real = getattr(worker, name)

    def submit(job: int, source: Any, target: Any) -> Any:
        source, target = copy.copy(source), copy.copy(target)
        change(source, target)
        return real(job, source, target)

    return mock.patch.object(worker, name, submit)


def _loading(rig: Rig, target: Any) -> str:
    """Return the request whose blocks a job fills."""
    for name in rig.scheduler.requests:
        if int(target.block_ids[0]) in rig.manager.get_block_ids(name)[0]:
            return str(name)
    raise LookupError("nobody loads these blocks")


def another_block_loaded(rig: Rig) -> Any:
    """The worker loads the block behind the one it was told to load."""
    worker = _worker(rig)

    def before(job: int, source: Any, target: Any) -> None:
        if rig.struck is None:
            name = _loading(rig, target)
            source.block_ids = source.block_ids.copy()
            source.block_ids[0] = (source.block_ids[0] + 1) % len(worker._store[0])
            rig.strike(name, *_first_row(rig, name, target, 0))

    return around(worker, "submit_load", before)


def nothing_loaded(rig: Rig) -> Any:
    """The worker says that a load is done, and has copied nothing."""

    def change(source: Any, target: Any) -> None:
        if rig.struck is None:
            name = _loading(rig, target)
            rig.strike(name, *_first_row(rig, name, target, 0))
            source.block_ids, target.block_ids = source.block_ids[:0], target.block_ids[:0]
            target.group_sizes = [0 for _ in target.group_sizes]

    return _submitting(_worker(rig), "submit_load", change)


def loaded_into_another_block(rig: Rig) -> Any:
    """The worker fills the second block of a load twice, and the first one not at all."""

    def change(source: Any, target: Any) -> None:
        if rig.struck is None and len(target.block_ids) > 1:
            name = _loading(rig, target)
            rig.strike(name, *_first_row(rig, name, target, 0))
            target.block_ids = target.block_ids.copy()
            target.block_ids[0] = target.block_ids[1]

    return _submitting(_worker(rig), "submit_load", change)


@contextmanager
def another_block_stored(rig: Rig) -> Any:
    """The worker stores a block of another request under a request's hash."""
    worker, wrong = _worker(rig), []

    def storing(source: Any, target: Any) -> None:
        if not wrong:
            wrong.append(int(target.block_ids[0]))
            source.block_ids = source.block_ids.copy()
            source.block_ids[0] = source.block_ids[0] % (rig.pool.num_gpu_blocks - 1) + 1

    def loading(source: Any, target: Any) -> None:
        if wrong and rig.struck is None and wrong[0] in source.block_ids:
            name = _loading(rig, target)
            number = source.block_ids.tolist().index(wrong[0])
            rig.strike(name, *_first_row(rig, name, target, number))

    with (
        _submitting(worker, "submit_store", storing),
        _submitting(worker, "submit_load", loading),
    ):
        yield


def stored_too_early(rig: Rig) -> Any:
    """A job stores a block of a prompt before its rows are computed."""

    def before(metadata: Any) -> None:
        for job in metadata.store_jobs.values():
            name, spec = job.req_id, job.src_spec
            table = rig.manager.get_block_ids(name)[0] if name in rig.scheduler.requests else []
            end = int(spec.block_indices[0]) + len(spec.block_ids)
            if (
                rig.struck is None
                and len(table) > end
                and spec.group_sizes == [len(table[:0]) or 1]
            ):
                spec.block_ids = spec.block_ids.copy()
                spec.block_ids[-1] = table[end]
                rig.strike(name, (end - 1) * 32, int(table[end]) * 32)

    stack = ExitStack()
    from kvtxn.integrations.vllm_plugin.seam import connectors

    stack.enter_context(around(connectors.connector(), "bind_connector_metadata", before))
    return stack


FAULTS = (
    *(another_block_loaded, nothing_loaded, loaded_into_another_block),
    *(another_block_stored, stored_too_early),
)
