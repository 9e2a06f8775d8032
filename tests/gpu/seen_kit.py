"""The conformance kit and the kernels' own tests on a GPU: reduced to numbers, and drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from kvtxn.benchmarks.common.markdown import table

#: Files below ``tests/`` with every case of the kit, and with planted faults that it has to find.
KITS: Final = (
    *("test_conformance_torch.py", "test_mutations.py"),
    *("backends/test_triton_conformance.py", "backends/test_cudagraph.py"),
)
#: Files and folders with the other tests that have kernels or graphs.
OTHERS: Final = (
    *("backends", "recurrent", "test_acceptance.py", "transformers_cache/test_on_a_gpu.py"),
    *("serving/test_graph_steps.py", "serving/test_packed_steps.py"),
    *("serving/test_pipeline_steps.py", "serving/test_steps_with_states.py"),
)

HEAD: Final = """## The conformance kit

Every case of the kit for each executor, and the kernels' own tests, by `pytest` on the GPU. Without
a GPU, Triton's interpreter runs a part of the cases, and none that needs graphs or streams.
*Skipped* cases ask for what a policy or a device does not have. *Broken executors* have planted
faults, and the kit has to fail with each of them.
"""

#: Files that are named by what they test; any other file by its name.
_SUBJECTS: Final = {
    "test_conformance_torch": "kit, torch",
    "backends.test_triton_conformance": "kit, triton",
    "backends.test_cudagraph": "kit, cudagraph",
    "recurrent.test_replay_torch": "kit of replays, torch",
    "recurrent.test_replay_triton": "kit of replays, triton",
    "test_mutations": "broken executors",
}
_FOLDERS: Final = {"backends": "launches and the ledger's kernels", "recurrent": "recurrences"}


def kit(folder: Path) -> dict[str, Any]:
    """Reduce the JUnit report ``kit.xml`` of pytest: by subject, how many cases ended how.

    Raises:
        FileNotFoundError: there is no report.
    """
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(folder / "kit.xml").iter("testcase"):
        found = counts.setdefault(_subject(case.get("classname", "")), Counter())
        ended = {child.tag for child in case} & {"failure", "error", "skipped"}
        found["skipped" if ended == {"skipped"} else "failed" if ended else "passed"] += 1
    return {
        subject: {each: found[each] for each in ("passed", "skipped", "failed")}
        for subject, found in sorted(counts.items())
    }


def _subject(place: str) -> str:
    """Return what a class of tests is about, given its dotted place: ``tests.FOLDER.FILE.CLASS``.

    A file that does not stand in ``_SUBJECTS`` counts to its folder.
    """
    words = place.removeprefix("tests.").split(".")
    for count in (1, 2):
        if (name := ".".join(words[:count])) in _SUBJECTS:
            return _SUBJECTS[name]
    return _FOLDERS.get(words[0], "engines' steps and caches")


def drawn(found: Mapping[str, Any]) -> str:
    """Tabulate subjects."""
    kinds = ("passed", "skipped", "failed")
    rows = [[name, *(str(each[kind]) for kind in kinds)] for name, each in found.items()]
    return table(["what", *kinds], rows)
