"""Engines whose weights change while rows that they computed are in the cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvtxn.integrations.vllm_plugin import audit_report, new_weights
from planting import Rig, texts

#: A prompt of three blocks and some tokens.
PROMPT = texts(3, 1, 110)[0]
_AGES = ("kvtxn_audit_rows_read_by_age_", "kvtxn_audit_states_read_by_age_")


def reload(llm: Any, rig: Rig) -> None:
    """By vLLM's own call."""
    llm.collective_rpc("reload_weights")


def load(llm: Any, rig: Rig) -> None:
    """One parameter after the other into the model, as trainers in the same process do it."""
    model = rig.runner.get_model()
    for name, parameter in list(model.named_parameters())[-2:]:
        model.load_weights([(name, parameter.data * 1.5)])


def in_place(llm: Any, rig: Rig) -> None:
    """In the model's parameters, of which nobody hears."""
    for name, parameter in rig.runner.get_model().named_parameters():
        if name.endswith("input_layernorm.weight"):
            parameter.data.mul_(1.5)


def told(llm: Any, rig: Rig) -> None:
    """In the model's parameters, and the audit is told."""
    in_place(llm, rig)
    new_weights(llm)


def twice(llm: Any, rig: Rig) -> None:
    """Twice, with a step in between."""
    reload(llm, rig)
    rig.run(texts(8, 1, 9), 2)
    reload(llm, rig)


def and_reset(llm: Any, rig: Rig) -> None:
    """The prefix cache is emptied after it, and says so."""
    reload(llm, rig)
    assert llm.reset_prefix_cache()


def while_a_request_runs(llm: Any, rig: Rig) -> None:
    """The prefix cache is to be emptied, and says that it was not."""
    in_the_middle(llm, rig)
    assert not llm.reset_prefix_cache()


def in_the_middle(llm: Any, rig: Rig) -> None:
    """A request goes on with the rows and the state that it has."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    rig.engine.add_request("runs", {"prompt_token_ids": PROMPT}, params)
    for _ in range(4):
        rig.engine.step()
    told(llm, rig)


def and_reset_all(llm: Any, rig: Rig) -> None:
    """The prefix cache and the connector say that they are empty; the latter has no such call."""
    reload(llm, rig)
    assert llm.reset_prefix_cache(reset_connector=True)


WAYS = (reload, load, told, in_place, twice, and_reset, while_a_request_runs)


def find(llm: Any, engine: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Change weights in each way between two runs of one prompt; report what the second read."""
    rig = Rig(llm)
    return {way.__name__: _changed(llm, rig, way) for way in engine.get("ways", WAYS)}


def _changed(llm: Any, rig: Rig, way: Callable[[Any, Rig], None]) -> dict[str, Any]:
    """Change weights in one way, ask twice, and once more with an empty cache."""
    rig.clear()
    rig.run([PROMPT], 4)
    counts = [_counted(rig)]
    way(llm, rig)
    said = [rig.run([PROMPT], 4)]
    counts.append(_counted(rig))
    report = {"found": rig.found(), "read": audit_report(llm, ages=True)[0]}
    for each in (*report["found"], *report["read"]):  # vLLM adds something to each name
        for name in ("request", "written_request"):
            if each.get(name) is not None:
                each[name] = each[name].partition("-")[0]
    said.append(rig.run([PROMPT], 4))
    counts.append(_counted(rig))
    request = rig.ran[1]
    rig.clear()
    said.append(rig.run([PROMPT], 4))
    first, second = (
        {name: number - before.get(name, 0) for name, number in after.items()}
        for before, after in pairwise(counts)
    )
    report |= {"first": _some(first), "second": _some(second)}
    return {**report, "said": said, "request": request}


def _some(counts: dict[str, float]) -> dict[str, float]:
    return {name: number for name, number in counts.items() if number}


def _counted(rig: Rig) -> dict[str, float]:
    """Return the rows and states read by each age from 1 on."""
    counters = rig.watch.counters()
    return {
        name.removeprefix("kvtxn_audit_"): number
        for name, number in counters.items()
        if name.startswith(_AGES) and not name.endswith("_0")
    }
