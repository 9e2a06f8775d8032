"""A declared inability that works fails: a backend says neither more nor less than it can."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import BackendUnavailableError
from ..executor import Capabilities, Executor, Txn
from ..layers import LayerRef
from .caches import LayerSpec
from .kit import POLICIES, TRANSACTIONAL, Kit, KitBase
from .naive import attention, make_sequences
from .number_formats import FORMATS
from .promise_device import replayed_commit, window_without_sync
from .rig import SIMPLE, Rig, registered
from .trees import expect_moved, padded


class Honesty(KitBase):
    """What the capabilities say is true in both directions."""

    def test_the_declaration_is_well_formed(self, kit: Kit) -> None:
        """Capabilities of the right type, known policies, at least one; a name of its own."""
        assert isinstance(kit.capabilities, Capabilities)
        assert kit.capabilities.policies, f"{kit.name} declares no policy at all"
        assert kit.capabilities.policies <= set(POLICIES)
        assert isinstance(kit.executor.name, str)
        assert kit.executor.name

    @pytest.mark.parametrize("policy", POLICIES)
    def test_policies(self, kit: Kit, policy: str) -> None:
        """A declared policy runs; another one is refused by name, and does not work either."""
        if policy in kit.capabilities.policies:
            assert kit.rig(policy).manager.policy == policy
            return
        with pytest.raises(BackendUnavailableError):
            Rig(kit.name, policy, kit.device, SIMPLE)
        claiming = that_claims(kit.executor, policies=frozenset(POLICIES))
        with registered(claiming) as name:
            worked = works(lambda: commit_two(Rig(name, policy, kit.device, SIMPLE)))
        assert not worked, f"{kit.name} declares that it cannot do {policy!r}, and can"

    def test_attention(self, kit: Kit) -> None:
        """An executor that declares no attention has none."""
        if kit.capabilities.attention:
            pytest.skip("attention is declared; promise 4 tests it")
        policy = next(iter(sorted(kit.capabilities.policies)))
        executor = that_claims(kit.executor, attention=True)
        with registered(executor) as name:
            spec = LayerSpec(fmt=FORMATS["fp32"], size=8, block_size=4)
            rig = Rig(name, policy, kit.device, [spec])
            worked = works(lambda: _attend_once(rig))
        assert not worked, f"{kit.name} declares no attention, and has it"

    def test_trees(self, kit: Kit) -> None:
        """An executor that declares no draft trees is not asked for one, and has none."""
        if kit.capabilities.trees:
            pytest.skip("trees are declared; they are tested by themselves")
        policy = min(kit.capabilities.policies)
        with pytest.raises(BackendUnavailableError):
            kit.rig(policy, SIMPLE).manager.window(2, tree=[-1, -1])
        executor = that_claims(kit.executor, trees=True)
        with registered(executor) as name:
            worked = works(lambda: _commit_branch(Rig(name, policy, kit.device, SIMPLE)))
        assert not worked, f"{kit.name} declares that it cannot do draft trees, and can"

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_atomic(self, kit: Kit, policy: str) -> None:
        """A commit that is declared to be atomic does nothing after it wrote: that could fail."""
        if not kit.capabilities.atomic:
            pytest.skip("no atomic commit is declared; then the window makes up for it")
        later: list[str] = []
        rig = kit.rig(policy, SIMPLE, executor=_watched(kit.executor, later))
        for _ in range(3):  # what recurs may go another way than what is new
            rig.run(rig.batch(), [2, 1])
        assert not later, f"{kit.name} declares an atomic commit, but went on with {later[0]}"

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_capture(self, kit: Kit, policy: str) -> None:
        """A commit that is declared not to be capturable is not."""
        kit.need_cuda()
        if kit.capabilities.capturable:
            pytest.skip("capture is declared; promise 6 tests it")
        rig = kit.rig(policy)
        assert not works(lambda: replayed_commit(rig)), (
            f"{kit.name} declares that commit cannot be captured, and it can"
        )

    def test_waiting(self, kit: Kit) -> None:
        """An executor that declares to wait for the device does so under some policy."""
        kit.need_cuda()
        if kit.capabilities.no_host_sync:
            pytest.skip("no waiting is declared; promise 6 tests it")
        policies = sorted(kit.capabilities.policies)
        silent = [works(partial(window_without_sync, kit.rig(p), False)) for p in policies]
        assert not all(silent), f"{kit.name} declares that it waits for the device, and does not"


class _AfterWrites(TorchDispatchMode):
    """Notes in ``later`` the operations that begin when one of the caches has changed."""

    def __init__(self, layers: Sequence[LayerRef], later: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._later = later
        self._cells = [plane.cells for ref in layers for plane in ref.planes]
        self._before = [cells.clone() for cells in self._cells]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        pairs = zip(self._cells, self._before, strict=True)
        if not capturing and not all(torch.equal(now, old) for now, old in pairs):
            self._later.append(str(func))
        return func(*args, **(kwargs or {}))


def _watched(executor: type[Executor], later: list[str]) -> type[Executor]:
    """The same executor; what its commits do after they wrote goes to ``later``."""

    def commit(self: Executor, txn: Txn, accepted: Tensor) -> None:
        with _AfterWrites(self.layers, later):
            executor.commit(self, txn, accepted)

    return type(f"Watched{executor.__name__}", (executor,), {"commit": commit})


def that_claims(executor: type[Executor], **claims: Any) -> type[Executor]:
    """The same executor, saying more of itself."""
    capabilities = attrs.evolve(executor.capabilities, **claims)
    return type(f"Claiming{executor.__name__}", (executor,), {"capabilities": capabilities})


def works(attempt: Any) -> bool:
    """Whether an attempt ends without an exception, wrong bytes included."""
    try:
        attempt()
    except Exception:
        return False
    return True


def commit_two(rig: Rig) -> None:
    """Two windows, looked at before and after commit; raises where the policy is not kept."""
    for counts in ([2, 0], [1, 2]):
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch)
            rig.expect_staged(batch)
            rig.check("staged")
            window.commit(rig.accepted(counts))
        rig.expect_committed(batch, batch.kept(counts))
        rig.check("committed")


def _commit_branch(rig: Rig) -> None:
    """A path that is not the first rows; raises where it does not end up in its places."""
    batch = rig.batch(((1, 1), (3, 2)), padding=0.0)
    forest = [(-1, -1, 1), (-1, 0)]
    with rig.open(batch, forest) as window:
        rig.stage(window, batch)
        rig.expect_staged(batch)
        window.commit(padded([[1, 2], [0]], rig.device))
    expect_moved(rig, batch, [[1, 2], [0]])
    rig.check("committed")


def _attend_once(rig: Rig) -> None:
    """One attention, compared; raises where it is missing or wrong."""
    sequences = make_sequences(rig, ((1, 1), (2, 1)), (5, 0), "native")
    batch, cache = sequences.batch, rig.caches[0]
    full = rig.truth.copy()
    for slot, row in zip(batch.slots["default"], batch.rows[cache.name], strict=True):
        full.write(cache.name, slot, row)
    query = torch.linspace(-1, 1, batch.num_rows * 4 * 8).view(-1, 4, 8)
    with rig.open(batch) as window:
        rig.stage(window, batch)
        table = sequences.table(cache).to(rig.device)
        out = window.attend(
            cache.ref, query.to(rig.device), table, rig.accepted(sequences.seq_lens)
        )
        window.abort()
    expected = attention(full, cache, sequences, query)
    if not bool(((out.double().cpu() - expected).abs() <= 1e-3).all()):
        raise AssertionError("attention is there, but wrong")
