"""The self-test of an engine with a release of vLLM that was not checked.

After the warm-up, and before the engine serves, dummy requests take a few verify steps twice: with
windows, and with every draft written directly, as stock does. Both begin with caches full of the
same noise. The window may differ from direct writes in the slots of rejected drafts alone, where
the noise has to be; no other slot of the cache may change. Then every byte is put back.

An engine that does not pass runs stock, or, with ``"required": true``, its start stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import attrs
import torch
from torch import Tensor

from ...errors import KVTxnError
from ...layers import LayerRef
from ...log import get_logger
from ...manager import TransactionManager
from ...row_io import LayerRows, read, read_layers, write_layers
from .runners.hooked_runner import HookedRunner, stay_out, unhook_runner
from .seam import dummy_steps, ranks
from .seam.dummy_steps import Dummy, Sizes

log = get_logger()

#: Verify steps; each knows one more token of the model's own text, to be accepted.
ROUNDS: Final = 3
#: Requests of a step that have drafts, if it has room for so many: one begins with right drafts,
#: and one has wrong ones. Another request has none.
_DRAFTING: Final = 2
#: Every byte of the noise is below this, so that no number of any format is infinite or none.
_FINITE: Final = 0x3B
#: Slots that are digested at once.
_CHUNK: Final = 4096


class SelfTestError(KVTxnError, RuntimeError):
    """Windows did not leave the bytes that they should have left."""

    default_hint = "run without the setting 'unchecked', or with a release that was checked"


@attrs.frozen(eq=False)
class Bench:
    """A runner under test.

    Attributes:
        runner: the runner, with steps over its caches.
        manager: the manager of its windows.
        sizes: its sizes.
        requests: the dummy requests.
        drafting: how many of them have drafts; they come first.
        slots: int64, by group: every slot of the requests' blocks.
        others: int64, by group: the slots of all blocks that belong to no request in any group.
    """

    runner: HookedRunner
    manager: TransactionManager
    sizes: Sizes
    requests: tuple[Dummy, ...]
    drafting: int
    slots: Mapping[str, Tensor]
    others: Mapping[str, Tensor]

    @property
    def layers(self) -> tuple[LayerRef, ...]:
        """The target's layers."""
        return tuple(self.manager.layers.values())

    @property
    def blocks(self) -> set[int]:
        """The numbers of all blocks of the requests, in any group."""
        return {block for each in self.requests for own in each.blocks for block in own}


def run(runner: HookedRunner) -> str | None:
    """Test a runner whose windows are attached; every rank of a group must call this.

    Returns:
        The reason for which windows must not be used, one sentence, of the first rank that has one;
        None if the test passed on every rank. An error of any kind counts as a failed test. The
        caches have the bytes that they had before.
    """
    why = None
    try:
        _test(_bench(runner))
    except SelfTestError as error:
        why = f"the self-test failed: {error.problem}; {error.hint}"
    except Exception as error:
        why = f"the self-test failed: {error!r}"
    if ranks.number_of_ranks() > 1:
        why = next((each for each in ranks.of_all(why) if each is not None), None)
    return why


def _bench(runner: HookedRunner) -> Bench:
    """Make the requests, with prompts that end shortly before a block: drafts cross into one.

    Raises:
        SelfTestError: the engine's steps, requests or cache have no room for them.
    """
    sizes = dummy_steps.sizes(runner)
    manager = runner.kvtxn.manager
    drafting, count = _room(sizes, manager.config.max_rows)
    length = min(
        min(sizes.block_sizes) - 2,
        sizes.max_length - sizes.drafts - 2,
        sizes.max_tokens,
    )
    if length < 1 or not drafting:
        raise SelfTestError(
            "self_test",
            "the engine's steps are too short for a dummy request",
            expected=f"room for {sizes.drafts + 1} verified rows after a prompt",
            got=f"steps of {sizes.max_tokens} tokens, requests of {sizes.max_length}",
        )
    first, requests = 1, []  # block 0 is nobody's
    for number in range(count):
        own = []
        for size in sizes.block_sizes:
            end = first + -(-(length + sizes.drafts + 1) // size)
            own.append(list(range(first, end)))
            first = end
        prompt = [(7 * number + token * token) % sizes.vocabulary for token in range(length)]
        requests.append(Dummy(f"kvtxn-self-test-{number}", prompt, tuple(own)))
    if first > sizes.num_blocks:
        raise SelfTestError("self_test", f"the cache has {sizes.num_blocks} blocks, not {first}")
    slots, others = {}, {}
    for ref in manager.layers.values():
        size = sizes.block_sizes[_group(ref)]
        blocks = torch.tensor([b for each in requests for b in each.blocks[_group(ref)]])
        ours = (blocks[:, None] * size + torch.arange(size)).flatten().to(manager.device)
        mask = torch.ones(ref.num_slots, dtype=torch.bool, device=manager.device)
        mask[size : first * size] = False  # layers of several groups may share one tensor
        slots[ref.group], others[ref.group] = ours, mask.nonzero().squeeze(1)
    return Bench(runner, manager, sizes, tuple(requests), drafting, slots, others)


def _room(sizes: Sizes, max_rows: int) -> tuple[int, int]:
    """Return how many requests with drafts a step has room for, and how many requests in all.

    Of those without drafts there is one, if the step has room for it.

    Args:
        sizes: the runner's.
        max_rows: the most rows of windows.
    """
    rows = sizes.drafts + 1
    most = min(_DRAFTING, sizes.max_requests, sizes.max_tokens // rows)
    drafting = min(most, max(1, max_rows // rows))
    another = drafting < sizes.max_requests and drafting * rows < sizes.max_tokens
    return drafting, drafting + another


def _group(ref: LayerRef) -> int:
    """Return the number of a layer's KV-cache group."""
    return int(ref.group.partition(".")[2])


def _test(bench: Bench) -> None:
    """Take verify steps with windows and without, and compare; every byte is put back.

    Raises:
        SelfTestError: tokens, bytes or counts differ, or the model accepted, or rejected, no draft.
    """
    known: dict[str, list[int]] = {each.name: [] for each in bench.requests}
    total = [0, 0]
    device = bench.manager.device
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        dummy_steps.borrowed(bench.runner, bench.blocks),
        _unwatched(bench.runner),
    ):
        noise = _noise(bench)
        for _ in range(ROUNDS):
            drafts = _drafts(bench, known)
            with _directly(bench.runner):
                expected = _take(bench, noise, drafts)
                direct = read_layers(bench.layers, bench.slots)
            rest, before = _digest(bench), _counts(bench)
            tokens = _take(bench, noise, drafts)
            found = read_layers(bench.layers, bench.slots)
            if tokens != expected:
                raise SelfTestError("self_test", "tokens differ from those of direct writes")
            accepted = {name: len(tokens[name]) - 1 for name in drafts}
            rejected = {name: len(drafts[name]) - accepted[name] for name in drafts}
            _compare(bench, _put_back(bench, direct, noise, accepted, rejected), found)
            if _digest(bench) != rest:
                raise SelfTestError("self_test", "rows of other blocks were written")
            counted = [now - then for now, then in zip(_counts(bench), before, strict=True)]
            sums = [sum(accepted.values()), sum(rejected.values())]
            if counted != sums:
                raise SelfTestError(
                    "self_test",
                    f"windows counted {counted[0]} accepted and {counted[1]} rejected drafts, "
                    f"where vLLM has {sums[0]} and {sums[1]}",
                )
            total = [a + b for a, b in zip(total, sums, strict=True)]
            known = {name: tokens[name] for name in known}
    if 0 in total:
        untested = (
            "accepted none of the test's drafts, so the test cannot tell whether windows write "
            "accepted rows"
            if not total[0]
            else "rejected none of the test's drafts, so the test cannot tell whether windows keep "
            "rejected rows out of the cache"
        )
        raise SelfTestError("self_test", f"the model {untested}")


def _drafts(bench: Bench, known: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Choose drafts: of the first request as far as its text is known, of another wrong ones.

    Args:
        bench: the runner under test.
        known: by name, the tokens that the last step gave.

    Returns:
        By name, as many drafts as the engine takes; requests without drafts are left out.
    """
    found = {}
    for number, each in enumerate(bench.requests[: bench.drafting]):
        right = known[each.name][: bench.sizes.drafts] if number == 0 else []
        wrong = (known[each.name] or [0])[-1] + 1
        rest = bench.sizes.drafts - len(right)
        found[each.name] = right + [(wrong + i) % bench.sizes.vocabulary for i in range(rest)]
    return found


def _take(bench: Bench, noise: LayerRows, drafts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Begin, verify and end the requests over caches full of noise; return the verified tokens.

    Random numbers begin with the same seed in each call. The requests end even if a step raises.
    """
    for ref in bench.layers:
        every = torch.ones_like(bench.slots[ref.group], dtype=torch.bool)
        write_layers([ref], noise, bench.slots, every)
    torch.manual_seed(0)
    try:
        sampled: dict[str, list[int]] = {}
        for each in bench.requests:
            sampled |= dummy_steps.begin(bench.runner, each)
        return dummy_steps.verify(bench.runner, bench.requests, sampled, drafts)
    finally:
        dummy_steps.end(bench.runner, bench.requests)


@contextmanager
def _directly(runner: HookedRunner) -> Iterator[None]:
    """Let steps write every draft into its slot, without a commit, within a ``with`` block."""
    steps = runner.kvtxn
    if steps is not None:
        steps.abandon()
    if getattr(steps, "deferred", False):
        steps.windows.mark(None)  # captured graphs read this buffer
    runner.kvtxn = None
    try:
        yield
    finally:
        runner.kvtxn = steps


@contextmanager
def _unwatched(runner: HookedRunner) -> Iterator[None]:
    """Hide the runner's steps from its audit, if there is one, until the ``with`` block ends."""
    watch = getattr(runner, "kvtxn_audit", None)
    if watch is not None:
        runner.kvtxn_audit = None
    try:
        yield
    finally:
        if watch is not None:
            runner.kvtxn_audit = watch


# -- bytes ------------------------------------------------------------------------------


def _noise(bench: Bench) -> LayerRows:
    """Make rows of noise for every slot of the requests' blocks, the same in each call.

    Every byte is from 1 to 0x3A, so that no number is infinite or none.
    """
    generator = torch.Generator().manual_seed(1)

    def rows(like: Tensor) -> Tensor:
        shape = (*like.shape[:-1], like.shape[-1] * like.itemsize)
        content = torch.randint(1, _FINITE, shape, dtype=torch.uint8, generator=generator)
        return content.view(like.dtype).to(like.device)

    found = read_layers(bench.layers, bench.slots)
    return {name: tuple(map(rows, parts)) for name, parts in found.items()}


def _digest(bench: Bench) -> list[int]:
    """Digest the rows of all blocks that are not the requests': one number for each plane.

    Planes are in the order of the layers.
    """
    found = []
    for ref in bench.layers:
        for plane in ref.planes:
            total = 0
            for slots in bench.others[ref.group].split(_CHUNK):
                words = read(plane, slots).flatten(1).to(torch.int64)
                columns = torch.arange(1, words.shape[1] + 1, device=words.device)
                total ^= int(((words * columns).sum(1) * (slots * 2 + 1)).sum())
            found.append(total)
    return found


def _put_back(
    bench: Bench,
    direct: LayerRows,
    noise: LayerRows,
    accepted: Mapping[str, int],
    rejected: Mapping[str, int],
) -> LayerRows:
    """Return the rows that windows should leave: noise below rejected drafts, else ``direct``.

    Args:
        bench: the runner under test.
        direct: the rows that direct writes left.
        noise: the rows before the step.
        accepted: by name, the number of accepted drafts.
        rejected: by name, the number of rejected drafts.
    """
    places = {}
    for group in bench.slots:
        number, begin = int(group.partition(".")[2]), 0
        found: list[int] = []
        for each in bench.requests:
            first = begin + len(each.prompt) + 1 + accepted.get(each.name, 0)
            found += range(first, first + rejected.get(each.name, 0))
            begin += len(each.blocks[number]) * bench.sizes.block_sizes[number]
        places[group] = torch.tensor(found, dtype=torch.int64, device=bench.slots[group].device)
    expected = {}
    for ref in bench.layers:
        parts = [part.clone() for part in direct[ref.name]]
        for part, before in zip(parts, noise[ref.name], strict=True):
            part[places[ref.group]] = before[places[ref.group]]
        expected[ref.name] = tuple(parts)
    return expected


def _compare(bench: Bench, expected: LayerRows, found: LayerRows) -> None:
    """Compare every byte of the requests' blocks.

    Raises:
        SelfTestError: a layer's rows differ.
    """
    for name, parts in expected.items():
        for want, got in zip(parts, found[name], strict=True):
            wrong = (want != got).flatten(1).any(1).nonzero().squeeze(1)
            if wrong.numel():
                slot = int(bench.slots[bench.manager.layers[name].group][wrong[0]])
                raise SelfTestError(
                    "self_test",
                    f"{wrong.numel()} rows of layer {name!r} are not those of direct writes, the "
                    f"first one in slot {slot}",
                )


def _counts(bench: Bench) -> list[int]:
    """Return the numbers of accepted and of rejected drafts that the windows counted."""
    counts = bench.manager.snapshot()
    names: Sequence[str] = ("kvtxn_rows_committed_total", "kvtxn_rows_rejected_total")
    return [int(counts[name]) for name in names]


def decide_by_test(runner: HookedRunner, version: str) -> None:
    """Test a hooked runner after its warm-up, once; unhook it, and log why, if the test fails.

    If it passes, the counters begin anew, and the windows are announced in the log. Nothing happens
    without windows, or if the test was passed before.

    Raises:
        RequiredError: it fails, and the user wants no engine without kvtxn.
    """
    steps = getattr(runner, "kvtxn", None)
    if steps is None or runner.kvtxn_announce is None:
        return  # kvtxn stays out already, or the test was passed before
    rank, required, announce = runner.kvtxn_rank, runner.kvtxn_required, runner.kvtxn_announce
    why = run(runner)
    if why is not None:
        unhook_runner(runner)
        stay_out(f"vLLM {version} was not checked, and {why}", rank, required=required)
        return
    runner.kvtxn_announce = None
    steps.manager.metrics.restart()
    log.info("kvtxn.self_test_passed", rank=rank, vllm=version, steps=ROUNDS)
    announce()
