"""A store in memory for OffloadingConnector on a CPU, where vLLM has no worker that copies.

The spec is vLLM's own, manager included; its worker copies blocks while it is asked to. vLLM
imports this module by the ``spec_module_path`` of a connector's settings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from .runner_protocols import BlockList, CacheTensors


class MemoryStoreWorker(OffloadingWorker):  # type: ignore[misc]  # untyped base
    """A worker that copies whole blocks, one after another."""

    def __init__(self, kv_caches: CacheTensors, chunks: int) -> None:
        self._caches: list[Tensor] = [cache.tensor for cache in kv_caches.tensors]
        self._tensors = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._store = [cache.new_zeros(chunks, *cache.shape[1:]) for cache in self._caches]
        self._ended: list[object] = []

    def submit_store(self, job_id: int, src_spec: BlockList, dst_spec: BlockList) -> bool:
        """Copy blocks out of the caches at once; return True. ``get_finished`` reports the job."""
        pairs = zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True)
        self._copy(self._caches, self._store, src_spec.group_sizes, list(pairs))
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: BlockList, dst_spec: BlockList) -> bool:
        """Copy blocks into the caches at once; return True. ``get_finished`` reports the job."""
        pairs = zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True)
        self._copy(self._store, self._caches, dst_spec.group_sizes, list(pairs))
        self._ended.append(TransferResult(job_id, True))
        return True

    def _copy(
        self,
        source: Sequence[Tensor],
        target: Sequence[Tensor],
        sizes: Sequence[int],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        """Copy pairs of blocks in all layers of their group; the first ``sizes[0]`` are group 0's.

        Args:
            source: by number of a cache.
            target: by number of a cache.
            sizes: pairs of each group.
            pairs: a block of ``source``, and the one of ``target``.
        """
        begin = 0
        with torch.inference_mode():
            for tensors, size in zip(self._tensors, sizes, strict=True):
                for there, here in pairs[begin : begin + size]:
                    for index in tensors:
                        target[index][here] = source[index][there]
                begin += size

    def get_finished(self) -> list[object]:
        """Return the results of the copies since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: no copy is ever under way."""


class MemoryStoreSpec(CPUOffloadingSpec):  # type: ignore[misc]  # untyped base
    """vLLM's spec of a store in memory, with a worker for caches that are in memory themselves."""

    _worker: MemoryStoreWorker | None

    def get_worker(self, kv_caches: CacheTensors) -> MemoryStoreWorker:
        """Return the worker, always the same one; the first call makes it over ``kv_caches``.

        Raises:
            ValueError: a chunk has several blocks.
        """
        if self.blocks_per_chunk != 1:
            raise ValueError("the store in memory needs chunks of one block")
        if self._worker is None:
            chunks = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
            self._worker = MemoryStoreWorker(kv_caches, chunks)
        return self._worker
