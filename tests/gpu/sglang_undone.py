"""A plug-in of SGLang for ``sglang_known``: dummy weights that differ, and fixes taken back.

``WEIGHTS=random`` draws the weights of a model that is loaded with dummies, so that its logits
depend on its states. ``UNDO=34043`` takes back that a prefill's graph keeps states for the radix
tree where drafts are used: sgl-project/sglang#34043.
"""

from __future__ import annotations

import os

RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"


def draw(model, low=0.0, high=0.0, seed=1234) -> None:
    """Draw each weight by its shape: a matrix keeps the size of what it multiplies.

    Gated delta nets forget slowly, so that a state's loss shows after hundreds of tokens.
    """
    import torch

    generators = {}
    for name, weight in model.state_dict().items():
        if not torch.is_floating_point(weight):
            continue
        if weight.dim() < 2:
            weight.fill_(1.0 if "norm" in name else -5.0 if name.endswith("A_log") else 0.0)
            continue
        place = weight.device
        if place not in generators:
            generators[place] = torch.Generator(device=place).manual_seed(seed)
        drawn = torch.randn(weight.shape, generator=generators[place], device=place)
        scale = 1.0 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5
        weight.copy_((drawn * scale).to(weight.dtype))


def register() -> None:
    """Replace what the variables name."""
    targets = {}
    if os.environ.get("WEIGHTS") == "random":
        targets["sglang.srt.model_loader.weight_utils.initialize_dummy_weights"] = draw
    if os.environ.get("UNDO") == "34043":
        targets[f"{RUNNER}._is_mamba_track_enabled"] = lambda runner: False
    if targets:
        hooks = __import__("sglang.srt.plugins.hook_registry", fromlist=["HookRegistry"])
        for target, function in targets.items():
            hooks.HookRegistry.register(target, function, hooks.HookType.REPLACE)
