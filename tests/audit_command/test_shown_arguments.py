"""No page, record or refusal has an engine's argument that may be a secret."""

from __future__ import annotations

import contextlib
import json

import pytest
import recorded

pytest.importorskip("vllm")

from kvtxn.integrations.audit_command import command
from kvtxn.integrations.audit_command.shown_arguments import shown

from kvtxn.cli import main

SECRET = "hf_0123456789"
WITH_SECRETS = {
    "model": "m", "hf_token": SECRET, "max_num_seqs": 3, "hf_overrides": {"a": {"b": SECRET}},
    "limit_mm_per_prompt": {"image": 1}, "tokenizer": ["m", SECRET],
    "kv_transfer_config": {
        "kv_connector": "LMCacheConnector", "kv_role": "kv_both", "engine_id": SECRET,
        "kv_connector_extra_config": {"url": f"redis://:{SECRET}@host"},
    },
    "additional_config": {
        "other": {"key": SECRET}, "kvtxn": {"policy": "auto", "audit_store": SECRET}
    },
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "new": SECRET},
}  # fmt: skip


def test_the_page_shows_no_secret_of_the_engine_s_arguments(tmp_path, monkeypatch):
    """The command stays readable: names, and the values that say what was audited."""
    page = tmp_path / "audit.html"
    monkeypatch.setattr(command, "play", lambda job, name: recorded.found(steps=30))
    monkeypatch.setattr(command, "watched", lambda given: dict(given))
    assert main(["audit", "--engine-args", json.dumps(WITH_SECRETS), "--html", str(page)]) == 0
    text = page.read_text()
    assert SECRET not in text
    assert shown(WITH_SECRETS) == {
        "model": "m", "hf_token": "...", "max_num_seqs": 3, "hf_overrides": "...",
        "limit_mm_per_prompt": "...", "tokenizer": "...",
        "kv_transfer_config": {
            "kv_connector": "LMCacheConnector", "kv_role": "kv_both", "engine_id": "...",
            "kv_connector_extra_config": "...",
        },
        "additional_config": {"other": "...", "kvtxn": {"policy": "auto", "audit_store": "..."}},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "new": "..."},
    }  # fmt: skip


NO_MODEL = (f'{{"hf_token": "{SECRET}"', json.dumps({"hf_token": SECRET}))
NO_OBJECT = tuple(
    json.dumps({"model": "m", "additional_config": given}) for given in (SECRET, {"kvtxn": SECRET})
)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("audit", given) for given in NO_MODEL + NO_OBJECT),
        *(("doctor", given) for given in NO_MODEL),
    ],
)
def test_no_refusal_repeats_what_may_be_a_secret(capsys, name, given):
    with contextlib.suppress(SystemExit):
        main([name, "--engine-args", given])
    said = capsys.readouterr().err
    assert "--engine-args" in said or "additional_config" in said
    assert SECRET not in said
