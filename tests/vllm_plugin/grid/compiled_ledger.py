"""The ledger's passes, compiled once for all engines, which takes longer than most of them run.

Imported by the process that engines are forked from; what they compile beside it, later ones load.
"""

from __future__ import annotations

from kvtxn.audit import Ledger, RowGroup

GROUPS = [RowGroup("one", 4, 8), RowGroup("other", 4, 8)]
for count in (1, 2):
    Ledger(GROUPS[:count], max_requests=4, max_length=64)
