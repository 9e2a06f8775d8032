"""Several ranks on one GPU: a worker extension that lets vLLM's workers share a device.

NCCL refuses two ranks on one device. Here every rank takes device 0, and what they say to each
other goes through gloo: it broadcasts and reduces tensors on a GPU by itself, and what pipeline
stages send to each other, or ranks gather, goes through the host. So everything that depends on
*which* step hears *what* is as on several GPUs, while times, NCCL and copies between devices are
not seen at all.

vLLM imports this module in each worker before it makes the device, and the import does it all;
``one_gpu_jobs`` has the variables and options that such an engine needs beside it.
"""

from __future__ import annotations

import faulthandler
from collections import deque
from typing import Any

import stage_oracle
from torch import Tensor

#: Seconds after which a rank says once where it is, in case it waits for another one for ever.
_PATIENCE = 190
#: Messages whose memory is kept: gloo may still read it when it calls them sent.
_KEPT = 64


def share() -> None:
    """Let the workers of this process share device 0; once."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "one_gpu"):
        return
    Worker.one_gpu = True
    faulthandler.dump_traceback_later(_PATIENCE)
    make, gather = Worker.init_device, DeviceCommunicatorBase.all_gather
    send, receive = GroupCoordinator.isend_tensor_dict, GroupCoordinator.irecv_tensor_dict
    kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def made(self: Any) -> None:
        self.local_rank = 0
        type(current_platform).dist_backend = "gloo"
        make(self)

    def sent(self: Any, tensors: dict[str, Any], dst: Any = None, **_: Any) -> Any:
        """Whole tensors: the ranks of a stage do not send a part each."""
        hosted = {name: each.cpu() if is_tensor(each) else each for name, each in tensors.items()}
        kept.append(hosted)
        return send(self, hosted, dst)

    def received(self: Any, src: Any = None, **_: Any) -> Any:
        tensors, handles, _ = receive(self, src)
        for handle in handles:
            handle.wait()
        if tensors is not None:
            tensors = {
                name: each.cuda() if is_tensor(each) else each for name, each in tensors.items()
            }
        return tensors, [], []

    def gathered(self: Any, part: Tensor, dim: int = -1) -> Tensor:
        return gather(self, part.cpu(), dim).to(part.device)

    Worker.init_device = made
    DeviceCommunicatorBase.all_gather = gathered
    GroupCoordinator.isend_tensor_dict = sent
    GroupCoordinator.irecv_tensor_dict = received


def is_tensor(each: Any) -> bool:
    """Tell tensors from what else is sent beside them."""
    return isinstance(each, Tensor)


class Watch(stage_oracle.Watch):
    """The worker extension of such ranks."""


share()
