"""Done once, by the process that engines are forked from: all that every engine would do anew.

Models are looked at here, and not each in a process that imports vLLM. Triton's kernels are
replaced before numba is imported, over which vLLM trips. The machine code of vLLM's n-gram search
is kept beside its source, for later sessions, too, as that of the ledger's passes is.

No thread may start here.
"""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import vllm.entrypoints.llm
import vllm.model_executor.model_loader.default_loader
import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.async_llm
import vllm.v1.engine.llm_engine
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

registry._run_in_subprocess = lambda function: function()
current_platform.import_kernels()
if hasattr(current_platform, "register_triton_kernel_overrides"):
    with warnings.catch_warnings(action="ignore"):  # of names in modules that are looked through
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)

import engine_child  # noqa: E402, F401
import kvtxn.integrations.vllm_plugin.engine_calls  # noqa: E402
import kvtxn.integrations.vllm_plugin.runner_parts  # noqa: E402
import kvtxn.integrations.vllm_plugin.worker_answers  # noqa: E402, F401
import model_files  # noqa: E402
from kvtxn.backends.audit_numba import numba_passes  # noqa: E402, F401
from transformers.utils.logging import disable_progress_bar  # noqa: E402
from vllm.v1.spec_decode import ngram_proposer  # noqa: E402

with suppress(RuntimeError):  # there is no folder that can be written
    ngram_proposer.batch_propose_numba.enable_caching()
disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:  # transformers reads up on all models before
    model_files.write("llama", Path(folder))
with suppress(ImportError):  # a release that does so when it is imported
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())
gc.freeze()  # the collector, which vLLM calls seven times for an engine, passes over all of this
gc.unfreeze = lambda: None
atexit.register(os._exit, 0)  # torch takes its time to end, and nobody waits for it
