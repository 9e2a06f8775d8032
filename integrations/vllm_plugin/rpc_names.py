"""Names of the methods that kvtxn gives to vLLM's workers, called by ``collective_rpc``."""

from __future__ import annotations

from typing import Final

#: Returns a worker's counters.
SNAPSHOT: Final = "kvtxn_snapshot"
#: Returns what its audit found.
REPORT: Final = "kvtxn_audit_report"
#: Returns the life of every slot, if the audit records it.
RECORDING: Final = "kvtxn_audit_recording"
