"""A plug-in of SGLang that plants faults, one after the other, and writes down where.

``FAULTS=NAME,NAME,...`` switches it on, or ``all``, ``chain`` and ``tree``; ``FAULTS_FILE`` gets a
line of JSON for each: its request, position and slot. The log gets the same line, between what the
engine says before and after it. The plug-in is registered behind kvtxn, so that its hooks run
before kvtxn's: the ledger, the KV canary and the engine get the same wrong numbers.
"""

from __future__ import annotations

import functools
import json
import os
import random

#: Decode steps from one fault to the next.
EVERY = 12
ROWS = (
    *("wrong_slot", "lost_write", "foreign_slot", "table_off_by_one", "swapped_lines"),
    *("slot_given_twice", "wrong_token", "wrong_position", "padding_read", "old_row"),
)
CHAIN = ("accepts_one_more", "length_one_less", "accepts_anothers")
TREE = ("lost_move",)
ENDS = ("stale_node", "flush_without_tree")
WINDOWS = ("window_left", "window_slot", "window_twice", "window_lost")
#: Of recurrent states: as a request begins, in a step, and in a commit.
BEGINS = ("state_clear", "state_copy", "state_other")
COMMITS = ("commit_lost", "commit_less")
#: Of HiCache: rows are loaded from, or to, each other's slots; or other rows are written.
HOST = ("host_page", "host_slot", "host_write")
#: After these no slot is given back twice, so that an engine that contains them serves on.
CONTAINED = (*ROWS[:2], *ROWS[6:8], "swapped_lines")
#: By the name of an engine's kind, its faults.
SETS = {
    "all": (*ROWS, *ENDS),
    "chain": (*ROWS[:7], *CHAIN, *ENDS),
    "tree": (*ROWS[:7], *TREE, *ENDS),
    "contain": CONTAINED * 2,
    "host": (*HOST, *ROWS[:3], *HOST),
    "states": ("state_swap", *BEGINS, *ROWS[:3], "state_swap", *BEGINS),
    # The kernels of Mamba-2 read no slot of a request that begins.
    "mamba2": ("state_swap", *BEGINS[1:], *ROWS[:3], "state_swap", *BEGINS[1:]),
    "commits": (*COMMITS, "state_clear", "state_copy", *ROWS[:3], *COMMITS),
    "windows": (*WINDOWS, *ROWS[:7], *ENDS, *WINDOWS),
}
NEXT_TOKENS = 2000


def guarded(plant):
    """Write an error of a planter down instead of raising it; the engine goes on."""

    @functools.wraps(plant)
    def call(self, *args):
        try:
            return plant(self, *args)
        except Exception as error:
            self.note("error", error=repr(error))
            return None

    return call


class Faults:
    """The faults of one scheduler, in their order.

    Args:
        todo: names.
        path: of the file of lines.
    """

    def __init__(self, todo, path) -> None:
        self.todo, self.path = list(todo), path
        self.steps, self.armed, self.chance = 0, None, random.Random(3)
        #: Puts right behind the forward what would make SGLang stop.
        self.undo = None
        self.last = None

    def note(self, name, **facts) -> None:
        line = json.dumps({"fault": name, "step": self.steps, **facts})
        with open(self.path, "a") as file:
            file.write(line + "\n")
        print(f"planted {line}", flush=True)

    # -- rows --------------------------------------------------------------------------------

    def forward(self, original, runner, batch, *args, **kwargs):
        modes = ("DECODE", "TARGET_VERIFY")
        if not runner.is_draft_worker and batch.rids and batch.forward_mode.name in modes:
            self.steps += 1
            due = self.todo and not self.armed and self.steps % EVERY == 0
            if due and len(batch.rids) >= 3:
                self.plant(self.todo.pop(0), runner, batch)
        if self.armed in BEGINS and batch.rids and batch.forward_mode.name == "EXTEND":
            self.begin(runner, batch)
        done = original(runner, batch, *args, **kwargs)
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()
        return done

    @guarded
    def plant(self, name, runner, batch) -> None:
        """Plant a fault of rows into this batch; arm one that waits for its occasion."""
        if name not in (*ROWS, *WINDOWS, "state_swap"):
            self.armed = name
            return
        table = runner.req_to_token_pool.req_to_token
        pair = self.pair(name, batch)
        if pair is None:  # another step has two requests that differ
            self.todo.insert(0, name)
            return
        n, m = pair
        facts = {"request": batch.rids[n], "other": batch.rids[m], "mode": batch.forward_mode.name}
        if name == "state_swap":
            facts |= self.swap_states(runner.req_to_token_pool, batch, n, m)
            self.note(name, **facts)
            return
        if name in WINDOWS:
            pool = runner.token_to_kv_pool_allocator.get_kvcache()
            facts |= self.change_map(name, table, batch, n, m, pool.full_to_swa_index_mapping)
            self.note(name, **facts)
            return
        plant = {
            "slot_given_twice": self.give_twice,
            "swapped_lines": self.swap_lines,
            "wrong_slot": self.write_elsewhere,
            "lost_write": self.write_elsewhere,
            "wrong_token": self.change_input,
            "wrong_position": self.change_input,
        }.get(name, self.change_table)
        facts |= plant(name, table, batch, n, m)
        self.note(name, **facts)

    def pair(self, name, batch):
        """Draw two requests; of lines that are swapped, two whose last tokens differ."""
        pairs = [self.chance.sample(range(len(batch.rids)), 2) for _ in range(20)]
        last = [int(batch.input_ids[self.first_row(batch, n)[0]]) for n in range(len(batch.rids))]
        fit = [(n, m) for n, m in pairs if name != "swapped_lines" or last[n] != last[m]]
        return fit[0] if fit else None

    def write_elsewhere(self, name, table, batch, n, m):
        """Let a row go to another request's slot, or to none."""
        where, first = self.first_row(batch, n)
        batch.out_cache_loc = batch.out_cache_loc.clone()
        right = int(batch.out_cache_loc[where])
        other, length = int(batch.req_pool_indices[m]), int(batch.seq_lens[m])
        batch.out_cache_loc[where] = 0 if name == "lost_write" else int(table[other, length // 2])
        return {"position": first, "slot": right}

    def change_table(self, name, table, batch, n, m):
        """Let a request's line name wrong slots of older rows."""
        _, first = self.first_row(batch, n)
        line, other = int(batch.req_pool_indices[n]), int(batch.req_pool_indices[m])
        at = max(first // 2, 1)
        if name == "table_off_by_one":
            table[line, at : first - 1] = table[line, at + 1 : first].clone()
        elif name == "foreign_slot":
            table[line, at] = table[other, min(at, int(batch.seq_lens[m]) - 2) - 1]
        else:
            table[line, at] = 0 if name == "padding_read" else table[line, at - 1]
        return {"position": at, "slot": int(table[line, at])}

    def swap_lines(self, name, table, batch, n, m):
        lines, rows = batch.req_pool_indices, [self.first_row(batch, each)[0] for each in (n, m)]
        batch.req_pool_indices = lines.clone()
        batch.req_pool_indices[n], batch.req_pool_indices[m] = int(lines[m]), int(lines[n])
        return {"position": None, "slot": None, "written": batch.out_cache_loc[rows].tolist()}

    def give_twice(self, name, table, batch, n, m):
        """Let a request write its row where another one has an older row."""
        where, first = self.first_row(batch, n)
        theirs = min(max(first // 2, 1), int(batch.seq_lens[m]) - 2)
        slot = int(table[int(batch.req_pool_indices[m]), theirs])
        table[int(batch.req_pool_indices[n]), first] = slot
        batch.out_cache_loc = batch.out_cache_loc.clone()
        batch.out_cache_loc[where] = slot
        them = {"request": batch.rids[m], "other": None, "writer": batch.rids[n]}
        return {"position": theirs, "slot": slot, **them}

    def change_input(self, name, table, batch, n, m):
        """Compute a row for another token, or for the next position."""
        where, first = self.first_row(batch, n)
        if name == "wrong_token":
            batch.input_ids = batch.input_ids.clone()
            batch.input_ids[where] = (batch.input_ids[where] + 1) % NEXT_TOKENS
        else:
            batch.positions = batch.positions.clone()
            batch.positions[where] += 1
        return {"position": first, "slot": int(batch.out_cache_loc[where])}

    def change_map(self, name, table, batch, n, m, mapping):
        """Let the map of windows name wrong slots while a forward runs."""
        where, first = self.first_row(batch, n)
        line, other = int(batch.req_pool_indices[n]), int(batch.req_pool_indices[m])
        here, at = int(table[line, first - 2]), first - 2
        theirs = int(table[other, int(batch.seq_lens[m]) - 3])
        if name == "window_twice":  # the other one's new row goes to this one's older row
            here, theirs = int(batch.out_cache_loc[self.first_row(batch, m)[0]]), here
        elif name == "window_lost":
            here, at = int(batch.out_cache_loc[where]), first
        before = int(mapping[here])
        mapping[here] = int(mapping[theirs]) if name in ("window_slot", "window_twice") else 0
        self.undo = lambda: mapping.__setitem__(here, before)
        slots = {"position": at, "slot": int(mapping[here]), "group": "group.1"}
        return slots | ({"writer": batch.rids[m]} if name == "window_twice" else {})

    def swap_states(self, pool, batch, n, m):
        """Let two requests continue each other's state."""
        mapping, lines = pool.req_index_to_mamba_index_mapping, batch.req_pool_indices[[n, m]]
        before = mapping[lines]
        mapping[lines] = before.flip(0)
        self.undo = lambda: mapping.__setitem__(lines, before)
        return {"position": None, "slot": int(before[1]), "group": "group.2"}

    @guarded
    def begin(self, runner, batch) -> None:
        """Let a request that begins keep what is in its slot, or get another prefix's state."""
        if runner.is_draft_worker:
            return
        clear = self.armed == "state_clear"
        slots = batch.mamba_clear_indices if clear else batch.mamba_cow_dst_indices
        if slots is None or not len(slots):
            return
        name, self.armed, slot = self.armed, None, int(slots[0])
        own = runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices]
        n = own.tolist().index(slot)
        if clear:
            batch.mamba_clear_indices = None
        elif name == "state_copy":
            batch.mamba_cow_src_indices = batch.mamba_cow_dst_indices = None
        else:
            batch.mamba_cow_src_indices = batch.mamba_cow_src_indices.clone()
            batch.mamba_cow_src_indices[0] = int(own[n - 1])
        self.note(name, request=batch.rids[n], position=None, slot=slot, group="group.2")

    def committed_states(self, original, worker, batch, lens, index, number, steps=None, **named):
        """Around ``commit_mamba_states_after_verify``."""
        steps = named.pop("prepared_step_indices", steps)
        if self.armed in COMMITS:
            wrong = self.change_commit(batch, lens, index, steps)
            if wrong is not None:
                if self.last == "commit_lost":
                    return None
                lens, index, steps = wrong
        return original(worker, batch, lens, index, number, prepared_step_indices=steps)

    @guarded
    def change_commit(self, batch, lens, index, steps):
        """Commit no state, or a request's state behind one row less."""
        n = next((n for n, value in enumerate(lens.tolist()) if value > 1), None)
        if n is None:
            return None
        self.last, self.armed, lens = self.armed, None, lens.clone()
        lens[n] -= 1
        if steps is not None:
            last = steps[0].clone()
            last[n] -= 1
            steps = (last, *steps[1:])
        facts = {"request": batch.reqs[n].rid, "position": None, "slot": None}
        self.note(self.last, group="group.2", **facts)
        return lens, index, steps

    def first_row(self, batch, n):
        """Return the number of a request's first row in the batch, and its position."""
        per = len(batch.input_ids) // len(batch.rids)
        return n * per, int(batch.seq_lens[n]) - (1 if per == 1 else 0)

    # -- outcomes ----------------------------------------------------------------------------

    def sampled(self, result, *args, **kwargs):
        """After ``eagle_sample(verify_input, batch, ...)``."""
        if self.armed not in ("accepts_one_more", "accepts_anothers"):
            return None
        return self.accept_more(result, args[1])

    @guarded
    def accept_more(self, result, batch):
        """Count drafts as accepted that were rejected."""
        predict, lens, index = result
        values, width = lens.tolist(), index.shape[1]
        if len(batch.reqs) < 2:
            return None
        if self.armed == "accepts_anothers":
            n = min(range(len(values)), key=values.__getitem__)
            now = max(values)
        else:
            n = next((n for n, value in enumerate(values) if value < width), 0)
            now = min(values[n] + 1, width)
        if values[n] == now:
            return None
        name, self.armed = self.armed, None
        lens, index = lens.clone(), index.clone()
        lens[n] = now
        for k in range(values[n], now):
            index[n, k] = n * width + k
        position = int(batch.seq_lens[n]) + values[n]
        slots = batch.out_cache_loc[n * width + values[n] : n * width + now]
        facts = {"position": position, "slot": None, "mode": "TARGET_VERIFY"}
        facts["written"] = slots.tolist()
        self.note(name, request=batch.reqs[n].rid, **facts)
        return predict, lens, index

    def committed(self, result, predict, accept_index, accept_lens, seq_lens, **kwargs):
        """After ``prepare_verify_commit_outputs``."""
        return self.shorten(result, accept_lens) if self.armed == "length_one_less" else None

    @guarded
    def shorten(self, result, accept_lens):
        """Lose an accepted draft of the new lengths."""
        n = next((n for n, value in enumerate(accept_lens.tolist()) if value > 1), None)
        if n is None:
            return None
        self.armed = None
        lengths = result[0].clone()
        lengths[n] -= 1
        facts = {"number": n, "position": int(lengths[n]), "slot": None}
        self.note("length_one_less", request=None, **facts)
        return (lengths, *result[1:])

    def moved(self, original, batch, accept_index, num_correct_drafts, *args, **kwargs):
        """Around ``move_accept_tokens_to_target_kvcache``: no row is moved, once one would be."""
        if self.armed == "lost_move" and self.would_move(batch, accept_index, num_correct_drafts):
            return None
        return original(batch, accept_index, num_correct_drafts, *args, **kwargs)

    @guarded
    def would_move(self, batch, accept_index, num_correct_drafts):
        width = len(batch.out_cache_loc) // len(batch.reqs)
        paths = zip(accept_index.tolist(), num_correct_drafts.tolist(), strict=False)
        for n, (path, count) in enumerate(paths):
            at = next((k for k in range(1, count + 1) if path[k] != n * width + k), None)
            if at is not None:
                self.armed = None
                slot = int(batch.out_cache_loc[n * width + at])
                position = int(batch.seq_lens[n]) + at
                self.note("lost_move", request=batch.reqs[n].rid, position=position, slot=slot)
                return True
        return False

    # -- the host ----------------------------------------------------------------------------

    def loaded(self, original, controller, host_indices, *args, **kwargs):
        """Around ``HybridCacheController.load``: a page comes from another one's slots."""
        name, page = self.armed, controller.page_size
        if name not in ("host_page", "host_slot") or len(host_indices) <= page:
            return original(controller, host_indices, *args, **kwargs)
        wrong = host_indices.roll(page) if name == "host_page" else host_indices
        found = original(controller, wrong, *args, **kwargs)
        if found is None:
            return None
        self.armed = None
        if name == "host_slot":
            controller.load_queue[-1].device_indices = found.roll(page)
        self.note(name, request=None, position=None, slot=found.tolist())
        return found

    def written(self, original, controller, device_indices, *args, **kwargs):
        """Around ``HybridCacheController.write``: a page of the host gets another page's rows."""
        if self.armed == "host_write" and len(device_indices) > controller.page_size:
            self.armed = None
            self.note("host_write", request=None, position=None, slot=None)
            device_indices = device_indices.roll(controller.page_size)
        return original(controller, device_indices, *args, **kwargs)

    # -- ends --------------------------------------------------------------------------------

    def released(self, original, req, tree_cache, *args, **kwargs):
        """Free slots that the tree keeps, behind a request's end."""
        armed = self.armed == "stale_node" and kwargs.get("checkpoint")
        freed = self.slots(req, tree_cache) if armed else None
        done = original(req, tree_cache, *args, **kwargs)
        if freed is not None:
            self.armed = None
            tree_cache.token_to_kv_pool_allocator.free(freed)
            self.note("stale_node", request=None, position=4, slot=freed.tolist(), giver=req.rid)
        return done

    @guarded
    def slots(self, req, tree_cache):
        if not req.kv.holds_kv or len(req.origin_input_ids) <= 24:
            return None
        table = tree_cache.req_to_token_pool.req_to_token
        return table[req.kv.req_pool_idx, 4:16].clone().long()

    def flushed(self, original, scheduler, *args, **kwargs):
        """Flush, and let the tree keep its nodes."""
        if self.armed != "flush_without_tree":
            return original(scheduler, *args, **kwargs)
        reset, scheduler.tree_cache.reset = scheduler.tree_cache.reset, lambda: None
        try:
            done = original(scheduler, *args, **kwargs)
        finally:
            scheduler.tree_cache.reset = reset
        if done:
            self.armed = None
            self.note("flush_without_tree", request=None, position=0, slot=None)
        return done


def register() -> None:
    """Plant faults into the scheduler of this process, if the user asks for it."""
    names = os.environ.get("FAULTS")
    if not names:
        return
    faults = Faults(SETS.get(names) or names.split(","), os.environ["FAULTS_FILE"])
    hooks = __import__("sglang.srt.plugins.hook_registry", fromlist=["HookRegistry"])
    around, after = hooks.HookType.AROUND, hooks.HookType.AFTER
    targets = [
        ("model_executor.model_runner.ModelRunner.forward", faults.forward, around),
        ("mem_cache.common.release_kv_cache", faults.released, around),
        ("managers.scheduler.Scheduler.flush_cache", faults.flushed, around),
    ]
    if set(TREE) & set(faults.todo):
        moves = "speculative.spec_utils.move_accept_tokens_to_target_kvcache"
        targets.append((moves, faults.moved, around))
    if set(HOST) & set(faults.todo):
        controller = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
        targets.append((f"{controller}.load", faults.loaded, around))
        targets.append((f"{controller}.write", faults.written, around))
    if set(COMMITS) & set(faults.todo):
        commit = "speculative.spec_utils.commit_mamba_states_after_verify"
        targets.append((commit, faults.committed_states, around))
    if set(CHAIN) & set(faults.todo):
        eagle = "speculative.eagle_worker_common"
        targets.append((f"{eagle}.eagle_sample", faults.sampled, after))
        targets.append((f"{eagle}.prepare_verify_commit_outputs", faults.committed, after))
    for target, hook, kind in targets:
        hooks.HookRegistry.register(f"sglang.srt.{target}", hook, kind)
