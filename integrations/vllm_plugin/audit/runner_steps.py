"""The base of what reads the steps of vLLM's runners for the ledger; see ``LedgerReader``."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from ...serving.ledger.rank_agreement import Wrong
from ...serving.ledger.watch import Watch
from ..internals import scheduling
from ..seam.hooked_runner import HookedRunner

HookedRunnerT = TypeVar("HookedRunnerT", bound=HookedRunner)


class RunnerSteps(Generic[HookedRunnerT]):
    """The steps of a hooked runner; its watch is the runner's ``kvtxn_audit``.

    Args:
        runner: the runner.

    Attributes:
        ready: see ``LedgerReader``.
    """

    ready: Literal["planned", "forward", "later"] = "forward"

    def __init__(self, runner: HookedRunnerT) -> None:
        self._runner = runner

    @property
    def watch(self) -> Watch | None:
        """The watch over the present caches; a self-test takes it away for a while."""
        return self._runner.kvtxn_audit

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._runner.kvtxn_audit = watch

    def begin(self) -> None:
        """Do nothing before a step; a kind of runner overrides it."""

    def mark(self, output: object, wrong: Wrong) -> None:
        """Add wrong reads to the output of their step."""
        scheduling.mark(output, wrong)
