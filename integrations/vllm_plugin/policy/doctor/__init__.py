"""The vLLM section of ``kvtxn doctor``; it decides by ``policy.rules``, as the plug-in does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from .....config import POLICIES
from .....doctor import LACKS
from .....errors import ConfigError
from ....serving.source_files import Sources
from ...seam import audited_requests, engine_config, workers
from ...seam.engine_protocols import VllmConfig
from ...seam.hook_points import HOOK_POINTS, places_of
from .. import release_records, supported
from ..decision import Decision
from ..engine_facts import EngineFacts
from ..matrix import BACKENDS, LEGEND, matrix
from ..release_records import Move
from ..rules import ASKED_FOR, decide, on_trial, refused
from ..settings import PluginSettings, asked_rows, settings
from ..state_rules import NO_FAST_FORM, PROMISES, measured_fast, takes, without_fast_form
from ..supported import no_bytes

#: Printed with every decision about an engine that does not run yet.
ASSUMED: Final = (
    "attention sinks, ALiBi and shared rows as the model's configuration says, and the attention "
    "that vLLM chooses unless one is named; a running engine's log line, kvtxn.active or "
    "kvtxn.inactive, has the last word"
)

#: Ends a decision about an engine with a release that was not checked.
ON_TRIAL: Final = "; if the engine passes the self-test at its start, else off"

#: The entry of an engine that vLLM itself does not run.
STOCK: Final = "stock vLLM"

#: Printed for GPUs.
SPARE_BLOCKS: Final = (
    "deferred on a GPU writes every draft, rejected ones too, to spare blocks behind those that "
    "vLLM hands out; the cache's own slots get settled and accepted rows only"
)


def report(engine_args: Mapping[str, object] | None) -> dict[str, object]:
    """Report the policy that kvtxn would take in the installed vLLM.

    Args:
        engine_args: arguments of the engine to judge, as for ``LLM(...)``; None for the plainest
            speculating engine on this machine.

    Returns:
        The release, the engine that is judged, what becomes of each setting that the engine
        arguments ask for, which of them the engine does not get, each policy's outcome with its
        reason (of an engine with pipeline stages for the last one, and for those before it),
        whether the ledger can watch, and what "auto" comes to for every kind of engine on this
        device.
        Facts that only a loaded model can tell are guessed by
        ``seam.engine_config.FROM_MODEL``; see ``ASSUMED``.

    Raises:
        ConfigError: a setting in ``additional_config={"kvtxn": {...}}`` is not valid, or vLLM does
            not take the engine arguments.
        BackendUnavailableError: no backend of that name is registered.
    """
    wanted, config = None, None
    if engine_args is None:
        facts = engine_config.plain_facts()
    else:
        wanted = settings(engine_args.get("additional_config"), 1, workers.device_type())
        config = _config(engine_args)
        facts = engine_config.expected_facts(config)
        check_fit(wanted, facts, config)
    gone, why = hook_gone(facts), refused(facts)
    lacks = [] if config is None else _lacking(wanted, facts, config, gone)
    plain = attrs.asdict(EngineFacts())
    special = {k: v for k, v in attrs.asdict(facts).items() if v != plain[k]}
    known = ", ".join(supported.releases_for(facts.device))
    return {
        "version": f"{facts.version} (windows are for vLLM {known}; the audit takes others, too)",
        **_moved(facts),
        "engine": {
            "device": facts.device,
            "runner": facts.runner,
            "method": facts.method,
            **special,
        },
        **({} if why is None else {STOCK: f"does not run this engine: {why}"}),
        **({} if config is None else {"asked": _asked(wanted, facts, config, gone)}),
        **({LACKS: lacks} if lacks else {}),
        "assumed": ASSUMED,
        "policies": _policies(facts, gone, wanted),
        **_earlier_stages(facts, gone),
        "audit": _audit_in_words(facts),
        **({"spare blocks": SPARE_BLOCKS} if facts.device == "cuda" else {}),
        "legend": list(LEGEND),
        "matrix": [str(row) for row in matrix(facts)],
    }


def _config(engine_args: Mapping[str, object]) -> VllmConfig:
    """Build vLLM's configuration.

    Raises:
        ConfigError: vLLM does not take the arguments; with what it says, and with the place where
            a model that is not found was looked for.
    """
    try:
        return engine_config.config_from(engine_args)
    except Exception as error:
        found = getattr(error, "errors", None)  # pydantic's, whose text has internals, too
        said = "; ".join(each["msg"] for each in found()) if callable(found) else str(error)
        model, hint = Path(str(engine_args["model"])), "mend the engine arguments"
        if not (model.exists() or isinstance(error, TypeError)):  # of an argument's name
            hint = f"{Path.cwd()} has no folder {str(model)!r}, so vLLM took it for a hub's name"
        raise ConfigError("vLLM", f"{type(error).__name__}: {said}", hint=hint) from error


def _audit_in_words(facts: EngineFacts) -> str:
    """Say for the doctor whether the ledger can watch an engine, and why not if it cannot.

    Of a release that is not listed it says that this is not known.
    """
    if refused(facts) is not None:
        return "there is no engine to watch"
    if not supported.is_listed(facts.version):
        return "not known of this release; kvtxn.audit_active or kvtxn.audit_inactive says it"
    why = supported.cannot_watch(facts.device, facts.runner, facts.context_parallel)
    if why is not None:
        return f"the ledger cannot watch this engine: {why}"
    return 'the ledger can watch this engine; "audit": "ledger" asks for it'


def _decide(asked: str, facts: EngineFacts, gone: str | None) -> Decision:
    """Choose a policy as the plug-in does when the engine starts, and extend the reason.

    Args:
        asked: the user's policy.
        facts: the facts of the engine.
        gone: the sentence that a hook point is gone, which rules out windows on trial.
    """
    found = decide(asked, facts)
    if found.policy == "off":
        return found
    if on_trial(facts) and gone is not None:
        return Decision("off", gone)
    trial = ON_TRIAL if on_trial(facts) else ""
    return Decision(found.policy, found.reason + _by_attention(asked, facts, found) + trial)


def _by_attention(asked: str, facts: EngineFacts, found: Decision) -> str:
    """Name the backends of latent attention with which the policy would be another one.

    On a GPU vLLM chooses among several when it loads the model. The text continues a sentence; it
    is empty if one is named already, and for engines without latent attention.
    """
    if not (facts.device == "cuda" and facts.mla and facts.attention is None):
        return ""
    others: dict[str, list[str]] = {}
    for backend in BACKENDS[facts.device][1]:
        policy = decide(asked, attrs.evolve(facts, attention=backend)).policy
        if policy != found.policy:
            others.setdefault(policy, []).append(backend)
    return "".join(f"; {policy} with {' or '.join(each)}" for policy, each in others.items())


def _policies(
    facts: EngineFacts, gone: str | None, wanted: PluginSettings | None = None
) -> list[str]:
    """Return one line for each policy that can be set: the policy that it gives, and why.

    The user's own one refers to its line among the settings, which has the reason.
    """
    asked = wanted.txn.policy if wanted is not None and wanted.windows else None
    lines = []
    for setting in POLICIES:
        policy, reason = _decide(setting, facts, gone)
        reason = reason.replace(ASKED_FOR, "if you name it", 1)
        lines.append(f"{setting} -> {policy} ({'see asked' if setting == asked else reason})")
    return lines


def _earlier_stages(facts: EngineFacts, gone: str | None) -> dict[str, object]:
    """Return an entry with the lines of ``_policies`` for pipeline stages before the last one.

    Empty without such stages.
    """
    if facts.pipeline_parallel == 1:
        return {}
    return {"policies on earlier stages": _policies(attrs.evolve(facts, last_stage=False), gone)}


def _moved(facts: EngineFacts) -> dict[str, object]:
    """Compare a release's hook points with the nearest checked release's; return two entries.

    Empty for a release that was checked.
    """
    if is_checked(facts.version, facts.device):
        return {}
    found = compare(facts.version, facts.device)
    return {
        "compared with": f"{found.version}, the nearest release that was checked: "
        f"{len(found.moves)} of {found.compared} hook points moved",
        "moved": [str(move) for move in found.moves],
    }


def _asked(
    wanted: PluginSettings | None, facts: EngineFacts, config: VllmConfig, gone: str | None = None
) -> list[str]:
    """Return one line for each of the user's settings: its effect; the last one on ``required``.

    Without settings one line says that kvtxn stays out.
    """
    if wanted is None:
        return ['nothing: "kvtxn" is not in additional_config, so kvtxn stays out']
    outcomes = list(_outcomes(wanted, facts, config, gone))
    lines = [str(outcome) for outcome in outcomes]
    if wanted.required:
        lacking = [outcome.why for outcome in outcomes if outcome.lacks]
        outcome = "the engine starts, unless its loaded model rules out what is asked for"
        if refused(facts) is not None:
            outcome = "the start stops, and would without it: vLLM itself does not run this engine"
        elif lacking:
            outcome = f"the start stops: kvtxn is required, but {lacking[0]}"
        lines.append(f"required -> {outcome}")
    return lines


def _lacking(
    wanted: PluginSettings | None, facts: EngineFacts, config: VllmConfig, gone: str | None
) -> list[str]:
    """Name each setting that has another value than the user asks for; or vLLM, if it refuses."""
    if refused(facts) is not None:
        return [STOCK]
    outcomes = () if wanted is None else _outcomes(wanted, facts, config, gone)
    return [f"{outcome.setting} {outcome.asked}" for outcome in outcomes if outcome.lacks]


@attrs.frozen
class _Outcome:
    """A setting, the value that the user asks for, and what becomes of it."""

    setting: str
    asked: str
    found: str
    why: str | None = None

    @property
    def lacks(self) -> bool:
        """True if the engine does not get the setting that the user asks for.

        Of a policy, and of "auto", only "off" is not what was asked for.
        """
        if self.asked == "auto" or self.setting == "policy":
            return self.found == "off"
        return self.found != self.asked

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.setting} {self.asked} -> {self.found}{why}"


def _states(asked: str, facts: EngineFacts) -> _Outcome:
    """Describe the value of ``recurrent`` that the engine gets, and its effect on a GPU.

    The gain of "fast" is named where the engine could have it.
    """
    if facts.device != "cuda":
        return _Outcome("recurrent", asked, asked)
    found = "exact" if asked == "auto" else asked
    says = PROMISES[found] if found == asked else f"{takes(facts)}; {PROMISES[found]}"
    if found == "exact" and not without_fast_form(facts):
        says += f'; with "fast" {PROMISES["fast"]}; {measured_fast(facts.recurrent)}'
    return _Outcome("recurrent", asked, found, says)


def _outcomes(
    wanted: PluginSettings, facts: EngineFacts, config: VllmConfig, gone: str | None = None
) -> Iterator[_Outcome]:
    """Yield the outcome of each setting about policy, states and audit, as the plug-in decides.

    Settings that are off are left out; so are states without windows, and all others of an audit
    that is impossible.
    """
    if wanted.windows:
        policy, why = _decide(wanted.txn.policy, facts, gone)
        yield _Outcome("policy", wanted.txn.policy, policy, why)
        if wanted.recurrent != "off" and facts.recurrent is not None and policy != "off":
            yield _states(wanted.recurrent, facts)
    if wanted.audit == "off":
        return
    unwatched = audited_requests.unwatched(config)
    if unwatched is not None:
        yield _Outcome("audit", wanted.audit, "off", unwatched)
        return
    known = wanted.audit == "bytes" and facts.device == "cuda" and facts.attention is not None
    unread = no_bytes(str(facts.attention), facts.kv_cache_dtype) if known else None
    found = wanted.audit if unread is None else "ledger"
    rate = f"a slot in {wanted.audit_every} is compared in each step" if found == "bytes" else None
    yield _Outcome("audit", wanted.audit, found, unread or rate)
    kept = audited_requests.uncontained(config) if wanted.evicts else None
    contains = kept if wanted.on_violation == "contain" else None
    yield _Outcome(
        "on_violation", wanted.on_violation, "log" if contains else wanted.on_violation, contains
    )
    if wanted.stale != "count":
        evicts = kept if wanted.stale == "contain" else None
        rate = f"untold changes of weights are looked for every {wanted.weights_every} steps"
        yield _Outcome("stale", wanted.stale, "alarm" if evicts else wanted.stale, evicts or rate)


@attrs.frozen
class Comparison:
    """The hook points of a release that moved since a checked one.

    Attributes:
        version: the checked release.
        compared: the number of hook points.
        moves: the hook points that are not as they were.
    """

    version: str
    compared: int
    moves: tuple[Move, ...]

    @property
    def gone(self) -> str | None:
        """Name the first hook point that is gone; None without any."""
        return next((move.name for move in self.moves if move.kind == "gone"), None)


def is_checked(version: str, device: str) -> bool:
    """Tell whether a release was checked on a device."""
    return version in supported.releases_for(device)


def compare(version: str, device: str) -> Comparison:
    """Compare the installed vLLM with the nearest release that was checked on a device.

    Hook points count that concern the device and that the checked release has. vLLM's source files
    are read, and nothing is imported.

    Args:
        version: the installed release.
        device: "cuda", or one that is compared with releases for CPUs.
    """
    check = "gpu" if device == "cuda" else "cpu"
    before = release_records.nearest(version, check, release_records.load())
    names = [name for place in places_of(device) for name in HOOK_POINTS[place]]
    known = [name for name in names if name in before.hooks]
    now = release_records.read_hooks(Sources(workers.source_folder()), known)
    found = release_records.moves(before.hooks, now, known)
    return Comparison(before.version, len(known), tuple(found))


def hook_gone(facts: EngineFacts) -> str | None:
    """Say in a sentence which hook point a release on trial lacks; None without any.

    None also for a release that was checked, which is not looked at.
    """
    if not on_trial(facts):
        return None
    gone = compare(facts.version, facts.device).gone
    return gone and f"vLLM {facts.version} was not checked, and lacks {gone}"


_WHERE: Final = "additional_config['kvtxn']"


def check_fit(wanted: PluginSettings | None, facts: EngineFacts, config: VllmConfig) -> None:
    """Refuse settings that do not fit the engine: ``max_rows`` and ``recurrent``.

    Nothing is read of a release of vLLM that was not checked, unless the user sets ``unchecked``.

    Raises:
        ConfigError: one of the two does not fit.
    """
    if wanted is None or not (supported.is_listed(facts.version) or facts.unchecked):
        return
    check_rows(asked_rows(workers.additional_config(config)), engine_config.drafts(config))
    check_states(wanted, facts)


def check_rows(max_rows: int | None, drafts: int) -> None:
    """Refuse a ``max_rows`` with which no request could have a window: fewer rows than one has.

    Raises:
        ConfigError: it is too small.
    """
    rows = drafts + 1
    if drafts and max_rows is not None and max_rows < rows:
        raise ConfigError(
            _WHERE,
            f"max_rows={max_rows} leaves no room for one request, so no window could ever open",
            expected=f"at least {rows} ({drafts} drafts, and the token before them)",
            got=max_rows,
            hint="leave max_rows out",
        )


def check_states(wanted: PluginSettings, facts: EngineFacts) -> None:
    """Refuse ``recurrent`` for a model whose layers it does not concern.

    Raises:
        ConfigError: the model has no recurrent layers, or none for which "fast" has kernels.
    """
    if wanted.recurrent not in ("off", "auto") and facts.recurrent is None:
        raise ConfigError(
            _WHERE,
            "recurrent has no effect: the model has no recurrent layers",
            got=repr(wanted.recurrent),
            hint="leave recurrent out",
        )
    if wanted.recurrent == "fast" and without_fast_form(facts):
        raise ConfigError(
            _WHERE,
            f"recurrent has no effect: {NO_FAST_FORM.format(recurrent=facts.recurrent)}",
            got=repr(wanted.recurrent),
            hint='use "exact"',
        )


def bounded(wanted: PluginSettings, config: VllmConfig) -> PluginSettings:
    """Return the settings with ``max_rows``, which sizes buffers, at most the rows of a step.

    They stay as they are without windows or without drafts.
    """
    if not (wanted.windows and engine_config.drafts(config)):
        return wanted
    most = engine_config.most_window_rows(config)
    txn = attrs.evolve(wanted.txn, max_rows=min(wanted.txn.max_rows, most))
    return attrs.evolve(wanted, txn=txn)
