"""An engine that is sent pictures, some of them under names that the clients give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtxn.integrations.vllm_plugin import audit_report, snapshots

#: Text behind each picture: with it, two blocks and some tokens.
TEXT = list(range(2, 60))
#: By scenario, the pictures that are sent one after the other: the colour, or None for a name
#: alone; and the client's name, or None.
SENT: dict[str, list[tuple[str | None, str | None]]] = {
    "without names": [("red", None), ("blue", None), ("red", None)],
    "with names": [("red", "x"), ("blue", "y"), ("red", "x"), (None, "y")],
    "one name for two": [("red", "z"), ("blue", "z"), ("blue", None)],
}


def find(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Send the pictures of each scenario; report what was said and found."""
    found: dict[str, Any] = {}
    told = 0
    for name, sent in SENT.items():
        outputs = [_ask(llm, *each) for each in sent]
        violations = audit_report(llm)[0]
        found[name] = {
            "requests": [output.request_id for output in outputs],
            "said": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "violations": violations[told:],
        }
        told = len(violations)
        llm.reset_prefix_cache()
    return {**found, "counts": snapshots(llm)[0]}


def _ask(llm: Any, colour: str | None, name: str | None) -> Any:
    """Ask about a picture."""
    from PIL import Image
    from vllm import SamplingParams

    picture = None if colour is None else Image.new("RGB", (20, 20), colour)
    prompt: dict[str, Any] = {"prompt_token_ids": TEXT, "multi_modal_data": {"image": [picture]}}
    if name is not None:
        prompt["multi_modal_uuids"] = {"image": [name]}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output
