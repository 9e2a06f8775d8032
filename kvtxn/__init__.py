"""Transactions for the KV cache of LLM inference.

A name is imported when it is first used: torch comes with most of them, and neither the command
line nor a vLLM process whose engine does not ask for kvtxn should wait for that.
"""

from typing import TYPE_CHECKING

from .lazy import first_use

if TYPE_CHECKING:
    from .captured_rows import CapturedRows
    from .config import TxnConfig
    from .errors import (
        AcceptanceError,
        BackendUnavailableError,
        CapacityError,
        ConfigError,
        IncompleteWindowError,
        KVTxnError,
        LayerError,
        SlotMappingError,
        StagedTwiceError,
        TreeError,
        UnresolvedWindowError,
        WindowStateError,
    )
    from .executor import SampledIds
    from .hooks import EndedWindow
    from .layers import LayerRef
    from .manager import TransactionManager, kv_window
    from .window import Window
    from .window_transitions import WindowState
else:
    __getattr__ = first_use(
        __name__,
        {
            "AcceptanceError": ".errors",
            "BackendUnavailableError": ".errors",
            "CapacityError": ".errors",
            "CapturedRows": ".captured_rows",
            "ConfigError": ".errors",
            "EndedWindow": ".hooks",
            "IncompleteWindowError": ".errors",
            "KVTxnError": ".errors",
            "LayerError": ".errors",
            "LayerRef": ".layers",
            "SampledIds": ".executor",
            "SlotMappingError": ".errors",
            "StagedTwiceError": ".errors",
            "TransactionManager": ".manager",
            "TreeError": ".errors",
            "TxnConfig": ".config",
            "UnresolvedWindowError": ".errors",
            "Window": ".window",
            "WindowState": ".window_transitions",
            "WindowStateError": ".errors",
            "kv_window": ".manager",
        },
    )

__version__ = "0.1.0"

__all__ = [
    "AcceptanceError",
    "BackendUnavailableError",
    "CapacityError",
    "CapturedRows",
    "ConfigError",
    "EndedWindow",
    "IncompleteWindowError",
    "KVTxnError",
    "LayerError",
    "LayerRef",
    "SampledIds",
    "SlotMappingError",
    "StagedTwiceError",
    "TransactionManager",
    "TreeError",
    "TxnConfig",
    "UnresolvedWindowError",
    "Window",
    "WindowState",
    "WindowStateError",
    "kv_window",
]
