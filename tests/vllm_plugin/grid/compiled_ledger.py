"""The ledger's passes, compiled once for all engines, which takes longer than most of them run.

Imported by the process that engines are forked from; what they compile beside it, numba keeps.
"""

from __future__ import annotations

import sys

from kvtxn.backends import audit_numba
from numba.core.dispatcher import Dispatcher

from kvtxn.audit import Ledger, RowGroup

for name, module in [*sys.modules.items()]:
    for each in vars(module).values() if name.startswith(audit_numba.__name__) else ():
        if isinstance(each, Dispatcher):
            each.enable_caching()

GROUPS = [RowGroup("one", 4, 8), RowGroup("other", 4, 8)]
for count in (1, 2):
    Ledger(GROUPS[:count], max_requests=4, max_length=64)
