"""Transactions for the KV cache of LLM inference."""

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
    UnresolvedWindowError,
    WindowStateError,
)
from .hooks import EndedWindow
from .layers import LayerRef
from .manager import TransactionManager, kv_window
from .states import WindowState
from .window import Window

__version__ = "0.1.0"

__all__ = [
    "AcceptanceError",
    "BackendUnavailableError",
    "CapacityError",
    "ConfigError",
    "EndedWindow",
    "IncompleteWindowError",
    "KVTxnError",
    "LayerError",
    "LayerRef",
    "SlotMappingError",
    "StagedTwiceError",
    "TransactionManager",
    "TxnConfig",
    "UnresolvedWindowError",
    "Window",
    "WindowState",
    "WindowStateError",
    "kv_window",
]
