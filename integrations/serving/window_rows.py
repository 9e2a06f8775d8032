"""The batches of ``GraphSteps``: the settings of their windows, and the rows that a window has."""

from __future__ import annotations

from typing import Final

from ...config import TxnConfig
from ...errors import ConfigError, SlotMappingError
from .step import Array

#: Settings that decide nothing where drafts wait in fixed tensors and their counts come from the
#: sampler, and what the steps do instead.
WITHOUT_EFFECT: Final = {
    "acceptance": "accepted drafts are counted on the device, from what the sampler returns",
    "staging": "drafts wait where the captured forward puts them",
}


def check_settings(config: TxnConfig) -> None:
    """Refuse settings that have no effect on the steps of a captured forward.

    Raises:
        ConfigError: such a setting is not ``"auto"``.
    """
    for name, instead in WITHOUT_EFFECT.items():
        value = getattr(config, name)
        if value != "auto":
            raise ConfigError(
                "TxnConfig",
                f"{name}={value!r} has no effect on a GPU: {instead}",
                expected=f"{name}='auto'",
                got=repr(value),
                hint=f"leave {name} out",
            )


def rows_of_window(
    drafts: Array,
    lengths: Array,
    prefilling: Array,
    query_len: int,
    max_rows: int,
    *,
    among_others: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]] | str | None:
    """Return the draft and settled rows of each request of a batch's window.

    These are the requests up to the last one with drafts; without ``among_others`` each of them has
    some.

    Args:
        drafts: see ``GraphSteps.begin``, not None.
        lengths: see there.
        prefilling: see there.
        query_len: most rows that a request with drafts has.
        max_rows: most rows of a window.
        among_others: see ``GraphSteps``.

    Returns:
        The draft rows and the settled rows; None without drafts; or why the batch has no window, as
        a counter's label: the first that applies of "order", "long_query", "max_rows" and
        "prompt_with_drafts".

    Raises:
        SlotMappingError: a request has more drafts than rows, or less than none.
    """
    if (drafts < 0).any() or (drafts > lengths).any():
        raise SlotMappingError(
            "begin",
            "draft rows and rows of the requests do not go together",
            expected="0 to as many draft rows as the request has rows",
            got=f"{drafts.tolist()} draft rows of {lengths.tolist()} rows",
            hint="count a request's draft rows among its rows",
        )
    which = drafts.nonzero()[0]
    if not len(which):
        return None
    count = int(which[-1]) + 1 if among_others else len(which)
    drafts, lengths, prefilling = drafts[:count], lengths[:count], prefilling[:count]
    drafting, long = drafts > 0, lengths > query_len
    for applies, reason in (
        (not among_others and not drafting.all(), "order"),
        ((long & drafting).any(), "long_query"),
        (long.any(), "order"),
        (int(lengths.sum()) > max_rows, "max_rows"),
        ((prefilling & drafting).any(), "prompt_with_drafts"),
    ):
        if applies:
            return reason
    return tuple(drafts.tolist()), tuple((lengths - drafts).tolist())
