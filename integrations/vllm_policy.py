"""What to do for a given vLLM configuration: the settings asked for, the facts, the decision.

One table decides; the plugin and ``kvtxn doctor`` read the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import attrs

from ..config import POLICIES, TxnConfig
from ..errors import ConfigError

#: vLLM releases whose internals were checked, one by one.
SUPPORTED: Final = ("0.32.0",)


@attrs.frozen(kw_only=True)
class Facts:
    """A vLLM engine as far as it matters here; the defaults describe the plainest one.

    The first block is known from the configuration, the second once the model is loaded.

    Attributes:
        version: of vLLM.
        device: ``"cpu"``, ``"cuda"``, ...
        runner: ``"v1"`` or ``"v2"``, vLLM's model runner.
        method: of speculation, such as ``"ngram"``; None without speculation.
        dtype: of the model's activations.
        kv_cache_dtype: ``"auto"`` or an 8-bit format.
        pipeline_parallel: number of pipeline stages.
        context_parallel: ranks that share one sequence's cache.
        connector: a KV connector moves rows in and out of the cache.
        mla: multi-head latent attention.
        recurrent: some layers keep a state instead of rows.
        microbatches: the batch is cut into overlapping halves.
        foreign_layer: a layer of the target with rows in a cache that is not plain attention.
        kv_sharing: some layers read another layer's rows.
        sinks: attention sinks or ALiBi slopes.
    """

    version: str = SUPPORTED[-1]
    device: str = "cpu"
    runner: str = "v1"
    method: str | None = "ngram"
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    pipeline_parallel: int = 1
    context_parallel: int = 1
    connector: bool = False
    mla: bool = False
    recurrent: bool = False
    microbatches: bool = False

    foreign_layer: str | None = None
    kv_sharing: bool = False
    sinks: bool = False


class Decision(NamedTuple):
    """What the plugin does: a policy, or ``"off"`` (stock vLLM, untouched), and why."""

    policy: str
    reason: str


_Rule = tuple[Callable[[Facts], bool], str]

#: Where kvtxn stays out altogether.
_OFF: Final[tuple[_Rule, ...]] = (
    (
        lambda f: f.version not in SUPPORTED,
        "vLLM {version} was not checked; supported: " + ", ".join(SUPPORTED),
    ),
    (lambda f: f.method is None, "the engine does not speculate, so no row is ever rejected"),
    (lambda f: f.runner != "v1", "model runner {runner} is not supported yet"),
    (lambda f: f.device != "cpu", "device {device} is not supported yet"),
    (lambda f: f.pipeline_parallel > 1, "pipeline parallelism is not supported yet"),
    (lambda f: f.context_parallel > 1, "context parallelism is not supported yet"),
    (lambda f: f.microbatches, "overlapping microbatches are not supported yet"),
    (lambda f: f.mla, "latent attention is not supported yet"),
    (lambda f: f.recurrent, "recurrent state cannot be in a window"),
    (lambda f: f.foreign_layer is not None, "layer {foreign_layer} is no plain attention"),
)

#: Where the attention cannot read the window, so drafts have to be in the cache.
_NOT_DEFERRED: Final[tuple[_Rule, ...]] = (
    (lambda f: f.kv_cache_dtype != "auto", "vLLM quantises {kv_cache_dtype} rows by itself"),
    (lambda f: f.connector, "a KV connector may read rows before they are committed"),
    (lambda f: f.kv_sharing, "some layers read the rows of others within the forward"),
    (lambda f: f.sinks, "the window attention has no sinks and no ALiBi"),
)

#: Where deferring works, but sums in another order than the stock attention: near-ties between
#: two tokens can fall the other way. "auto" promises stock's tokens; by name it can be had.
_AUTO_NOT_DEFERRED: Final[tuple[_Rule, ...]] = (
    (lambda f: f.dtype != "float32", "in {dtype} another order of sums can tip a near-tie"),
)


def decide(asked: str, facts: Facts) -> Decision:
    """The policy for this engine, and why.

    Args:
        asked: ``"auto"``, ``"deferred"``, ``"undo"`` or ``"direct"``.
        facts: the engine.

    Returns:
        A policy that is safe here, or ``"off"``; a policy asked for by name is never swapped
        for another one.
    """
    for applies, reason in _OFF:
        if applies(facts):
            return Decision("off", _fill(reason, facts))
    if asked in ("undo", "direct"):
        return Decision(asked, "asked for")
    rules = _NOT_DEFERRED + (_AUTO_NOT_DEFERRED if asked == "auto" else ())
    obstacles = [_fill(reason, facts) for applies, reason in rules if applies(facts)]
    if not obstacles:
        why = "asked for" if asked == "deferred" else "the window attention can read the window"
        return Decision("deferred", why)
    if asked == "deferred":
        return Decision("off", f"policy 'deferred' cannot work here: {obstacles[0]}")
    return Decision("undo", f"rows cannot be deferred here: {obstacles[0]}")


def _fill(reason: str, facts: Facts) -> str:
    return reason.format_map(attrs.asdict(facts))


def settings(additional_config: object, max_rows: int) -> TxnConfig | None:
    """What ``additional_config={"kvtxn": {...}}`` asks for; None where it asks for nothing.

    Args:
        additional_config: vLLM's, as the user gave it.
        max_rows: the default for ``max_rows``.

    Raises:
        ConfigError: a key or value is not valid.
        BackendUnavailableError: no backend of that name is registered.
    """
    given = additional_config.get("kvtxn") if isinstance(additional_config, Mapping) else None
    if given is None:
        return None
    known = [field.name for field in attrs.fields(TxnConfig)]
    if not isinstance(given, Mapping):
        raise ConfigError(
            "kvtxn", "additional_config['kvtxn'] is not valid", expected="a dict", got=repr(given)
        )
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown:
        raise ConfigError(
            "kvtxn",
            f"additional_config['kvtxn'] has no setting {unknown[0]!r}",
            expected=f"one of {', '.join(known)}",
            got=", ".join(unknown),
        )
    if given.get("policy") is None:
        raise ConfigError(
            "kvtxn",
            "additional_config['kvtxn'] names no policy",
            expected=f"policy: one of {', '.join(map(repr, POLICIES))}",
            got=dict(given),
        )
    return TxnConfig(**{"max_rows": max_rows, **given})


def surfaces_errors(additional_config: object) -> bool:
    """Whether ``on_error="raise"`` was asked for, even if other settings are invalid."""
    given = additional_config.get("kvtxn") if isinstance(additional_config, Mapping) else None
    return isinstance(given, Mapping) and given.get("on_error") == "raise"
