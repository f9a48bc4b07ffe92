"""Bytes measured from outside the library: sent through groups, sent by torch's own operators, alive in storages."""

import weakref
from collections import Counter

import optree
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCALARS = 12  # numbers a step sums beside its payload, in one exchange: losses, norms and what all ranks must know


def is_payload(tensor, scalars=SCALARS):
    """Whether an exchanged tensor is payload, not the scalars of a step, which are float64 or a few numbers."""
    return tensor.numel() > (scalars if tensor.dtype is torch.float64 else min(scalars, 4))


def stored_bytes(tree, counters=False):
    """Bytes of the distinct storages behind a pytree's tensors; those of an optimizer's counters (0-d) aside."""
    tensors = [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.dim() or not counters]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Counted(TorchDispatchMode):
    """How often each operation is called meanwhile."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


class CountingGroup:
    """Stands before a mesh axis's group and counts the bytes that leave this rank for the others."""

    def __init__(self, group, scalars=SCALARS):
        self._group, self._scalars = group, scalars
        self.size, self.rank = group.size, group.rank
        self.sent = 0
        self.agreed = 0  # how often ranks agreed on the next unit
        self.gathered = []  # weak references to the storages that gathers wrote to

    def all_reduce(self, tensor):
        self._count(tensor, 2 * (self.size - 1), self.size)
        return self._group.all_reduce(tensor)

    def all_gather(self, out, inp):
        if inp.dtype is torch.int32:  # by these ranks agree on what is next: set-up, not payload
            self.agreed += 1
            return self._group.all_gather(out, inp)
        self._count(inp, self.size - 1, whole=out)
        self.gathered.append(weakref.ref(out.untyped_storage()))
        return self._group.all_gather(out, inp)

    def reduce_scatter(self, out, inp):
        self._count(inp, self.size - 1, self.size)
        return self._group.reduce_scatter(out, inp)

    def all_to_all(self, out, inp, splits=None):
        kept = inp.numel() // self.size if splits is None else splits.sent[self.rank]
        self.sent += (inp.numel() - kept) * inp.dtype.itemsize  # never a step's scalars
        return self._group.all_to_all(out, inp, splits)

    def broadcast(self, tensor, source):
        self._count(tensor, self.size - 1 if self.rank == source else 0)
        return self._group.broadcast(tensor, source)

    def permute(self, out, inp, pairs):
        self._count(inp, sum(1 for source, destination in pairs if source == self.rank != destination))
        return self._group.permute(out, inp, pairs)

    def send(self, tensor, peer, tag):
        if tensor.dtype is not torch.uint8:  # those are headers: what a message holds, not payload
            self.sent += tensor.numel() * tensor.dtype.itemsize
        return self._group.send(tensor, peer, tag)

    def recv(self, out, peer, tag):
        return self._group.recv(out, peer, tag)

    def all_gather_object(self, value):  # set-up, not payload
        return self._group.all_gather_object(value)

    def _count(self, tensor, times, ways=1, whole=None):
        if is_payload(tensor if whole is None else whole, self._scalars):
            self.sent += tensor.numel() * tensor.dtype.itemsize * times // ways


def count_payload(mesh, scalars=SCALARS):
    """Wrap every group of ``mesh``; returns a function that tells the bytes sent per axis since it was last asked.

    Exchanges of at most ``scalars`` elements in float64, or of 4 in another dtype, are left out.
    """
    counters = {axis: CountingGroup(mesh.group(axis), scalars) for axis, size in mesh.shape.items() if size > 1}
    mesh._groups.update(counters)

    def sent():
        recorded = {axis: counter.sent for axis, counter in counters.items()}
        for counter in counters.values():
            counter.sent = 0
        return recorded

    return sent


class CountOperators(TorchDispatchMode):
    """Bytes this process sends, seen at torch's own c10d operators. Exchanges of few elements are left out."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks
        self.sent = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not func._opname.startswith("recv"):
            self.seen.add(func._opname)
            self.sent += self._volume(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _volume(self, name, args):
        tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        size = sum(t.numel() * t.dtype.itemsize for t in tensors)
        if name == "send":  # one message of many: small ones are parts of an exchange that is not
            return size
        if len(tensors) == 1 and not is_payload(tensors[0]):
            return 0
        if name == "allreduce_":
            return round(size * 2 * (self.ranks - 1) / self.ranks)
        raise AssertionError(f"an exchange that is not counted here: {name}")


class WatchGathered(TorchDispatchMode):
    """Most bytes alive at once in storages that hold gathered parameters: those a gather wrote to, and plain copies."""

    COPIES = ("copy_", "clone", "cat", "split_with_sizes_copy", "_to_copy", "contiguous")

    def __init__(self, counters):
        super().__init__()
        self._counters = counters
        self._alive = {}
        self._known = set()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for counter in self._counters:
            while counter.gathered:
                storage = counter.gathered.pop()()
                if storage is not None:
                    self._add(storage)
        flat = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        tainted = any(v.untyped_storage()._cdata in self._alive for v in flat)
        out = func(*args, **(kwargs or {}))
        if tainted and func._opname in self.COPIES:
            written = [v for v in tree_leaves(out) if isinstance(v, torch.Tensor)]
            for tensor in written or flat:
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self._alive.values()))
        return out

    def _add(self, storage):
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)


class WatchPeak(TorchDispatchMode):
    """A mode that measures the bytes of storages that operations made while it was active: those alive, and the most at
    once."""

    def __init__(self):
        super().__init__()
        self._alive, self._sizes, self._moments = {}, [], []

    @property
    def alive(self):
        return sum(self._sizes[number] for number in self._alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {v.untyped_storage()._cdata for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._alive[storage._cdata] = len(self._sizes)  # a freed one's identity is used again
                    self._sizes.append(storage.nbytes())
                    weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self._moments.append(set(self._alive.values()))
        return out

    def peak(self, without=()):
        """The peak without the bytes of some tensors."""
        aside = {self._alive.get(tensor.untyped_storage()._cdata) for tensor in without}
        return max(sum(self._sizes[number] for number in alive - aside) for alive in self._moments)


class Live(TorchDispatchMode):
    """Most bytes alive at once, of one device, in storages made under this mode."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.peak = self._now = 0
        self._device, self._known = device, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            # What only pretends to be there (the recording) costs nothing.
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == self._device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return out

    def _gone(self, key, nbytes):
        self._known.discard(key)
        self._now -= nbytes
