"""Objects of the V2 runner that tell it, within a step, that the audit can look at the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..attach import follow
from .graph_watch import GraphWatch


class Telling(Protocol):
    """A runner, as these objects need it.

    Attributes:
        kvtxn_audit: the ``Watch``, if there is one.
        kvtxn_metadata: gets the step's attention metadata.
    """

    kvtxn_audit: GraphWatch | None
    kvtxn_metadata: object

    def kvtxn_step_is_ready(self) -> None:
        """Tell the watch of the step."""


def tell_metadata(state: object, runner: Telling) -> Callable[[], None]:
    """Let vLLM's ``model_state`` give a runner the attention metadata of each step.

    The step is ready then, unless a connector brings rows. Windows that hold states may have put
    themselves around the same method; they see the metadata first.

    Returns:
        A function that undoes it.
    """

    def prepared(metadata: object) -> None:
        runner.kvtxn_metadata = metadata
        if runner.kvtxn_audit is not None and runner.kvtxn_audit.transfers is None:
            runner.kvtxn_step_is_ready()

    return follow(state, "prepare_attn", prepared)


class TellingConnector:
    """A mixin of the object by which the V2 runner calls its connector.

    The rows that a connector brings within a step are in their blocks once this has begun, so the
    audit compares what the step reads only then.

    Attributes:
        kvtxn_runner: the runner.
    """

    kvtxn_runner: Telling

    def pre_forward(self, *args: Any, **kwargs: Any) -> None:
        """Begin the step's transfers; then the step is ready."""
        super().pre_forward(*args, **kwargs)  # type: ignore[misc]
        self.kvtxn_runner.kvtxn_step_is_ready()
