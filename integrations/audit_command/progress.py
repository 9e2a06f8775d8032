"""``Progress``: a line on stderr that says how far an audit is."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final, Self, TextIO

#: Seconds between two lines: on a terminal, where each takes the place of the last, and elsewhere.
_IN_PLACE, _LINES = 0.5, 10.0
#: Move to the beginning of a terminal's line, and clear it.
_ANEW: Final = "\r\x1b[K"


class Progress:
    """Prints the running workload, the number of requests done, and the seconds so far.

    On a terminal the line is written anew in its place, and is gone at the end. Elsewhere, in a log
    of CI say, there is one line in ``every`` seconds. It runs in its own thread, since a request
    may take minutes, and so may the engine's start.

    Args:
        command: the command's name, the first words of each line.
        total: the number of requests to come.
        stream: None: stderr.
        every: seconds between two lines; None: by the kind of stream.
    """

    def __init__(
        self, command: str, total: int, stream: TextIO | None = None, every: float | None = None
    ) -> None:
        self._command: Final = command
        self._total: Final = total
        self._stream: Final = sys.stderr if stream is None else stream
        self._in_place: Final = self._stream.isatty()
        self._every: Final = (_IN_PLACE if self._in_place else _LINES) if every is None else every
        self._doing, self._done = "starting the engine", -1
        self._begin = time.monotonic()
        self._ended: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._in_place:
            self._write(_ANEW)

    def show(self, workload: str, done: int) -> None:
        """Record how many requests of a job are done, for the next line."""
        self._doing, self._done = workload, done

    def interrupt(self) -> None:
        """Print that the job ends early, and what happens next; no line follows."""
        begin, end = (_ANEW, "") if self._in_place else ("", "\n")
        what = "interrupted: asking the engine what it found so far; once more to end at once"
        self._write(f"{begin}{self._command}: {what}{end}")
        self._ended.set()

    def __str__(self) -> str:
        """Return the line of now: command, workload, requests done of how many, and seconds."""
        seconds = f"{time.monotonic() - self._begin:.0f} s"
        if self._done < 0:
            return f"{self._command}: {self._doing}, {seconds}"
        count = f"{self._done} of {max(self._total, self._done)} requests"
        return f"{self._command}: {self._doing}, {count}, {seconds}"

    def _repeat(self) -> None:
        """Write the line every so many seconds, until the job ends or is interrupted."""
        while not self._ended.wait(self._every):
            self._write(f"{_ANEW}{self}" if self._in_place else f"{self}\n")

    def _write(self, text: str) -> None:
        """Write to the stream at once; once its reader is gone, no more lines are written."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the reader is gone
            self._ended.set()
