"""Imported once, by the process that engines are forked from: all that every engine would import.

No thread may start here.
"""

from __future__ import annotations

import engine_child  # noqa: F401
import vllm.entrypoints.llm
import vllm.model_executor.model_loader
import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
