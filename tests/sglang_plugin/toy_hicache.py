"""The toy of SGLang's scheduler with HiCache: rows of the tree on the host, and a storage."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from toy_sglang import ToySglang, Tree

#: Slots of the host.
HOST = 900


class HostPool:
    """Slots of the host's memory."""

    size = HOST

    def __init__(self):
        self.free = list(range(HOST))

    def alloc(self, number):
        found, self.free = self.free[:number], self.free[number:]
        return torch.tensor(found)


class TransferEngine:
    """Counts copies; SGLang's launches them."""

    def __init__(self):
        self.copies = {"write": 0, "load": 0}

    def submit_device_to_host(self, transfers):
        self.copies["write"] += len(transfers)

    def submit_host_to_device(self, transfers, *, transfer_layer_id_max):
        self.copies["load"] += len(transfers)


class HostTree(Tree):
    """A tree that writes its rows through to the host, and loads back what it finds there alone."""

    def __init__(self, toy):
        self.toy, self.hosts = toy, {}
        pool = toy.token_to_kv_pool_allocator.get_kvcache()
        self.host_pool = HostPool()
        drafter = SimpleNamespace(host_pool=HostPool(), device_pool=object())
        entry = SimpleNamespace(host_pool=self.host_pool, device_pool=pool)
        self.engine = TransferEngine()
        self.cache_controller = SimpleNamespace(
            mem_pool_host=SimpleNamespace(entries=[entry, drafter]),
            l2_transfer_engine=self.engine,
            enable_storage=False,
        )
        super().__init__()

    def reset(self):
        super().reset()
        self.hosts = {}
        self.host_pool.free = list(range(HOST))

    def transfer(self, device, host):
        copy = {"device_indices": torch.tensor(device), "host_indices": torch.tensor(host)}
        target = SimpleNamespace(host_pool=self.host_pool, is_draft=False, **copy)
        return [target, SimpleNamespace(**{**vars(target), "is_draft": True})]

    def insert(self, key, tokens, slots):
        before = {*self.slots}
        found = super().insert(key, tokens, slots)
        new = [each for each in self.slots if each not in before]
        new = [each for each in new if each not in self.hosts]
        if new:
            hosts = self.host_pool.alloc(len(new)).tolist()
            self.hosts |= dict(zip(new, hosts, strict=True))
            device = [self.slots[each] for each in new]
            self.engine.submit_device_to_host(self.transfer(device, hosts))
        return found

    def match(self, key, tokens):
        """Load what the host alone has back to new slots."""
        paths = [(key, *tokens[:end]) for end in range(1, len(tokens) + 1)]
        here = 0
        while here < len(paths) and (paths[here] in self.slots or paths[here] in self.hosts):
            here += 1
        missing = [path for path in paths[:here] if path not in self.slots]
        if missing:
            slots = self.toy.token_to_kv_pool_allocator.alloc(len(missing))
            self.slots |= dict(zip(missing, slots, strict=True))
            hosts = [self.hosts[path] for path in missing]
            device = self.toy.misplaced(slots) if self.toy.misplaced else slots
            transfers = self.transfer(device, hosts)
            self.engine.submit_host_to_device(transfers, transfer_layer_id_max=2)
            self.toy.events["loaded"] += 1
        return super().match(key, tokens)

    def store(self, key, tokens):
        """Get rows of a text from a storage, which no step of this engine has computed."""
        paths = [(key, *tokens[:end]) for end in range(1, len(tokens) + 1)]
        new = [path for path in paths if path not in self.hosts]
        hosts = self.host_pool.alloc(len(new)).tolist()
        self.hosts |= dict(zip(new, hosts, strict=True))

    def evict(self, chance=1.0):
        """Let rows leave the device that no running request has."""
        toy = self.toy
        used = {slot for req in toy.running for slot in toy.row(req).tolist()}
        gone = [path for path, slot in self.slots.items() if slot not in used]
        gone = [path for path in gone if toy.random.random() < chance]
        toy.token_to_kv_pool_allocator.free([self.slots.pop(path) for path in gone])


class HiCacheToy(ToySglang):
    """The scheduler; the tree's rows leave the device now and then."""

    #: Returns the slots that a copy goes to in the place of given ones.
    misplaced = None

    def __init__(self, hooks=None, **more):
        super().__init__(hooks, **more)
        self.events["loaded"] = 0
        self.tree_cache = HostTree(self)
        self.server_args.enable_hierarchical_cache = True

    def plan(self):
        if self.random.random() < 0.3:
            self.tree_cache.evict(0.7)
        return super().plan()
