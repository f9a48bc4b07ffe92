"""`GradientTransformation`: two pure functions, and what they need to run on shards.

As in optax, ``init(params) -> state`` and ``update(updates, state, params) -> (updates, state)`` map pytrees to
pytrees. A train step runs them on flat shards: a dictionary from bucket name to this rank's flat buffer.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import optree
import torch

from shardlib.collectives.codecs.base import Codec
from shardlib.errors import IllegalComposition, TreeError, listing
from shardlib.mesh.memories import MEMORIES
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport import EchoGroup
from shardlib.optim.code import Code
from shardlib.optim.separate import separate_memory, turns
from shardlib.optim.shards import WHOLE, Locality, MeshShards, Shards
from shardlib.optim.storing import optimizer_shards, stored
from shardlib.plan.claims import ROLES, AxisOwner, Claim, LeafInfo, Reduce
from shardlib.plan.code import code_of
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Resolved, Transform
from shardlib.plan.value import PlanValue
from shardlib.sharded.tree import Sharded, require_no_shards
from shardlib.tree import (
    T,
    Tree,
    check_alike,
    check_trained,
    flatten,
    leaves_of,
    same_values,
    tied_pairs,
    trained_part,
    tree_map,
)

S = TypeVar("S")  # an optimizer's state


class StateMethods(Protocol):
    """What a state (a NamedTuple) of an optimizer may say of its fields, by any of these methods."""

    def rank_local(self) -> tuple[str, ...]:
        """The fields that differ now between the ranks of the optimizer's axis, whose parameters are rank-local then."""
        ...

    def held_trees(self) -> tuple[str, ...]:
        """The fields that are copies of the parameters to return to. When a caller replaces these, the copies are too."""
        ...

    def by_path(self) -> tuple[str, ...]:
        """The fields that are dictionaries from paths of parameters. In an update of some of the parameters the state has
        what is kept for these alone."""
        ...


class Packed(abc.ABC):
    """A node of an optimizer's state that holds one tensor in fewer bits, or elsewhere. Checkpoints hold the decoded tensor.

    Attributes:
        rounds: whether the tensor holds other values than its parts; False if it is only elsewhere.
    """

    rounds = True

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """Elements that are encoded, or read and written, together: parts begin at multiples of it."""

    @property
    @abc.abstractmethod
    def like(self) -> torch.Tensor:
        """A tensor of the decoded one's shape and dtype, without memory (on the meta device)."""

    @abc.abstractmethod
    def part(self, first: int, stop: int) -> torch.Tensor:
        """Elements ``first`` to ``stop`` of the decoded tensor, flat."""

    def unpacked(self) -> torch.Tensor:
        """The decoded tensor, in the shape of its parameter (or shard)."""
        return self.part(0, self.like.numel()).view(self.like.shape)

    @abc.abstractmethod
    def pack(self, values: torch.Tensor, first: int = 0) -> None:
        """Encode ``values`` in place, as the elements from ``first`` on. Encoding the result of `part` changes no bit."""


@dataclass(frozen=True)
class Owned(Transform):
    """The claim of a gradient transformation that reduces gradients over an axis itself, in few bits.

    Attributes:
        label: the transformation's name, for messages.
        axis: a mesh axis that shares the batch and splits nothing.
        codec: the codec of its exchanges.
        unreduced: ``unreduced(state)``: whether the next update takes the gradients of each rank, whose mean over the axis is
            the gradient. Otherwise it takes averaged gradients like any transformation. Must be the same on all ranks.
    """

    label: str
    axis: str
    codec: Codec
    unreduced: Callable[[Tree], bool]

    @property
    def name(self) -> str:
        return self.label

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Reduce(self.axis, owner=AxisOwner(self.label, self.axis, self.codec))

    def check(self, resolved: Resolved) -> None:
        axis, sizes = self.axis, resolved.sizes
        split = {other for role in ROLES for other in resolved.location(role).axes}
        if axis not in sizes:
            unsplit = [other for other in sizes if resolved.varies_over(other) and other not in split]
            remedy = f"name {unsplit[0]!r} with axis=" if unsplit else f"add {axis}=1 to the mesh"
            raise IllegalComposition(
                f"{self.name} sums gradients over axis {axis!r}, which the mesh ({', '.join(sizes)}) does not have; {remedy}"
            )
        if axis in split or (sizes[axis] > 1 and not resolved.varies_over(axis)):
            problem = "zero splits the state over it" if axis in split else "the batch is not shared over it"
            raise IllegalComposition(
                f"{self.name} sums gradients over axis {axis!r} itself, and {problem}. Split over another axis: "
                f"zero(stage, axis='local', replicate={axis!r})"
            )
        dealt = [path for path, use in resolved.uses.items() if axis in (use.varying or ())]
        if dealt and sizes[axis] > 1:
            raise IllegalComposition(
                f"{self.name} sums gradients over axis {axis!r} itself, and {len(dealt)} leaves ({dealt[0]} first) are dealt "
                "out over it. Deal experts out over another axis"
            )
        codec = resolved.of_axes("codec").get(axis)
        if codec is not None:
            raise IllegalComposition(
                f"{self.name} sums gradients over axis {axis!r} itself; the plan already sends them over it in "
                f"{codec}; drop one"
            )


class GradientTransformation:
    """A pair of pure functions with their locality.

    Args:
        init: ``init(params, shards) -> state`` with a locality; without one the plain optax form ``init(params) -> state``.
        update: ``update(updates, state, params, shards=...) -> (updates, state)``; without a locality
            ``update(updates, state, params) -> (updates, state)``.
        locality: what the update of an element reads beyond the element. None is refused on shards.
        factor: for a transformation that multiplies every element by one number: ``factor(updates, scale, shards)``
            returns the number for ``updates * scale``. A chain folds it into its next pass over memory.
        apply: with a locality, ``update`` and the addition in one pass, in place: ``apply(params, updates, state, scale,
            shards, copies) -> state`` for ``updates * scale``. It may use up the memory of ``updates`` and ``state``.
            ``copies`` are as in the method `apply`.
        reads_old: whether ``apply`` also takes ``old=``, as `body` does; it then does not change ``updates``.
        owns: the axis over which the transformation reduces gradients itself, through ``shards.compressed_mean``.
        sends: ``sends(shards) -> {axis: bytes}``: the bytes that one rank sends in a step through ``shards.whole`` and
            ``shards.total``; none by default.
        lead: for a transformation that is elementwise but for one number by which it multiplies the gradients first (a chain
            of clips and an elementwise rest): ``lead(updates, scale, shards)`` returns that number times ``scale``. ``apply``
            then leaves it out.
        last: why no transformation may follow in a chain, for updates that state new values of parameters, not changes.
        rest: the locality of what is left after ``lead``; that of all by default.

    Attributes:
        code: returns the code that makes the transformation, which its repr is; None for those that no public function made.
    """

    reads_old: bool

    owns: Owned | None
    last: str | None
    locality: Locality | None
    factor: Callable[[Tree, torch.Tensor | None, Shards], torch.Tensor] | None
    rest: Locality | None
    code: Code | None = None

    def __init__(
        self,
        init: Callable[..., Tree],
        update: Callable[..., tuple[Tree, Tree]],
        locality: Locality | None = None,
        factor: Callable[[Tree, torch.Tensor | None, Shards], torch.Tensor] | None = None,
        apply: Callable[..., Tree] | None = None,
        owns: Owned | None = None,
        sends: Callable[[Shards], Mapping[str, int]] | None = None,
        last: str | None = None,
        lead: Callable[[Tree, torch.Tensor | None, Shards], torch.Tensor | None] | None = None,
        rest: Locality | None = None,
        reads_old: bool = False,
    ) -> None:
        self._init, self._update, self.owns, self._sends, self.last = init, update, owns, sends, last
        self.locality, self.factor, self._apply, self._lead = locality, factor, apply, lead
        self.rest, self.reads_old = locality if rest is None else rest, reads_old

    def init(self, params: Tree, *, shards: Shards = WHOLE) -> Tree:
        """The state for ``params``: a pytree, or `Sharded` (then over this rank's flat shards)."""
        if isinstance(params, Sharded):
            return self.init(self._lower(params), shards=MeshShards(params.plan, params.mesh))
        check_trained(params)
        if shards is WHOLE:
            require_no_shards("init", params)
            params = trained_part(params)
        return self._init(params) if self.locality is None else self._init(params, shards.allowing(self.locality))

    def sends(self, shards: Shards) -> Mapping[str, int]:
        """Axis -> payload bytes of a step, without scalars."""
        return self._sends(shards) if self._sends else {}

    def planned(self, plan: Plan) -> tuple[Tree, Mapping[str, int]]:
        """The state of a rank of ``plan`` as meta tensors, and the bytes that it `sends`. Moves no data and needs no
        ranks."""
        groups = {axis: EchoGroup(size) for axis, size in plan.sizes.items()}
        shards = MeshShards(plan, Mesh(plan.sizes, 0, groups, torch.device("cpu"), abstract=True))
        flat = {b.name: torch.empty(b.owned, dtype=b.master_dtype or b.dtype, device="meta") for b in plan.trained}
        parts = [shards.of(group, self.rest) for group in turns(plan)] if self.in_turn(plan) else [shards]
        sent = Counter[str]()
        for part in parts:
            sent.update(self.sends(part))
        return self.init(flat, shards=shards), dict(sent)

    @overload
    def update(
        self, updates: Sharded[T], state: S, params: Sharded[T] | None = None, *, shards: Shards = WHOLE
    ) -> tuple[Sharded[T], S]: ...
    @overload
    def update(self, updates: T, state: S, params: T | None = None, *, shards: Shards = WHOLE) -> tuple[T, S]: ...
    def update(self, updates: Any, state: Any, params: Any = None, *, shards: Shards = WHOLE) -> tuple[Any, Any]:
        """The transformed ``updates`` (at first gradients) and the new state. Changes nothing in place.

        ``updates`` may also be `Sharded` parameters, to average them; the result is then `Sharded` parameters.

        Raises:
            TreeError: arguments in another order, or sharded ones beside whole ones.
        """
        if isinstance(state, Sharded) or (
            isinstance(updates, Sharded) != isinstance(params, Sharded) and params is not None
        ):
            given = ", ".join(type(each).__name__ for each in (updates, state, params))
            raise TreeError(
                f"update was given ({given}): it takes (gradients, the optimizer's state, parameters). Both trees are Sharded"
                " (of a TrainState, state.params), or both plain pytrees"
            )
        if isinstance(updates, Sharded):
            shards = MeshShards(updates.plan, updates.mesh)
            flat: Any
            flat, state = self.update(self._lower(updates), state, self._lower(params), shards=shards)
            if updates.role == "param":
                return stored(updates, flat), state
            return Sharded(updates.plan, updates.mesh, "grad", flat), state
        if shards is WHOLE:
            require_no_shards("update", (updates, params))
            updates, params = trained_part(updates), trained_part(params)
        if params is not None:
            check_alike("update", updates, params, ("updates", "parameters"))
            if not isinstance(shards, MeshShards) and self.locality is Locality.GLOBAL:  # in every chain
                _require_counted_once(params, updates)
        if self.locality is None:
            return self._update(updates, state, params)
        return self._update(updates, state, params, shards=shards.allowing(self.locality))

    def apply(
        self,
        params: Tree,
        updates: Tree,
        state: Tree,
        *,
        scale: torch.Tensor | None = None,
        shards: Shards = WHOLE,
        copies: Tree = None,
    ) -> Tree:
        """Update ``params`` in place from ``updates * scale``; returns the new state.

        May use up the memory of ``updates`` and ``state``.

        Args:
            copies: tensors to write the new parameters to as well, in other dtypes (16-bit parameters, where ``params`` are
                their fp32 masters): a tree like ``params``, with the same tensor where there is no copy; None for no copies.
        """
        if shards is WHOLE:
            _refuse_tied(tied_pairs(params), "what is added in place is added twice")
            require_no_shards("apply", (params, updates))
            params, updates, copies = map(trained_part, (params, updates, copies))
        scale = self.lead(updates, scale, shards)
        return self.body(params, updates, state, scale=scale, shards=shards, copies=copies)

    def __repr__(self) -> str:
        if self.code is not None:
            return self.code()
        locality = "" if self.locality is None else f", {code_of(self.locality)}"
        return f"GradientTransformation({code_of(self._init)}, {code_of(self._update)}{locality})"

    @property
    def separable(self) -> bool:
        """Whether `body` may run on some of the parameters alone, once `lead` has seen all gradients."""
        return self.owns is None and self.rest is Locality.ELEMENTWISE

    @property
    def by_leaf(self) -> bool:
        """Whether no update reads beyond one parameter, so that states may rest on disk; `separable` ones do not either."""
        return self.owns is None and self.rest not in (None, Locality.GLOBAL)

    def in_turn(self, plan: PlanValue) -> bool:
        """Whether groups of buckets are updated one after the other under a plan: where states of some rank are elsewhere
        than on the device, or its parameters rest on disk, if `separable`; and where states rest on disk, if `by_leaf`. All
        ranks then make exchanges for each group."""
        everyones = plan.everywhere.trained
        memories = {bucket.memory.optimizer for bucket in everyones} - {"device"}
        apart = bool(memories) or any(MEMORIES[bucket.memory.param].rests for bucket in everyones)
        return (self.separable and apart) or (self.by_leaf and any(MEMORIES[name].rests for name in memories))

    def lead(self, updates: Tree, scale: torch.Tensor | None, shards: Shards) -> torch.Tensor | None:
        """The factor of all elements for `body`: ``scale``, times the factors of clips."""
        if self._lead is None or self.locality is None:
            return scale
        return self._lead(updates, scale, shards.allowing(self.locality))

    def body(
        self,
        params: Tree,
        updates: Tree,
        state: Tree,
        *,
        scale: torch.Tensor | None,
        shards: Shards,
        copies: Tree,
        old: tuple[Tree, Tree] | None = None,
    ) -> Tree:
        """`apply` after `lead`, which has returned ``scale``.

        Args:
            old: parameters and state before the update, which stay, and so do ``updates``; ``params`` and ``state`` are
                memory for the new ones, in which only the numbers of the state (0-d tensors) have their values.
        """
        copies = params if copies is None else copies
        if old is not None and not self.reads_old:
            updates = tree_map(torch.clone, updates)
            _copy_values((params, state), old)
            old = None
        if self._apply is not None and self.locality is not None:
            given = (params, updates, state, scale, shards.allowing(self.locality), copies)
            return self._apply(*given) if old is None else self._apply(*given, old=old)
        updates, state = self.update(scaled(updates, scale), state, params, shards=shards)
        state = separate_memory(state, leaves_of(params))
        tree_map(torch.Tensor.add_, params, updates)
        write_copies(copies, params)
        return state

    def _lower(self, params: Tree) -> Tree:
        if not isinstance(params, Sharded):
            return params
        self.require_locality(params)
        return params.buffers if params.role == "grad" else optimizer_shards(params)

    def require_locality(self, params: Sharded) -> None:
        """Raise `IllegalComposition` for shards if no locality is declared."""
        if self.locality is None and params.mesh.size > 1:
            raise IllegalComposition(
                f"this gradient transformation declares no locality, so it may be wrong on shards ({params.mesh}); "
                "pass locality=: sl.optim.Locality.ELEMENTWISE, or what it asks shards for (LEAF, GLOBAL or WHOLE)"
            )


def _require_counted_once(params: Tree, updates: Tree) -> None:
    """Refuse leaves of a plain tree that are one parameter, as they are tied and have one gradient, for sums over all."""
    paths, leaves, _ = flatten(updates)
    given = dict(zip(paths, leaves, strict=True))
    one = [(first, other) for first, other in tied_pairs(params) if same_values(given[first], given[other])]
    _refuse_tied(one, "a sum over all elements counts them twice")


def _refuse_tied(pairs: Sequence[tuple[str, str]], why: str) -> None:
    """Refuse tied leaves of a plain tree, in which they are leaves of their own; in a `Sharded` tree they are one."""
    if pairs:
        raise TreeError(
            f"leaves of a plain tree are tied, and {why}:\n{listing([f'{first} and {other}' for first, other in pairs])}\n"
            "Shard the tree, before tx.init too: params = sl.shard(params, sl.make_mesh())"
        )


def require_unpacked(plan: Plan, state: Tree) -> None:
    """Refuse packed tensors in an optimizer's state on a plan whose bits must not depend on the mesh.

    Raises:
        IllegalComposition: names the class of the packed tensors.
    """
    nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, Packed))
    packed = next((type(node).__name__ for node in nodes if isinstance(node, Packed) and node.rounds), None)
    if plan.step.tree and packed:
        raise IllegalComposition(
            f"reproducible() takes no optimizer whose state is in {packed} tensors, rounded by what a rank's shard holds. "
            "Use one with moments in fp32, such as adamw"
        )


def _copy_values(memory: Tree, values: Tree) -> None:
    for to, value in zip(leaves_of(memory), leaves_of(values), strict=True):
        if isinstance(to, torch.Tensor) and to.dim():
            to.copy_(value)


def scaled(updates: Tree, scale: torch.Tensor | None) -> Tree:
    """``updates * scale``, where 16-bit updates become fp32: fp16 cannot hold gradients without their loss scale, and of a
    small term that a transformation adds (a decay, noise) 16 bits would keep nothing."""

    def product(update: torch.Tensor) -> torch.Tensor:
        wide = update.to(torch.promote_types(update.dtype, torch.float32))
        return wide if scale is None else wide * scale.to(wide.dtype)

    return tree_map(product, updates)


def write_copies(copies: Tree, params: Tree) -> None:
    """Write ``params`` to ``copies``, which are as in `GradientTransformation.apply`."""
    tree_map(lambda copy, param: copy if separate_copy(copy, param) is None else copy.copy_(param), copies, params)


def separate_copy(copy: torch.Tensor, param: torch.Tensor) -> torch.Tensor | None:
    """``copy``, or None when it is the parameter itself (the same elements of the same memory)."""
    return None if copy is param or copy.is_set_to(param) else copy


def require_params(what: str, params: Tree) -> None:
    """Refuse an update that was given no parameters."""
    if params is None:
        raise ValueError(f"{what} needs the parameters: update(updates, state, params)")


def empty_init(params: Any, shards: Shards) -> tuple[()]:
    """The state of a transformation that has none."""
    return ()
