"""Groups of layers, and the positions at which the ledger keeps the words of their slots.

Layers of one group share a block table. Groups of one *pool* share its blocks, as in engines that
hand out pages of one size to layers of several kinds: a block belongs to one group at a time,
and what one group writes destroys what another had there. So the words lie by pool, and each
group has its own view of the pool's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import attrs
from torch import Tensor

from ..errors import ConfigError
from .digest import is_encodable

#: Bytes of a word, of a digest and of every other number that the ledger keeps.
WORD_BYTES: Final = 8

#: Sizes are below this number, so that no product of two of them leaves int64.
_TOO_LARGE: Final = 1 << 31


def positive(instance: object, attribute: Any, value: Any, least: int = 1) -> None:
    """Validate a size: an int from ``least`` to 2^31 - 1, or None where that is the default.

    Raises:
        ConfigError: it is something else.
    """
    if value is None and attribute.default is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _TOO_LARGE:
        owner = {"Sizes": "Ledger", "ByteBooks": "Scrub"}.get(
            type(instance).__name__, type(instance).__name__
        )
        raise ConfigError(
            owner,
            f"{attribute.name} must be {'a positive int' if least else 'an int of at least 0'}",
            expected=f"an int from {least} to {_TOO_LARGE - 1}",
            got=repr(value),
            hint=f"see kvtxn.audit.{owner}",
        )


#: Validates a number: an int from 0 to 2^31 - 1; raises as ``positive`` does.
whole: Final = partial(positive, least=0)


def _text(instance: object, attribute: Any, value: Any) -> None:
    """Validate a name: a str that is not empty, or None where that is the default.

    Raises:
        ConfigError: it is something else, or UTF-8 cannot encode it.
    """
    if value is None and attribute.default is None:
        return
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise ConfigError(
            type(instance).__name__, f"{attribute.name} must be a str",
            expected="a str that is not empty and has no lone surrogates", got=repr(value),
            hint="groups and pools have names, which digests take in as UTF-8",
        )  # fmt: skip


@attrs.frozen
class RowGroup:
    """Layers whose cache has one row per token: attention, latents, or a drafter's own layers.

    Attributes:
        name: the group's name, unique in a ledger.
        block_size: rows per block.
        num_blocks: number of blocks; a table may name blocks 0 to ``num_blocks - 1``.
        window: positions that a query sees, itself included; None: all positions up to its own.
        chunk: for attention by chunks, the size of a chunk; a query sees its own chunk only.
        ring: for a request's ring, its size: position p lies at ring position ``p % ring``.
        pool: groups of one pool share its blocks; None: the group has blocks of its own.
        reads: the name of another group whose rows this group's layers read; they write none.
        drafter: a drafter's layers may be among the group's: its rows grow older with the drafter's
            weights.
        context_free: a row depends on its own token and position alone, as those of a model's first
            layer do; so blocks of equal bytes may well be of different prefixes.
    """

    name: str = attrs.field(validator=_text)
    block_size: int = attrs.field(validator=positive)
    num_blocks: int = attrs.field(validator=positive)
    window: int | None = attrs.field(default=None, kw_only=True, validator=positive)
    chunk: int | None = attrs.field(default=None, kw_only=True, validator=positive)
    ring: int | None = attrs.field(default=None, kw_only=True, validator=positive)
    pool: str | None = attrs.field(default=None, kw_only=True, validator=_text)
    reads: str | None = attrs.field(default=None, kw_only=True, validator=_text)
    drafter: bool = attrs.field(default=True, kw_only=True)
    context_free: bool = attrs.field(default=False, kw_only=True)

    is_state = False

    def __attrs_post_init__(self) -> None:
        """Check that a ring finds room.

        Raises:
            ConfigError: it does not.
        """
        room = self.block_size * self.num_blocks
        if self.ring is not None and self.ring > room:
            raise ConfigError(
                "RowGroup", "ring must fit into the group's blocks",
                expected=f"at most {room}, block_size times num_blocks", got=repr(self.ring),
                hint="a request's ring lies in the blocks of its table",
            )  # fmt: skip


@attrs.frozen
class StateGroup:
    """Recurrent layers: a block holds one state, and a step reads one state per request.

    An engine that keeps a state per draft, in columns, has a block per column.

    Attributes:
        name: the group's name, unique in a ledger.
        num_blocks: number of states; a block number is 0 to ``num_blocks - 1``.
        pool: as for ``RowGroup``.
    """

    name: str = attrs.field(validator=_text)
    num_blocks: int = attrs.field(validator=positive)
    pool: str | None = attrs.field(default=None, kw_only=True, validator=_text)

    block_size = 1
    window = chunk = ring = reads = None
    is_state = True
    drafter = False


Group = RowGroup | StateGroup


@attrs.frozen
class Place:
    """A group's words in ``Books.words``.

    The word of slot s is at index ``base + s // block_size * stride + s % block_size``.

    Attributes:
        group: the group.
        index: the group's number among the groups.
        base: the index of the first word of its pool.
        stride: words per block of its pool.
        owners: the index of its first state in ``Books.owners``; 0 for a group of rows.
        written: the name of the group that writes these rows: its own name, or ``group.reads``.
    """

    group: Group
    index: int
    base: int
    stride: int
    owners: int
    written: str

    def pool_of(self, words: Tensor) -> Tensor:
        """Return the words of the group's pool, ``[num_blocks, stride]``, a view into ``words``."""
        size = self.group.num_blocks * self.stride
        return words[self.base : self.base + size].view(-1, self.stride)

    @property
    def num_slots(self) -> int:
        """Slots of the group."""
        return self.group.num_blocks * self.group.block_size


@attrs.frozen
class Layout:
    """The ``Place`` of every group.

    Attributes:
        places: by group name, in the order given.
        num_words: words of all pools.
        num_states: states of all groups.
    """

    places: dict[str, Place]
    num_words: int
    num_states: int

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Layout:
        """Lay out the groups.

        Raises:
            ConfigError: there is no group, or one is none; a name is taken twice, a pool's groups
                disagree on its blocks, or ``reads`` names no group of rows with the same blocks.
        """
        if not groups:
            raise ConfigError("Ledger", "there is no group", hint="pass at least one RowGroup")
        for group in groups:
            if not isinstance(group, (RowGroup, StateGroup)):
                raise ConfigError(
                    "Ledger", "this is not a group", expected="a RowGroup or a StateGroup",
                    got=repr(group), hint="describe each group of layers by one of them",
                )  # fmt: skip
        names = [group.name for group in groups]
        if len({*names}) < len(names):
            raise ConfigError(
                "Ledger", "two groups have one name", expected="a name of its own for each",
                got=names, hint="rename one of them",
            )  # fmt: skip
        pools = _pools(groups)
        bases, total = {}, 0
        for pool, members in pools.items():
            stride = max(group.block_size for group in members)
            bases[pool] = (total, stride)
            total += stride * members[0].num_blocks
        places: dict[str, Place] = {}
        states = 0
        for index, group in enumerate(groups):
            written = _source(group, groups)
            base, stride = bases[_pool_of(written)]
            places[group.name] = Place(group, index, base, stride, states, written.name)
            states += group.num_blocks if group.is_state else 0
        return cls(places, total, states)


def _pool_of(group: Group) -> str:
    """Return the name of a group's pool; a group without one has a pool of its own."""
    # No name of a user's pool begins with a NUL.
    return f"\0{group.name}" if group.pool is None else group.pool


def _pools(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups that have rows of their own, by the name of their pool.

    Raises:
        ConfigError: groups of one pool have different numbers of blocks.
    """
    pools: dict[str, list[Group]] = {}
    for group in groups:
        if group.reads is None:
            pools.setdefault(_pool_of(group), []).append(group)
    for pool, members in pools.items():
        sizes = {group.num_blocks for group in members}
        if len(sizes) > 1:
            raise ConfigError(
                "Ledger", f"groups of pool {pool!r} count its blocks differently",
                expected="one num_blocks", got=sorted(sizes),
                hint="groups of one pool share its blocks; else give them pools of their own",
            )  # fmt: skip
    return pools


def _source(group: Group, groups: Sequence[Group]) -> Group:
    """Return the group whose rows ``group`` reads: itself, if it names no other.

    Raises:
        ConfigError: the named group is none of rows of its own, with the same blocks.
    """
    if group.reads is None:
        return group
    for other in groups:
        same = (other.block_size, other.num_blocks) == (group.block_size, group.num_blocks)
        if other.name == group.reads and other.reads is None and not other.is_state and same:
            return other
    raise ConfigError(
        "Ledger",
        f"group {group.name!r} reads {group.reads!r}, which is not a group with rows of its own",
        hint="name a RowGroup with the same block_size and num_blocks that reads no other",
    )
