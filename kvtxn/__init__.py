"""Transactions for the KV cache of LLM inference."""

from .captured.rows import CapturedRows
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
from .states import WindowState
from .window import Window

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
