"""The worker extension of engines under audit whose ranks share a GPU; see ``one_gpu``."""

from __future__ import annotations

import gpu_audit_child
import one_gpu


class AuditWorker(gpu_audit_child.AuditWorker):
    """The extension of the audit's engines, in workers that share a device."""


one_gpu.share()
