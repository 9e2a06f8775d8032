"""Ranks of one engine: their ledgers are told the same, so they must write the same.

Under tensor parallelism each rank has a share of every head, and all ranks write the rows of the
same tokens to the same slots. A ledger keeps, for each of its last steps and each group, one word
over all digests and slots that it has written until then. Ranks whose words agree at a step have
written the same in every step before it, but for a chance of about 2^-64; where they part, the
first step at which they do is named, if it is among the last ones.

No rank waits for another: each gives its ``Ledger.fingerprints()`` when it is asked for a report,
and whoever has them all calls ``compare_ranks``. All ranks need the same key: ``Key.derived``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .arguments import listed, prints_of
from .violation import Violation

#: By step, then by the name of the group: a word over everything written until then.
Fingerprints = Mapping[int, Mapping[str, int]]


def compare_ranks(ranks: Sequence[Fingerprints]) -> list[list[Violation]]:
    """Find the ranks that wrote something else than most ranks.

    Args:
        ranks: the ``fingerprints()`` of the ledger of each rank that has the same layers; call
            this once for each pipeline stage. A rank may be some steps ahead, or have no
            fingerprints. Fingerprints that were JSON, where steps are text, are understood, too.

    Returns:
        For each rank its violations: none, or one of kind ``ranks``, for the first step and the
        first KV-cache group at which the rank differs from most ranks. If there is no majority,
        the first rank of ``ranks`` counts as right.

    Raises:
        ConfigError: an element of ``ranks`` is not what ``fingerprints()`` returns.
    """
    given = listed("compare_ranks", "ranks", ranks, "a list of what fingerprints() returned")
    ranks = [prints_of(each) for each in given]
    found: list[list[Violation]] = [[] for _ in ranks]
    for step in sorted({step for rank in ranks for step in rank}):
        for group in dict.fromkeys(name for rank in ranks for name in rank.get(step, ())):
            words = {
                number: rank[step][group]
                for number, rank in enumerate(ranks)
                if not found[number] and group in rank.get(step, ())
            }
            if len({*words.values()}) < 2:
                continue
            right = Counter(words.values()).most_common(1)[0][0]
            for number, word in words.items():
                if word != right:
                    found[number].append(difference(step, group))
    return found


def difference(step: int, group: str) -> Violation:
    """Return the violation of a rank that wrote something else in a step."""
    return Violation("ranks", step, None, group, None, None, None, None, "foreign", ())
