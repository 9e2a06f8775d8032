"""Lets vLLM's CPU platform run its workers through Ray, in stock engines and in ours alike.

vLLM 0.32 has a Ray executor that knows GPUs and the like, and its CPU platform
names no resource to ask Ray for. Here it asks for "GPU", of which a local Ray
is told that it has one per core; a CPU worker needs nothing else of them.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

#: Engines of one job, one after another; Ray gives back what they asked for too late for the next.
ENGINES, WORKERS = 3, 2


def prepare() -> None:
    """Name the resource, in this process. Ray calls it in each of its workers as well."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


def start() -> dict[str, Any]:
    """Start a local Ray; returns the engine's options."""
    import ray

    prepare()
    environment = {"worker_process_setup_hook": "vllm_ray.prepare"}
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            num_gpus=ENGINES * WORKERS,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=tempfile.mkdtemp(prefix="ray-"),
            runtime_env=environment,
        )
    return {"distributed_executor_backend": "ray"}


def stop() -> None:
    """Stop it."""
    import ray

    ray.shutdown()
