"""Pytrees sent from rank to rank: a header with the structure, then one message per dtype.

A header is sent every time, so a carry may change its shapes and structure from micro-batch to micro-batch, and
may hold integers, skips or auxiliary losses. Gradients are sent back without a header: they have the carry's structure.

gloo begins to send a message once its receive is posted. A receiver that waited for the header before it posts the tensors'
receives would get them after its next computation, so it posts receives for tensors like those of the tree before. If others
come, the sender fills those receives first.
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
from shardlib.mesh.transport.activity import naming
from shardlib.tree import Tree, TreeDef, adopt_classes, adopted_in, flatten, unflatten

_HEAD = 1024  # bytes of a header's first message: its length, and all of most headers
# Tags of a tree's messages: the rest of the header, the tensors that are expected, and those that come in their place.
_REST, _EXPECTED, _OTHERS, TAGS = 1, 2, 17, 32


@dataclass(frozen=True)
class Facts:
    """What the receiver of a tensor must know."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class PeerLink:
    """A connection to one other rank along an axis, in both directions.

    Attributes:
        about: what passes, for reports.
    """

    mesh: Mesh
    axis: str
    peer: int
    about: str = ""

    def send(self, tensor: torch.Tensor, tag: int, *, scalars: bool = False) -> SentMessage:
        with naming(self.about):
            return SentMessage(primitives.send(self.mesh, self.axis, tensor, self.peer, tag, scalars=scalars), tensor)

    def recv(self, out: torch.Tensor, tag: int) -> Work:
        with naming(self.about):
            return primitives.recv(self.mesh, self.axis, out, self.peer, tag)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to receive into."""
        with naming(self.about):
            return torch.empty(numel, dtype=dtype, device=self.mesh.device)

    def packed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors of one dtype as one message. Copies unless single and contiguous."""
        with naming(self.about):
            flat = [tensor.reshape(-1) for tensor in tensors]
            return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


@dataclass
class SentMessage:
    """A message under way, with its memory, which must not be freed before the message is received."""

    work: Work
    buffer: torch.Tensor


def finish(sent: Iterable[SentMessage]) -> None:
    """Wait until the memory of these messages may be used again."""
    for message in sent:
        message.work.wait()


def send_tree(
    link: PeerLink, tree: Tree, tag: int, expected: Sequence[Facts] = (), *, scalars: bool = False
) -> list[SentMessage]:
    """Send any pytree; `IncomingTree` with the same ``tag`` and ``expected`` receives it. ``scalars``: see `Traffic`."""
    _, leaves, treedef = flatten(tree)
    described = [_facts(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        header = pickle.dumps((adopted_in(treedef), pickle.dumps((treedef, described))))
    except Exception as error:
        raise LossError(
            f"what passes between stages cannot be pickled ({error}). Define its classes at the top of a module"
        ) from error
    device = link.mesh.device
    framed = len(header).to_bytes(8, "little") + header
    head = torch.frombuffer(bytearray(framed.ljust(_HEAD, b"\0")), dtype=torch.uint8).to(device)
    first, *rest = head.split_with_sizes(_cut(head))
    sent = [link.send(first, tag, scalars=True)]
    others = not _alike(facts_of(tensors), expected)
    fillers = [torch.empty(fact.shape, dtype=fact.dtype, device=device) for fact in expected] if others else tensors
    sent += send_tensors(link, fillers, tag + _EXPECTED, scalars=scalars)
    sent += [link.send(message, tag + _REST, scalars=True) for message in rest]
    return sent + send_tensors(link, tensors, tag + _OTHERS, scalars=scalars) if others else sent


def send_tensors(
    link: PeerLink, tensors: Sequence[torch.Tensor], tag: int, *, scalars: bool = False
) -> list[SentMessage]:
    """Send tensors whose `Facts` the receiver knows, for `IncomingTensors`: one message per dtype. ``scalars``: see
    `Traffic`."""
    sent = []
    for number, group in enumerate(_by_dtype(tensors)):
        packed = link.packed([tensors[index] for index in group])
        if packed.numel():
            sent.append(link.send(packed, tag + number, scalars=scalars))
    return sent


class IncomingTensors:
    """Tensors that are being received; the constructor posts the receives."""

    def __init__(self, link: PeerLink, facts: Sequence[Facts], tag: int) -> None:
        self._facts = facts
        self._buffers: list[tuple[list[int], torch.Tensor, Work | None]] = []
        for number, group in enumerate(_by_dtype(facts)):
            numel = sum(facts[index].shape.numel() for index in group)
            buffer = link.empty(numel, facts[group[0]].dtype)
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
    """A pytree that is being received; the constructor posts the receives of its header and of the tensors that are expected,
    `open` those of others."""

    def __init__(self, link: PeerLink, tag: int, expected: Sequence[Facts] = ()) -> None:
        self._link, self._tag = link, tag
        self._head = link.empty(_HEAD, torch.uint8)
        self._work = link.recv(self._head, tag)
        self._expected, self._tensors = expected, IncomingTensors(link, expected, tag + _EXPECTED)
        self._fillers: list[IncomingTensors] = []
        self._facts: list[Facts] | None = None

    @property
    def opened(self) -> bool:
        """Whether it is known what comes, and all receives are posted."""
        return self._facts is not None

    def open(self) -> list[Facts]:
        """Wait for the header, and start to receive tensors that were not expected; returns the tensors' facts."""
        if self._facts is not None:
            return self._facts
        self._work.wait()
        framed = self._head.cpu().numpy().tobytes()
        size = int.from_bytes(framed[:8], "little")
        if size > _HEAD - 8:
            more = self._link.empty(size - (_HEAD - 8), torch.uint8)
            self._link.recv(more, self._tag + _REST).wait()
            framed += more.cpu().numpy().tobytes()
        self._treedef: TreeDef
        adopted, tree = pickle.loads(framed[8 : 8 + size])
        adopt_classes(adopted)
        self._treedef, self._described = pickle.loads(tree)
        self._facts = [fact for fact in self._described if isinstance(fact, Facts)]
        if not _alike(self._facts, self._expected):
            self._fillers.append(self._tensors)
            self._tensors = IncomingTensors(self._link, self._facts, self._tag + _OTHERS)
        return self._facts

    def wait(self) -> Tree:
        """The tree. Tensors that required gradients on the sender do so here, as leaves of a new graph."""
        self.open()
        for fillers in self._fillers:
            fillers.wait()
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


def _alike(some: Sequence[Facts], others: Sequence[Facts]) -> bool:
    """Whether tensors have the same messages."""
    return [(fact.shape, fact.dtype) for fact in some] == [(fact.shape, fact.dtype) for fact in others]


def _cut(head: torch.Tensor) -> list[int]:
    rest = head.numel() - _HEAD
    return [_HEAD, rest] if rest else [_HEAD]


def _by_dtype(tensors: Sequence[torch.Tensor] | Sequence[Facts]) -> list[list[int]]:
    """Indices of the tensors of each dtype, in order of first appearance."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(tensor.dtype for tensor in tensors):
        groups.setdefault(dtype, []).append(index)
    return list(groups.values())
