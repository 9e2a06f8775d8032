"""Steps of gated delta nets: by SGLang's replay ring, by kvtxn's kernels, and by the recurrence."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

HV, H, K, V = 32, 16, 128, 128
LAYERS: Final = 24
#: Sets of requests that take turns.
SETS: Final = 2
REQUESTS: Final = (8, 32, 128)
SLOTS: Final = 1 + SETS * max(REQUESTS)
DTYPE: Final = torch.bfloat16
SHAPE: Final = {
    "value_heads": HV,
    "key_heads": H,
    "key_size": K,
    "value_size": V,
    "layers": LAYERS,
    "slots": SLOTS,
    "states": "float32",
    "activations": "bfloat16",
    "ring": "bfloat16 d and k with low parts, float32 g",
    "convolution": "excluded on both sides",
    "gated_norm": "excluded on both sides",
    "snapshots": "none on both sides",
}
RING: Final = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode"


# -- SGLang's functions -------------------------------------------------------------------


def ring_functions(whole: bool) -> Any:
    """Return SGLang's module of the ring.

    Importing its package runs the imports of a server, so the file is run alone, with the two flags
    that it imports set to what they are on NVIDIA's GPUs.

    Args:
        whole: import the package.
    """
    if whole:
        return importlib.import_module(RING)
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'")
    folder = Path(next(iter(found.submodule_search_locations)))
    path = folder.joinpath(*RING.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location("sglang_replay_ring", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_replay_ring"] = module
    tensor_cores = torch.cuda.get_device_capability(0)[0] >= 8
    with _stand_ins(
        {
            "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": tensor_cores},
            "sglang.srt.utils": {"is_gfx95_supported": lambda: False},
        }
    ):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _stand_ins(flags: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Put empty modules, and modules of flags, into the place of SGLang's."""
    names = {"sglang"} | {
        ".".join(name.split(".")[: n + 1]) for name in flags for n in range(name.count(".") + 1)
    }
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        for name in names:
            module = types.ModuleType(name)
            module.__path__ = []
            vars(module).update(flags.get(name, {}))
            sys.modules[name] = module
        yield
    finally:
        for name, was in before.items():
            del sys.modules[name]
            if was is not None:
                sys.modules[name] = was


# -- tensors ------------------------------------------------------------------------------


class Inputs:
    """Rows of all layers, as the convolution leaves them; both implementations read the same.

    Args:
        requests: of one set.
        drafts: of each request.
        steps: with counts of their own.
        device: of all tensors.
    """

    def __init__(self, requests: int, drafts: int, steps: int, device: str = "cuda") -> None:
        self.requests, self.width, self.steps = requests, drafts + 1, steps
        self.rows, self.device, self.scale = requests * self.width, device, K**-0.5
        generator = torch.Generator(device=device).manual_seed(7)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device, generator=generator)

        self.layers = []
        for _ in range(LAYERS):
            mixed = drawn(self.rows, 2 * H * K + HV * V).to(DTYPE)
            parts = zip(mixed.split([H * K, H * K, HV * V], dim=1), (K, K, V), strict=True)
            q, k, v = (part.unflatten(1, (-1, size)) for part, size in parts)
            a, b = (drawn(self.rows, HV).to(DTYPE) for _ in range(2))
            rate = drawn(HV) * 0.5 - 2.0  # decays near 0.9, so that history counts
            self.layers.append((q, k, v, a, b, rate, drawn(HV) * 0.5))
        host = torch.Generator().manual_seed(requests * 100 + drafts)
        #: Accepted drafts and the row before them, of each step, set and request.
        self.lots = torch.randint(1, self.width + 1, (steps, SETS, requests), generator=host)
        self.counts = [[self.ints(lots) for lots in step] for step in self.lots]
        order = 1 + torch.randperm(SLOTS - 1, generator=host)
        self.slots = [self.ints(order[t * requests : (t + 1) * requests]) for t in range(SETS)]
        self.starts = self.ints(torch.arange(requests + 1)) * self.width

    def ints(self, numbers: torch.Tensor) -> torch.Tensor:
        """Copy, so that each tensor is as well aligned as an engine's."""
        return numbers.to(self.device, torch.int32).clone()

    def outs(self) -> list[torch.Tensor]:
        shape = (self.rows, HV, V)
        return [torch.zeros(shape, dtype=DTYPE, device=self.device) for _ in range(LAYERS)]


class Ring:
    """SGLang's pool, sized as its ``MambaPool`` sizes it, and its steps.

    Args:
        module: of ``ring_functions``.
        states: ``[layers, slots, value heads, V, K]``, float32.
        length: of the ring, in rows.
    """

    def __init__(self, module: Any, states: torch.Tensor, length: int) -> None:
        self.module, self.states, self.length = module, states, length

        def room(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=states.device)

        rows = (LAYERS, SLOTS)
        self.d, self.d_low = (room(*rows, HV, length, V) for _ in range(2))
        self.k, self.k_low = (room(*rows, H, length, K) for _ in range(2))
        self.g = room(*rows, HV, length, dtype=torch.float32)
        self.cursors = {
            "write_pos": room(SLOTS, dtype=torch.int32),
            "cache_base": room(SLOTS, dtype=torch.int32),
            "is_flush": room(SLOTS, dtype=torch.int8),
        }

    def reset(self) -> None:
        for part in (self.d, self.d_low, self.k, self.k_low, self.g, *self.cursors.values()):
            part.zero_()

    def use(self, given: Inputs) -> None:
        self.given, self.layer_outs = given, given.outs()
        self.where = [each.long() for each in given.slots]  # indices of requests are int64

    def verify(self, turn: int, step: int) -> None:
        given = self.given
        for layer, (q, k, v, a, b, rate, bias) in enumerate(given.layers):
            self.module.gdn_replayssm_spec_decode(
                **{"q": q, "k": k, "v": v, "a": a, "b": b, "A_log": rate, "dt_bias": bias},
                checkpoint_state=self.states[layer],
                d_cache=self.d[layer],
                k_cache=self.k[layer],
                g_cache=self.g[layer],
                rawv_cache=self.d_low[layer],
                rawk_cache=self.k_low[layer],
                beta_cache=None,
                out=self.layer_outs[layer],
                query_start_loc=given.starts,
                ssm_state_indices=given.slots[turn],
                replay_indices=self.where[turn],
                **self.cursors,
                max_cache_len=self.length,
                max_spec_len=given.width,
                scale=given.scale,
                use_qk_l2norm_in_kernel=True,
                null_block_id=-1,
                launch_mode="verify",
            )

    def commit(self, turn: int, step: int) -> None:
        self.module.commit_gdn_replayssm_spec(
            **self.cursors,
            num_accepted=self.given.counts[step][turn],
            replay_indices=self.where[turn],
            max_cache_len=self.length,
            max_spec_len=self.given.width,
            fold_every_commit=self.states.dtype != torch.float32,
            null_block_id=-1,
        )
        self.fold(turn, step)

    def fold(self, turn: int, step: int) -> None:
        self.module.commit_gdn_replayssm_circular(
            checkpoint_state=self.states,
            d_cache=self.d,
            k_cache=self.k,
            g_cache=self.g,
            d_residual_cache=self.d_low,
            k_residual_cache=self.k_low,
            state_batch_indices=self.given.slots[turn],
            replay_indices=self.where[turn],
            **self.cursors,
            accept_lens=self.given.counts[step][turn],
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            null_block_id=-1,
        )

    def settle(self, turn: int) -> None:
        """Fold what every request of a set has in its ring, to see its state."""
        where = self.where[turn]
        self.cursors["is_flush"][where] = (self.cursors["write_pos"][where] > 0).to(torch.int8)
        self.fold(turn, 0)


class Fast:
    """kvtxn's steps.

    Args:
        states: ``[layers, slots, value heads, V, K]``, float32.
    """

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states

    def use(self, given: Inputs) -> None:
        from kvtxn.backends.gated_delta import DeltaLayers, DeltaRows

        self.given, self.layer_outs = given, given.outs()
        self.kept = [
            [DeltaRows.build(given.rows, H, HV, K, V, self.states.device) for _ in range(LAYERS)]
            for _ in range(SETS)
        ]
        self.layers = [DeltaLayers.build(list(self.states), kept) for kept in self.kept]

    def verify(self, turn: int, step: int) -> None:
        from kvtxn.backends.gated_delta.launch import launch_verify

        given = self.given
        for layer, rows in enumerate(given.layers):
            launch_verify(
                rows,
                self.states[layer],
                given.slots[turn],
                given.starts,
                self.layer_outs[layer],
                self.kept[turn][layer],
                scale=given.scale,
                normalise=True,
                longest=given.width,
            )

    def commit(self, turn: int, step: int) -> None:
        from kvtxn.backends.gated_delta.launch import launch_advance

        given = self.given
        slots, counts = given.slots[turn][None], given.counts[step][turn]
        ends = (given.starts, None, None)
        launch_advance(self.layers[turn], slots, counts, *ends, longest=given.width)

    def settle(self, turn: int) -> None:
        """Do nothing: each commit moves the states."""


Steps = Ring | Fast


# -- the recurrence -----------------------------------------------------------------------


class Exact:
    """The recurrence in float64, of one layer and one set of requests, row by row.

    Args:
        given: of the first set.
        layer: its number.
        state: ``[requests, value heads, V, K]``, at the beginning.
    """

    def __init__(self, given: Inputs, layer: int, state: torch.Tensor) -> None:
        q, k, v, a, b, rate, bias = (part.double() for part in given.layers[layer])
        shape = (given.requests, given.width)
        x = a + bias
        softplus = torch.where(x <= 20, torch.log1p(torch.exp(x)), x)
        self.decay = torch.exp(-torch.exp(rate) * softplus).unflatten(0, shape)
        self.beta = torch.sigmoid(b).unflatten(0, shape)
        self.v = v.unflatten(0, shape)
        self.q, self.k = (
            normalised(part).repeat_interleave(HV // H, dim=1).unflatten(0, shape)
            for part in (q, k)
        )
        self.q = self.q * given.scale
        self.state = state.double()

    def step(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[rows, HV, V]``, and keep the state after the counted rows."""
        now, kept, outs = self.state, self.state, []
        for row in range(self.q.shape[1]):
            k = self.k[:, row, :, None, :]
            now = now * self.decay[:, row, :, None, None]
            u = self.beta[:, row, :, None] * (self.v[:, row] - (now * k).sum(-1))
            now = now + u[..., None] * k
            outs.append((now * self.q[:, row, :, None, :]).sum(-1))
            kept = torch.where((counts > row)[:, None, None, None], now, kept)
        self.state = kept
        return torch.stack(outs, dim=1).flatten(0, 1)


def normalised(part: torch.Tensor) -> torch.Tensor:
    """Scale each key or query to length 1."""
    return part / torch.sqrt((part * part).sum(-1, keepdim=True) + 1e-6)


def check(way: Steps, given: Inputs, steps: int) -> dict[str, Any]:
    """Run steps of the first set eagerly beside the recurrence; first and last layer."""
    slots, ends = given.slots[0].long(), sorted({0, LAYERS - 1})
    exact = {end: Exact(given, end, way.states[end][slots]) for end in ends}
    worst = largest = rounded = off = size = 0.0

    def most(tensor: torch.Tensor) -> float:
        return float(tensor.abs().max())

    for number in range(steps):
        step = number % given.steps
        way.verify(0, step)
        for end in ends:
            wanted = exact[end].step(given.counts[step][0])
            worst = max(worst, most(way.layer_outs[end].double() - wanted))
            rounded = max(rounded, most(wanted.to(DTYPE).double() - wanted))
            largest = max(largest, most(wanted))
        way.commit(0, step)
    way.settle(0)
    for end in ends:
        off = max(off, most(way.states[end][slots].double() - exact[end].state))
        size = max(size, most(exact[end].state))
    return {
        "steps": steps,
        "output_max_difference": worst,
        "output_max": largest,
        "output_bfloat16_rounding_alone": rounded,
        "state_max_difference": off,
        "state_max": size,
        "ok": worst <= rounded + 1e-2 * largest and off <= 1e-2 * size,
    }
