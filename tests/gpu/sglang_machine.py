"""Where SGLang runs: variables of its engines; machine, releases and command for the JSON."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvtxn.benchmarks.common.machine import describe

#: For every engine: the kernels may be of an older release, which fits this machine's torch.
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_JIT_CACHE_DIR": str(Path(tempfile.gettempdir()) / "sglang_jit"),
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_CACHE_DIR": str(Path(tempfile.gettempdir()) / "sglang_triton"),
}


def environment() -> dict[str, str]:
    """Return the variables of an engine's process; those that this one has come first.

    The CUDA compiler is named, and ninja found, which compile kernels at the start.
    """
    compilers = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    found = {**ENVIRONMENT, **os.environ}
    if compilers:
        found.setdefault("CUDA_HOME", str(compilers[0].parents[1]))
    tools = [f"{found.get('CUDA_HOME', '/usr/local/cuda')}/bin", str(Path(sys.executable).parent)]
    found["PATH"] = os.pathsep.join([*tools, found.get("PATH", "")])
    return found


def where(out: Path) -> dict[str, str]:
    """Describe the run of the script that was started.

    Args:
        out: the folder that it writes to, which the command calls OUT.
    """
    words = ["OUT" if Path(word).resolve() == out else word for word in sys.argv[1:]]
    found = describe()
    parts = [found.get("gpu", found["processor"]), f"driver {found.get('driver', 'unknown')}"]
    for package in ("torch", "triton", "sglang", "sglang-kernel"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    script = f"tests/gpu/{Path(sys.argv[0]).name}"
    return {
        "machine": ", ".join(parts),
        "commit": found["commit"],
        "command": shlex.join(["python", script, *words]),
    }
