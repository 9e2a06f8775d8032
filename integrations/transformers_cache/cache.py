"""``TxnCache``: a Hugging Face transformers cache that is written by transactions.

    cache = TxnCache(model.config, max_tokens=512)
    model.generate(**inputs, past_key_values=cache, assistant_model=assistant)

transformers announces by ``activate_past_recording`` that a ``crop`` follows each forward, and says
by ``crop(-n)`` how many of its tokens were rejected. So a forward is a window: until the crop none
of its rows is in the cache, and afterwards exactly the accepted ones are. Without recording, a
forward is committed with its last layer. ``PagedSequences`` begins and ends the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from ...compile_guard import outside_graphs
from ...config import Policy, TxnConfig
from ...errors import AcceptanceError, ConfigError, LayerError
from ...manager import TransactionManager
from .paged_sequences import PagedSequences
from .ring_storage import Shape

try:
    import transformers
    from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils
    from transformers.cache_utils import (
        CacheLayerMixin,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )
except ImportError as error:
    raise ImportError(
        "kvtxn.integrations.transformers_cache needs transformers 5.18 or newer: "
        "pip install 'kvtxn[transformers]'"
    ) from error
if not hasattr(Cache, "activate_past_recording"):  # generate announces a crop with it
    raise ImportError(
        "kvtxn.integrations.transformers_cache needs transformers 5.18 or newer, found "
        f"{transformers.__version__}: pip install --upgrade 'kvtxn[transformers]'"
    )

#: Types of models whose recurrent states are attributes of the model, as of transformers 5.19.
_STATES_ELSEWHERE: Final = ("recurrent_gemma", "rwkv", "xlstm")


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a ``TxnCache``; the cache crops, resets and reorders all layers at once."""

    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = True
    supports_early_init: ClassVar[bool] = False

    def __init__(self, sequences: PagedSequences, index: int) -> None:
        super().__init__()
        self._sequences = sequences
        self._index = index
        self._region = sequences.region(index)
        self.is_sliding = self._region.window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first forward makes the caches of all layers together."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take this forward's rows, and return those that its tokens may see, its own last.

        In the model's last layer the forward is committed, unless its rows wait for ``crop``.

        Args:
            key_states: ``[batch, num_kv_heads, count, head_size]``.
            value_states: ``[batch, num_kv_heads, count, value_head_size]``.
            args: unused.
            kwargs: unused.

        Returns:
            ``[batch, num_kv_heads, seen + count, head_size]`` each.
        """
        if torch.compiler.is_compiling():
            return outside_graphs(PagedLayer.update)(self, key_states, value_states)
        return self._sequences.take(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that ``update`` will return, and the first key's position."""
        length = self._sequences.seq_length
        first = self._region.first_seen(length)
        return length - first + query_length, first

    def get_seq_length(self) -> int:
        """Return the number of tokens of each sequence, those that wait for ``crop`` included."""
        return self._sequences.seq_length

    def get_max_length(self) -> int:
        """Return the most tokens that a sequence can have; for a sliding layer, its window."""
        return self._region.window or self._sequences.capacity


class TxnCache(Cache):  # type: ignore[misc]
    """A paged cache of fixed size for ``generate``.

    Pass it as ``past_key_values``, which transformers calls ``cache`` from 5.24 on.

    Args:
        config: the model's configuration, which says which layers slide.
        max_tokens: tokens per sequence, prompt and new ones together.
        block_size: slots per block of the paged caches.
        max_drafts: candidates per step. The caches have room for them beside ``max_tokens``, a
            sliding layer's cache beside its window.
        policy: the policy of the ``TransactionManager``.
        backend: the backend of the ``TransactionManager``.

    Raises:
        ConfigError: a size is not a positive int, or ``config`` is no model configuration.
        LayerError: a layer is neither full, sliding nor chunked attention.

    The first forward allocates the memory, for its batch size. A full cache raises
    ``CapacityError`` and stays as it is. An exception in the middle of a forward leaves every byte
    as it was before (under "undo": once the next forward begins, or after ``abort``), and the next
    forward may follow at once. If the very first forward fails, call ``reset``.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        max_tokens: int,
        block_size: int = 16,
        max_drafts: int = 64,
        policy: Policy = "deferred",
        backend: str = "auto",
    ) -> None:
        sizes = {"max_tokens": max_tokens, "block_size": block_size, "max_drafts": max_drafts}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(
                    "TxnCache", f"{name} is not valid", expected="a positive int", got=repr(size)
                )
        layers = stock_layers(config)
        windows = tuple(getattr(layer, "sliding_window", None) for layer in filter(_holds, layers))
        sequences = PagedSequences(
            Shape(windows, **sizes), TxnConfig(policy=policy, backend=backend)
        )
        self._over(sequences, layers)

    def _over(self, sequences: PagedSequences, layers: Sequence[Any]) -> None:
        """Use these sequences for every layer that holds rows; keep the other layers."""
        self._sequences = sequences
        number = iter(range(len(layers)))
        super().__init__(
            layers=[
                PagedLayer(sequences, next(number)) if _holds(layer) else layer for layer in layers
            ]
        )

    @property
    def manager(self) -> TransactionManager | None:
        """The manager of the windows; None until the first forward is complete."""
        return self._sequences.manager

    def snapshot(self) -> dict[str, float]:
        """Return the manager's counters; empty before the first forward.

        Every row of a forward counts as staged, those of known good tokens too. Committed rows are
        the tokens in the cache; rejected rows are the tokens that ``crop`` took back.
        """
        return {} if self.manager is None else self.manager.snapshot()

    def activate_past_recording(self) -> None:
        """Let each forward's rows wait for ``crop`` from now on; ``generate`` calls this itself."""
        self._sequences.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Commit the last forward without its last ``-tokens_to_remove`` tokens.

        If the last forward had fewer tokens, tokens before it are removed as well. A positive
        number is the length to keep, as in older versions of transformers.

        Raises:
            AcceptanceError: the cache has fewer tokens, or ``tokens_to_remove`` is no int.
            CapacityError: a sliding layer no longer has rows that the next token would see.
        """
        if not hasattr(tokens_to_remove, "__index__"):
            raise AcceptanceError(
                "crop",
                "tokens_to_remove is not valid",
                expected="an int, such as -2 for the last two tokens",
                got=repr(tokens_to_remove),
            )
        tokens_to_remove = int(tokens_to_remove)  # generate of some versions passes a tensor
        length = self._sequences.seq_length
        keep = tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove
        self._sequences.crop(max(0, length - keep))

    def commit(self) -> None:
        """Commit all rows that wait for ``crop``; nothing if none wait."""
        self._sequences.settle()

    def abort(self) -> None:
        """Drop the last forward if its rows wait for ``crop``, or if it failed; else nothing."""
        self._sequences.abort()

    def reset(self) -> None:
        """Forget every token, waiting ones included; the memory and the counters stay."""
        self._sequences.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Commit waiting rows, then make sequence i a copy of ``beam_idx[i]``, for beam search."""
        self._sequences.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise LayerError: the cache's memory is for one batch size."""
        raise _fixed_batch("batch_repeat_interleave", f"{repeats} copies of each sequence")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raise LayerError: the cache's memory is for one batch size."""
        raise _fixed_batch("batch_select_indices", f"{len(indices)} selected sequences")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy: several generations may start from one prompt's cache.

        Raises:
            WindowStateError: rows wait for ``crop``.
        """
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._over(self._sequences.clone(), self.layers)
        return twin


def stock_layers(config: PreTrainedConfig) -> list[Any]:
    """Return the layers of transformers' own cache for a model, all of which fit paged caches.

    Raises:
        ConfigError: ``config`` is no model configuration.
        LayerError: the model has an encoder, or a layer keeps something else than attention rows.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(
            "TxnCache",
            "config is not a model configuration",
            expected="a PreTrainedConfig",
            got=type(config).__name__,
            hint="pass model.config",
        )
    if config.model_type in _STATES_ELSEWHERE:
        raise LayerError(
            "TxnCache",
            "the model keeps its states beside the cache, where nobody takes drafts back",
            expected="a model whose layers keep attention rows",
            got=config.model_type,
            hint="use transformers' own cache for this model",
        )
    if config.is_encoder_decoder:
        raise LayerError(
            "TxnCache",
            "the model has an encoder",
            expected="a decoder-only model",
            got="an encoder",
        )
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except Exception as error:  # what it reads of a configuration differs by model
        raise LayerError(
            "TxnCache",
            f"transformers makes no cache of this configuration: {error!r}",
            got=config.model_type,
            hint="let the model make its own cache",
        ) from error
    for index, layer in enumerate(layers):
        if _holds(layer) and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise LayerError(
                "TxnCache",
                f"layer {index} cannot be kept in pages",
                expected="full, sliding or chunked attention",
                got=type(layer).__name__,
                hint="use transformers' DynamicCache for this model",
            )
    return layers


def _holds(layer: object) -> bool:
    """Tell whether a layer has rows of its own; stand-ins of layers that share rows have none."""
    dummy = getattr(cache_utils, "DummyLayer", ())  # older versions leave such layers out
    return not isinstance(layer, dummy)


def _fixed_batch(operation: str, got: str) -> LayerError:
    """Return the error of a call that would change the number of sequences."""
    return LayerError(
        operation,
        "the number of sequences cannot change",
        expected="the number of sequences of the first forward",
        got=got,
        hint="make a new cache for another batch size",
    )
