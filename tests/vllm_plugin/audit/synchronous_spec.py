"""An offloading spec for engines on a CPU: vLLM's own, but its worker copies at once, in torch."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class SynchronousWorker(OffloadingWorker):
    """Copies whole blocks while it is asked to.

    Args:
        kv_caches: the caches, block by block.
        chunks: blocks of the store; a chunk is one block.
    """

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self.caches = [each.tensor for each in kv_caches.tensors]
        self.groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self.store = [
            torch.zeros((chunks, *each.shape[1:]), dtype=each.dtype) for each in self.caches
        ]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.copy(self.caches, src_spec.block_ids, self.store, dst_spec.block_ids, src_spec)
        self.done.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.copy(self.store, src_spec.block_ids, self.caches, dst_spec.block_ids, dst_spec)
        self.done.append(TransferResult(job_id, True))
        return True

    def copy(self, source: Any, these: Any, target: Any, those: Any, spec: Any) -> None:
        """Copy blocks, group by group."""
        at = 0
        for tensors, size in zip(self.groups, spec.group_sizes, strict=True):
            for number in range(at, at + size):
                for index in tensors:
                    target[index][int(those[number])] = source[index][int(these[number])]
            at += size

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class SynchronousSpec(CPUOffloadingSpec):
    """vLLM's spec of a store in memory, with a worker that takes caches in memory."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            self._worker = SynchronousWorker(kv_caches, self.num_chunks)
        return self._worker
