"""Honest capabilities: a test fails if a declared ability is missing, or a denied one works."""

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
from ..executor import Capabilities, Executor, SampledIds, Txn
from ..layers import LayerRef
from .batches import SHAPES
from .caches import LayerSpec
from .kit import POLICIES, TRANSACTIONAL, Kit, KitBase
from .mixed_layers import REPLAYED, RING, ROWS, STATE
from .number_formats import FORMATS
from .promise_device import replayed_commit, window_without_sync
from .promise_own_writes import attend_and_compare
from .rig import SIMPLE, AnySpec, Rig, registered
from .trees import run_tree


class Claims(KitBase):
    """The declared capabilities are exactly the capabilities that work."""

    def test_the_declaration_is_well_formed(self, kit: Kit) -> None:
        """The capabilities have the right type and at least one policy, all of them known.

        The executor has a name.
        """
        assert isinstance(kit.capabilities, Capabilities)
        assert kit.capabilities.policies, f"{kit.name} declares no policy at all"
        assert kit.capabilities.policies <= set(POLICIES)
        assert isinstance(kit.executor.name, str)
        assert kit.executor.name

    def test_policies(self, kit: Kit, policy: str) -> None:
        """A declared policy runs under its name; any other is refused with BackendUnavailableError.

        The executor does not keep an undeclared policy even where it is made to claim it.
        """
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
        """An executor that declares no attention has none that is right, if made to claim it."""
        if kit.capabilities.attention:
            pytest.skip("attention is declared; promise 4 tests it")
        policy = next(iter(sorted(kit.capabilities.policies)))
        executor = that_claims(kit.executor, attention=True)
        with registered(executor) as name:
            spec = LayerSpec(fmt=FORMATS["fp32"], size=8, block_size=4)
            rig = Rig(name, policy, kit.device, [spec])
            past = (((1, 1), (2, 1)), (5, 0))
            worked = works(lambda: attend_and_compare(rig, *past, 1e-3, {}))
        assert not worked, f"{kit.name} declares no attention, and has it"

    @pytest.mark.parametrize("kind", ["ring", "recurrent", "replayed"])
    def test_denied_kinds(self, kit: Kit, kind: str) -> None:
        """A layer of a kind that is not declared is refused by name, and does not work either."""
        if kind in kit.capabilities.kinds:
            pytest.skip(f"{kind} layers are declared; they are tested by themselves")
        layers: dict[str, AnySpec] = {"ring": RING, "recurrent": STATE, "replayed": REPLAYED[0]}
        specs = (ROWS, layers[kind])
        with pytest.raises(BackendUnavailableError, match=kind):
            kit.rig("deferred", specs)
        claimed = {kind} | ({"recurrent"} if kind == "replayed" else set())
        claiming = that_claims(kit.executor, kinds=kit.capabilities.kinds | claimed)
        with registered(claiming) as name:
            worked = works(lambda: _lap_and_replace(name, kit, specs))
        assert not worked, f"{kit.name} declares that it cannot hold {kind} layers, and can"

    def test_trees(self, kit: Kit) -> None:
        """An executor that declares no draft trees is asked for none.

        A window with a tree is refused. If it is made to claim them, its commits along paths are
        wrong or raise.
        """
        if kit.capabilities.trees:
            pytest.skip("trees are declared; they are tested by themselves")
        policy = min(kit.capabilities.policies)
        with pytest.raises(BackendUnavailableError):
            kit.rig(policy, SIMPLE).manager.window(2, tree=[-1, -1])
        executor = that_claims(kit.executor, trees=True)
        with registered(executor) as name:
            rig = Rig(name, policy, kit.device, SIMPLE)
            batch = rig.batch(((1, 1), (3, 2)), padding=0.0)
            forest, paths = [(-1, -1, 1), (-1, 0)], [[1, 2], [0]]
            worked = works(lambda: run_tree(rig, batch, forest, paths))
        assert not worked, f"{kit.name} declares that it cannot do draft trees, and can"

    def test_sampled_ids(self, kit: Kit) -> None:
        """An executor that declares to take no ``SampledIds`` cannot commit by them."""
        if kit.capabilities.takes_ids:
            pytest.skip("ids are declared; they are tested by themselves")
        with registered(that_claims(kit.executor, takes_ids=True)) as name:
            rig = Rig(name, min(kit.capabilities.policies), kit.device, SIMPLE)
            batch = rig.batch(((1, 1), (3, 2)), padding=0.0)
            ids = torch.tensor([[5, 5, -1, -1], [5, -1, -1, -1]]).to(kit.device)
            worked = works(lambda: rig.commit(batch, [1, 0], given=SampledIds(ids)))
        assert not worked, f"{kit.name} declares that it takes no sampled ids, and takes them"

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_atomic(self, kit: Kit, policy: str) -> None:
        """A commit that is declared to be atomic calls nothing of torch after it wrote a cache.

        Any later step may fail, and half of the commit would stand.
        """
        if not kit.capabilities.atomic:
            pytest.skip("no atomic commit is declared; then the window makes up for it")
        later: list[str] = []
        rig = kit.rig(policy, SIMPLE, executor=_watched(kit.executor, later))
        for _ in range(3):  # a repeated window may take another code path than a new one
            rig.run(rig.batch(), [2, 1])
        assert not later, f"{kit.name} declares an atomic commit, but went on with {later[0]}"

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_capture(self, kit: Kit, rig: Rig) -> None:
        """A commit that is declared not to be capturable cannot be captured and replayed.

        On a GPU.
        """
        kit.need_cuda()
        if kit.capabilities.capturable:
            pytest.skip("capture is declared; promise 6 tests it")
        assert not works(lambda: replayed_commit(rig)), (
            f"{kit.name} declares that commit cannot be captured, and it can"
        )

    def test_waiting(self, kit: Kit) -> None:
        """An executor that declares to wait for the device does so under some policy; on a GPU."""
        kit.need_cuda()
        if kit.capabilities.no_host_sync:
            pytest.skip("no waiting is declared; promise 6 tests it")
        policies = sorted(kit.capabilities.policies)
        silent = [works(partial(window_without_sync, kit.rig(p), False)) for p in policies]
        assert not all(silent), f"{kit.name} declares that it waits for the device, and does not"


class _AfterWrites(TorchDispatchMode):
    """A mode that notes in ``later`` the operations of torch that begin after a cache has changed.

    Nothing is noted while a graph is captured.
    """

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
    """Make a subclass of an executor whose commits note in ``later`` the calls after a write."""

    def commit(self: Executor, txn: Txn, accepted: Tensor) -> None:
        """Commit under ``_AfterWrites``."""
        with _AfterWrites(self.layers, later):
            executor.commit(self, txn, accepted)

    return type(f"Watched{executor.__name__}", (executor,), {"commit": commit})


def that_claims(executor: type[Executor], **claims: Any) -> type[Executor]:
    """Make a subclass of an executor that declares other capabilities, as in ``claims``."""
    capabilities = attrs.evolve(executor.capabilities, **claims)
    return type(f"Claiming{executor.__name__}", (executor,), {"capabilities": capabilities})


def works(attempt: Any) -> bool:
    """Tell whether an attempt ends without an exception, which is swallowed.

    Wrong bytes raise one.
    """
    try:
        attempt()
    except Exception:
        return False
    return True


def commit_two(rig: Rig) -> None:
    """Run two windows, compared before and after commit; raise if the policy is not kept."""
    for counts in ([2, 0], [1, 2]):
        batch = rig.batch()
        rig.commit(batch, counts, "committed", check_staged=True)


def _lap_and_replace(name: str, kit: Kit, specs: Sequence[AnySpec]) -> None:
    """Run windows with laps; raise if any of them is wrong."""
    commit_two(Rig(name, "deferred", kit.device, specs))
    rig = Rig(name, "deferred", kit.device, specs)
    batch = rig.batch(SHAPES["settled-laps"])
    rig.commit(batch, when="committed")
