"""Faults planted in a running vLLM, from outside, and the rig that they are planted in.

A fault is a function of the rig that returns a context manager. Once it has struck, ``rig.struck``
says where: the request, the position and the slot of a read that is wrong from then on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import attrs
from model_files import VOCAB


@attrs.frozen
class Struck:
    """A read that a fault made wrong.

    Attributes:
        request: vLLM's id of the request that reads.
        position: the first wrong position.
        slot: its slot; None for a state.
        step: the number of the step in which it can be seen first.
    """

    request: str
    position: int
    slot: int | None
    step: int


class Rig:
    """An engine in this process, and ways into its scheduler, its runner and its audit.

    Args:
        llm: the engine; its blocks have 32 rows.

    Attributes:
        struck: where the planted fault has struck; None until it has.
        ran: names of all requests, in their order.
        failed: names of those that ended with an error.
    """

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.engine = llm.llm_engine
        self.scheduler = core.scheduler
        self.manager = core.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.watch = self.runner.kvtxn_audit
        self.struck: Struck | None = None
        self.ran: list[str] = []
        self.failed: list[str] = []
        self._count = self._old = 0

    # -- requests ----------------------------------------------------------------------------

    def run(self, prompts: list[list[int]], outputs: int) -> list[list[int]]:
        """Generate for all prompts side by side; returns their tokens."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False
        )
        self._count += 1
        names = [f"{self._count}.{index}" for index in range(len(prompts))]
        self.ran += names
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        done: dict[str, list[int]] = {}
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            for output in self.engine.step():
                done[output.request_id] = list(output.outputs[0].token_ids)
                if output.outputs[0].finish_reason == "error":
                    self.failed.append(output.request_id)
        else:
            self.engine.abort_request(list(self.scheduler.requests), internal=True)
        return [done.get(name, []) for name in names]

    def clear(self) -> None:
        """Forget the last fault, and everything in the prefix cache and in a connector's store."""
        self.engine.abort_request(list(self.scheduler.requests), internal=True)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        connected = self.scheduler.connector is not None
        self.engine.reset_prefix_cache(reset_connector=connected)
        self.struck = None
        self.ran, self.failed = [], []
        self._old = len(self.watch.report())

    def found(self) -> list[dict[str, Any]]:
        """Return the violations found since the last ``clear``, oldest first."""
        return list(self.watch.report()[self._old :])

    # -- where things are --------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The ledger's number of the step that comes next, or is being prepared."""
        return int(self.watch.counters()["kvtxn_audit_steps_total"]) + 1

    def slot(self, request: str, position: int) -> int:
        """Return the slot of a row of the first group."""
        table = self.manager.get_block_ids(request)[0]
        return int(table[position // 32]) * 32 + position % 32

    def strike(self, request: str, position: int, slot: int | None, later: int = 0) -> None:
        """Note where the fault has struck, in the step being prepared or so many later."""
        self.struck = Struck(request, position, slot, self.next_step + later)


Fault = Callable[[Rig], Any]


def texts(seed: int, count: int, length: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that some drafts are right."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        phrase = [chance.randrange(1, VOCAB) for _ in range(chance.randint(5, 9))]
        found.append((phrase * length)[: length + chance.randint(0, 5)])
    return found


@contextmanager
def around(
    owner: Any, name: str, before: Callable[..., Any] | None = None, after: Any = None
) -> Iterator[None]:
    """Call functions before and after a method of an object, with its arguments.

    Args:
        owner: the object.
        name: the method's name.
        before: gets the method's arguments.
        after: gets the result and the arguments; if it returns anything, that is the result.
    """
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = real(*args, **kwargs)
        changed = None if after is None else after(result, *args, **kwargs)
        return result if changed is None else changed

    with mock.patch.object(owner, name, call):
        yield


@contextmanager
def prepared(rig: Rig, tamper: Callable[[Batch], Any]) -> Iterator[None]:
    """Tamper with the inputs of forwards until the fault strikes.

    ``tamper`` may change the batch's tensors; the tables are put right after the forward.
    """
    if hasattr(rig.runner, "prepare_attn"):
        with _prepared_v2(rig, tamper):
            yield
        return
    undo: list[Callable[[], Any]] = []

    def restore(*args: Any, **kwargs: Any) -> None:
        while undo:
            undo.pop()()

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        if rig.struck is None:
            tamper(Batch(rig, result, undo))

    with (
        around(rig.runner, "_prepare_inputs", after=after),
        around(rig.runner, "_model_forward", after=restore),
    ):
        yield


@contextmanager
def _prepared_v2(rig: Rig, tamper: Callable[[Batch], Any]) -> Iterator[None]:
    """Do the same to the V2 runner, which gathers slots and tables anew for each step."""
    coming: list[Any] = []

    def before(batch: Any) -> None:
        coming.append(batch)

    def after(*args: Any, **kwargs: Any) -> None:
        if coming and rig.struck is None:  # or else it is the drafter that asks
            tamper(BatchV2(rig, coming.pop()))
        coming.clear()

    with (
        around(rig.runner, "prepare_attn", before),
        around(rig.runner.block_tables, "compute_slot_mappings", after=after),
    ):
        yield


class Batch:
    """The inputs of a forward.

    Args:
        rig: the rig.
        result: the result of ``_prepare_inputs``.
        undo: functions that put right what must be right in the next step.

    Attributes:
        names: the requests.
        starts: each request's first row, and the end.
        first: the position of each request's first row.
        drafts: drafts of each request.
        slots: the slot of each row.
        tables: the blocks of each request.
        tokens: the token of each row.
    """

    def __init__(self, rig: Rig, result: Any, undo: list[Callable[[], Any]]) -> None:
        runner = rig.runner
        self.names = list(runner.input_batch.req_ids)
        count = len(self.names)
        self.starts = runner.query_start_loc.np[: count + 1].tolist()
        self.positions = runner.positions
        self.first = [int(runner.positions[start]) for start in self.starts[:-1]]
        self.drafts = list(result[1].num_draft_tokens) if result[1] is not None else [0] * count
        self.slots = runner.input_batch.block_table[0].slot_mapping.gpu
        self.tables = runner.input_batch.block_table[0].block_table.gpu
        self.tokens = runner.input_ids.gpu
        self._undo = undo

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, index: int) -> int:
        """Return the number of rows of a request."""
        return int(self.starts[index + 1] - self.starts[index])

    def settled(self, index: int) -> int:
        """Return the number of rows of a request that are no drafts."""
        return self.rows(index) - int(self.drafts[index])

    def put_table(self, index: int, row: Any) -> None:
        """Replace a request's table for this step."""
        line, before = self.tables[index], self.tables[index].clone()
        self._undo.append(partial(line.copy_, before))
        line.copy_(row)


class BatchV2(Batch):
    """The inputs of a forward of the V2 runner, once its slots are in place.

    Args:
        rig: the rig.
        batch: vLLM's ``InputBatch``.
    """

    def __init__(self, rig: Rig, batch: Any) -> None:
        buffers, tables = rig.runner.input_buffers, rig.runner.block_tables
        self.names = list(batch.req_ids)
        count = len(self.names)
        self.starts = batch.query_start_loc_np[: count + 1].tolist()
        self.positions = buffers.positions
        self.first = [int(buffers.positions[start]) for start in self.starts[:-1]]
        drafts = batch.num_draft_tokens_per_req
        self.drafts = [0] * count if drafts is None else drafts.tolist()
        self.slots = tables.slot_mappings[0]
        self.tables = tables.input_block_tables[0]
        self.tokens = buffers.input_ids
        self._undo = []
