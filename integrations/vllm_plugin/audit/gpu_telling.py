"""Objects of the V2 runner that tell it, within a step, that the audit can look at the step."""

from __future__ import annotations

from typing import Any, Protocol

from .watch import Watch


class Telling(Protocol):
    """A runner, as these objects need it.

    Attributes:
        kvtxn_audit: the watch, if there is one.
        kvtxn_metadata: gets the step's attention metadata.
    """

    kvtxn_audit: Watch | None
    kvtxn_metadata: Any

    def kvtxn_step_is_ready(self) -> None:
        """Tell the watch of the step."""


class TellingModelState:
    """A mixin of vLLM's ``model_state``: gives a runner the attention metadata of each step.

    Attributes:
        kvtxn_runner: the runner.
    """

    kvtxn_runner: Telling

    def prepare_attn(self, *args: Any, **kwargs: Any) -> Any:
        """Make the metadata; the step is ready, unless a connector brings rows."""
        metadata = super().prepare_attn(*args, **kwargs)  # type: ignore[misc]
        runner = self.kvtxn_runner
        runner.kvtxn_metadata = metadata
        if runner.kvtxn_audit is not None and runner.kvtxn_audit.transfers is None:
            runner.kvtxn_step_is_ready()
        return metadata


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
