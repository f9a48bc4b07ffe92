"""`experts_on_host`: a model's parameters with its experts in host memory, of which the device has room for a few of each
layer; they come as tokens need them, and those that the next layer may need."""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from shardlib.common.devices import default_device, pages, pins, with_index
from shardlib.errors import IllegalComposition, TreeError
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.mesh.memories import Transfer, Transfers
from shardlib.models.decoding.kinds import decoder_of
from shardlib.nn.moe.experts import Expert, Groups, StoredExperts
from shardlib.sharded.given import Local, given_params
from shardlib.sharded.tree import Sharded
from shardlib.tree import flatten, leaves_of, tree_map, unflatten


class Tally(NamedTuple):
    """Numbers of experts, counted once for each layer and step that uses them.

    Attributes:
        used: experts that had tokens.
        misses: those of them that were neither on the device nor on their way when their layer began.
        ahead: experts that were fetched ahead, because the router of the layer before named them.
        right: those of them that their layer then used.
        bytes: of all that were fetched.
    """

    used: int = 0
    misses: int = 0
    ahead: int = 0
    right: int = 0
    bytes: int = 0

    @property
    def hits(self) -> int:
        """Experts with tokens that were on the device, or on their way."""
        return self.used - self.misses

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        return Tally(*map(operator.add, self, other))


class _CachedLeaf:
    """A leaf of a layer's experts in host memory, and its slots on the device."""

    def __init__(self, leaf: torch.Tensor | QuantizedMatrix, slots: int, device: torch.device) -> None:
        self._quantized = leaf if isinstance(leaf, QuantizedMatrix) else None
        parts = leaf.by_expert if isinstance(leaf, QuantizedMatrix) else (leaf,)
        self.parts = [_in_pages(part, device) for part in parts]
        self.room = [torch.empty((slots, *part.shape[1:]), dtype=part.dtype, device=device) for part in parts]

    def copy(self, expert: int, slot: int) -> None:
        for part, room in zip(self.parts, self.room, strict=True):
            room[slot].copy_(part[expert], non_blocking=True)

    def at(self, slot: int) -> torch.Tensor | QuantizedMatrix:
        """The leaf of the expert in a slot, ``[1, …]``."""
        if self._quantized is None:
            return self.room[0][slot : slot + 1]
        values, scales = (room[slot] for room in self.room)
        shape = torch.Size((1, *self._quantized.shape[1:]))
        return replace(self._quantized, values=values, scales=scales, shape=shape)


class ExpertCache:
    """Room on the device for ``number`` experts of one layer. Where there is none left, the least recently used one leaves.

    Args:
        leaves: of the layer's experts, each with the experts along dimension 0.

    Attributes:
        size: bytes of one expert.
        bytes: of all slots.
    """

    number: int

    def __init__(
        self, leaves: Sequence[torch.Tensor | QuantizedMatrix], number: int, transfers: Transfers, device: torch.device
    ) -> None:
        self.number, self._transfers = number, transfers
        # Expert -> its slot, and the copy to it; the least recently used one first.
        self._taken: OrderedDict[int, tuple[int, Transfer]] = OrderedDict()
        self._leaves = [_CachedLeaf(leaf, number, device) for leaf in leaves]
        self.size: int = sum(part[0].nbytes for leaf in self._leaves for part in leaf.parts)
        self.bytes: int = number * self.size
        self._free = list(range(number))

    def __iter__(self) -> Iterator[int]:
        """The experts that are here or on their way."""
        return iter([*self._taken])

    def __contains__(self, expert: int) -> bool:
        return expert in self._taken

    def fetch(self, expert: int, keep: Collection[int]) -> bool:
        """Start to bring an expert that is not here to a slot; False if all have experts to ``keep``."""
        if self._free:
            slot = self._free.pop()
        else:
            leaving = next((held for held in self._taken if held not in keep), None)
            if leaving is None:
                return False
            slot, _ = self._taken.pop(leaving)

        def copies() -> None:
            for leaf in self._leaves:
                leaf.copy(expert, slot)

        # A copy waits for what the device was given before: for all that reads the slot.
        self._taken[expert] = slot, self._transfers.start("up", copies)
        return True

    def use(self, expert: int) -> list[Any]:
        """The leaves of an expert that is here or on its way. What the device is given next waits for it."""
        slot, coming = self._taken[expert]
        coming.join()
        self._taken.move_to_end(expert)
        return [leaf.at(slot) for leaf in self._leaves]

    def __del__(self) -> None:
        # The memory goes back when this returns, so no copy may write to it: a wrong guess may still be under way.
        if not sys.is_finalizing():
            for _, coming in self._taken.values():
                coming.wait()


def _in_pages(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``part`` in host memory from which copies to ``device`` run beside other work; itself if it is there."""
    if part.device.type == "cpu" and part.is_contiguous() and (not pins(device) or part.is_pinned()):
        return part.detach()
    kept = pages(part.nbytes, pinned=pins(device)).view(part.dtype).view(part.shape)
    return kept.copy_(part.detach())


class LayerStore:
    """Brings the experts of one layer to the device when they have rows. For one run of the layer at a time.

    A layer's experts that are there compute while those that are missing come; then the ones that the next layer may need
    follow, by its router's choices for this layer's inputs (arXiv 2312.17238, section 3.2). Where a layer needs more experts
    than there are slots, each comes once, as soon as another has computed.

    Args:
        slots: room for the layer's experts, which are numbered from 0 on.
        first: the number of the first of them among all ranks' experts.
        number: of them.

    Attributes:
        ahead: the next layer, and its router's choices for inputs ``[T, W]``: experts int64 ``[T, k]``, −1 for none; None
            where nothing is fetched ahead.
        tally: what was counted so far.
        bytes: of the slots.
    """

    tally: Tally
    bytes: int

    def __init__(self, slots: ExpertCache, first: int, number: int) -> None:
        self._slots, self._first, self._number = slots, first, number
        self.ahead: tuple[LayerStore, Callable[[torch.Tensor], torch.Tensor]] | None = None
        self.tally, self.bytes = Tally(), slots.bytes
        self._guessed: torch.Tensor | None = None
        self._early: set[int] = set()  # experts that were fetched ahead of this layer's next run

    def expect(self, x: torch.Tensor) -> None:
        """Note the layer's inputs ``[T, W]``, before its tokens travel: they tell what the next layer may need."""
        if self.ahead is not None:
            following, choices = self.ahead
            self._guessed = following.counts(choices(x))

    def counts(self, choices: torch.Tensor) -> torch.Tensor:
        """How often each of this layer's experts is among the choices, int64 ``[E]``."""
        local = choices.flatten() - self._first
        local = local.where((local >= 0) & (local < self._number), self._number)
        return local.new_zeros(self._number + 1).scatter_add_(0, local, torch.ones_like(local))[:-1]

    def outputs(
        self, expert: Expert, params: Mapping[str, Any], rows: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """The experts' outputs for ``rows`` that are sorted by expert; 0 for those from the last of the ``ends`` on."""
        results = None
        for here, one in self._each(params, ends):
            count = here.stop - here.start
            part = expert(one, rows[here], Groups(ends.new_full((1,), count), count).product)
            if results is None:
                results = part.new_zeros(len(rows), *part.shape[1:])
            results[here] = part
        assert results is not None
        return results

    def _each(self, params: Mapping[str, Any], ends: torch.Tensor) -> Iterator[tuple[slice, Mapping[str, Any]]]:
        """The rows of one expert after the other, with its parameters ``[1, …]``, until the next one is taken. Without any
        rows one expert comes, for no rows."""
        ranges, likely = self._read(ends)
        here = [expert for expert in self._slots if expert in ranges]
        missing = deque(expert for expert in ranges if expert not in self._slots)
        self.tally += Tally(len(ranges), len(missing), 0, len(self._early & {*ranges}), len(missing) * self._slots.size)
        self._early.clear()
        left, treedef = {*ranges}, flatten(params)[2]
        for expert in [*here, *missing]:
            while missing and self._slots.fetch(missing[0], keep=left):
                missing.popleft()
            if not missing and self.ahead is not None and likely:
                self.ahead[0].fetch_ahead(likely)
                likely = []
            yield ranges[expert], unflatten(treedef, self._slots.use(expert))
            left.discard(expert)

    def _read(self, ends: torch.Tensor) -> tuple[dict[int, slice], Sequence[int]]:
        """The rows of each expert that has any, and the counts of the next layer's, in one synchronisation."""
        guessed, self._guessed = self._guessed, None
        numbers = (ends if guessed is None else torch.cat([ends, guessed])).tolist()
        starts = [0, *numbers[: len(ends)]]
        ranges = {expert: slice(*starts[expert : expert + 2]) for expert in range(len(ends))}
        with_rows = {expert: rows for expert, rows in ranges.items() if rows.start < rows.stop}
        return with_rows or {next(iter(self._slots), 0): slice(0, 0)}, numbers[len(ends) :]

    def fetch_ahead(self, likely: Sequence[int]) -> None:
        """Fetch the experts with the largest of the counts ``likely``, as many as there is room for."""
        named = sorted((expert for expert, count in enumerate(likely) if count), key=lambda expert: -likely[expert])
        named = named[: self._slots.number]
        for expert in named:
            if expert not in self._slots and self._slots.fetch(expert, keep=named):
                self._early.add(expert)
                self.tally += Tally(ahead=1, bytes=self._slots.size)


class ExpertsOnHost:
    """What `experts_on_host` keeps on the device, and what it has counted.

    Attributes:
        bytes: of the room for experts on the device.
    """

    def __init__(self, stores: Sequence[LayerStore]) -> None:
        self._stores = stores
        self.bytes: int = sum(store.bytes for store in stores)

    @property
    def tally(self) -> Tally:
        """What was counted since the beginning, in all layers."""
        return sum((store.tally for store in self._stores), Tally())

    def __repr__(self) -> str:
        return f"ExpertsOnHost({self.bytes:,} bytes on the device, {self.tally})"


def experts_on_host(
    model: Any, params: Any, slots: int, *, ahead: bool = True, device: torch.device | None = None
) -> tuple[Any, ExpertsOnHost]:
    """Parameters whose experts are in host memory, for `shardlib.generate` on a device that has no room for all of them.

    All other parameters are on the device, and room for ``slots`` experts of each layer. A layer's experts with tokens come
    up from pinned memory if they are not there, each once, and the least recently used ones make room. Those that are there
    compute while others come; beside them come the experts that the next layer may need, by its router's choices for this
    layer's inputs (arXiv 2312.17238). A wrong guess costs time, never a number: tokens are those with all experts on the
    device. On a mesh without an accelerator the host's memory is the device's, and the copies only cost.

    Args:
        model: as `shardlib.generate` takes it, with layers of experts.
        params: a plain tree, also of `quantized`; or `Sharded`, or a `TrainState`, whose ranks hold what they compute with
            (ZeRO stages 0 to 2), best in host memory, ``sl.offload(params="host")``. They are used where they are: do not
            train them meanwhile. Under `shardlib.experts` each rank brings up its own experts, and guesses by its own tokens.
        slots: at least 1; with 2 an expert comes while another computes.
        ahead: whether experts are fetched ahead of their layer.
        device: of a plain tree; by default that of its leaves, and for leaves on the CPU the process's accelerator.

    Returns:
        parameters for `shardlib.generate`, and what counts hits and bytes.

    Raises:
        TreeError: a model without layers of experts, or one whose experts are in host memory so already; gradients or a
            module in the place of parameters.
        IllegalComposition: a plan that gathers parameters, or slices each expert.
        ValueError: fewer than one slot.

    >>> experts = sl.models.gpt.Experts((4,), sl.nn.MoEConfig(sl.nn.routers.top_k(1)))
    >>> config = sl.models.gpt.GPTConfig(vocab=32, layers=2, width=16, heads=2, moe=experts)
    >>> params, kept = sl.models.decoding.experts_on_host(config, sl.models.gpt.init(config), slots=2)
    >>> len(sl.generate(config, params, [[1, 2, 3]], 5)[0])
    5
    >>> kept.tally.used >= 2 * 5
    True
    """
    if slots < 1:
        raise ValueError(f"experts_on_host(slots={slots}): give a layer one slot at least")
    decoder = decoder_of(model)
    params = given_params("experts_on_host", params)
    local = Local.of(params, "experts_on_host") if isinstance(params, (Sharded, Local)) else None
    tree = params if local is None else local.tree
    layers = decoder.layers_of_experts(tree)
    if not layers:
        raise TreeError(f"experts_on_host: {type(decoder).__name__} names no layers of experts of this model")
    if any(isinstance(leaf, StoredExperts) for leaf in leaves_of(tree)):
        raise TreeError("experts_on_host: the experts are in host memory already; pass what it was given")
    if local is None:
        if device is None:
            devices = {leaf.device for leaf in leaves_of(tree)}
            device = next((each for each in devices if each.type != "cpu"), default_device())
        device = with_index(device)
        transfers = Transfers(device)
    else:
        device, transfers = local.mesh.device, local.mesh.transfers
        _refuse_slices(local, layers)
    stored: dict[int, StoredExperts] = {}
    stores = []
    for layer in layers:
        leaves = leaves_of(layer["experts"])
        number = leaves[0].shape[0]
        room = ExpertCache(leaves, min(slots, number), transfers, device)
        stores.append(LayerStore(room, 0 if local is None else _first(local, leaves[0]), number))
        stored |= {id(leaf): StoredExperts(leaf.shape, leaf.dtype, stores[-1], leaf.device) for leaf in leaves}
    tree = tree_map(lambda leaf: stored[id(leaf)] if id(leaf) in stored else leaf.to(device), tree)
    if ahead:
        for (store, after), layer in zip(pairwise(stores), decoder.layers_of_experts(tree)[1:]):
            store.ahead = after, partial(decoder.choices, layer)
    return tree if local is None else local.with_tree(tree), ExpertsOnHost(stores)


def _refuse_slices(local: Local, layers: Sequence[Mapping[str, Any]]) -> None:
    experts = {id(leaf) for layer in layers for leaf in leaves_of(layer["experts"])}
    if sliced := [place.path for place, leaf in local.leaves() if id(leaf) in experts and place.style is not None]:
        raise IllegalComposition(
            f"experts_on_host: ranks hold slices of each expert ({', '.join(sliced)}): deal whole experts out with "
            "sl.experts(), or leave them out of sl.tensor_slicing"
        )


def _first(local: Local, leaf: Any) -> int:
    """The number of the first expert that a leaf has on this rank."""
    return next(local.window(placement).first[0] for placement, other in local.leaves() if other is leaf)
