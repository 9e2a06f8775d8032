"""The record of what engines and servers did on GPUs; the page drawn from it.

python tests/gpu/gpu_seen.py KIND PATH COMMIT [RELEASE]   takes over what a script left, and draws
python tests/gpu/gpu_seen.py                              draws again

KIND is one of ``REDUCERS``, PATH the script's folder of reports, or its file of them.
A record is taken over engine by engine: what a run left out keeps what an older one said. A run
with another release of vLLM than the page's gives it after the commit; its engines' names say so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
for _folder in (".", "..", "../serving", "../vllm_plugin/grid", "../vllm_plugin/audit"):
    sys.path.insert(0, str(HERE / _folder))

import seen_canary  # noqa: E402
import seen_identities  # noqa: E402
import seen_kit  # noqa: E402
import seen_known  # noqa: E402
import seen_servers  # noqa: E402
import seen_sglang  # noqa: E402
import seen_stages  # noqa: E402
from kvtxn.benchmarks import documents  # noqa: E402
from kvtxn.benchmarks.common.markdown import table  # noqa: E402

#: How far a state may be off, see ``state_recurrence.TOLERANCE``.
STATES_OFF: Final = "2^-18 (float32) or 2^-8 (bfloat16)"

RECORD: Final = HERE / "seen.json"
PAGE: Final = HERE / "SEEN.md"
#: Has parts that are drawn from the record.
COMPARISON: Final = HERE.parents[1] / "integrations" / "KV_CANARY.md"


# -- what the page says above its tables -------------------------------------------

HEAD: Final = """# The kit, states, audits, connectors, stages, servers and SGLang on a GPU

What real engines showed on {machine}, drawn by `python tests/gpu/gpu_seen.py`; of vLLM 0.33.0 where
nothing else is named. Models are small and have random weights. Each engine has a process of its
own.
"""
STATES: Final = """## Recurrent states

`python tests/gpu/try_states.py`: `recurrent="exact"` beside stock vLLM over the same requests,
drafts accepted by lot. *States* are compared request by request after every step, all layers, by
the digest of their bytes; *blocks* is how many state blocks a request has. *Requests at once* is
what vLLM says fits into the same memory. *After a fault*: launches of commits that were made to
fail were repeated, and the tokens are stock's. In engines named *cached* the prefix cache keeps
states: those at the ends of blocks are compared, too, and *from the cache* counts the prompt tokens
that were found there. In those named *left* every third request is aborted in the middle; *eagle*
has a drafter that reads hidden states, and a layer of *falcon* has a state beside its attention.
"""
FAST: Final = """## Recurrent states by kvtxn's own kernels

`python tests/gpu/try_states.py`: `recurrent="fast"` beside stock, gated delta nets and Mamba-2;
in rows named *vLLM's* stock by one of vLLM's two kernels beside stock by the other. Tokens may
part at near-ties: *gap* is the most by which stock's best logit leads that of the token which the
other engine took, *noise* the most that a logit differs by after the same tokens, in steps of
bfloat16, of at most {near} and {noise}. After each commit all states are compared with a
recurrence in float64 over the kept rows: *off* counts those whose difference is more than
{tolerance} of the state's largest number, and *worst* is the largest difference; *ends* counts
those among them that commits left at the ends of blocks, for the prefix cache. *Preempted*
requests are computed again; stock has blocks for all there, and drafts are accepted where the
model says the same. *From the cache* counts prompt tokens whose states came from there. *Strays*
counts states that a forward changed, *elsewhere* blocks of other requests that a step changed; -
was not watched. *After a fault*: launches of commits that were made to fail were repeated, and
the engine gave the same tokens again. *Wrong counts*: commits took in one row more or less than
was accepted; so many states were off, of so many.
"""
AUDIT: Final = """## The audit

`python tests/gpu/gpu_audit.py`: each engine runs scenarios without the audit and with it. *Texts*
counts requests that say the same both times where nothing is drawn by lot and nothing depends on
time; *wrong* is how many violations were reported though nothing was planted. *Faults* are planted
one after the other: found means that the report names the request, the position and the slot.
*Rows brought* came back through a KV connector. *Contained* counts faults after which every text,
those of the requests that were computed again included, is the one without the fault. With *poison*
what is dead was filled with NaN, so that a kernel that reads it would show it; a write into a dead
row, which nobody reads, was reported nowhere. In *aligned* engines the prefix cache keeps states;
in those named *held* kvtxn's windows hold them. *Failed* counts forwards that were made to fail,
before or after the GPU computed them, in an engine that went on: whoever read their rows was told.
"""
CONNECTORS: Final = """## KV connectors

`pytest tests/gpu -k connectors`: requests that come back through a connector (the prefix cache was
emptied, or they were preempted, or come to a second engine). An oracle compares each byte that
leaves with what is durable. *Not durable* counts, after every step, the rows in the cache that no
accepted token left: an engine with windows has some only of steps that were *bypassed*, and stock
of each rejected draft.
"""

# -- records ------------------------------------------------------------------------


def states(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce reports of ``try_states``: each engine with windows beside its stock."""
    found = {}
    for name, ours in reports.items():
        kind, _, policy = name.rpartition(".")
        stock = reports.get(f"{kind}.stock", {"error": "not run"})
        if policy in ("stock", "again", "fast") or "error" in stock or "error" in ours:
            continue
        if ours.get("preempted"):  # their states come of other steps than stock's; see ``fast``
            continue
        played = [
            each for each in stock if isinstance(stock[each], dict) and "digests" in stock[each]
        ]
        pairs = [(stock[each], ours[each]) for each in played]
        digests = [(a["digests"], b["digests"]) for a, b in pairs]
        tokens = [both for a, b in pairs for both in zip(a["tokens"], b["tokens"], strict=True)]
        found[name] = {
            "runner": ours["runner"],
            "graphs": ours["graphs"],
            "requests": len(tokens),
            "same": sum(a == b for a, b in tokens),
            "states": sum(len(a) for a, _ in digests),
            "equal": sum(b.get(key) == value for a, b in digests for key, value in a.items()),
            "accepted_alike": all(a["accepted"] == b["accepted"] for a, b in pairs),
            "strays": sum(
                value for _, b in pairs for key, value in b["counts"].items() if "stray" in key
            ),
            "fault": ours["fault"]["tokens"] == stock["eight"]["tokens"],
            "blocks": [stock["state_blocks"], ours["state_blocks"]],
            "at_once": [stock["concurrency"], ours["concurrency"]],
            "hits": sum(b.get("hits", 0) for _, b in pairs),
            "machine": ours["machine"],
        }
    return found


def fast(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce reports of ``try_states``: engines with kvtxn's kernels, and stock's two kernels."""
    from gpu_ties import compare
    from state_models import SCENARIOS

    def played(report: Mapping[str, Any]) -> list[str]:
        return [each for each in SCENARIOS if each in report]

    def ties(ours: Mapping[str, Any], stock: Mapping[str, Any]) -> dict[str, Any]:
        pairs = [compare(dict(ours[each]), dict(stock[each])) for each in played(ours)]
        tokens = [
            both
            for each in played(ours)
            for both in zip(stock[each]["tokens"], ours[each]["tokens"], strict=True)
        ]
        return {
            "graphs": ours["graphs"],
            "runner": ours["runner"],
            "requests": len(tokens),
            "same": sum(a == b for a, b in tokens),
            "gap": max(each["gap"] for each in pairs),
            "noise": max(each["noise"] for each in pairs),
            "by_lot": sum(each["by_lot"] for each in pairs),
            "machine": ours["machine"],
        }

    def compared(ours: Mapping[str, Any]) -> dict[str, Any]:
        """Comparisons with the recurrence, of engines with kvtxn's own kernels."""
        if "miscounted" not in ours:
            return {}
        seen = [ours[each]["recurred"] for each in (*played(ours), "fault")]
        # Before it said which blocks are its own, a watch counted those in which drafts wait.
        keys = ["states", "off", "blind", "ends", *(["other_blocks"] * ("own_blocks" in ours))]
        return {
            **{key: sum(each.get(key, 0) for each in seen) for key in keys},
            "worst": max(each.get("worst", 0.0) for each in seen),
            "given_wrong": ours["given_wrong_counts"],
            "seen_wrong": ours["miscounted"]["recurred"]["off"],
        }

    found = {}
    done = {name: each for name, each in reports.items() if "error" not in each}
    for name, ours in done.items():
        if name.count(".") != 2:
            continue
        kind, own, who = name.split(".")
        modes = (own, "eager", "graphs", "full")
        beside = next((m for m in modes if f"{kind}.{m}.stock" in done), None)
        near = who == "fast" or (who != "stock" and ours.get("preempted"))
        if not near or beside is None:
            continue
        stock = done[f"{kind}.{beside}.stock"]
        found_in = [ours[each] for each in played(ours)]
        found[name] = ties(ours, stock) | {
            **compared(ours),
            "strays": sum(
                v for each in found_in for k, v in each["counts"].items() if "stray" in k
            ),
            "replays": sum(each["counts"].get("graphs", 0) for each in found_in),
            "repeated": ours["commits_repeated"].get("failed", 0),
            "fault": ours["fault"]["tokens"] == ours["eight"]["tokens"],
            "beside": beside,
            "preempted": ours.get("preempted", 0),
            "hits": sum(each.get("hits", 0) for each in found_in),
            "blocks": [stock["state_blocks"], ours["state_blocks"]],
            "at_once": [stock["concurrency"], ours["concurrency"]],
        }
        if stock["block_sizes"] != ours["block_sizes"] or kind == "few":
            del found[name]["at_once"]  # of other caches
    for mode in ("eager", "graphs", "full"):
        names = [f"{kind}_float32.{mode}.stock" for kind in ("fused", "triton")]
        if all(name in done for name in names):
            found[f"vLLM's two kernels.{mode}"] = ties(*(done[name] for name in reversed(names)))
    return found


def audit(folder: Path) -> dict[str, Any]:
    """Reduce the reports of ``gpu_audit``, one file for each engine."""
    from gpu_audit import DRAWN, ENGINES
    from gpu_jobs import TIMED

    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.stem not in ENGINES:  # what an engine had reported when it was cut off
            continue
        report, job = json.loads(path.read_text()), ENGINES[path.stem]
        cells = {name: each for name, each in report["healthy"].items() if "error" not in each}
        counts = [count for cell in cells.values() for count in cell["counters"]]
        planted = dict(report.get("planted") or {"found": {}})["found"]
        planted = {name: each for name, each in planted.items() if "error" not in each}
        failed = (report.get("failed") or {}).values()
        long = report.get("long") or {"rows": 0, "violations": 0}
        told = [
            cell["same"].split(" of ")
            for name, cell in cells.items()
            if name not in DRAWN and not (cell["facts"]["ahead"] and name in TIMED)
        ]
        found[path.stem] = {
            "audit": job["asked"]["audit"] + ", poison" * job["asked"].get("poison", False),
            "windows": job["asked"].get("policy"),
            "runner": "V1" if job.get("environment", {}).get("VLLM_USE_V2_MODEL_RUNNER") else "V2",
            "rows": int(sum(c.get("kvtxn_audit_rows_checked_total", 0) for c in counts))
            + long["rows"],
            "wrong": int(sum(c.get("kvtxn_audit_violations_total", 0) for c in counts))
            + long["violations"],
            "states": int(sum(c.get("kvtxn_audit_states_checked_total", 0) for c in counts)),
            "failed": sum(bool(each["violations"]) for each in failed),
            "same": sum(int(a) for a, _ in told),
            "requests": sum(int(b) for _, b in told),
            "compared": sum(cell["facts"].get("compared") or 0 for cell in cells.values()),
            "brought": sum(cell["facts"].get("brought", 0) for cell in cells.values()),
            "healed": len((report.get("contained") or {"healed": ()})["healed"]),
            "faults": len(planted),
            "found": sum(bool(each.get("violations")) for each in planted.values()),
            "missed": sorted(n for n, each in planted.items() if not each.get("violations")),
        }
    return found


def connectors(reports: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the reports of engines with connectors: the oracle's sums over all scenarios."""
    keys = ("stored_blocks", "stored_rows", "stored_wrong", "stored_pending", "loaded_blocks")
    keys = (*keys, "loaded_wrong", "rejected", "residue")
    found = {}
    for name, report in reports.items():
        played = [each for each in report.values() if isinstance(each, dict) and "egress" in each]
        if played:
            counts = [each["kvtxn"][-1] if each["kvtxn"] else {} for each in played]
            found[name] = {key: sum(each["egress"].get(key, 0) for each in played) for key in keys}
            found[name]["bypassed"] = sum(
                int(each.get("kvtxn_bypassed_windows_total", 0)) for each in counts
            )
            found[name]["runner"] = report["runner"]
    return found


# -- the page -------------------------------------------------------------------------


def draw(record: Mapping[str, Any]) -> str:
    """Draw the page."""
    machine = next(iter(record["states"].values()))["machine"].partition("+")[0]
    parts = [HEAD.format(machine=machine)]
    rings_head = seen_sglang.rings_head(record.get("sglang_rings", {}))
    for kind, head, body in (
        ("kit", seen_kit.HEAD, _by(seen_kit.drawn)),
        ("states", STATES, _states),
        ("fast", fast_head(), _fast),
        ("audit", AUDIT, _audit),
        ("connectors", CONNECTORS, _connectors),
        ("identities", seen_identities.HEAD, _by(seen_identities.drawn)),
        ("stages", seen_stages.HEAD, _by(seen_stages.drawn)),
        ("servers", seen_servers.HEAD, _by(seen_servers.drawn)),
        ("sglang", seen_sglang.ENGINES, _by(seen_sglang.drawn_engines)),
        ("sglang_canary", seen_canary.HEAD, _by(seen_canary.drawn)),
        ("sglang_known", seen_known.HEAD, _by(seen_known.drawn)),
        ("sglang_cost", seen_sglang.COST, _by(seen_sglang.drawn_cost)),
        ("sglang_rings", rings_head, _by(seen_sglang.drawn_rings)),
        ("sglang_mamba", seen_sglang.MAMBA, _by(seen_sglang.drawn_mamba)),
    ):
        parts += [head, body(record[kind])] if kind in record else []
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def compared(text: str, record: Mapping[str, Any]) -> str:
    """Draw the generated parts of the page that holds SGLang's KV canary against the ledger."""
    found = record.get("sglang_canary", {})
    return documents.fill(
        text, {name: partial(make, found) for name, make in seen_canary.SECTIONS.items()}
    )


def _commits(engines: Iterable[Mapping[str, Any]]) -> str:
    return "\n\nCommits: " + ", ".join(sorted({each["commit"] for each in engines})) + "."


def _states(engines: Mapping[str, Any]) -> str:
    rows = [
        [
            *(name, each["graphs"], f"{each['same']} / {each['requests']}"),
            *(f"{each['equal']} / {each['states']}", "yes" if each["accepted_alike"] else "**no**"),
            *(str(each["strays"]), "yes" if each["fault"] else "**no**"),
            " -> ".join(str(sum(blocks)) for blocks in each["blocks"]),
            " -> ".join(f"{number:.0f}" for number in each["at_once"]),
            str(each.get("hits") or "-"),
        ]
        for name, each in engines.items()
    ]
    header = ["engine", "graphs", "same tokens", "equal states", "same counts", "strays"]
    header += ["after a fault", "blocks", "requests at once", "from the cache"]
    return table(header, rows) + _commits(engines.values())


def fast_head() -> str:
    """Say what the columns are, and what is allowed."""
    from gpu_ties import NEAR, NOISE

    return FAST.format(near=NEAR, noise=NOISE, tolerance=STATES_OFF)


def _fast(engines: Mapping[str, Any]) -> str:
    header = ["engine", "graphs", "same tokens", "gap", "noise", "off", "worst", "ends", "strays"]
    header += ["elsewhere", "preempted", "from the cache", "after a fault", "wrong counts"]
    header += ["requests at once"]
    rows = []
    for name, each in engines.items():
        other = each.get("beside", name.split(".")[1])
        beside = "" if other == name.split(".")[1] else f", beside stock ({other})"
        row = [name + beside, each["graphs"], f"{each['same']} / {each['requests']}"]
        row += [f"{each['gap']:.0f}", f"{each['noise']:.0f}"]
        known = "states" in each
        row += [f"{each['off']} / {each['states']}", f"{each['worst']:.1e}"] if known else ["-"] * 2
        row += [str(each.get("ends") or "-")]
        row += [str(each.get("strays", "-")), str(each.get("other_blocks", "-"))]
        row += [str(each.get("preempted") or "-"), str(each.get("hits") or "-")]
        row += [{True: "yes", False: "**no**", None: "-"}[each.get("fault")]]
        row += [f"{each['seen_wrong']} / {each['given_wrong']}" if known else "-"]
        row += [" -> ".join(f"{n:.0f}" for n in each["at_once"]) if "at_once" in each else "-"]
        rows.append(row)
    return table(header, rows) + _commits(engines.values())


def _audit(engines: Mapping[str, Any]) -> str:
    rows = [
        [
            *(name, each["runner"], each["audit"], each["windows"] or "-", str(each["rows"])),
            *(
                str(each.get("states") or "-"),
                str(each["wrong"]),
                str(each["compared"]),
                f"{each['same']} / {each['requests']}",
            ),
            str(each.get("brought", 0) or "-"),
            f"{each['found']} / {each['faults']}" if each["faults"] else "-",
            *(str(each.get("healed", 0) or "-"), str(each.get("failed") or "-")),
        ]
        for name, each in engines.items()
    ]
    total = {key: sum(each[key] for each in engines.values()) for key in ("rows", "wrong", "found")}
    faults = sum(each["faults"] for each in engines.values())
    missed = ", ".join(
        f"`{fault}` in {name}" for name, each in engines.items() for fault in each["missed"]
    )
    says = (
        f"\n\nTogether {total['rows']} rows read, {total['wrong']} wrong where nothing was "
        f"planted, {total['found']} of {faults} faults found"
        + (f"; not found: {missed}." if missed else ".")
    )
    header = ["engine", "runner", "audit", "windows", "rows read", "states read", "wrong"]
    header += ["sums compared", "texts", "rows brought", "faults", "contained", "failed"]
    return table(header, rows) + says + _commits(engines.values())


def _connectors(engines: Mapping[str, Any]) -> str:
    rows = [
        [
            *(name.removeprefix("connectors_"), each["runner"].upper()),
            *(str(each["stored_blocks"] or each["stored_rows"]), str(each["stored_wrong"])),
            *(str(each["stored_pending"]), str(each["loaded_blocks"]), str(each["loaded_wrong"])),
            *(str(each["rejected"]), str(each["residue"]), str(each["bypassed"])),
        ]
        for name, each in engines.items()
    ]
    header = ["engine", "runner", "stored", "wrong", "before commit", "loaded", "wrong"]
    header += ["rejected drafts", "not durable", "bypassed"]
    return table(header, rows) + _commits(engines.values())


def _by(drawn: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    return lambda engines: drawn(engines) + _commits(engines.values())


#: By kind of record, what reduces a folder of reports, or the content of a file of them.
REDUCERS: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "kit": seen_kit.kit,
    **{"states": states, "fast": fast, "audit": audit, "connectors": connectors},
    "identities": seen_identities.identities,
    **{"stages": seen_stages.stages, "servers": seen_servers.servers},
    "sglang": seen_sglang.engines,
    "sglang_canary": seen_canary.canary,
    "sglang_known": seen_known.known,
    "sglang_cost": seen_sglang.cost,
    "sglang_rings": seen_sglang.rings,
    "sglang_mamba": seen_sglang.mamba,
}


def take(kind: str, path: Path, commit: str, release: str = "") -> None:
    """Take reports over, engine by engine: what a run left out keeps what an older one said.

    Args:
        kind: one of ``REDUCERS``.
        path: a folder of reports, or a file.
        commit: of the sources that ran.
        release: of vLLM, if it is not the page's.
    """
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    new = REDUCERS[kind](path if path.is_dir() else json.loads(path.read_text()))
    after = f", vLLM {release}" if release else ""
    known = record.setdefault(kind, {})
    known |= {f"{name}{after}": {"commit": commit, **each} for name, each in new.items()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def redraw() -> None:
    """Draw the pages from the record."""
    record = json.loads(RECORD.read_text())
    PAGE.write_text(draw(record))
    COMPARISON.write_text(compared(COMPARISON.read_text(), record))


def main() -> None:
    """Take a record over, if one is named, and draw."""
    if len(sys.argv) > 1:
        take(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    redraw()


if __name__ == "__main__":
    main()
