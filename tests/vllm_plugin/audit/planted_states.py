"""Faults in what a forward takes for its recurrent state: columns, accepted counts, blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

from planting import Rig, around


def _metadata(rig: Rig, change: Callable[[Any, Any], None]) -> Any:
    """Change the metadata of the recurrent layers until the fault strikes.

    ``change`` gets the metadata and the indices of the requests with columns, in the batch's order.
    """
    stack = ExitStack()
    for groups in rig.runner.attn_groups:
        for group in groups:
            builder = group.get_metadata_builder(0)
            if "GDN" in type(builder).__name__:

                def after(metadata: Any, *args: Any, **kwargs: Any) -> None:
                    if rig.struck is None and metadata.spec_sequence_masks is not None:
                        mask = metadata.spec_sequence_masks.nonzero().flatten().tolist()
                        change(metadata, mask)

                stack.enter_context(around(builder, "build", after=after))
    return stack


def _strike(rig: Rig, index: int) -> None:
    """Note that a request of the batch continues a wrong state."""
    start = int(rig.runner.query_start_loc.np[index])
    name = rig.runner.input_batch.req_ids[index]
    rig.strike(name, int(rig.runner.positions[start]) - 1, None)


def _arrived(rig: Rig) -> None:
    """Wait until the counts that a GPU has sent are on the host: they would undo a fault there."""
    event = getattr(rig.runner, "num_accepted_tokens_event", None)
    if event is not None:
        event.synchronize()


def _kept(metadata: Any, least: int) -> int | None:
    """Find a request of which so many drafts were kept in the step before."""
    found = (metadata.num_accepted_tokens - 1 >= least).nonzero().flatten().tolist()
    return found[0] if found else None


def count_one_too_few(rig: Rig) -> Any:
    """The kernels are told one accepted draft too few."""

    def change(metadata: Any, mask: list[int]) -> None:
        if (number := _kept(metadata, 1)) is not None:
            metadata.num_accepted_tokens = metadata.num_accepted_tokens.clone()
            metadata.num_accepted_tokens[number] -= 1
            _strike(rig, mask[number])

    return _metadata(rig, change)


def count_one_too_many(rig: Rig) -> Any:
    """The kernels are told one accepted draft too many."""

    def change(metadata: Any, mask: list[int]) -> None:
        width = metadata.spec_state_indices_tensor.shape[1]
        for number, accepted in enumerate(metadata.num_accepted_tokens.tolist()):
            if accepted < width:
                metadata.num_accepted_tokens = metadata.num_accepted_tokens.clone()
                metadata.num_accepted_tokens[number] += 1
                _strike(rig, mask[number])
                return

    return _metadata(rig, change)


def state_columns_swapped(rig: Rig) -> Any:
    """The columns of a request's table change places."""

    def change(metadata: Any, mask: list[int]) -> None:
        for number in range(len(mask)):
            if int(metadata.num_accepted_tokens[number]) <= 2:
                table = metadata.spec_state_indices_tensor.clone()
                table[number, :2] = table[number, :2].flip(0).clone()
                metadata.spec_state_indices_tensor = table
                _strike(rig, mask[number])
                return

    return _metadata(rig, change)


def anothers_state(rig: Rig) -> Any:
    """A request continues the state of another one."""

    def change(metadata: Any, mask: list[int]) -> None:
        if len(mask) > 1:
            table = metadata.spec_state_indices_tensor.clone()
            table[0] = table[1]
            metadata.spec_state_indices_tensor = table
            _strike(rig, mask[0])

    return _metadata(rig, change)


def first_column_without_drafts(rig: Rig) -> Any:
    """A step without drafts continues the first column, whatever was kept before."""

    def before(*args: Any, **kwargs: Any) -> None:
        _arrived(rig)
        drafts, accepted = rig.runner.num_decode_draft_tokens.np, rig.runner.num_accepted_tokens.np
        for index in range(len(rig.runner.input_batch.req_ids)):
            if rig.struck is None and drafts[index] == 0 and accepted[index] > 1:
                drafts[index] = -1
                _strike(rig, index)

    stack = ExitStack()
    stack.enter_context(_without_drafts(rig))
    stack.enter_context(around(rig.runner, "_build_attention_metadata", before))
    return stack


@contextmanager
def _without_drafts(rig: Rig) -> Any:
    """Take the drafts from requests of which drafts were kept in the step before."""
    kept: set[str] = set()

    def before(scheduler_output: Any, output: Any) -> None:
        kept.clear()
        for name, index in output.req_id_to_index.items():
            kept.update([name] if len(output.sampled_token_ids[index]) > 1 else [])

    def schedule(*args: Any) -> None:
        for request in rig.scheduler.running:
            if request.request_id in kept and rig.struck is None:
                request.spec_token_ids = []

    with (
        around(rig.scheduler, "update_from_output", before),
        around(rig.scheduler, "schedule", schedule),
    ):
        yield


@contextmanager
def counts_forgotten(rig: Rig) -> Any:
    """The runner does not record how many drafts were accepted in a step."""
    forgotten: list[str] = []

    def before(ids: Any, *args: Any) -> None:
        names = rig.runner.input_batch.req_ids
        for index, kept in enumerate(((ids != -1).sum(1) - 1).tolist()):
            if rig.struck is None and not forgotten and kept > 0:
                forgotten.append(names[index])

    def after(result: Any, ids: Any, *args: Any) -> None:
        _arrived(rig)
        for index, name in enumerate(rig.runner.input_batch.req_ids):
            if rig.struck is None and name in forgotten:
                rig.runner.input_batch.num_accepted_tokens_cpu[index] = 1
                first = int(rig.runner.positions[int(rig.runner.query_start_loc.np[index])])
                rig.strike(name, first + int((ids[index] != -1).sum()) - 1, None)

    with around(rig.runner, "_update_states_after_model_execute", before, after):
        yield


def state_of_the_request_before(rig: Rig) -> Any:
    """Requests keep the counts of those that had their place in the batch before.

    Few drafts are accepted of a model with random weights, and then no request may end just when
    counts differ. So the last request of the batch gets right drafts, those of an earlier request
    with its prompt; once they are kept, another one is aborted, and the last takes its place.
    """
    counts: dict[int, int] = {}
    texts: dict[tuple[int, ...], list[int]] = {}
    most = int(rig.runner.speculative_config.num_speculative_tokens)

    def schedule(*args: Any) -> None:
        if rig.struck is not None:
            return
        _arrived(rig)
        names = rig.runner.input_batch.req_ids
        running = {each.request_id: each for each in rig.scheduler.running}
        for request in running.values():
            tokens, prompt = [*request.all_token_ids], tuple(request.prompt_token_ids)
            texts[prompt] = max(texts.get(prompt, []), tokens, key=len)
        if len(names) < 2 or names[-1] not in running:
            return
        *accepted, own = rig.runner.input_batch.num_accepted_tokens_cpu[: len(names)].tolist()
        others = zip(names[:-1], accepted, strict=True)
        if (other := next((n for n, a in others if n in running and a != own), None)) is not None:
            rig.engine.abort_request([other], internal=True)
        elif (last := running[names[-1]]).num_output_tokens:
            right = texts[tuple(last.prompt_token_ids)][last.num_tokens :][:most]
            last.spec_token_ids = right or last.spec_token_ids

    def before(*args: Any) -> None:
        _arrived(rig)
        batch = rig.runner.input_batch
        counts.clear()
        counts.update(enumerate(batch.num_accepted_tokens_cpu[: len(batch.req_ids)].tolist()))

    def after(result: Any, *args: Any) -> None:
        batch = rig.runner.input_batch
        for index, name in enumerate(batch.req_ids):
            known = rig.runner.requests[name].num_computed_tokens
            own = int(batch.num_accepted_tokens_cpu[index])
            if rig.struck is None and known and index in counts and counts[index] != own:
                batch.num_accepted_tokens_cpu[index] = counts[index]
                rig.strike(name, known - 1, None)

    stack = ExitStack()
    stack.enter_context(around(rig.scheduler, "schedule", schedule))
    stack.enter_context(around(rig.runner, "_update_states", before, after))
    return stack


def single_states_swapped(rig: Rig) -> Any:
    """Two requests, whose states windows hold, continue each other's."""
    number = int(next(iter(rig.watch.states)).partition(".")[2])

    def before(*args: Any, **kwargs: Any) -> None:
        batch = rig.runner.input_batch
        computed = batch.num_computed_tokens_cpu[: len(batch.req_ids)]
        if rig.struck is None and len(computed) > 1 and min(computed[:2]) > 0:
            table = batch.block_table[number].block_table.np
            table[[0, 1], 0] = table[[1, 0], 0]
            rig.strike(batch.req_ids[0], int(computed[0]) - 1, None)

    return around(rig.runner, "_prepare_inputs", before)


#: Of an engine whose windows hold one state per request.
OF_WINDOWS = (single_states_swapped,)

FAULTS = (
    *(count_one_too_few, count_one_too_many, state_columns_swapped, anothers_state),
    *(first_column_without_drafts, counts_forgotten, state_of_the_request_before),
)
