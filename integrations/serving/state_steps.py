"""Steps whose windows hold recurrent states: each state takes in exactly the accepted drafts.

An engine with one state per request has nothing to fall back to: after a step without a commit a
state would be behind its request. So the draft rows of each layer with a state are kept here as
well as in the window. Where a window ends without having taken them in, or where there is none,
they are taken in one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from torch import Tensor

from ...config import TxnConfig
from ...errors import KVTxnError
from ...layers import LayerRef
from ...log import get_logger
from ...manager import TransactionManager
from ...states import WindowState
from .eager_steps import EagerSteps

log = get_logger()

#: The ends of a window after its commit. (A window that was aborted may end in the second as well.)
_TAKEN_IN = (WindowState.COMMITTED, WindowState.FELL_BACK)


@attrs.frozen(eq=False)
class StateRows:
    """The draft rows of one layer with a state in one step, request by request.

    Attributes:
        requests: the places in the batch of the requests that have drafts.
        draft_len: the number of drafts of each of these requests.
        slots: int64 ``[num_requests]``, the slot of each request's state.
        parts: ``[num_rows, *shape]`` each: the tensors that the layer stages.
    """

    requests: tuple[int, ...]
    draft_len: tuple[int, ...]
    slots: Tensor
    parts: tuple[Tensor, ...]


class StateSteps(EagerSteps):
    """The windows of a model runner, some of whose layers replay rows into a state.

    The forward takes settled rows into the states by itself; drafts it computes over copies.

    Args:
        manager: over the target's layers, under policy ``deferred``.
        vocab_size: sampled ids at or above it do not count as tokens.
    """

    def __init__(self, manager: TransactionManager, vocab_size: int) -> None:
        super().__init__(manager, vocab_size)
        self._slots: Mapping[str, Tensor] = {}
        self._rows: dict[str, StateRows] = {}
        self._staged: set[str] = set()
        self._taken_in = False

    def begin(self, find: Callable[[], Mapping[str, Tensor] | str]) -> None:
        """Open the window of a planned step, see ``EagerSteps``."""

        def remembered() -> Mapping[str, Tensor] | str:
            found = find()
            self._slots = {} if isinstance(found, str) else found
            return found

        super().begin(remembered)

    def draft_slots(self, group: str) -> Tensor:
        """Return the slots of the step's draft rows in a group of layers with rows."""
        assert self._plan is not None
        return self._slots[group][self._plan.rows]

    def verified(self, ref: LayerRef, rows: StateRows) -> None:
        """Keep the draft rows of a layer with a state, and stage them in the step's window.

        Raises:
            KVTxnError: these are other rows than those that the step's plan has as drafts. A draft
                among the other rows is in its request's state already.
        """
        plan = self._plan
        if plan is not None:
            planned = tuple(plan.requests.tolist()), plan.draft_len
            if planned != (rows.requests, rows.draft_len):
                raise KVTxnError(
                    "verify",
                    f"layer {ref.name!r} verifies other rows than the step has drafts",
                    expected=f"drafts {planned[1]} of requests {planned[0]}",
                    got=f"drafts {rows.draft_len} of requests {rows.requests}",
                    hint="start the engine without windows over states, and report this",
                )
        self._rows[ref.name] = rows
        window = self.window
        if window is None or not self.deferring:
            return
        try:
            window.stage(ref, rows.parts)
        except Exception as error:
            if ref.name not in window.missing:
                self._staged.add(ref.name)
            self.fail("stage", error)
        else:
            self._staged.add(ref.name)

    def commit(self, sampled: Callable[[], Tensor]) -> None:
        """Commit the accepted drafts; afterwards every state has taken them in.

        Raises:
            KVTxnError: a state did not take them in. The engine must not go on.
        """
        rows, staged = self._rows, self._staged
        if self._plan is not None:
            self._check_all(rows)
        self._taken_in = False
        super().commit(sampled)
        done = staged if self._taken_in else set()
        try:
            for name in rows.keys() - done:
                self._take_in(self.manager.layers[name], rows[name], sampled())
        except Exception as error:
            raise KVTxnError(
                "commit",
                f"a state did not take in its accepted drafts: {error!r}",
                hint="the state is not that of its request: start the engine again",
            ) from error
        self._forget()

    def _check_all(self, rows: Mapping[str, StateRows]) -> None:
        """Refuse a step with drafts that a layer did not verify: its state has them already."""
        layers = self.manager.layers.items()
        without = [name for name, ref in layers if ref.replay and name not in rows]
        if without:
            raise KVTxnError(
                "commit",
                f"layer {without[0]!r} took the drafts of this step in before they were accepted",
                expected="draft rows of every layer with a state",
                got=f"{len(without)} layers without any",
                hint="start the engine without windows over states, and report this",
            )

    def abandon(self) -> None:
        """Forget the step, see ``EagerSteps``; a window that is still open takes no draft in.

        Where the forward failed, the layers that it reached have taken the settled rows in by
        themselves. An engine must not go on with these requests: vLLM does not repeat a step, whose
        tokens it counts as computed when it schedules them.
        """
        self._taken_in = self.window is not None and self.window.state in _TAKEN_IN
        super().abandon()
        self._forget()

    def _forget(self) -> None:
        self._slots, self._rows, self._staged = {}, {}, set()

    def _take_in(self, ref: LayerRef, rows: StateRows, sampled: Tensor) -> None:
        """Let one layer take in the accepted drafts, in a window of its own, by the reference."""
        log.debug("states.taken_in_alone", layer=ref.name, requests=len(rows.requests))
        most = max(sum(rows.draft_len), 1)
        config = TxnConfig(policy="deferred", backend="torch", max_rows=most, on_error="raise")
        manager = TransactionManager([ref], config)
        accepted = manager.acceptance.from_ids(
            sampled[list(rows.requests)], rows.draft_len, vocab_size=self._vocab_size
        )
        with manager.window(rows.draft_len, rows.slots, settled=0) as window:
            window.stage(ref, rows.parts)
            window.commit(accepted)
