"""The passes of Triton and of numba leave what the torch passes leave, and find the same."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest
import torch
from kernels_here import ON_GPU, importing_kernels
from ledger_kit.engine import SmallEngine
from ledger_kit.life import GROUPS, live, new_engine, new_ledger, said
from ledger_kit.mutants import MUTANTS
from ledger_pairs import DEVICE, assert_equal_books, pair, step_of

from kvtxn.audit import Step, Stretch
from kvtxn.audit.books import FINGERPRINTS, JOURNALLED, KEPT
from kvtxn.audit.rows import first_of

with importing_kernels():
    pass


__all__ = ["pair"]


@pytest.mark.parametrize("name", GROUPS)
def test_a_healthy_life(pair, name):
    ledgers = pair(name)
    live(new_engine(SmallEngine, name, ledgers, seed=2, device=DEVICE), 60 if ON_GPU else 12)
    assert_equal_books(*ledgers)
    one, other = ledgers
    assert said(one) == said(other) == []
    assert one.fingerprints() == other.fingerprints()
    steps = one.counters()["kvtxn_audit_steps_total"]
    assert 5 < steps == len(one.fingerprints()) < FINGERPRINTS


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.contested])
def test_the_same_is_found(pair, mutant):
    names = ["states"] if mutant.needs == "states" else ["sliding", "plain", "shared"]
    for name in names if ON_GPU else names[:1]:
        ledgers = pair(name)
        engine = new_engine(mutant, name, ledgers, seed=3, device=DEVICE)
        live(engine, 60 if ON_GPU else 9)
        found = [ledger.violations() for ledger in ledgers]
        if ON_GPU:  # programs run at once there, so which reader of a wrong row reports it is open
            one, other = ({causes(name, v) for v in each} for each in found)
            assert one == other
            for field in ("words", "owners", "facts"):
                assert torch.equal(*(getattr(each.books, field) for each in ledgers)), field
        else:
            one, other = (sorted(map(str, each)) for each in found)
            assert one == other
            assert_equal_books(*ledgers)


def causes(name, violation):
    """Say when something wrong was found and of which kind, in which group's memory."""
    memory = {group.name: getattr(group, "reads", None) or group.name for group in GROUPS[name]}
    return violation.kind, violation.step, memory.get(violation.group, violation.group)


def every_call(ledger):
    """Make each call of a ledger once, right and wrong."""
    prompt = [11, 12, 13, 14, 15, 16]
    ledger.admit("a", prompt)
    fill = (0, prompt, range(4, 10), [1, 2, 3], [-1] * 5 + [20], -1)
    ledger.write(step := step_of(ledger, "a", *fill))
    ledger.check(step)
    later = (6, [17, 18, 19], range(10, 13), [1, 2, 3], [20, 21, 22], 20)
    ledger.write(step := step_of(ledger, "a", *later, drafts=2))
    ledger.check(step)
    ledger.export("a", "full", [1, 2, 3], 4, 9)  # two rows are drafts
    ledger.resolve(torch.tensor([1, 0], device=DEVICE), torch.tensor([[18, 30, -1]] * 2).to(DEVICE))
    wrong = (8, [31], [12], [1, 2, 3], [21], 21)  # another token than was sampled
    ledger.write(step := step_of(ledger, "a", *wrong, told=0))
    ledger.check(step)
    digests = ledger.export("a", "full", [1], 0, 4)
    ledger.admit("b", [9, 12, 13, 14], extras=[7], embedded={1: 123})
    ledger.import_rows("b", "full", [5], 0, 4, digests)
    ledger.admit("c", [*prompt, 17, 18, 30])
    state = ledger.export_state("c", "mamba", 22, 9)
    ledger.import_state("c", "mamba", 33, 9, state)
    ledger.import_state("b", "mamba", 34, 2, state)
    reads = (4, [50], [24], [5, 6, 6], [35], 34)  # rows of block 5 that it was told of
    ledger.write(step := step_of(ledger, "b", *reads))
    ledger.check(step)
    ledger.publish_state("c", "mamba", 22, 9)
    ledger.copy("mamba", [21], [30])
    ledger.publish("c", "full", [1, 2, 3], 0, 9)
    ledger.hand_out("full", [1])
    ledger.publish("c", "full", [1, 2, 9999], 0, 9)
    last = (9, [40], [13], [6, 6, 6], [31], 30)  # no table of its own, a state that was copied
    ledger.write(step := step_of(ledger, "c", *last))
    ledger.check(step)


def test_every_call_agrees(pair):
    """Both find the same, and say it with the same words."""
    ledgers = pair("states")
    for ledger in ledgers:
        every_call(ledger)
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other
    kinds = {text.partition(":")[0] for text in one}
    assert {"exported", "state", "foreign", "imported", "published", "unwritten"} <= kinds
    assert_equal_books(*ledgers)


def malformed(ledger):
    """Give steps that an engine should not give: no line, position or row lies inside."""
    numbers = lambda *values: torch.tensor(values, device=DEVICE)  # noqa: E731
    ledger.admit("a", [1, 2, 3, 4, 5])
    ledger.admit("gone", [1, 2, 3])
    gone = ledger.line("gone")
    ledger.release("gone")
    good = ledger.line("a")
    cases = [
        # lines, starts, first: the second request is malformed, or padding with stale numbers
        ((good, gone), (0, 2, 4), (0, 0)),
        ((good, 999), (0, 2, 4), (0, 0)),
        ((good, ledger.books.sizes.max_requests), (0, 2, 4), (0, 0)),
        ((-1, good), (0, 2, 99), (10**6, 2)),
        ((good, -1), (0, 2, 2), (0, 10**9)),
        ((good, good), (0, 2, 2), (0, -(10**9))),
        ((good, 3), (0, 2, 10**6), (0, 0)),
        ((good, 3), (0, 2, 1), (0, 0)),
        ((good, 3), (-5, 2, 4), (0, 0)),
        ((good, good), (0, 2, 4), (2, ledger.books.sizes.max_length - 1)),
        ((good, good), (0, 2, 4), (2, -1)),
    ]
    for lines, starts, first in cases:
        step = Step(
            lines=numbers(*lines),
            starts=numbers(*starts),
            first=numbers(*first),
            tokens=numbers(1, 2, 3, -4),
            slots={"full": numbers(4, 5, 6, 10**9), "mamba": numbers(-1, 20, -1, -7)},
            tables={"full": numbers((1, 2), (1, -9)).to(torch.int32)},
            sources={"mamba": numbers(20, 10**12)},
            drafts=numbers(1, 99),
        )
        for call in (ledger.passes.write, ledger.passes.check):
            call(step)
        ledger.passes.resolve(step, numbers(-5, 10**6), numbers((2**45, -1), (-9, 3)))


def test_malformed_requests_are_left_out(pair):
    """Both leave the same books: nothing is written outside, and what was left out is counted."""
    ledgers = pair("states")
    for ledger in ledgers:
        malformed(ledger)
    one, other = (sorted(str(v) for v in ledger.violations()) for ledger in ledgers)
    assert one == other
    for ledger in ledgers:  # a GPU's journal has empty entries for rows that were left out
        ledger.books.counters[JOURNALLED] = 0
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.own, ledgers[1].books.own)
    assert ledgers[0].refused == ledgers[1].refused == 10


def test_steps_that_nobody_resolves_and_steps_of_nobody(pair):
    """Both count the same requests; a step without requests is a step, too."""
    ledgers = pair("states")
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for ledger in ledgers:
        ledger.admit("a", [1, 2, 3, 4, 5])
        fill = ("a", 0, [1, 2, 3], [4, 5, 6], [1, 2], [-1, -1, 20], -1)
        ledger.write(step_of(ledger, *fill, drafts=1))
        for _ in range(2):
            empty = Step(none, none.new_zeros(1), none, none, {"full": none})
            ledger.write(empty)
            ledger.check(empty)
            ledger.resolve([])
        ledger.write(step_of(ledger, *fill, drafts=2))
        ledger.write(step_of(ledger, *fill, drafts=2))
        ledger.resolve(torch.tensor([1, 0], device=DEVICE))
        ledger.write(step_of(ledger, *fill))
    one, other = ledgers
    assert one.unresolved == other.unresolved == 2
    assert one.counters() == other.counters()
    assert one.counters()["kvtxn_audit_steps_total"] == 6
    assert one.fingerprints() == other.fingerprints()
    assert_equal_books(*ledgers)


def test_a_line_that_another_request_gets_while_the_step_is_open(pair):
    """Both mark the rows of the request that ran, and let the other one alone."""
    ledgers = pair("plain")
    numbers = lambda *values: torch.tensor(values, device=DEVICE)  # noqa: E731
    for ledger in ledgers:
        line = numbers(ledger.admit("a", [1, 2, 3]))
        slots, tables = {"full": numbers(4, 5, 6)}, {"full": numbers([1])}
        step = Step(line, numbers(0, 3), numbers(0), numbers(1, 2, 3), slots, tables, numbers(1))
        ledger.write(step)
        ledger.release("a")
        assert ledger.admit("b", [1, 2, 3, 4]) == int(line)
        ledger.check(step)
        ledger.resolve(numbers(0), numbers([9]))
        ledger.publish("b", "full", [1], 0, 3)
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other
    assert [each.partition(":")[0] for each in one] == ["published"]
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.own, ledgers[1].books.own)


def test_a_state_is_compared_at_the_position_that_the_step_gives(pair):
    """Where the step before began is not read."""
    for ledger in pair("states"):
        prompt = [11, 12, 13, 14, 15, 16]
        ledger.admit("a", [*prompt, 17, 18])
        fill = (0, prompt, range(4, 10), [1, 2, 3], [-1] * 5 + [20], -1)
        ledger.write(step_of(ledger, "a", *fill))
        later = step_of(ledger, "a", 6, [17], [10], [1, 2, 3], [20], 20)
        six = torch.tensor([6], device=DEVICE)
        ledger.write(attrs.evolve(later, first=None, positions=six))
        assert ledger.violations() == []
        wrong = step_of(ledger, "a", 3, [18], [11], [1, 2, 3], [20], 20)
        # Once more: that state has taken it in already.
        ledger.write(attrs.evolve(wrong, first=None, positions=six))
        assert [(v.kind, v.position) for v in ledger.violations()] == [("state", 5)]
        assert ledger.counters()["kvtxn_audit_states_checked_total"] == 2


def test_positions_and_counts_as_a_runner_on_a_gpu_has_them(pair):
    """First positions are found on the device, and counts are of sampled tokens."""
    plain, ledgers = new_ledger("plain", device=DEVICE, backend="torch"), pair("plain")
    numbers = lambda *values: torch.tensor(values, device=DEVICE)  # noqa: E731
    for ledger in (plain, *ledgers):
        lines = [ledger.admit(name, [1, 2, 3, 4, 5]) for name in ("a", "b")]
        given = {
            "lines": numbers(*lines, -1), "starts": numbers(0, 3, 5, 5),
            "tokens": numbers(3, 4, 5, 4, 9), "slots": {"full": numbers(6, 7, 8, 11, 12)},
            "tables": {"full": numbers([1, 2], [2, 3], [0, 0])}, "drafts": numbers(0, 1, 0),
        }  # fmt: skip
        if ledger is plain:
            step = Step(first=numbers(2, 3, -1), **given)
        else:
            step = Step(first=None, positions=numbers(2, 3, 4, 3, 4), **given)
        ledger.write(step)
        ledger.check(step)
        counts = (0, 1, -1) if ledger is plain else (1, 2, 0)
        ids = numbers([6, -1], [9, 8], [-1, -1])
        ledger.resolve(numbers(*counts), ids, besides=0 if ledger is plain else 1)
        assert first_of(ledger.books, step).tolist() == [2, 3, -1]
    found = [sorted(map(str, ledger.violations())) for ledger in (plain, *ledgers)]
    assert found[0] == found[1] == found[2] != []
    assert_equal_books(*ledgers)
    assert torch.equal(plain.books.facts, ledgers[0].books.facts)
    assert int(plain.books.facts[KEPT].max()) == 1


def test_tables_without_columns_lead_nowhere(pair):
    """For both: each row is read outside of the group."""
    ledgers = pair("plain")
    numbers = lambda *values: torch.tensor(values, device=DEVICE)  # noqa: E731
    none = torch.zeros(1, 0, dtype=torch.int32, device=DEVICE)
    for ledger in ledgers:
        line = numbers(ledger.admit("a", [1, 2, 3]))
        slots = {"full": numbers(4, 5, 6)}
        step = Step(line, numbers(0, 3), numbers(0), numbers(1, 2, 3), slots, {"full": none})
        ledger.write(step)
        ledger.check(step)
        ledger.inspect(Stretch(line, numbers(0, 5), numbers(3, 9), {"full": none}, "published"))
    one, other = ([str(v) for v in ledger.violations()] for ledger in ledgers)
    assert one == other
    assert [each.partition(":")[0] for each in one] == ["unwritten", "published"]
    assert_equal_books(*ledgers)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvtxn.backends.launching import repeated_launch
from kvtxn.backends.audit import byte_lists, byte_work, change_kernel, compare_kernel
from kvtxn.backends.audit import resolve_kernel, write_kernel

SIZES = {"num_requests", "num_rows", "own_stride", "num_lines", "journal_size", "capacity"}
NUMBERS = {"num_tokens", "num_blocks", "num_released", "count", "first", "second", "width", "end"}
SCALARS = {*SIZES, *NUMBERS, "kind", "columns", "besides", "every", "violations"}
KINDS = {**dict.fromkeys(SCALARS, "i64"), "short": "i32", "outputs": "*bf16"}
WRITE = {"FILLS": True, "DRAFTS": True, "POSITIONS": True, "TILE": 128}
KERNELS = (
    (repeated_launch._add, {"FACTOR": 3}),
    (change_kernel.change_books, {"SEALS": True, "TILE": 512}),
    (change_kernel.put_numbers, {"TILE": 512}),
    (change_kernel.count_tokens, {"TILE": 16}),
    (write_kernel.write_rows, {**WRITE, "TREES": False}),
    (write_kernel.write_rows, {**WRITE, "TREES": True}),
    (resolve_kernel.resolve_rows, {"DRAFTS": True, "TREES": False, "TILE": 16, "REJECTED": 1}),
    (resolve_kernel.resolve_rows, {"DRAFTS": True, "TREES": True, "TILE": 16, "REJECTED": 1}),
    (compare_kernel.compare_rows, {"STEPPING": True, "EXPORTED": False, "SPLITS": 8, "TILE": 1024}),
    (compare_kernel.compare_rows, {"STEPPING": False, "EXPORTED": True, "SPLITS": 8, "TILE": 1024}),
    (compare_kernel.compare_states, {"TOLD": True, "FILLS": True, "TILE": 1024}),
    (byte_lists.list_reads, {"FILLS": True, "SPLITS": 8}),
    (byte_lists.list_written, {"DRAFTS": True, "TILE": 128}),
    (byte_work.do_work, {"PROGRAMS": 64, "ENTRIES": 1024, "TILE": 128}),
    (byte_work.find_nan, {"ENTRIES": 1024, "TILE": 1024}),
)
for kernel, constants in KERNELS:
    constants = {"GROUPS": 2, **constants} if "GROUPS" in kernel.arg_names else constants
    signature = {
        name: "constexpr" if name in constants else KINDS.get(name, "*i64")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    words = ptx.count(".param .u64") + ptx.count(".param .u32")
    arguments = len(signature) - len(constants)
    assert arguments <= words <= arguments + repeated_launch.SCRATCH, (kernel.__name__, words)
print("compiled", len(KERNELS))
"""


@pytest.mark.skipif(ON_GPU, reason="the other tests compile them")
def test_the_kernels_compile_for_a_gpu():
    """The interpreter takes more than the compiler does; it needs no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=600, check=False
    )
    assert "compiled 15" in done.stdout, done.stderr[-3000:]
