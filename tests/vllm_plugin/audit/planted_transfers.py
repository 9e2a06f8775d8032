"""Faults of a connector that keeps blocks in memory: what it stores, and what it loads."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from planting import Rig, around


def _worker(rig: Rig) -> Any:
    """Return the worker that copies blocks."""
    from kvtxn.integrations.vllm_plugin.internals import connectors

    return connectors.connector().connector_worker.worker


def _first_row(rig: Rig, request: str, spec: Any, number: int) -> tuple[int, int]:
    """Return the position and the slot of the first row of a block of a job."""
    return (int(spec.block_indices[0]) + number) * 32, int(spec.block_ids[number]) * 32


def another_block_loaded(rig: Rig) -> Any:
    """The worker loads the block behind the one it was told to load."""
    worker = _worker(rig)

    def before(job: int, source: Any, target: Any) -> None:
        if rig.struck is None:
            name = _loading(rig, target)
            source.block_ids = source.block_ids.copy()
            source.block_ids[0] = (source.block_ids[0] + 1) % len(worker.store[0])
            rig.strike(name, *_first_row(rig, name, target, 0))

    return around(worker, "submit_load", before)


def _loading(rig: Rig, target: Any) -> str:
    """Return the request whose blocks a job fills."""
    for name in rig.scheduler.requests:
        if int(target.block_ids[0]) in rig.manager.get_block_ids(name)[0]:
            return str(name)
    raise LookupError("nobody loads these blocks")


def nothing_loaded(rig: Rig) -> Any:
    """The worker says that a load is done, and has copied nothing."""
    worker = _worker(rig)
    real = worker.copy

    def copy(source: Any, these: Any, target: Any, those: Any, spec: Any) -> None:
        if target is worker.caches and rig.struck is None:
            name = _loading(rig, spec)
            rig.strike(name, *_first_row(rig, name, spec, 0))
            return
        real(source, these, target, those, spec)

    return mock.patch.object(worker, "copy", copy)


def loaded_into_another_block(rig: Rig) -> Any:
    """The worker fills the second block of a load twice, and the first one not at all."""
    worker = _worker(rig)
    real = worker.copy

    def copy(source: Any, these: Any, target: Any, those: Any, spec: Any) -> None:
        if target is worker.caches and rig.struck is None and len(those) > 1:
            name = _loading(rig, spec)
            rig.strike(name, *_first_row(rig, name, spec, 0))
            those = those.copy()
            those[0] = those[1]
        real(source, these, target, those, spec)

    return mock.patch.object(worker, "copy", copy)


@contextmanager
def another_block_stored(rig: Rig) -> Any:
    """The worker stores a block of another request under a request's hash."""
    worker = _worker(rig)
    real, wrong = worker.copy, []

    def copy(source: Any, these: Any, target: Any, those: Any, spec: Any) -> None:
        if source is worker.caches and not wrong:
            wrong.append(int(those[0]))
            these = these.copy()
            these[0] = these[0] % (len(worker.caches[0]) - 1) + 1
        elif target is worker.caches and wrong and rig.struck is None and wrong[0] in these:
            name = _loading(rig, spec)
            rig.strike(name, *_first_row(rig, name, spec, list(these).index(wrong[0])))
        real(source, these, target, those, spec)

    with mock.patch.object(worker, "copy", copy):
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
    from kvtxn.integrations.vllm_plugin.internals import connectors

    stack.enter_context(around(connectors.connector(), "bind_connector_metadata", before))
    return stack


FAULTS = (
    *(another_block_loaded, nothing_loaded, loaded_into_another_block),
    *(another_block_stored, stored_too_early),
)
