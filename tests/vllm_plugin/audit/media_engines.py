"""An engine that is sent pictures, some of them under names that the clients give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kvtxn.integrations.vllm_plugin import audit_report, new_weights, snapshots

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
