"""The verdict on a soak: sums over its pieces, slopes within them, and a list of problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import NormalDist, median
from typing import Any, Final

import attrs

from ..common.markdown import machine_line, table

#: How sure an interval is meant to be.
LEVEL: Final = 0.95
#: Share of a piece's time that is left out of slopes: caches and stores fill in it.
_WARMING: Final = 0.25
#: Most MiB per hour by which the host's memory may surely grow. A step that keeps 200 bytes is
#: beyond it at 100 steps per second.
HOST_LIMIT: Final = 64.0
#: Seconds from which on a soak's slopes are judged; those of a shorter one are its warm-up.
SHORTEST: Final = 10.0
#: Most percent per hour by which throughput may surely fall.
FALL_LIMIT: Final = 5.0

_MIB: Final = 1 << 20
_HOUR: Final = 3600.0

Sample = Mapping[str, Any]


@attrs.frozen
class Slope:
    """A change per hour: the median of all pairs of samples, and an interval.

    Attributes:
        median: the slope (Theil and Sen's).
        low: lower end of the interval.
        high: upper end of the interval.
        samples: number of samples.
    """

    median: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        """Show median and interval, or say that there are too few samples."""
        if math.isnan(self.median):
            return "too few samples"
        return f"{self.median:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def slope(series: Sequence[Sequence[tuple[float, float]]]) -> Slope:
    """Estimate one slope of values over time, pooled over several series.

    The interval is Sen's (1968), by the normal approximation of Kendall's statistic. The statistic
    is summed over series, so differences between series do not count. With fewer than three pairs
    of samples the slope is NaN, and its interval everything.

    Args:
        series: pairs of a time and a value each.
    """
    slopes = sorted(
        (after - before) / (then - now)
        for pairs in series
        for (now, before), (then, after) in combinations(pairs, 2)
        if then > now
    )
    count = sum(map(len, series))
    if len(slopes) < 3:
        return Slope(math.nan, -math.inf, math.inf, count)
    variance = sum(n * (n - 1) * (2 * n + 5) / 18 for n in map(len, series))
    reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(variance)
    first = int((len(slopes) - reach) // 2)
    last = math.ceil((len(slopes) + reach) / 2)
    low = slopes[first] if first >= 0 else -math.inf
    high = slopes[last] if last < len(slopes) else math.inf
    return Slope(median(slopes), low, high, count)


def _late(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out samples of the first quarter of the time, while caches and stores filled."""
    end = samples[-1]["at"] if samples else 0.0
    return [each for each in samples if each["at"] >= _WARMING * end]


def memory_slope(pieces: Sequence[Mapping[str, Any]], name: str) -> Slope:
    """Find by how many MiB per hour memory changes, on the ``host`` or the ``device``.

    Each piece's first quarter is left out.
    """
    return slope(
        [
            [(each["at"] / _HOUR, each[name] / _MIB) for each in _late(piece["samples"])]
            for piece in pieces
        ]
    )


def speeds(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return tokens per second of processors between neighbouring samples.

    Each is at the hour of the later sample. Other work on the machine takes from the time on the
    clock, and little from this. A GPU's time is not in it.
    """
    return [
        (after["at"] / _HOUR, (after["tokens"] - before["tokens"]) / seconds)
        for before, after in pairwise(samples)
        if "cpu" in before and (seconds := after["cpu"] - before["cpu"]) > 0
    ]


def speed_slope(pieces: Sequence[Mapping[str, Any]]) -> Slope:
    """Find by how many percent per hour the tokens per second of processors change.

    Of each piece's median; its first quarter is left out.
    """
    series = []
    for piece in pieces:
        found = speeds(_late(piece["samples"]))
        usual = median(value for _, value in found) if found else 1.0
        series.append([(at, 100.0 * value / usual) for at, value in found])
    return slope(series)


@attrs.frozen(kw_only=True)
class Verdict:
    """The result of a soak.

    Attributes:
        seconds: of all pieces, from the first request to the last sample.
        sums: counts over all pieces, by name.
        speed: tokens per second.
        host: growth of the host's memory, MiB per hour; all processes of the engine.
        device: growth of the tensors on the device, MiB per hour.
        graphs: the most bytes of captured commits in a sample of each third of the time, the
            largest of all pieces; None for a soak that did not sample them.
        change: change of tokens per second of processors, percent per hour.
        wrong: sentences; none if all is well.
    """

    seconds: float
    sums: Mapping[str, int]
    speed: float
    host: Slope
    device: Slope
    change: Slope
    wrong: Sequence[str]
    graphs: Sequence[int] | None = None

    def __str__(self) -> str:
        """Show the verdict as lines of text; each problem has a line that begins with "WRONG"."""
        s = self.sums
        lines = [
            f"{self.seconds / _HOUR:.2f} hours in {s['pieces']} pieces"
            f"{_cut(s)}: {s['steps']:,} steps, "
            f"{s['committed']:,} windows, {s['tokens']:,} tokens, {s['preempted']:,} preemptions, "
            f"{s['loaded']:,} tokens from a connector",
            f"requests: {s['asked']:,} asked, {s['finished']:,} finished, {s['aborted']:,} "
            f"aborted, {s['lost']} lost",
            f"left: {s['open']} windows open, {s['missing']} blocks, {s['running']} requests; "
            f"{s['fell_back']} fell back",
            f"texts: {s['texts']} compared with stock's, {s['same']} the same, {s['near']} parted "
            f"at near-ties, {s['other']} otherwise",
            f"memory per hour: host {self.host} MiB, device {self.device} MiB",
            f"tokens per second: {self.speed:.0f}; of processors, change per hour: {self.change} %",
        ]
        return "\n".join([*lines, *(f"WRONG: {each}" for each in self.wrong or ())])


#: Counts that are summed over the last samples of pieces.
_SUMMED: Final = (
    *("steps", "tokens", "preempted", "drafted", "accepted", "loaded", "cached"),
    *("asked", "finished", "aborted", "lost"),
    *("windows", "committed", "fell_back", "bypassed"),
    *("rows_staged", "rows_committed", "rows_rejected"),
)
#: Counts that must be 0 in each sample; the largest of a piece is reported.
_ZEROS: Final = ("open", "missing", "running")
_TEXTS: Final = ("texts", "same", "near", "other")


def judge(pieces: Sequence[Mapping[str, Any]], *, windows: bool) -> Verdict:
    """Sum up the reports of one soak's pieces, and list what is wrong.

    Wrong is a piece that ended early, a count that does not add up, and a slope whose whole
    interval is beyond its limit, if the soak took ``SHORTEST`` seconds. Counts are of each piece's
    last sample; counts that must be 0 are the largest of any sample.

    Args:
        pieces: the reports, in order.
        windows: the engines were to have windows; a soak without a commit is wrong then.
    """
    ends = [piece["samples"][-1] for piece in pieces if piece["samples"]]
    sums = {name: sum(end[name] for end in ends) for name in _SUMMED}
    sums |= {
        name: sum(max((each[name] for each in piece["samples"]), default=0) for piece in pieces)
        for name in _ZEROS
    }
    sums |= {name: sum(piece["texts"][name] for piece in pieces) for name in _TEXTS}
    sums |= {"pieces": len(pieces), "cut": sum(bool(piece.get("cut")) for piece in pieces)}
    busy = sum(end["busy"] for end in ends)
    found = {
        "host": memory_slope(pieces, "host"),
        "device": memory_slope(pieces, "device"),
        "change": speed_slope(pieces),
    }
    return Verdict(
        seconds=sum(end["at"] for end in ends),
        sums=sums,
        speed=sum(end["played"] for end in ends) / busy if busy else 0.0,
        **found,
        graphs=_graphs(pieces),
        wrong=[
            *_ended(pieces),
            *_counted(sums, pieces, windows),
            *(_grown(**found) if sum(end["at"] for end in ends) >= SHORTEST else ()),
        ],
    )


def _graphs(pieces: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the most bytes of captured commits in each third of a piece's time.

    None without samples, or if a sample lacks them.
    """
    samples = [each for piece in pieces for each in piece["samples"]]
    if not samples or any("graphs" not in each for each in samples):
        return None
    most = [0, 0, 0]
    for piece in pieces:
        end = piece["samples"][-1]["at"]
        for each in piece["samples"]:
            third = min(int(3 * each["at"] / end), 2)
            most[third] = max(most[third], each["graphs"])
    return most


def _ended(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence with the error for each piece that did not reach its end."""
    return [
        f"piece {number} ended early: {piece['error']}"
        for number, piece in enumerate(pieces)
        if piece["error"]
    ]


def _counted(
    sums: Mapping[str, int], pieces: Sequence[Mapping[str, Any]], windows: bool
) -> list[str]:
    """Return a sentence for each count that has a wrong value."""
    why = [reason for piece in pieces for each in piece["samples"][-1:] for reason in each["why"]]
    refused = sum(not each["cleared"] for piece in pieces for each in piece["samples"])
    resolved = sums["rows_committed"] + sums["rows_rejected"]
    answered = sums["finished"] + sums["aborted"] + sums["lost"]
    said = {
        f"{sums['lost']} requests were lost: {'; '.join(why[:3])}": sums["lost"],
        f"{sums['asked'] - answered} requests are in no account": sums["asked"] != answered,
        f"{sums['open']} windows were left open": sums["open"],
        f"{sums['missing']} blocks did not come back": sums["missing"],
        f"the prefix cache could not be cleared {refused} times: blocks are in use": refused,
        f"{sums['running']} requests stayed in the scheduler": sums["running"],
        f"{sums['fell_back']} steps fell back": sums["fell_back"],
        f"{sums['rows_staged'] - resolved} draft rows were neither kept nor rejected": sums[
            "rows_staged"
        ]
        != resolved,
        f"{sums['other']} texts are not stock's": sums["other"],
        "no window was committed": windows and not sums["committed"],
        "no request was made": not sums["asked"],
    }
    return [sentence for sentence, wrong in said.items() if wrong]


def _grown(host: Slope, device: Slope, change: Slope) -> list[str]:
    """Return a sentence for each measure whose whole interval is beyond its limit."""
    said = []
    if host.low > HOST_LIMIT:
        said.append(f"the host's memory grows: {host} MiB per hour")
    if device.low > 0:
        said.append(f"the device's memory grows: {device} MiB per hour")
    if change.high < -FALL_LIMIT:
        said.append(f"throughput falls: {change} % per hour")
    return said


def report(soaks: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of soaks, a column for each result file, and their problems."""
    header, columns, lines = [""], list[list[str]](), []
    for found in soaks:
        pieces, settings = found["pieces"], found["settings"]
        verdict = judge(pieces, windows=settings["policy"] != "stock")
        where = pieces[-1]["machine"].get("gpu") or "CPU"
        header.append(f"{where}: {settings['about']}, `{settings['policy']}`")
        columns.append(_column(verdict))
        commits = dict.fromkeys(piece["machine"]["commit"] for piece in pieces)
        line = machine_line({**pieces[-1]["machine"], "commit": ", ".join(commits)})
        lines.append(f"- {line}.")
        lines += [f"- **wrong**: {each}." for each in verdict.wrong]
    rows = [[name, *cells] for name, *cells in zip(_ROWS, *columns, strict=True)]
    return "\n".join([table(header, rows), "", *lines])


def _column(verdict: Verdict) -> list[str]:
    """Return the facts of a soak as texts, in the order of ``_ROWS``."""
    s = verdict.sums
    return [
        f"{verdict.seconds / _HOUR:.2f} ({s['pieces']}{_cut(s)})",
        *(f"{s[name]:,}" for name in ("steps", "committed", "drafted", "accepted")),
        f"{s['asked']:,} ({s['aborted']:,})",
        *(f"{s[name]:,}" for name in ("preempted", "loaded")),
        *(str(s[name]) for name in ("lost", "open", "missing", "fell_back")),
        f"{s['texts']:,}: {s['same']:,}, {s['near']}, {s['other']}",
        *(str(verdict.host), str(verdict.device)),
        "-" if verdict.graphs is None else ", ".join(f"{n / _MIB:.1f}" for n in verdict.graphs),
        f"{verdict.speed:.0f}",
        str(verdict.change),
    ]


def _cut(sums: Mapping[str, int]) -> str:
    """Return ", N cut off" for pieces that still ran when the command was ended; "" for none."""
    return f", {sums['cut']} cut off" if sums["cut"] else ""


#: The facts of a column, in their order.
_ROWS: Final = (
    *("hours (pieces)", "steps", "windows", "drafts", "accepted", "requests (aborted)"),
    *("preemptions", "tokens from the connector", "requests lost", "windows left open"),
    *("blocks missing", "steps that fell back"),
    "texts compared: stock's, parted at near-ties, others",
    *("host, MiB per hour", "device, MiB per hour"),
    "captured commits, MiB at most in each third of the time",
    "tokens per second",
    "change of tokens per processor second, % per hour",
)
