"""Pytrees sent from rank to rank: a header with the structure, then one message per dtype.

A header is sent every time, so a carry may change its shapes and structure from micro-batch to micro-batch, and
may hold integers, skips or auxiliary losses. Gradients are sent back without a header: they have the carry's structure.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shardlib.collectives import primitives
from shardlib.errors import LossError
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import Work
from shardlib.tree import Tree, TreeDef, flatten, unflatten

TAGS = 16  # tags per tree: two for the header's messages, and one per dtype
_HEAD = 1024  # bytes of a header's first message: its length, and all of most headers


@dataclass(frozen=True)
class Facts:
    """What the receiver of a tensor must know."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Link:
    """A connection to one other rank along an axis, in both directions."""

    mesh: Mesh
    axis: str
    peer: int

    def send(self, tensor: torch.Tensor, tag: int, *, scalars: bool = False) -> Sent:
        return Sent(primitives.send(self.mesh, self.axis, tensor, self.peer, tag, scalars=scalars), tensor)

    def recv(self, out: torch.Tensor, tag: int) -> Work:
        return primitives.recv(self.mesh, self.axis, out, self.peer, tag)


@dataclass
class Sent:
    """A message under way, with its memory, which must not be freed before the message is received."""

    work: Work
    buffer: torch.Tensor


def finish(sent: Iterable[Sent]) -> None:
    """Wait until the memory of these messages may be used again."""
    for message in sent:
        message.work.wait()


def send_tree(link: Link, tree: Tree, tag: int) -> list[Sent]:
    """Send any pytree; `IncomingTree` with the same ``tag`` receives it."""
    _, leaves, treedef = flatten(tree)
    described = [_facts(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    try:
        header = pickle.dumps((treedef, described))
    except Exception as error:
        raise LossError(
            f"what passes between pipeline stages must be a pytree of tensors and picklable values ({error}); pass tensors, "
            "numbers, strings, and containers defined at the top of a module"
        ) from error
    device = link.mesh.device
    framed = len(header).to_bytes(8, "little") + header
    head = torch.frombuffer(bytearray(framed.ljust(_HEAD, b"\0")), dtype=torch.uint8).to(device)
    sent = [
        link.send(message, tag + number, scalars=True)
        for number, message in enumerate(head.split_with_sizes(_cut(head)))
    ]
    return sent + send_tensors(link, [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)], tag + 2)


def send_tensors(link: Link, tensors: Sequence[torch.Tensor], tag: int) -> list[Sent]:
    """Send tensors whose `Facts` the receiver knows, for `IncomingTensors`: one message per dtype. Copies unless single."""
    sent = []
    for number, group in enumerate(_by_dtype(tensors)):
        flat = [tensors[index].reshape(-1) for index in group]
        packed = flat[0] if len(flat) == 1 else torch.cat(flat)
        if packed.numel():
            sent.append(link.send(packed, tag + number))
    return sent


class IncomingTensors:
    """Tensors that are being received; the constructor posts the receives."""

    def __init__(self, link: Link, facts: Sequence[Facts], tag: int) -> None:
        self._facts = facts
        self._buffers: list[tuple[list[int], torch.Tensor, Work | None]] = []
        for number, group in enumerate(_by_dtype(facts)):
            numel = sum(facts[index].shape.numel() for index in group)
            buffer = torch.empty(numel, dtype=facts[group[0]].dtype, device=link.mesh.device)
            self._buffers.append((group, buffer, link.recv(buffer, tag + number) if numel else None))

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once: they are then the caller's alone."""
        tensors: dict[int, torch.Tensor] = {}
        buffers, self._buffers = self._buffers, []
        for group, buffer, work in buffers:
            if work is not None:
                work.wait()
            shapes = [self._facts[index].shape for index in group]
            flat = buffer.split_with_sizes([shape.numel() for shape in shapes])
            tensors.update((index, tensor.view(shape)) for index, tensor, shape in zip(group, flat, shapes))
        return [tensors[index] for index in range(len(tensors))]


class IncomingTree:
    """A pytree that is being received; the constructor posts the receive of its header, `open` those of its tensors."""

    def __init__(self, link: Link, tag: int) -> None:
        self._link, self._tag = link, tag
        self._head = torch.empty(_HEAD, dtype=torch.uint8, device=link.mesh.device)
        self._work = link.recv(self._head, tag)
        self._tensors: IncomingTensors | None = None

    @property
    def opened(self) -> bool:
        """Whether the receives of the tensors are posted."""
        return self._tensors is not None

    def open(self) -> None:
        """Wait for the header and start to receive the tensors."""
        if self._tensors is not None:
            return
        self._work.wait()
        framed = self._head.cpu().numpy().tobytes()
        size = int.from_bytes(framed[:8], "little")
        if size > _HEAD - 8:
            more = torch.empty(size - (_HEAD - 8), dtype=torch.uint8, device=self._link.mesh.device)
            self._link.recv(more, self._tag + 1).wait()
            framed += more.cpu().numpy().tobytes()
        self._treedef: TreeDef
        self._treedef, self._described = pickle.loads(framed[8 : 8 + size])
        facts = [fact for fact in self._described if isinstance(fact, Facts)]
        self._tensors = IncomingTensors(self._link, facts, self._tag + 2)

    def wait(self) -> Tree:
        """The tree. Tensors that required gradients on the sender do so here, as leaves of a new graph."""
        self.open()
        assert self._tensors is not None
        arrived = iter(self._tensors.wait())
        leaves = [
            next(arrived).requires_grad_(fact.requires_grad) if isinstance(fact, Facts) else fact
            for fact in self._described
        ]
        return unflatten(self._treedef, leaves)


def _facts(tensor: torch.Tensor) -> Facts:
    return Facts(tensor.shape, tensor.dtype, tensor.requires_grad)


def facts_of(tensors: Sequence[torch.Tensor]) -> list[Facts]:
    """The `Facts` of tensors, for `IncomingTensors`."""
    return [_facts(tensor) for tensor in tensors]


def _cut(head: torch.Tensor) -> list[int]:
    rest = head.numel() - _HEAD
    return [_HEAD, rest] if rest else [_HEAD]


def _by_dtype(tensors: Sequence[torch.Tensor] | Sequence[Facts]) -> list[list[int]]:
    """Indices of the tensors of each dtype, in order of first appearance."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(tensor.dtype for tensor in tensors):
        groups.setdefault(dtype, []).append(index)
    return list(groups.values())
