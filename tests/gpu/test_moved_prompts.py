"""Drafters' copies of tokens, which engines of the state grid keep right though vLLM does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from state_watch_v1 import with_moved_prompts
from vllm.v1.spec_decode.ngram_proposer_gpu import update_ngram_gpu_tensors_incremental


def test_a_request_that_moves_before_it_answers_takes_its_tokens_along(monkeypatch):
    """Its place had another request's; those of requests that answered move as in vLLM."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    host = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 10]], dtype=torch.int32)
    copy, lengths = torch.zeros_like(host), torch.tensor([3, 3, 4], dtype=torch.int32)
    batch = SimpleNamespace(
        token_ids_cpu_tensor=host,
        num_tokens_no_spec_cpu_tensor=lengths,
        num_tokens_no_spec=lengths.numpy(),
        prev_req_id_to_index=None,
        req_id_to_index={"ended": 0, "begun": 1, "answered": 2},
    )
    requests = {name: SimpleNamespace(req_id=name) for name in batch.req_id_to_index}
    update = with_moved_prompts(update_ngram_gpu_tensors_incremental, requests)
    buffers = torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.int32)
    counts = torch.zeros(3, dtype=torch.int32)
    update(batch, copy, counts, list(requests.values()), torch.device("cpu"), *buffers)
    batch.prev_req_id_to_index = {"ended": 0, "answered": 2}
    batch.req_id_to_index = {"begun": 0, "answered": 1}
    host[0], host[1] = host[1].clone(), host[2].clone()
    lengths[:2] = torch.tensor([3, 4])
    copy[2, 3] = 11  # which the device alone knows, as it has just been sampled
    update(batch, copy, counts, [], torch.device("cpu"), *buffers)
    assert copy[:2].tolist() == [[4, 5, 6, 0], [7, 8, 9, 11]]
    assert counts[:2].tolist() == [3, 4]
