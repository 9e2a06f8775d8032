"""Judging engines with recurrent layers: ours beside stock, and what the state oracle saw."""

from __future__ import annotations

from typing import Any, Final

from gpu_ties import NEAR, NOISE, compare

#: Of each scenario: requests, shortest and longest prompt, output tokens.
SCENARIOS: Final[dict[str, tuple[int, int, int, int]]] = {
    "one": (1, 30, 30, 40),
    "eight": (8, 8, 70, 48),
    "chunked": (12, 40, 300, 32),
    "many": (24, 5, 40, 40),
    # Past the end of a block of 272 tokens, and on from there: the second turn of each.
    "growing": (10, 225, 262, 56),
    "returning": (10, 0, 0, 40),
    # Every third request is aborted in the middle.
    "left": (12, 20, 60, 48),
}


def after_the_same_tokens(theirs: dict[str, Any], mine: dict[str, Any]) -> set[str]:
    """The digests, ``request@tokens``, that two engines took after the very same tokens.

    What a last step accepts beyond a request's limit nobody is told: then the tokens are unknown.
    """
    found = set()
    for key in theirs["digests"].keys() & mine["digests"].keys():
        request, count = map(int, key.split("@"))
        prompt = theirs["prompts"][request]
        made = [each["tokens"][request][: max(0, count - len(prompt))] for each in (theirs, mine)]
        if made[0] == made[1] and len(prompt) + len(made[0]) >= count:
            found.add(key)
    return found


def judge(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Say in lines how an engine with windows, or a second stock, differs from stock."""
    lines = []
    for name in (each for each in SCENARIOS if each in ours):
        theirs, mine = stock[name], ours[name]
        same = sum(a == b for a, b in zip(theirs["tokens"], mine["tokens"], strict=True))
        common = after_the_same_tokens(theirs, mine)
        equal = {key for key in common if theirs["digests"][key] == mine["digests"][key]}
        unequal = sorted(common - equal, key=lambda key: [int(x) for x in key.split("@")])
        lines.append(
            f"    {name}: tokens equal {same}/{len(mine['tokens'])}; states equal after the same "
            f"tokens {len(equal)}/{len(common)} (stock has {len(theirs['digests'])}, this "
            f"{len(mine['digests'])}); steps {mine['counts'].get('steps')}, graphs "
            f"{mine['counts'].get('graphs', 0)}, of both commits {mine['counts'].get('joint', 0)}, "
            f"steps without a window of their own {mine['counts'].get('unopened', 0)}, "
            f"accepted counts {mine['accepted']} / stock "
            f"{theirs['accepted']}, cached tokens {mine['hits']} / {theirs['hits']}"
        )
        if unequal:
            key = unequal[0]
            layers = zip(theirs["digests"][key], mine["digests"][key], strict=True)
            wrong = [number for number, (a, b) in enumerate(layers) if a != b]
            lines.append(f"      first unequal request@tokens {key}, parts {wrong[:12]}")
        for number, (a, b) in enumerate(zip(theirs["tokens"], mine["tokens"], strict=True)):
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                lines.append(f"      request {number} parts at token {at} of {len(a)}")
                break
        strays = {k: v for k, v in mine["counts"].items() if "stray" in k and v}
        if strays:
            lines.append(f"      STRAYS {strays}")
    if "fault" in ours:
        same = ours["fault"]["tokens"] == stock["eight"]["tokens"]
        lines.append(f"    fault: tokens equal {same}; repeated {ours['commits_repeated']}")
    return lines


def near_ties(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Say in lines where an engine whose sums differ parts from another, and how near the ties."""
    lines = []
    for name in (each for each in SCENARIOS if each in ours):
        theirs, mine = stock[name], ours[name]
        same = sum(a == b for a, b in zip(theirs["tokens"], mine["tokens"], strict=True))
        found = compare(mine, theirs)
        lines.append(
            f"    {name}: tokens equal {same}/{len(mine['tokens'])}; in steps of bfloat16 gap "
            f"{found['gap']:.1f} of {NEAR}, noise {found['noise']:.1f} of {NOISE}; by lot "
            f"{found['by_lot']}; steps {mine['counts'].get('steps')}, graphs "
            f"{mine['counts'].get('graphs', 0)}, of both commits {mine['counts'].get('joint', 0)}, "
            f"steps without a window of their own {mine['counts'].get('unopened', 0)}, "
            f"accepted counts {mine['accepted']} / "
            f"{theirs['accepted']}, cached tokens {mine['hits']} / {theirs['hits']}"
        )
        strays = {k: v for k, v in mine["counts"].items() if "stray" in k and v}
        lines += [f"      STRAYS {strays}"] if strays else []
        lines += [f"      states {mine['recurred']}"] if mine["recurred"] else []
    if "fault" in ours:
        both = zip(ours["fault"]["tokens"], ours["eight"]["tokens"], strict=True)
        same = sum(a == b for a, b in both)
        lines.append(
            f"    fault: own tokens again {same}/{len(ours['eight']['tokens'])}; repeated "
            f"{ours['commits_repeated']}; states {ours['fault']['recurred']}"
        )
    if "miscounted" in ours:
        lines.append(
            f"    wrong counts for {ours['given_wrong_counts']} states: "
            f"{ours['miscounted']['recurred']}"
        )
    return lines


def told(name: str, report: dict[str, Any]) -> list[str]:
    """One engine on its own: what it is, its capacity, and whether digests tell states apart."""
    keys = ("runner", "graphs", "commit_graphs", "attention", "kernels", "state_blocks", "blocks")
    keys += ("concurrency", "block_sizes", "preempted")
    lines = [f"  {name}: " + ", ".join(f"{key} {report.get(key)}" for key in keys)]
    digests = [
        tuple(each)
        for name in SCENARIOS
        if name in report
        for each in report[name]["digests"].values()
    ]
    lines.append(f"    digests of states: {len(digests)}, {len(set(digests))} of them distinct")
    fell = {k: v for k, v in report["counters"].items() if "fallback" in k or "windows" in k}
    if fell:
        lines.append(f"    counters {dict(sorted(fell.items()))}")
    return lines


def judgement(name: str, reports: dict[str, dict[str, Any]]) -> list[str]:
    """All lines about one engine: itself, and itself beside stock if that has a report."""
    kind, _, who = name.rpartition(".")
    report, stock = reports[name], reports.get(f"{kind}.stock", {"error": "not run"})
    if "error" in report:
        return [f"  {name}: FAILED {report['error']}"]
    lines = told(name, report)
    if "error" not in stock and who != "stock":
        # States of requests that were preempted come of other steps than stock's.
        near = who == "fast" or report["preempted"]
        lines += near_ties(stock, report) if near else judge(stock, report)
    return lines


def summary(reports: dict[str, dict[str, Any]]) -> str:
    """All findings as text."""
    lines = []
    for kind in dict.fromkeys(name.rpartition(".")[0] for name in reports):
        lines.append(f"{kind}")
        for name in reports:
            if name.rpartition(".")[0] == kind:
                lines += judgement(name, reports)
    lines += ["vLLM's Triton kernel beside its fused one, both stock"]
    for mode in ("eager", "graphs", "full"):
        pair = [reports.get(f"{kind}_float32.{mode}.stock", {}) for kind in ("fused", "triton")]
        if all("graphs" in each for each in pair):
            lines += [f"  {mode}", *near_ties(*pair)]
    return "\n".join(lines) + "\n"
