"""An engine that is sent pictures, some of them under names that the clients give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kvtxn.integrations.vllm_plugin import audit_report, new_weights, snapshots
from planting import Rig

#: Text behind each picture: with it, two blocks and some tokens.
TEXT = list(range(2, 60))
#: By scenario, the pictures that are sent one after the other: the colour, or None for a name
#: alone; and the client's name, or None.
SENT: dict[str, list[tuple[str | None, str | None]]] = {
    "without names": [("red", None), ("blue", None), ("red", None)],
    "with names": [("red", "x"), ("blue", "y"), ("red", "x"), (None, "y")],
    "one name for two": [("red", "z"), ("blue", "z"), ("blue", None)],
}


class Painter:
    """An extension of vLLM's worker."""

    def see_otherwise(self) -> None:
        """Change the weights of the encoder in place, and no others."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with torch.inference_mode():
            for name, parameter in model.named_parameters():
                if name.startswith("vision_model."):
                    parameter.mul_(-1.5)


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
    return {**found, "counts": snapshots(llm)[0], "updated": _update(llm)}


def ask_about_red(llm: Any) -> None:
    """Ask about the picture that another process will have under the same name, too."""
    _ask(llm, "red", "z")


def find_in_store(llm: Any, engine: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Ask about pictures whose rows a connector takes for those of another process's picture."""
    found: list[dict[str, Any]] = []
    for colour in ("red", "blue"):
        assert llm.reset_prefix_cache()
        output, old = _ask(llm, colour, "z"), sum(len(each["violations"]) for each in found)
        assert Rig(llm).watch.transfers._shared._thread.wait(60)
        unverified = snapshots(llm)[0]["kvtxn_audit_rows_unverified_total"]
        violations = audit_report(llm)[0][old:]
        found.append(
            {
                "cached": output.num_cached_tokens,
                "unverified": unverified,
                "violations": [(v["kind"], v["position"], v["differs"]) for v in violations],
            }
        )
    return found


def _update(llm: Any) -> dict[str, Any]:
    """Send a picture before the encoder's weights change, and twice afterwards.

    The second time its output is still kept, the third time it is computed anew.
    """
    outputs = [_ask(llm, "green", None)]
    llm.collective_rpc("see_otherwise")
    new_weights(llm)
    for forget in (lambda: None, llm.llm_engine.reset_encoder_cache):
        assert llm.reset_prefix_cache()
        forget()
        outputs.append(_ask(llm, "green", None))
    return {
        "requests": [output.request_id for output in outputs],
        "said": [list(output.outputs[0].token_ids) for output in outputs],
        "ages": audit_report(llm, ages=True)[0],
    }


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
