"""The ledger: checks that every row that an engine reads was computed from the right tokens."""

from .admission import Admission
from .byte_books import Window
from .digest import Key
from .epochs import ReadAges
from .groups import RowGroup, StateGroup
from .ledger import Ledger
from .rank_fingerprints import compare_ranks
from .recording import RecordingLedger
from .scrub import Scrub
from .step import Step, Stretch
from .violation import KINDS, Violation
from .weights import WeightWatch

__all__ = [
    "KINDS",
    "Admission",
    "Key",
    "Ledger",
    "ReadAges",
    "RecordingLedger",
    "RowGroup",
    "Scrub",
    "StateGroup",
    "Step",
    "Stretch",
    "Violation",
    "WeightWatch",
    "Window",
    "compare_ranks",
]
