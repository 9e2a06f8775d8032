"""``RequestTable``: the line of each admitted request, and the names behind serial numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from ..errors import CapacityError, ConfigError

#: The number of released requests whose names are remembered.
REMEMBERED: Final = 1 << 16


class RequestTable:
    """The lines of admitted requests, and the names of admitted and released requests.

    Args:
        max_requests: the number of lines.
    """

    def __init__(self, max_requests: int) -> None:
        self._max = max_requests
        self._lines: dict[str, tuple[int, int]] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        #: The names of admitted requests, and those of released ones, by serial number.
        self._names: dict[int, str] = {}
        self._released: OrderedDict[int, str] = OrderedDict()
        self._seeds: dict[int, int] = {}  # by serial number, none that is 0
        self._next_serial = 0

    def __contains__(self, request: str) -> bool:
        return request in self._lines

    @property
    def lines(self) -> list[int]:
        """The lines of the admitted requests."""
        return [line for line, _ in self._lines.values()]

    def admit(self, requests: Sequence[str]) -> list[tuple[int, int]]:
        """Return the line and the serial number of each request; give it new ones if it has none.

        Args:
            requests: names, none of them twice.

        Raises:
            CapacityError: no line is left for one of them; none of them was given a line.
        """
        self.require_room(requests)
        for request in requests:
            if request in self._lines:
                continue
            self._lines[request] = self._free.pop(), self._next_serial
            self._names[self._next_serial] = request
            self._next_serial += 1
        return [self._lines[request] for request in requests]

    def require_room(self, requests: Sequence[str], leaving: Sequence[str] = ()) -> None:
        """Refuse requests that do not all have a line or get one.

        Args:
            requests: names, none of them twice.
            leaving: names of admitted requests that are released before.

        Raises:
            CapacityError: no line is left for one of them.
        """
        gone = {*leaving}
        room = len(self._free) + len(gone)
        new = [each for each in requests if each not in self._lines or each in gone]
        if len(new) > room:
            raise CapacityError(
                "admit",
                f"request {new[room]!r} does not fit: all {self._max} lines are taken",
                expected=f"at most {self._max} requests at one time",
                got=f"{len(self._lines) - len(gone)} that stay and {len(new)} that come",
                hint="release requests that ended, or raise max_requests",
            )

    def line(self, request: str, operation: str = "line") -> int:
        """Return the line of a request; ``operation`` is the call that needs it.

        Raises:
            ConfigError: the request was not admitted, or was released.
        """
        if not isinstance(request, str) or request not in self._lines:
            raise ConfigError(
                operation,
                f"request {request!r} is not admitted",
                expected="the name of an admitted request",
                got=repr(request),
                hint="admit it before its first step",
            )
        return self._lines[request][0]

    def lines_of(self, requests: Sequence[str]) -> list[int] | None:
        """Return the lines of requests; None if one of them is not admitted.

        Raises:
            ConfigError: these are no names.
        """
        known = self._lines
        try:
            return [known[request][0] for request in requests]
        except KeyError:
            return None
        except TypeError:
            raise ConfigError(
                "lines_of", "requests are not valid", expected="a list of names",
                got=repr(requests)[:80],
                hint="pass the names by which the requests were admitted",
            ) from None  # fmt: skip

    def release(self, request: str) -> int | None:
        """Free the line of a request, and return it; None for an unknown name.

        Beyond ``REMEMBERED`` released requests, the name that was released first is forgotten.
        """
        entry = self._lines.pop(request, None)
        if entry is None:
            return None
        line, serial = entry
        self._free.append(line)
        self._released[serial] = self._names.pop(serial)
        if len(self._released) > REMEMBERED:
            self._seeds.pop(self._released.popitem(last=False)[0], None)
        return line

    def clear(self) -> None:
        """Free all lines; the names of the requests stay known."""
        for request in list(self._lines):
            self.release(request)

    def remember_seed(self, serial: int, seed: int) -> None:
        """Remember the digest of a request's extras as long as its name, to say what differs."""
        if seed or serial in self._seeds:
            self._seeds[serial] = seed

    def seed(self, serial: int) -> int | None:
        """Return the digest of a request's extras, 0 for none; None if it is forgotten."""
        return self._seeds.get(serial, 0) if self.name(serial) is not None else None

    def name(self, serial: int) -> str | None:
        """Return the name of the request with a serial number; None if it is forgotten."""
        return self._names.get(serial, self._released.get(serial))
