"""Watches a KV connector: every byte that leaves the cache, and every byte that comes back.

The oracle keeps an image of the caches that only ever takes in durable rows: all rows of a step but
drafts at once, accepted drafts when the sampler has spoken, and blocks that a connector filled.
Each byte that a connector stores has to be the image's. It knows nothing of kvtxn, and works the
same in a stock engine, where rejected rows make cache and image differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from cache_oracle import caches_of, drafted, groups_of, planes
from torch import Tensor

#: Findings that a report describes; all of them are counted.
DESCRIBED = 6


class Store:
    """A transfer that is under way: the bytes that may leave, and where they go."""

    def __init__(self, what: str, blocks: list[int], expected: list[Tensor]) -> None:
        self.what, self.blocks, self.expected = what, blocks, expected


class EgressOracle:
    """Methods for ``collective_rpc``; ``self`` is vLLM's worker."""

    def egress_install(self) -> None:
        """Watch every step, and every connector, from now on; no request may be under way."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.eg_counts, self.eg_told = Counter[str](), list[str]()
        groups = groups_of(runner)
        assert set(groups.values()) == {0}, "the image has one group's blocks"
        self.eg_caches = caches_of(runner, groups)
        storages = {c.untyped_storage().data_ptr(): c for c in self.eg_caches.values()}
        self.eg_bytes = {
            pointer: torch.empty(0, dtype=torch.uint8, device=cache.device)
            .set_(cache.untyped_storage())
            .clone()
            for pointer, cache in storages.items()
        }
        self.eg_images = {name: self.eg_image(cache) for name, cache in self.eg_caches.items()}
        self.eg_step: dict[str, Any] | None = None
        self.eg_stores: dict[Any, Store] = {}
        self.eg_loads: dict[Any, tuple[list[int], list[Tensor]]] = {}
        self.eg_order: list[str] = []
        if hasattr(runner, "prepare_attn"):
            self._eg_watch_v2(runner, groups)
        else:
            self._eg_watch_v1(runner, groups)
        if has_kv_transfer_group():
            self._eg_tap(get_kv_transfer_group(), "")

    def eg_image(self, like: Tensor) -> Tensor:
        """The image's view of the same bytes as those of a view of a cache."""
        found = torch.empty(0, dtype=like.dtype, device=like.device)
        memory = self.eg_bytes[like.untyped_storage().data_ptr()].untyped_storage()
        return found.set_(memory, like.storage_offset(), like.shape, like.stride())

    # -- steps --------------------------------------------------------------------------

    def _eg_watch_v2(self, runner: Any, groups: dict[str, int]) -> None:
        prepare, sample = runner.prepare_attn, runner.sample

        def prepared(batch: Any) -> Any:
            result = prepare(batch)
            count = len(batch.req_ids)
            ends = batch.query_start_loc_np[1 : count + 1].tolist()
            given = batch.num_draft_tokens_per_req if batch.num_draft_tokens else None
            drafts = [0] * count if given is None else given.tolist()
            slots = runner.block_tables.slot_mappings
            by_name = {name: slots[number, : ends[-1]].clone() for name, number in groups.items()}
            self._eg_begin(by_name, drafts, ends)
            return result

        def sampled(*args: Any) -> Any:
            output = sample(*args)
            self._eg_end([max(0, count - 1) for count in output[1].tolist()])
            return output

        runner.prepare_attn, runner.sample = prepared, sampled

    def _eg_watch_v1(self, runner: Any, groups: dict[str, int]) -> None:
        prepare, sample, tables = (
            runner._prepare_inputs, runner._sample, runner.input_batch.block_table,
        )  # fmt: skip

        def prepared(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = prepare(scheduler_output, num_scheduled_tokens)
            count = len(num_scheduled_tokens)
            ends = runner.query_start_loc.np[1 : count + 1].tolist()
            metadata = result[1]
            drafts = [0] * count if metadata is None else list(metadata.num_draft_tokens)
            by_name = {
                name: tables[number].slot_mapping.gpu[: ends[-1]].clone()
                for name, number in groups.items()
            }
            self._eg_begin(by_name, drafts, ends)
            return result

        def sampled(logits: Any, metadata: Any) -> Any:
            output = sample(logits, metadata)
            counts = (output.sampled_token_ids != -1).sum(1) - 1
            self._eg_end(counts.clamp(min=0).tolist())
            return output

        runner._prepare_inputs, runner._sample = prepared, sampled

    def _eg_begin(self, slots: dict[str, Tensor], drafts: list[int], ends: list[int]) -> None:
        rows = drafted(drafts, ends)
        others = sorted(set(range(ends[-1])) - set(rows))
        first = next(iter(slots.values()))
        self.eg_step = {"slots": slots, "drafts": drafts, "ends": ends, "settled": others,
                        "pending": set(first[rows].tolist())}  # fmt: skip
        self.eg_counts["steps"] += 1
        self.eg_counts["drafts"] += len(rows)
        self._eg_note("begin")

    def _eg_end(self, accepted: list[int]) -> None:
        step = self.eg_step
        assert step is not None
        kept = []
        for drafts, end, count in zip(step["drafts"], step["ends"], accepted, strict=False):
            kept += range(end - drafts, end - drafts + min(count, drafts))
        for name in self.eg_caches:
            self._eg_take_in(name, step["settled"] + kept)
        counts = self.eg_counts
        counts["kept"] += len(kept)
        counts["rejected"] += sum(step["drafts"]) - len(kept)
        residue = self._eg_residue()
        counts["residue"] += len(residue)
        if residue:
            self._eg_tell(f"after step {counts['steps']} slots {residue[:8]} are not durable rows")
        self.eg_step = None
        self._eg_note("end")

    def _eg_take_in(self, name: str, rows: list[int]) -> None:
        """Copy rows of the step from a layer's cache to its image."""
        assert self.eg_step is not None
        slot = self.eg_step["slots"][name][rows]
        slot = slot[slot >= 0]
        cache, image = self.eg_caches[name], self.eg_images[name]
        for now, then in zip(planes(cache), planes(image), strict=True):
            size = now.shape[1]
            then[slot // size, slot % size] = now[slot // size, slot % size]

    def _eg_residue(self) -> list[int]:
        """Slots whose rows differ from the image in any layer; blocks being filled left out."""
        found = None
        for name, cache in self.eg_caches.items():
            for now, then in zip(planes(cache), planes(self.eg_images[name]), strict=True):
                differ = (now != then).flatten(2).any(2)
                found = differ if found is None else found | differ
        assert found is not None
        for blocks, _ in self.eg_loads.values():
            found[blocks] = False
        return [block * found.shape[1] + row for block, row in found.nonzero().tolist()]

    def _eg_note(self, event: str) -> None:
        """Count in which order things happen in a step."""
        self.eg_order.append(event)
        if event == "end":
            self.eg_counts["order: " + " ".join(self.eg_order)] += 1
            self.eg_order = []

    def _eg_tell(self, text: str) -> None:
        if len(self.eg_told) < DESCRIBED:
            self.eg_told.append(text)

    # -- connectors ---------------------------------------------------------------------

    def _eg_tap(self, connector: Any, place: str) -> None:
        """Watch a connector, or each of several."""
        kinds = [kind.__name__ for kind in type(connector).__mro__]  # an audit makes a subclass
        for number, each in enumerate(getattr(connector, "_connectors", ())):
            self._eg_tap(each, f"{place}{number}.")
        if getattr(connector, "connector_worker", None) is not None:
            if hasattr(connector.connector_worker, "worker"):
                self._eg_tap_offloading(connector.connector_worker.worker, f"{place}offload")
            else:  # DecodeBenchConnector
                self._eg_around(connector, "start_load_kv", self._eg_filled)
        elif getattr(connector, "worker_handler", None) is not None:
            self._eg_tap_simple(connector, connector.worker_handler, f"{place}simple")
        elif "ExampleConnector" in kinds:
            self._eg_tap_example(connector)

    def _eg_around(self, owner: Any, method: str, then: Callable[[Any], None]) -> None:
        own = getattr(owner, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            then(owner)
            return result

        setattr(owner, method, called)

    def _eg_leaves(self, key: Any, what: str, blocks: list[int], regions: list[Tensor]) -> None:
        """Blocks are read from now on; regions: views ``[num_blocks, bytes]`` of the caches."""
        counts, size = self.eg_counts, self._eg_block_size()
        slots = {block * size + row for block in blocks for row in range(size)}
        pending = self.eg_step["pending"] if self.eg_step is not None else set()
        counts["stored_blocks"] += len(blocks)
        counts["stored_pending"] += len(slots & pending)
        self._eg_note(what)
        expected = [self.eg_image(region)[blocks].cpu() for region in regions]
        self.eg_stores[key] = Store(what, blocks, expected)

    def _eg_left(self, key: Any, stored: list[Tensor]) -> None:
        """The transfer is over: compare the bytes in the store with those that might leave."""
        store = self.eg_stores.pop(key)
        for number, (found, want) in enumerate(zip(stored, store.expected, strict=True)):
            wrong = (found.view(torch.uint8) != want.view(torch.uint8)).flatten(1)
            self.eg_counts["stored_bytes"] += wrong.numel()
            self.eg_counts["stored_wrong"] += int(wrong.sum())
            for place, row in enumerate(wrong):
                if row.any():
                    at = row.nonzero().flatten().tolist()
                    self._eg_tell(
                        f"{store.what} {key}: {len(at)} bytes of region {number}, block "
                        f"{store.blocks[place]}, from byte {at[0]} on, were not durable"
                    )

    def _eg_comes(self, key: Any, blocks: list[int], stored: list[Tensor]) -> None:
        """Blocks are filled from now on with bytes of the store."""
        self.eg_counts["loaded_blocks"] += len(blocks)
        self.eg_loads[key] = blocks, [each.clone() for each in stored]

    def _eg_came(self, key: Any, regions: list[Tensor]) -> None:
        """The blocks are filled: compare them with the store; they are durable."""
        blocks, stored = self.eg_loads.pop(key)
        for region, want in zip(regions, stored, strict=False):
            wrong = region[blocks].cpu().view(torch.uint8) != want.view(torch.uint8)
            self.eg_counts["loaded_wrong"] += int(wrong.sum())
            if wrong.any():
                self._eg_tell(f"load {key}: {int(wrong.sum())} bytes of blocks {blocks} are wrong")
        for name, cache in self.eg_caches.items():
            self.eg_images[name][blocks] = cache[blocks]

    def _eg_block_size(self) -> int:
        return int(planes(next(iter(self.eg_caches.values())))[0].shape[1])

    def _eg_tap_offloading(self, worker: Any, what: str) -> None:
        store, load, finished = worker.submit_store, worker.submit_load, worker.get_finished
        if hasattr(worker, "_store_handler"):  # vLLM's own, on a GPU
            regions = list(worker._store_handler.src_tensors)
            kept = list(worker._store_handler.dst_tensors)
        else:
            regions, kept = worker._caches, worker._store

        def of(spec: Any) -> list[int]:
            return [int(each) for each in spec.block_ids]

        def submit_store(job: int, source: Any, target: Any) -> Any:
            self._eg_leaves((what, job, tuple(of(target))), what, of(source), regions)
            return store(job, source, target)

        def submit_load(job: int, source: Any, target: Any, **more: Any) -> Any:
            stored = [each[of(source)] for each in kept]
            self._eg_comes((what, job), of(target), stored)
            return load(job, source, target, **more)

        def get_finished() -> Any:
            results = finished()
            for job in (result.job_id for result in results):
                for key in [key for key in self.eg_stores if key[:2] == (what, job)]:
                    self._eg_left(key, [each[list(key[2])] for each in kept])
                if (what, job) in self.eg_loads:
                    self._eg_came((what, job), regions)
            return results

        worker.submit_store, worker.submit_load = submit_store, submit_load
        worker.get_finished = get_finished

    def _eg_tap_simple(self, connector: Any, handler: Any, what: str) -> None:
        backend, names = handler._backend, list(handler.gpu_kv_caches)
        launch = backend.launch_copy
        regions = [handler.gpu_kv_caches[name] for name in names]
        kept = [handler.cpu_kv_caches[name] for name in names]

        def launched(
            source: Any, target: Any, is_store: bool, event_idx: int, *args: Any, **named: Any
        ) -> Any:
            source, target = list(source), list(target)
            if is_store:
                self._eg_leaves((what, event_idx, tuple(target)), what, source, regions)
            else:
                stored = [each[source] for each in kept]
                self._eg_comes((what, event_idx), target, stored)
            return launch(source, target, is_store, event_idx, *args, **named)

        def polled(_: Any) -> None:
            for key in [k for k in self.eg_stores if k[0] == what and k[1] <= handler._store_hwm]:
                self._eg_left(key, [each[list(key[2])] for each in kept])
            for key in [k for k in self.eg_loads if k[0] == what and k[1] <= handler._load_hwm]:
                self._eg_came(key, regions)

        backend.launch_copy = launched
        self._eg_around(connector, "get_finished", polled)

    def _eg_tap_example(self, connector: Any) -> None:
        import safetensors.torch

        save, save_file = connector.save_kv_layer, safetensors.torch.save_file
        files: list[tuple[Tensor, str]] = []

        def kept(tensors: dict[str, Tensor], filename: str) -> None:
            files.append((tensors["kv_cache"], filename))
            save_file(tensors, filename)

        def saved(layer_name: str, kv_layer: Tensor, *args: Any, **kwargs: Any) -> None:
            asked = [each for each in connector._get_connector_metadata().requests if each.is_store]
            files.clear()
            save(layer_name, kv_layer, *args, **kwargs)
            if layer_name not in self.eg_caches or self.eg_step is None:
                return
            self._eg_take_in(layer_name, self.eg_step["settled"])
            image, size = self.eg_images[layer_name], self._eg_block_size()
            for request, (stored, _) in zip(asked, files, strict=True):
                slots = request.slot_mapping.to(image.device)
                want = image[slots // size, :, slots % size].cpu().contiguous()
                bytes_of = stored.contiguous().view(torch.uint8)
                same = (bytes_of == want.view(torch.uint8)).flatten(1).all(1)
                self.eg_counts["stored_rows"] += len(same)
                self.eg_counts["stored_wrong"] += int((~same).sum())
                self.eg_counts["stored_pending"] += len(
                    self.eg_step["pending"] & set(slots.tolist())
                )
                if not same.all():
                    wrong = slots.cpu()[~same].tolist()
                    self._eg_tell(f"example: slots {wrong[:8]} of {layer_name} were not durable")
            if asked:
                self._eg_note("save")

        def loaded(_: Any) -> None:
            size = self._eg_block_size()
            for each in connector._get_connector_metadata().requests:
                if not each.is_store:
                    blocks = sorted({int(slot) // size for slot in each.slot_mapping.tolist()})
                    self.eg_counts["loaded_blocks"] += len(blocks)
                    for name, cache in self.eg_caches.items():
                        self.eg_images[name][blocks] = cache[blocks]

        safetensors.torch.save_file = kept
        connector.save_kv_layer = saved
        self._eg_around(connector, "start_load_kv", loaded)

    def _eg_filled(self, connector: Any) -> None:
        """Take in the blocks that DecodeBenchConnector filled."""
        for groups, _ in connector._connector_metadata.reqs_to_fill.values():
            blocks = [block for group in groups for block in group]
            self.eg_counts["loaded_blocks"] += len(blocks)
            for name, cache in self.eg_caches.items():
                self.eg_images[name][blocks] = cache[blocks]

    # -- the outcome --------------------------------------------------------------------

    def egress_take(self) -> dict[str, Any]:
        """The counts since the last call, and what was found first."""
        found = {**self.eg_counts, "under_way": len(self.eg_stores) + len(self.eg_loads)}
        told, self.eg_told = self.eg_told, []
        self.eg_counts.clear()
        return found | {"told": told}
