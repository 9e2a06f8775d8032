"""The user's settings in vLLM's ``additional_config={"kvtxn": {...}}``, checked.

A setting that does not exist, or a value that a setting cannot take, is the user's mistake and
stops vLLM's start. An engine that kvtxn cannot serve is none: it runs stock, unless the user says
``"required": true``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs
import torch

from .... import registry
from ....acceptance import Acceptance
from ....audit.store_url import store_url
from ....config import POLICIES, TxnConfig
from ....errors import ConfigError, KVTxnError
from ....policy_choice import choose_policy
from ...serving import window_rows
from ...serving.audit_settings import (
    AUDITS,
    OF_AUDITS,
    AuditSettings,
    idle_settings,
    read_audit,
)
from ...serving.given_settings import GivenSettings
from . import is_asked, wants

_WHERE: Final = "additional_config['kvtxn']"

#: By device type: settings of ``TxnConfig`` that its steps do not use, and why.
WITHOUT_EFFECT: Final[Mapping[str, Mapping[str, str]]] = {"cuda": window_rows.WITHOUT_EFFECT}

#: The values of ``recurrent``: whether, and by which operators, windows hold recurrent states.
#: "exact" runs vLLM's own, "fast" kvtxn's kernels where it has some; "auto" is "exact" or "off", by
#: the rule of ``policy.state_rules``. "off" is the default: without a window stock writes rows of
#: attention, but an engine with one state per request stops if its commits cannot run.
RECURRENT: Final = ("off", "exact", "fast", "auto")


@attrs.frozen
class PluginSettings(AuditSettings):
    """The checked settings, those of the audit among them.

    Attributes:
        txn: how windows keep their promises.
        unchecked: windows may run with a release of vLLM that was not checked, after a self-test;
            and, without one, on pipeline stages before the last one.
        windows: the user names a policy; without a policy no window is opened.
        recurrent: one of ``RECURRENT``.
        poison: audit "bytes" fills dead rows and states with NaN; on a GPU alone.
        audit_store: the URL of a store of identities that several processes share; None: rows that
            other processes computed are not verified.
        audit_key_file: the file with the key of these processes.
    """

    txn: TxnConfig
    windows: bool = True
    recurrent: str = "off"
    unchecked: bool = False
    poison: bool = False
    audit_store: str | None = None
    audit_key_file: str | None = None


def is_audited(additional_config: object) -> bool:
    """Tell whether the user asks for an audit, "ledger" or "bytes"."""
    return any(wants(additional_config, "audit", each) for each in AUDITS[1:])


def asks_for_windows(additional_config: object) -> bool:
    """Tell whether the user names a policy; without one an audit opens no window."""
    return is_asked(additional_config) and not wants(additional_config, "policy", None)


def asked_states(additional_config: object) -> str:
    """Return the user's setting ``recurrent``; "off" if it is missing or has no valid value."""
    return next((each for each in RECURRENT if wants(additional_config, "recurrent", each)), "off")


def asked_rows(additional_config: object) -> int | None:
    """Return the user's setting ``max_rows``, which ``settings`` has checked; None without it."""
    given = additional_config["kvtxn"] if is_asked(additional_config) else None
    return given.get("max_rows") if isinstance(given, Mapping) else None


def settings(additional_config: object, max_rows: int, device: str) -> PluginSettings | None:
    """Read and check the settings in ``additional_config={"kvtxn": {...}}``; None without any.

    Args:
        additional_config: the user's.
        max_rows: the default of that setting.
        device: the type of the engine's device.

    Raises:
        ConfigError: a setting does not exist, has no effect on this device or beside the others, or
            cannot take its value; or neither a policy nor an audit is named.
        BackendUnavailableError: no backend of that name is registered, or the backend or the way to
            count accepted drafts cannot work on this device.
    """
    if not is_asked(additional_config):
        return None
    given = additional_config["kvtxn"]
    if not isinstance(given, Mapping):
        raise ConfigError(
            _WHERE,
            "the settings are not valid",
            expected="a dict",
            got=repr(given),
            hint="""write {"kvtxn": {"policy": "auto"}}, or leave kvtxn out to run stock""",
        )
    derived = ("txn", "windows")
    ours = [field.name for field in attrs.fields(PluginSettings) if field.name not in derived]
    found = GivenSettings(_WHERE, given)
    found.check_names([field.name for field in attrs.fields(TxnConfig)] + ours)
    windows = given.get("policy") is not None
    if not windows and found.one_of("audit", AUDITS) == "off":
        raise ConfigError(
            _WHERE,
            "names neither a policy nor an audit, so kvtxn has nothing to do",
            got=f"only {', '.join(map(str, given))}" if given else "no setting",
            hint="""add "policy": "auto" for windows, "audit": "ledger" for the ledger, or both""",
        )
    if windows:  # ``TxnConfig`` refuses it, too, but its hint, to leave the policy out, is no help
        found.one_of("policy", POLICIES, 'write "policy": "auto"')
    checked = PluginSettings(
        TxnConfig(),
        windows=windows,
        recurrent=found.one_of("recurrent", RECURRENT),
        unchecked=found.flag("unchecked"),
        poison=found.flag("poison"),
        **read_audit(found),
    )
    for name, why, hint in _idle(given, checked, device):
        if name in given:
            raise ConfigError(
                _WHERE,
                f"{name} has no effect {why}",
                got=None if name == "audit_store" else repr(given[name]),  # it may have a password
                hint=hint,
            )
    audit_store, audit_key_file = _audit_store(found)
    left_out = ours if windows else [*ours, "policy"]
    values: dict[str, Any] = {n: value for n, value in given.items() if n not in left_out}
    with _in_the_users_words():
        txn = TxnConfig(**{"max_rows": max_rows, **values})
    if windows:
        _check_backend(txn, device)
    return attrs.evolve(checked, txn=txn, audit_store=audit_store, audit_key_file=audit_key_file)


def _idle(
    given: Mapping[str, object], checked: PluginSettings, device: str
) -> Iterator[tuple[str, str, str]]:
    """Yield names of settings that have no effect if they are given, why, and the next step.

    Args:
        given: the user's settings.
        checked: the same, checked.
        device: the type of the engine's device.
    """
    policy, recurrent = given.get("policy"), checked.recurrent
    no_window = "without a policy: no window is opened"
    if policy in ("undo", "direct") and given.get("staging", "auto") != "auto":
        why = f"under policy {policy!r}: no rows wait outside of the cache"
        yield "staging", why, "leave staging out"
    if checked.audit != "bytes":
        hint = 'add "audit": "bytes", or leave poison out'
        yield "poison", "without an audit of bytes", hint
    elif checked.poison and device == "cpu":
        why = "on device cpu: its attention multiplies masked rows by zero, and lets a NaN through"
        yield "poison", why, "leave poison out"
    if policy is None:
        if checked.unchecked:
            yield "unchecked", no_window, "leave unchecked out"
        for field in attrs.fields(TxnConfig):
            if field.name != "policy":
                yield field.name, no_window, f'add "policy": "auto", or leave {field.name} out'
    if "audit_store" not in given:
        hint = 'add "audit_store": "sqlite:///PATH" or "redis://HOST", or leave it out'
        yield "audit_key_file", "without a store", hint
    yield from idle_settings(checked.audit, (*OF_AUDITS, "audit_store", "audit_key_file"))
    for name, why in WITHOUT_EFFECT.get(device, {}).items():
        if given.get(name, "auto") != "auto":
            yield name, f"on device {device}: {why}", f"leave {name} out"
    if recurrent not in ("off", "auto") and device not in ("cpu", "cuda"):
        why = f"on device {device}: kvtxn's vLLM plug-in holds states on CPUs and GPUs only"
        yield "recurrent", why, "leave recurrent out"
    if recurrent != "off" and policy is None:
        yield "recurrent", no_window, "leave recurrent out"
    if recurrent == "fast" and device == "cpu":
        why = "on device cpu: vLLM's own operator is exact there, and kvtxn has no faster one"
        yield "recurrent", why, 'use "exact"'


def _audit_store(found: GivenSettings) -> tuple[str | None, str | None]:
    """Return the URL of a store of identities, and the file of its key; None twice without one.

    The key of a store that is a file is in a file beside it, if the user names no other.

    Raises:
        ConfigError: the URL is not valid, or a store that is no file has no key file.
    """
    given = found.given
    if "audit_store" not in given:
        return None, None
    with _in_the_users_words():
        path = store_url(given["audit_store"]).path
    beside = f"{path}.key" if path is not None else None
    file = given.get("audit_key_file", beside)
    if not isinstance(file, str) or not file:
        hint = f"leave audit_key_file out for {beside}"
        if beside is None:
            hint = "copy a file that key_from_file has written to every machine of the store"
        raise found.not_valid("audit_key_file", "the path of a file", hint)
    return str(given["audit_store"]), file


def _check_backend(txn: TxnConfig, device: str) -> None:
    """Raise what the library would raise in a worker that has come a long way by then.

    A backend may ask CUDA about the device. That would initialise CUDA, which a process must not do
    before vLLM forks its workers from it; so on a GPU only a process that uses CUDA anyway asks.
    Elsewhere nothing is checked.

    Raises:
        BackendUnavailableError: backend or acceptance cannot work on this device.
        ConfigError: the backend cannot have the policy.
    """
    if device == "cpu" or (device == "cuda" and torch.cuda.is_initialized()):
        where = torch.device(device)
        with _in_the_users_words():
            backend = registry.resolve(txn.backend, where)
            choose_policy(txn.policy, backend.capabilities)
            Acceptance(txn.acceptance, where)


@contextmanager
def _in_the_users_words() -> Iterator[None]:
    """Let errors of the library name the user's dict as their place, instead of an operation."""
    try:
        yield
    except KVTxnError as error:
        raise type(error)(
            _WHERE, error.problem, expected=error.expected, got=error.got, hint=error.hint
        ) from None
