"""Recurrent states of vLLM's runners on a GPU: one block for each request, as windows hold them.

In a verify step vLLM itself writes a state per row, 1 + k of them, and reads the one it needs in
the next step. Here the step writes none. Its rows wait in fixed buffers until the sampler has said
how many are kept; then each layer's kernel runs once more and writes one state. ``HeldStates``
supplies these launches to the windows over the rows of attention, by vLLM's kernels or kvtxn's own.

The past of a convolution stays vLLM's: it is one window per request already, and vLLM reads it at
the number of tokens that were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ....cuda_graphs import GraphCache
from ....errors import LayerError
from ....log import get_logger
from ....state_supplier import Capture, StateSupplier
from ..policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA, SHORT_CONV
from . import aligned_states, engine_config
from .engine_config import MOST_REPLAYED, NO_ATTENTION, NOT_TRITON, OWN_REPLAY, too_many
from .hooks import not_called, not_used
from .replayed_rows import REPLAYED, ReplayedRows, staged_bytes
from .runner_protocols import Runner, RunnerV2
from .state_commits import (
    BRANCHES,
    STEPS,
    CommitGraphs,
    StateTables,
    VerifyStep,
    counts_of_step,
    uses_graphs,
)
from .state_layers import (
    GATED_DELTA_NORM,
    GATED_DELTA_SPLIT,
    KERNELS,
    LAUNCHES,
    StateLayer,
    kind_of,
    modules_of,
    state_layers,
)
from .verified_rows import make_rows, row_elements

log = get_logger()

_SLOWER: Final = "each step commits its states layer by layer, which takes the host longer"

#: By kind of layer, the field of its metadata that has the blocks of requests with drafts.
_TABLES: Final[Mapping[str, str]] = {
    GATED_DELTA: "spec_state_indices_tensor",
    OLMO_DELTA: "spec_state_indices_tensor",
    MAMBA2: "state_indices_tensor_d",
    SHORT_CONV: "state_indices_tensor_d",
}


#: Most columns of a table that vLLM's fused kernel of gated delta nets takes. For more rows than
#: that per request vLLM takes the other kernel.
_FUSED_COLUMNS: Final = 8


def launches_differ(runner: Runner, *, fast: bool = False) -> str | None:
    """Say in a sentence why a model's states cannot be held one per request; None if they can.

    Checked are the signatures of vLLM's methods and the names that ``hook`` replaces in them,
    layers that are not the target's, and settings: Mamba-2 on another backend than Triton's (of
    vLLM's it alone skips a request whose table names no block), vLLM's own replay, more drafts than
    the kernels take. With a prefix cache that keeps states, vLLM's copies of states are checked,
    too. With ``fast`` kvtxn's own kernels verify the layers of ``REPLAYED``.
    """
    from .hooks import check_methods

    if not runner.model_config.is_hybrid:
        return NO_ATTENTION
    modules = modules_of(runner)
    own = {id(module) for module in runner.get_model().modules()}
    foreign = [name for name, module in modules.items() if id(module) not in own]
    if foreign:
        return f"layer {foreign[0]} is not the target's"
    for module, kind in found_kinds(modules).values():
        replayed = fast and kind in REPLAYED
        fused = getattr(module, "enable_fused_gdn_spec_decode", False)
        split = GATED_DELTA_SPLIT if replayed and kind == GATED_DELTA else {}
        norm = GATED_DELTA_NORM if replayed and fused else {}
        wrong = check_methods(type(module), {**LAUNCHES[kind], **split, **norm})
        wrong = wrong or _unused(type(module), kind, *split)
        if wrong is not None:
            return wrong
        if kind == MAMBA2 and runner.vllm_config.mamba_config.backend.value != "triton":
            return NOT_TRITON
        if getattr(module, "use_replayssm", False):
            return OWN_REPLAY
        if replayed and width(runner) > MOST_REPLAYED:
            return too_many(kind)
        if fused and not replayed and width(runner) == _FUSED_COLUMNS:
            return (
                f"with {_FUSED_COLUMNS - 1} drafts vLLM's fused kernel of gated delta nets has no "
                "column left to read from; take fewer drafts, or VLLM_GDN_DECODE_KERNEL=triton"
            )
    return aligned_states.copies_differ() if aligned_states.is_aligned(runner) else None


def _unused(owner: type, kind: str, *split: str) -> str | None:
    """Say in a sentence that a layer's code does not use a name that ``hook`` replaces.

    None if each method of ``LAUNCHES`` and of ``split`` is called in its module, and uses its
    kernel.
    """
    for method in (*LAUNCHES[kind], *split):
        function = getattr(owner, method)
        name = KERNELS[kind].get(method)
        wrong = not_called(function) or (name and not_used(function, name))
        if wrong:
            return wrong
    return None


class HeldStates(StateSupplier):
    """The states of a runner's recurrent layers.

    Args:
        runner: a runner whose KV cache exists.
        make: captures the commits of all layers; None commits layer by layer.
        fast: kvtxn's own kernels verify and commit the layers of ``REPLAYED``.
        kept: keeps the captured commits; a cache of its own if None.

    Attributes:
        layers: the recurrent layers, without their caches.
        names: of those of them that have a state beside the past of a convolution.
        nbytes: bytes of the buffers and tables.
        graphs: commits that were captured; None without any.
        aligned: the prefix cache keeps states at the ends of blocks.
        writes_ends: commits write a state that is at such an end into both blocks that want it;
            vLLM's own kernels write it into one.
    """

    def __init__(
        self,
        runner: Runner,
        make: Capture | None = None,
        *,
        fast: bool = False,
        kept: GraphCache | None = None,
    ) -> None:
        self.layers = state_layers(runner)
        self.names = tuple(layer.name for layer in self.layers if layer.kind in LAUNCHES)
        self._width = width(runner)
        self._groups = list(dict.fromkeys(layer.group for layer in self.layers))
        own = [each for each in self.layers if fast and each.kind in REPLAYED]
        others = [each for each in self.layers if each not in own]
        requests, rows, device = most_requests(runner), most_rows(runner), runner.device
        self.aligned = aligned_states.is_aligned(runner)
        self.writes_ends = all(each.kind not in LAUNCHES for each in others)
        with torch.inference_mode(False):  # its tensors outlive the mode they are made in
            self._blocks = (
                aligned_states.block_tables(runner, self._groups) if self.aligned else None
            )
            sizes = len(self._groups), requests, self._width, device
            replay = self.writes_ends
            self.tables = StateTables.build(*sizes, replay=replay, aligned=self.aligned)
            self._replayed: list[ReplayedRows] = []
            for kind in dict.fromkeys(each.kind for each in own):
                alike = [each for each in own if each.kind == kind]
                groups = [self._groups.index(each.group) for each in alike]
                self._replayed.append(ReplayedRows(alike, self.tables, groups, rows, self._width))
            self._verified = [
                *self._replayed,
                *make_rows(others, self._groups, self.tables, rows, runner.dtype),
            ]
            #: One launch commits all layers, so there is nothing to capture.
            alone = len(self._replayed) == len(self._verified) == 1
            self._alone = self._replayed[0] if alone else None
            self.graphs: CommitGraphs | None = None
            if make is not None and self._verified and self._alone is None:
                most = int(runner.max_num_reqs)
                given = self._verified, self.tables, self._width, most, make
                self.graphs = CommitGraphs(*given, GraphCache() if kept is None else kept)
        self._dtype = runner.dtype
        #: Of the step that is under way; None: there is nothing to commit.
        self.metadata: Any = None
        self.batch: Any = None
        self._known: VerifyStep | None = None
        self._done = 0
        self.nbytes = bytes_of_buffers(runner, fast=fast)
        # vLLM's profiling gives the memory of its caches back, so nothing here may hold them.
        nothing = torch.empty(0)
        self.layers = [attrs.evolve(each, past=nothing, state=None) for each in self.layers]
        self._first = next((each for each in self.layers if each.kind in LAUNCHES), None)

    def hook(self) -> None:
        """Let the layers verify without writing a state, and keep each step's rows."""
        for rows in self._verified:
            rows.hook()

    def unhook(self) -> None:
        """Give the layers vLLM's own methods back: they write states in each step again."""
        for rows in self._verified:
            rows.unhook()

    def forget_caches(self) -> None:
        """Drop the references to caches that commits keep, so that vLLM can free their memory.

        The next commit finds the layers' caches anew.
        """
        for rows in self._replayed:
            rows.forget_caches()

    def warm_up(self) -> None:
        """Compile the kernels of a commit and of a verify step, and capture the commits.

        The kernels are launched over rows whose requests have no block, so no state changes.
        Commits are captured if the supplier was given ``make``; where that fails, a warning is
        logged, and each commit stays layer by layer.
        """
        device, metadata = self.tables.whole.device, None
        starts = torch.tensor([0, self._width], dtype=torch.int32, device=device)
        step = VerifyStep(1, self._width, starts, None, metadata)
        with torch.inference_mode():
            for replayed in self._replayed:
                replayed.warm_up(self._dtype)
            if self._blocks is not None:
                self.tables.name_snapshots(self._blocks, starts[:1], starts, step)
            self.tables.name_commits(self.tables.whole[:1], starts)
            for rows in self._verified:
                rows.commit(step)
            if self._alone is not None:
                self._alone.commit_sampled(step, torch.ones_like(starts[:1]))
            if self.graphs is not None:
                try:
                    self.graphs.capture()
                except Exception as error:
                    self.graphs = None
                    log.warning("kvtxn.commits_not_captured", why=repr(error), hint=_SLOWER)

    # -- a step ---------------------------------------------------------------------

    def begin(
        self, metadata: Any, batch: Any = None, *, captured: bool = False, replayed: bool = False
    ) -> None:
        """Note a step whose metadata is ready, and name its requests' blocks to the kernels.

        A step that was noted before and not committed is forgotten: its states are as they were
        before it. Tables in ``metadata`` are changed in place to have one column per row. Without
        ``replayed``, metadata that is no dict makes a step without anything to commit.

        Args:
            metadata: vLLM's, by layer.
            batch: vLLM's input batch, or the V1 runner's ``StepRows``; its requests are counted if
                ``replayed``, and its lengths and starts are read if the prefix cache keeps states.
            captured: the forward will be captured, in a graph that names the blocks by itself.
            replayed: the forward is the replay of such a graph, so the host has no block to name.

        Raises:
            LayerError: the step has more requests than the tables have lines.
        """
        self._known, self._done = None, 0
        self.metadata, self.batch = metadata, batch
        if replayed:  # the step is described when it is committed, if it has to be
            self.replays = 0 if batch is None else batch.num_reqs
            return
        self.replays = 0
        self.tables.begin_forward()
        if not isinstance(metadata, dict):
            self.metadata = None
            return
        seen: set[int] = set()
        for layer in self.layers:
            given = metadata.get(layer.name)
            if given is None or id(given) in seen:
                continue
            seen.add(id(given))
            self._prepare(layer, given, captured=captured)
        self._known = self._step

    @property
    def _step(self) -> VerifyStep | None:
        """The requests that the present step verifies; None if it verifies none."""
        metadata = self.metadata
        if metadata is None:
            return None
        known, first = self._known, self._first
        if known is None and first is not None and isinstance(metadata, dict):
            given = metadata.get(first.name)
            if given is not None:
                known = self._known = STEPS[first.kind](given, metadata)
        return known

    def _prepare(self, layer: StateLayer, metadata: object, *, captured: bool) -> None:
        """Name the blocks of a group's requests to its kernels; nothing without a table of them.

        vLLM takes the most rows of a request from the number of columns of its table, which has one
        here. So the table in ``metadata`` is replaced by one in which each column is the first one.
        If ``captured``, the table is remembered for the graph.

        Raises:
            LayerError: the table has more lines than ``StateTables``.
        """
        name = _TABLES[layer.kind]
        table = getattr(metadata, name)
        if table is None:
            return
        if table.shape[0] > self.tables.most_requests:
            raise LayerError(
                "vllm",
                "a step has more requests than the tables of states",
                expected=f"at most {self.tables.most_requests}",
                got=table.shape[0],
                hint="start the engine without the setting 'recurrent', and report this",
            )
        if table.shape[1] != self._width:
            setattr(metadata, name, table[:, :1].expand(-1, self._width))
        group = self._groups.index(layer.group)
        self.tables.name_sources(group, table)
        if captured:
            self.tables.captured[group] = table

    @property
    def waits(self) -> bool:
        """True if some request of the step verifies."""
        step = self._step
        return step is not None and step.requests > 0

    def commit(self, sampled: Tensor) -> None:
        """Write the states after the last kept row of each request that verified, if any did.

        Args:
            sampled: int ``[num_requests]``, the tokens sampled for each request of the batch.
        """
        step = self._step
        if step is None or not step.requests:
            return
        self._name_ends(step, self.batch)
        if self._alone is not None:
            whole = step.places is None
            self._alone.commit_sampled(step, sampled if whole else counts_of_step(step, sampled))
        elif self.graphs is not None and self.graphs.takes(step):
            self.graphs.run(step, counts_of_step(step, sampled))
        else:
            self._commit(step, sampled)

    def repeat(self, sampled: Tensor) -> None:
        """Commit the layers that a commit which raised had left, one after another.

        Args:
            sampled: as for ``commit``.
        """
        step = self._step
        assert step is not None  # the commit that failed had one
        self._name_ends(step, self.batch)
        self._commit(step, sampled)

    def _name_ends(self, step: VerifyStep, batch: Any) -> None:
        """Name the blocks that are to keep states at the ends of blocks, if any are kept."""
        if self._blocks is not None:
            lengths, starts = batch.seq_lens, batch.query_start_loc
            self.tables.name_snapshots(self._blocks, lengths, starts, step)

    def _commit(self, step: VerifyStep, sampled: Tensor) -> None:
        """Commit the layers that are not committed yet, one by one, and count them as done."""
        self.tables.name_commits(counts_of_step(step, sampled), step.starts)
        for rows in self._verified[self._done :]:
            rows.commit(step)
            self._done += 1

    def abandon(self) -> None:
        """Forget the step, so that nothing is committed; its states stay as they were before it."""
        self.metadata = self._known = self.batch = None
        self._done = self.replays = 0

    # -- together with the step's rows ------------------------------------------------------

    def launches(self, sampled: Tensor, num_requests: int) -> Callable[[], None] | None:
        """Return a function that makes the launches of the step's commit, to be captured.

        None if some of the ``num_requests`` does not verify, if ``sampled`` is not int32, or if
        commits are launched layer by layer.
        """
        step, batch, alone, graphs = self._step, self.batch, self._alone, self.graphs
        if step is None or step.places is not None or step.requests != num_requests:
            return None
        if sampled.dtype is not torch.int32:
            return None
        if alone is None and (graphs is None or not graphs.takes(step)):
            return None

        def run() -> None:
            self._name_ends(step, batch)
            if alone is not None:
                alone.commit_sampled(step, sampled)
            else:
                graphs.launch(step, counts_of_step(step, sampled))  # type: ignore[union-attr]

        return run

    @property
    def capture(self) -> Capture | None:
        """The capture for ``launches``; None without graphs: any will do, they allocate nothing."""
        return None if self.graphs is None else self.graphs.make


def model_state(runner: RunnerV2) -> object:
    """Return the part of a V2 runner that makes the metadata of its steps."""
    return runner.model_state


# -- rows, requests and bytes, by formula -------------------------------------------------


def bytes_of_buffers(runner: Runner, *, fast: bool = False) -> int:
    """Return the bytes of ``HeldStates``: buffers, tables, and outputs of captured commits.

    The runner's KV caches need not exist yet.
    """
    kinds = list(found_kinds(modules_of(runner)).values())
    sizes = most_rows(runner), most_requests(runner), width(runner)
    found = bytes_by_formula(kinds, *sizes, int(runner.dtype.itemsize), fast=fast)
    own = [(module, kind) for module, kind in kinds if not (fast and kind in REPLAYED)]
    return found + (bytes_of_graphs(runner, own) if uses_graphs(runner) else 0)


def bytes_of_graphs(runner: Runner, kinds: Sequence[tuple[Any, str]]) -> int:
    """Return the bytes of outputs that captured commits write and nobody reads.

    vLLM's Triton kernels of gated delta nets allocate them for each layer. Layers in one branch of
    a graph share them, so the first ``BRANCHES`` layers of ``kinds`` count.
    """
    makes = (GATED_DELTA, OLMO_DELTA)
    sizes = [module.value_dim // module.tp_size for module, kind in kinds if kind in makes]
    most = sum(sizes[:BRANCHES])
    return most_rows(runner) * int(most) * int(runner.dtype.itemsize)


def bytes_by_formula(
    kinds: Sequence[tuple[Any, str]],
    rows: int,
    requests: int,
    width: int,
    size: int,
    *,
    fast: bool = False,
) -> int:
    """Return the bytes of buffers and tables; for the tables it is an upper bound.

    Args:
        kinds: module and kind of each layer with a state.
        rows: the most rows of a verify step.
        requests: the most requests of a step.
        width: columns of a table, one per row of a request.
        size: bytes of one number of the model's dtype.
        fast: layers of ``REPLAYED`` kinds count with the rows that they stage, not with the buffers
            that vLLM's kernels need.
    """
    own = [(module, kind) for module, kind in kinds if not (fast and kind in REPLAYED)]
    replayed = [(module, kind) for module, kind in kinds if fast and kind in REPLAYED]
    elements = sum(row_elements(module, kind) for module, kind in own)
    shared = max((_scratch_elements(module, kind) for module, kind in own), default=0)
    tables = 12 * len(kinds) * requests * (width + 4)
    staged = sum(staged_bytes(module, kind) for module, kind in replayed)
    return rows * ((elements + shared) * size + staged) + tables


def _scratch_elements(module: Any, kind: str) -> int:
    """Return how many numbers per row a layer's commit writes that nobody reads.

    0 for kinds other than gated delta nets and Mamba-2.
    """
    if kind == GATED_DELTA:
        return 2 * int(module.value_dim // module.tp_size)
    if kind == MAMBA2:
        return int(module.num_heads // module.tp_size * module.head_dim)
    return 0


def found_kinds(modules: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Select layers with a state beside a convolution's past: by name, module and kind."""
    found = {name: (module, kind_of(module) or "") for name, module in modules.items()}
    return {name: (module, kind) for name, (module, kind) in found.items() if kind in LAUNCHES}


def width(runner: Runner) -> int:
    """Return the most rows of a request in a verify step: one, and the drafts."""
    return int(runner.vllm_config.num_speculative_tokens) + 1


def most_rows(runner: Runner) -> int:
    """Return the most rows that requests with drafts can have in one step."""
    return engine_config.most_window_rows(runner.vllm_config)


def most_requests(runner: Runner) -> int:
    """Return the most requests in one table of vLLM's, padding of captured graphs included.

    It is rounded up to a multiple of 64, so that each group's table is aligned like a tensor alone.
    """
    captured = runner.compilation_config.max_cudagraph_capture_size or 0
    return -(-max(int(runner.max_num_reqs), int(captured)) // 64) * 64
