"""The ledger: checks that every row that an engine reads was computed from the right tokens."""

from .admission import Admission
from .byte_books import Window
from .digest import Key
from .groups import RowGroup, StateGroup
from .ledger import Ledger
from .passes import Stretch
from .ranks import compare_ranks
from .recording import RecordingLedger
from .scrub import Scrub
from .step import Step
from .violation import KINDS, Violation

__all__ = [
    "KINDS",
    "Admission",
    "Key",
    "Ledger",
    "RecordingLedger",
    "RowGroup",
    "Scrub",
    "StateGroup",
    "Step",
    "Stretch",
    "Violation",
    "Window",
    "compare_ranks",
]
