"""Lets vLLM's CPU platform run its workers through Ray, in stock engines and in ours alike.

vLLM 0.32 has a Ray executor that knows GPUs and the like, and its CPU platform
names no resource to ask Ray for. Here it asks for "GPU", of which a local Ray
is told that it has one per core; a CPU worker needs nothing else of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

WORKERS = 2

#: Where the Ray of this process keeps its files; short, since its sockets are among them.
_FOLDERS: list[Path] = []


def prepare() -> None:
    """Name the resource, in this process. Ray calls it in each of its workers as well."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


def start() -> dict[str, Any]:
    """Start a local Ray; returns the engine's options."""
    import ray

    prepare()
    environment = {"worker_process_setup_hook": "ray_cluster.prepare"}
    if not ray.is_initialized():
        _FOLDERS.append(Path(tempfile.mkdtemp(prefix="ray-")))
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            num_gpus=WORKERS,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,  # `stop` prints every line; a driver may leave some out
            _temp_dir=str(_FOLDERS[0]),
            runtime_env=environment,
        )
    return {"distributed_executor_backend": "ray"}


def stop() -> None:
    """End this process's Ray, print what its workers printed, and remove its files."""
    import ray

    ray.shutdown()
    while _FOLDERS:
        folder = _FOLDERS.pop()
        for log in sorted(folder.glob("session_2*/logs/worker-*")):
            print(log.read_text(errors="replace"), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
