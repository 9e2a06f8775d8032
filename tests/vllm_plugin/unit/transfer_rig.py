"""A ledger whose rows a connector stores and loads, without an engine."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.serving.ledger.transfers import TransferWatch
from kvtxn.integrations.serving.step import Arrival, Rows
from kvtxn.integrations.vllm_plugin.seam import connectors
from kvtxn.integrations.vllm_plugin.seam.request_blocks import RequestBlocks

from kvtxn.audit import Ledger, RowGroup, Step

GROUP = RowGroup("group.0", 4, 12, pool="blocks")
TOKENS = list(range(20, 32))
#: Of a step whose positions the device alone knows.
ROWS = Rows([], torch.zeros(1, dtype=torch.int32), None, torch.zeros(0), None, {}, {})


def scheduled(new=(), grown=(), resumed=(), gone=(), preempted=None):
    """What the scheduler tells a runner of a step: requests by name, each with its content.

    ``grown`` and ``resumed`` have the blocks by group in its place.
    """
    for name, content in new:
        content.req_id = name
    cached = SimpleNamespace(
        req_ids=[name for name, _ in (*grown, *resumed)],
        new_block_ids=[blocks for _, blocks in (*grown, *resumed)],
        resumed_req_ids={name for name, _ in resumed},
    )
    return SimpleNamespace(
        finished_req_ids=set(gone), preempted_req_ids=preempted, scheduled_cached_reqs=cached,
        scheduled_new_reqs=[content for _, content in new], kv_connector_metadata=None,
        new_block_ids_to_zero=None, kv_cache_block_copies=None,
    )  # fmt: skip


def state_of(blocks, tokens, **more):
    """What the runner is told of a request that comes."""
    state = SimpleNamespace(block_ids=(list(blocks),), prompt_token_ids=list(tokens),
                            prompt_embeds=None, mm_features=[])  # fmt: skip
    vars(state).update(more)
    return state


def follow(ledger, runner, cache, stop, sizes=None):
    """Follow the transfers of a runner whose blocks have these bytes."""
    read, flushed = (
        partial(each, runner, runner.kvtxn_requests)
        for each in (connectors.transfers, connectors.flushed)
    )

    def hashes(group, blocks):
        words = [[int.from_bytes(cache[block][:7], "big"), 0] for block in blocks]
        return torch.tensor(words, dtype=torch.int64).view(-1, 2)

    tables = runner.kvtxn_requests.tables
    return TransferWatch(
        ledger, {"group.0": GROUP}, sizes or {}, read, flushed, hashes, tables, stop
    )


@pytest.fixture
def rig():
    """A ledger with one request that wrote 8 rows into blocks 1 and 2, and a watch of transfers."""
    ledger = Ledger([GROUP], max_requests=4, max_length=32)
    spec, requests = SimpleNamespace(block_size=4), RequestBlocks()
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * 2,
        hisparse_host_num_blocks=None,
        prefix_cacheable_group_ids=(0, 1),
    )
    model = SimpleNamespace(is_encoder_decoder=False)
    requests.hear(scheduled(new=[("a", state_of([1, 2, 3], TOKENS[:9]))]))
    transfer = SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": 1})
    engine = SimpleNamespace(kv_transfer_config=transfer)
    runner = SimpleNamespace(
        kv_cache_config=config, kvtxn_requests=requests, model_config=model, vllm_config=engine
    )
    cache = {block: b"%d" % block for block in range(12)}
    stopped = []
    watch = follow(ledger, runner, cache, stopped.append)
    ledger.admit("a", TOKENS[:9])
    ledger.hand_out("group.0", [1, 2, 3])
    write(ledger, "a", [1, 2, 3])
    return SimpleNamespace(ledger=ledger, watch=watch, cache=cache, runner=runner, stopped=stopped)


def write(ledger, name, table):
    """Write a request's first 8 rows."""
    step = Step(
        lines=torch.tensor([ledger.line(name)]), starts=torch.tensor([0, 8]),
        first=torch.tensor([0]), tokens=torch.tensor(TOKENS[:8]),
        slots={"group.0": slots(table[:2])}, tables={"group.0": torch.tensor([table])},
    )  # fmt: skip
    ledger.write(step)


def slots(blocks):
    return torch.cat([torch.arange(4) + 4 * block for block in blocks])


def stored(rig, *blocks, tokens=None):
    """Metadata in ``ExampleConnector``'s manner: it stores the prompt's rows in these blocks."""
    ids = torch.tensor(TOKENS[: 4 * len(blocks)] if tokens is None else tokens)
    return SimpleNamespace(
        requests=[SimpleNamespace(token_ids=ids, slot_mapping=slots(blocks), is_store=True)]
    )


def load(rig, *blocks, tokens=None):
    """Metadata that load a prompt's rows into these blocks."""
    found = stored(rig, *blocks, tokens=tokens)
    found.requests[0].is_store = False
    return found


def come(rig, name, blocks, tokens, metadata):
    """Let a request come whose rows are loaded into its blocks before the forward."""
    arrival = Arrival(name, list(tokens), [], {}, 4 * len(blocks), [blocks])
    rig.runner.kvtxn_requests.hear(scheduled(new=[(name, state_of(blocks, tokens))]))
    rig.watch.before_change(True, [])
    rig.ledger.admit(name, tokens)
    rig.watch.change([arrival], [])
    rig.watch.begin(metadata)
    return arrival


def kinds(rig):
    assert rig.stopped == []
    return [violation.kind for violation in rig.ledger.violations()]


class Loaded:
    """What vLLM has loaded, by adapter's number; its manager, and the manager's manager."""

    def __init__(self):
        self._adapter_manager, self.adapters = self, {}
        self.get_adapter = self.adapters.get
