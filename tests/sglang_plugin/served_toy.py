"""The toy of SGLang's scheduler behind the calls of ``sglang.Engine``."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from toy_sglang import VOCABULARY, ToySglang


class ServedToy:
    """An engine whose scheduler is a toy; whoever waits for an output makes the next step.

    Args:
        hooks: the plug-in's.
        more: arguments of the toy.
    """

    def __init__(self, hooks, **more) -> None:
        self.hooks, self.toy = hooks, ToySglang(hooks.around(), **more)
        self.toy.aborts = 0.0
        hooks.opens(lambda scheduler: None, self.toy)
        self.tokenizer_manager = self
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY, context_len=80)
        self.server_args = SimpleNamespace(page_size=1)
        self.requests, self.asked, self.stopped = {}, [], False

    async def async_generate(self, *, input_ids, sampling_params, rid, stream):
        assert stream
        self.asked.append(sampling_params)
        self.requests[rid] = req = self.toy.offer(input_ids, sampling_params["max_new_tokens"])
        req.rid = rid
        return self.outputs(req)

    async def outputs(self, req):
        while req not in self.toy.done:
            await asyncio.sleep(0)
            self.toy.step()
            if req.output_ids:
                yield self.output(req, None)
        yield self.output(req, {"type": "abort" if req.aborted else "length"})

    @staticmethod
    def output(req, reason):
        return {"output_ids": list(req.output_ids), "meta_info": {"finish_reason": reason}}

    def abort_request(self, rid):
        for name, req in self.requests.items():
            if name.startswith(rid):  # as SGLang does
                req.aborted = True

    async def flush_cache(self):
        return self.toy.flush()

    async def get_internal_state(self):
        self.toy.serve(0)
        return [{"kvtxn": self.hooks.report()}]

    def shutdown(self):
        self.stopped = True
