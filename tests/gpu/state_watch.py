"""Reads the recurrent states on the device around every step of a GPU's V2 runner.

``state_watch_v1`` does it in the V1 runner.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import state_recurrence
import torch
from gpu_oracle import Watch as Base
from kvtxn.backends.graphs import static_window
from kvtxn.integrations.serving.parts import Parts
from kvtxn.integrations.vllm_plugin.seam import layers as attention_layers
from kvtxn.integrations.vllm_plugin.seam.state_layers import state_layers

state_recurrence.watch_launches()

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def digest(part: torch.Tensor) -> torch.Tensor:
    """A number of the bits of each row, int64 ``[rows]``; places count."""
    words = part.contiguous().view(_WORDS[part.element_size()]).flatten(1).to(torch.int64)
    places = torch.arange(1, words.shape[1] + 1, device=part.device) * 2654435761
    return (words * (places % 1000003)).sum(1)


def own_blocks(runner: Any) -> int:
    """Return the number of blocks that vLLM hands out; drafts wait in spare ones behind them."""
    for part in getattr(runner, "kvtxn_parts", Parts())._parts:
        if getattr(part, "spare", None) is not None:
            return int(part.spare.own)
    return int(runner.kv_cache_config.num_blocks)


class Watch(Base):
    """The worker extension: methods that vLLM calls in each worker."""

    #: The prefix cache keeps states at the ends of blocks.
    aligned = False

    def describe(self) -> dict[str, Any]:
        """Describe the engine, and how many requests it holds at once."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        config = runner.kv_cache_config
        found = state_layers(runner)
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        _, facts = attention_layers.target_layers(runner)
        modules: list[Any] = [layer.module for layer in found]
        graphs = getattr(getattr(runner, "kvtxn_states", None), "graphs", None)
        return {
            "runner": facts.runner,
            "graphs": runner.compilation_config.cudagraph_mode.name,
            "commit_graphs": 0 if graphs is None else graphs.count,
            "attention": facts.attention,
            "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
            "kernels": sorted({str(getattr(m, "gdn_decode_kernel", "")) for m in modules}),
            "states": [[str(p.dtype), list(p.shape[1:]), list(p.stride())]
                       for p in (found[0].past, found[0].state) if p is not None],
            "state_blocks": sorted({1 + s.num_speculative_blocks for s in specs
                                    if hasattr(s, "num_speculative_blocks")}),
            "blocks": config.num_blocks,
            "own_blocks": own_blocks(runner),
            "page_bytes": sorted({s.page_size_bytes for s in specs}),
            "block_sizes": [s.block_size for s in specs],
            "concurrency": round(
                get_max_concurrency_for_kv_cache_config(runner.vllm_config, config), 2
            ),
        }  # fmt: skip

    def randomise(self, spread: float) -> None:
        """New weights, see ``gpu_oracle``; states shall fade, and convolutions be felt."""
        super().randomise(spread)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, weight in runner.get_model().named_parameters():
                last = name.rpartition(".")[2]
                if last == "A":
                    weight.data.copy_(-0.2 - weight.data.abs())
                elif ("conv" in name and weight.is_floating_point()) or "embed" in name:
                    weight.data.mul_(6.0)

    def watch(self) -> None:
        """Digest states from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.know(runner)
        prepare, sampled_by = runner.prepare_attn, runner.postprocess_sampled
        manager = runner.cudagraph_manager
        replay, model_state = manager.run_fullgraph, runner.model_state
        moved_by = model_state.preprocess_state

        def prepared(batch: Any) -> Any:
            self.batch = batch
            return prepare(batch)

        def moved(*args: Any, **kwargs: Any) -> Any:
            """States may move to other blocks before a forward; so look once they have."""
            result = moved_by(*args, **kwargs)
            self.before = self.states_now()
            self.blocks = self.blocks_now()
            return result

        def sampled(
            idx_mapping: Any,
            sampled_tokens: Any,
            num_sampled: Any,
            num_rejected: Any,
            query_start_loc: Any = None,
        ) -> None:
            self.look("forward")
            step = runner.kvtxn_states._step if self.replayed else None
            self.counts["unopened"] += getattr(getattr(runner, "kvtxn", None), "_unopened", False)
            sampled_by(idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc)
            self.look("commit")
            if step is not None:
                self.recur(step, num_sampled)
            self.note(num_sampled, idx_mapping)

        def replayed(*args: Any, **kwargs: Any) -> Any:
            self.counts["graphs"] += 1
            return replay(*args, **kwargs)

        runner.prepare_attn, runner.postprocess_sampled = prepared, sampled
        model_state.preprocess_state = moved
        manager.run_fullgraph = replayed

    def know(self, runner: Any) -> None:
        """Find what is watched."""
        self.found = state_layers(runner)
        self.num_blocks = own_blocks(runner)
        self.held = getattr(runner, "kvtxn_states", None) is not None
        self.aligned = runner.vllm_config.cache_config.mamba_cache_mode == "align"
        static_window._OFTEN_WITH_STATES = 2  # few steps are of one kind here
        replayed = getattr(getattr(runner, "kvtxn_states", None), "_replayed", ())
        self.replayed = [layer for rows in replayed for layer in rows.layers]
        self.begin(0)

    def begin(self, seed: int) -> None:
        """Forget what was seen; the same lots are drawn again."""
        self.oracle_seed(seed)
        self.counts = Counter[str]()
        self.accepted = Counter[int]()
        device = self.found[0].past.device
        self.recurred = torch.zeros(5, dtype=torch.float64, device=device)
        self.elsewhere = torch.zeros((), dtype=torch.int64, device=device)
        self.ends = torch.zeros((), dtype=torch.int64, device=device)
        self.digests: dict[str, list[int]] = {}
        self.names: dict[str, str] = {}
        self.first: int | None = None

    def tables(self, layer: Any) -> torch.Tensor:
        """The blocks of the batch's requests in a layer's group."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        number = int(layer.group.partition(".")[2])
        return runner.block_tables.input_block_tables[number][: self.batch.num_reqs].long()

    def all_tables(self) -> list[torch.Tensor]:
        """The blocks of the batch's requests, of every group."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        tables = runner.block_tables.input_block_tables
        return [table[: self.batch.num_reqs].long() for table in tables]

    def tokens_of_block(self) -> int:
        """Tokens of a block that keeps a state."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        number = int(self.found[0].group.partition(".")[2])
        return int(runner.kv_cache_config.kv_cache_groups[number].kv_cache_spec.block_size)

    def column(self) -> torch.Tensor:
        """The first column of each request's states in the tables: of its last row's block."""
        if not self.aligned:
            return torch.zeros_like(self.tables(self.found[0])[:, 0])
        lengths = self.batch.seq_lens[: self.batch.num_reqs].long()
        return (lengths - 1) // self.tokens_of_block()

    def computed(self) -> torch.Tensor:
        """The tokens of each request before the step."""
        starts = self.batch.query_start_loc[: self.batch.num_reqs + 1]
        return self.batch.seq_lens[: self.batch.num_reqs].long() - starts.diff().long()

    def states_in(self, layer: Any, column: torch.Tensor) -> torch.Tensor:
        """The states of a layer in one column for each request."""
        return layer.state[self.tables(layer).gather(1, column[:, None]).squeeze(1)]

    def states_now(self) -> list[torch.Tensor]:
        """The first block of each request of the batch, of each layer with a state."""
        with_state = [layer for layer in self.found if layer.state is not None]
        return [self.states_in(layer, self.column()).clone() for layer in with_state]

    def look(self, stage: str) -> None:
        """Count the states that a stage changed; before the commit only prompts may change any."""
        if not self.held:
            return
        prefilling = torch.from_numpy(self.batch.is_prefilling_np.copy())
        for now, was in zip(self.states_now(), self.before, strict=True):
            changed = (digest(now) != digest(was)).cpu()
            self.counts[f"{stage}_changed"] += int(changed.sum())
            if stage == "forward":
                self.counts["strays"] += int((changed & ~prefilling).sum())

    def blocks_now(self) -> list[torch.Tensor]:
        """A number of each block, of each layer that kvtxn's own kernels advance."""
        if not self.replayed:
            return []
        states = [layer.state for layer in self.found if layer.state is not None]
        return [state_recurrence.words_of_blocks(state) for state in states]

    def recur(self, step: Any, num_sampled: torch.Tensor) -> None:
        """Compare the states that a commit wrote with the recurrence over the kept rows."""
        count, known = self.batch.num_reqs, step.starts.tolist()
        places = list(range(step.requests)) if step.places is None else step.places.tolist()
        pairs = [(n, at) for n, at in enumerate(places) if at < count and known[n + 1] > known[n]]
        if not pairs:
            return
        assert pairs[-1][0] == len(pairs) - 1, "requests without rows come last"
        device, ends = num_sampled.device, known[: len(pairs) + 1]
        whose = torch.tensor([at for _, at in pairs], device=device)
        starts = torch.tensor(ends, device=device)
        most = max(end - start for start, end in pairwise(ends))
        kept = num_sampled[whose].long()
        for layer, was, now in zip(self.replayed, self.before, self.states_now(), strict=True):
            found = state_recurrence.compare(layer, was[whose], now[whose], starts, kept, most)
            self.recurred = state_recurrence.added(self.recurred, found)
            if self.aligned:
                self.recur_at_ends(layer, was[whose], starts, kept, most, whose)
        # Layers of other groups have their rows and states in the same pages.
        mine = torch.cat([table.flatten() for table in self.all_tables()])
        for was, now in zip(self.blocks, self.blocks_now(), strict=True):
            changed = now != was
            changed[mine] = False
            self.elsewhere += changed[1 : self.num_blocks].sum()

    def recur_at_ends(
        self,
        layer: Any,
        was: torch.Tensor,
        starts: torch.Tensor,
        kept: torch.Tensor,
        most: int,
        whose: torch.Tensor,
    ) -> None:
        """Compare the states that a commit left at the ends of blocks."""
        column = self.computed() // self.tokens_of_block()
        rows = ((column + 1) * self.tokens_of_block() - self.computed())[whose]
        crossed = rows <= kept.clamp(min=1).minimum(starts.diff())
        [found] = [each for each in self.found if each.module is layer.module]
        ends = self.states_in(found, column)[whose]
        self.ends += crossed.sum()
        compared = state_recurrence.compare(layer, was, ends, starts, rows, most, crossed)
        self.recurred = state_recurrence.added(self.recurred, compared)

    def note(self, num_sampled: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """Digest the state of each request of the batch."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        computed = runner.req_states.num_computed_tokens.gpu[idx_mapping].tolist()
        # Where vLLM has moved a state to the first column, it counts one accepted row.
        accepted = runner.model_state.num_accepted_tokens_gpu[idx_mapping[: self.batch.num_reqs]]
        self.note_states(num_sampled, computed, accepted.long() - 1)

    def note_states(
        self, num_sampled: torch.Tensor, computed: list[int], place: torch.Tensor
    ) -> None:
        """Digest the state of each request of the batch.

        Args:
            num_sampled: tokens sampled for each request.
            computed: tokens of each request after the step.
            place: int64, where vLLM finds the past of each: its first row.
        """
        count = self.batch.num_reqs
        kept = num_sampled[:count].clamp(min=1).long()
        self.counts["steps"] += 1
        prefilling = self.batch.is_prefilling_np.tolist()
        drafts = self.batch.num_draft_tokens_per_req
        for number, tokens in enumerate(kept.tolist()):
            if not prefilling[number]:
                self.accepted[tokens] += 1
                self.counts["zero_draft_rows"] += drafts is None or not int(drafts[number])
        digests = self.digests_in(
            self.column(), torch.zeros_like(kept) if self.held else place, place
        )
        for number, request in enumerate(self.batch.req_ids):
            self.digests[f"{self.name_of(request)}@{computed[number]}"] = digests[number]
        if self.aligned:
            self.note_ends(computed)

    def digests_in(
        self, column: torch.Tensor, further: torch.Tensor, row: torch.Tensor
    ) -> list[list[int]]:
        """Digest states and pasts of each request.

        Args:
            column: of the block in the tables.
            further: columns from there to the state's.
            row: the first row of the past.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        parts: list[torch.Tensor] = []
        for layer in self.found:
            if layer.state is not None:
                parts.append(self.states_in(layer, column + further))
            width = layer.past.shape[1] - runner.vllm_config.num_speculative_tokens
            places = row[:, None] + torch.arange(width, device=row.device)
            block = self.tables(layer).gather(1, column[:, None])
            parts.append(layer.past[block, places])
        found: list[list[int]] = torch.stack([digest(part) for part in parts], 1).tolist()
        return found

    def note_ends(self, computed: list[int]) -> None:
        """Digest what is kept at the end of a block that a request's step has crossed."""
        tokens, before = self.tokens_of_block(), self.computed()
        column = before // tokens
        none = torch.zeros_like(column)
        digests = self.digests_in(column, none, none)
        prefilling = self.batch.is_prefilling_np.tolist()  # whose steps may pass blocks
        for number, request in enumerate(self.batch.req_ids):
            end = (int(column[number]) + 1) * tokens
            if end <= computed[number] and not prefilling[number]:
                self.counts["ends"] += 1
                self.digests.setdefault(f"{self.name_of(request)}@{end}", digests[number])

    def name_of(self, request: str) -> str:
        """The place of a request among a scenario's, which vLLM numbers as they come."""
        numbers = [each.partition("-")[0] for each in (request, *self.batch.req_ids)]
        if request not in self.names and all(number.isdecimal() for number in numbers):
            if self.first is None:  # the first batch has the first request
                self.first = min(map(int, numbers))
            self.names[request] = str(int(numbers[0]) - self.first)
        return self.names.setdefault(request, str(len(self.names)))

    def take(self) -> dict[str, Any]:
        """What was seen since ``begin``."""
        steps: Any = getattr(self.model_runner, "kvtxn", None)  # type: ignore[attr-defined]
        self.counts["joint"] = getattr(getattr(steps, "beside", None), "captured", 0)
        return {
            "counts": dict(self.counts),
            "accepted": {str(k): v for k, v in sorted(self.accepted.items())},
            "digests": self.digests,
            "recurred": self.seen_states() if self.replayed else {},
        }

    def seen_states(self) -> dict[str, float]:
        """What the comparisons with the recurrence found."""
        *counts, worst = self.recurred.tolist()
        found = dict(zip(state_recurrence.COUNTS, map(int, counts), strict=True))
        more = {"worst": worst, "other_blocks": int(self.elsewhere), "ends": int(self.ends)}
        return {**found, **more}

    # -- faults in commits, planted on purpose ---------------------------------------------

    def fail_once(self) -> None:
        """Let a commit fail in every seventh step: a captured one, or else one layer's."""
        states: Any = self.model_runner.kvtxn_states  # type: ignore[attr-defined]
        self.repeated = Counter[str]()
        if not states._verified:
            return
        self.by_themselves()
        ways = ("commit_sampled", states._alone), ("run", states.graphs)
        found = [(name, each) for name, each in ways if each is not None]
        name, self.spoiled = next(iter(found), ("commit", states._verified[-1]))
        commit, calls = getattr(self.spoiled, name), [0]

        def failing(*args: Any) -> None:
            calls[0] += 1
            if calls[0] % 7 == 0:
                self.repeated["failed"] += 1
                raise RuntimeError("a fault that a test injects")
            commit(*args)

        setattr(self.spoiled, name, failing)

    def repair(self) -> dict[str, int]:
        """Everything works again; returns how often the commit failed."""
        for name in ("commit", "commit_sampled", "run"):
            vars(getattr(self, "spoiled", self)).pop(name, None)
        self.together()
        return dict(self.repeated)

    def by_themselves(self) -> None:
        """Let states be committed before rows, so that a test can put itself between."""
        states: Any = self.model_runner.kvtxn_states  # type: ignore[attr-defined]
        begin = states.begin

        def beginning(*args: Any, **named: Any) -> None:
            begin(*args, **named)
            states.replays = 0

        states.begin = beginning

    def together(self) -> None:
        """Commit states and rows by one launch again, where they were before."""
        vars(self.model_runner.kvtxn_states).pop("begin", None)

    def miscount(self) -> None:
        """Let the commit of every fifth step take in one row less or more than is kept."""
        states: Any = self.model_runner.kvtxn_states  # type: ignore[attr-defined]
        self.by_themselves()
        commit, calls, self.miscounted = states.commit, [0], 0

        def miscounting(sampled: torch.Tensor) -> None:
            calls[0] += 1
            step = states._step
            if calls[0] % 5 == 0 and step is not None and step.requests:
                wrong = torch.where(sampled > 1, sampled - 1, sampled + 1)
                places = slice(step.requests) if step.places is None else step.places
                lengths = step.starts.diff()[: sampled[places].shape[0]]
                right, other = (
                    each[places].clamp(min=1).minimum(lengths) for each in (sampled, wrong)
                )
                self.miscounted += int((right != other).sum()) * len(self.replayed)
                sampled = wrong
            commit(sampled)

        states.commit = miscounting

    def count_again(self) -> int:
        """Commit what is kept again; returns how many states were given a wrong count."""
        del self.model_runner.kvtxn_states.commit
        self.together()
        return self.miscounted
