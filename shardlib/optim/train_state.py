"""`TrainState`, which a train step takes and returns, and the replacement of its parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, NoReturn, NotRequired, Protocol, TypedDict

import optree
import torch

from shardlib.collectives.attempts import attempted, error_of
from shardlib.common.devices import cloned
from shardlib.common.display.panels import Grid, Panel, Shown, Title
from shardlib.common.thresholds import chunks
from shardlib.errors import DonatedStateError, IllegalComposition, TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.optim.base import Packed
from shardlib.optim.on_disk import InPlace, OnDisk, PendingChange, in_files, rests, without_changes, write_changes
from shardlib.optim.storing import optimizer_shard
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.plan import Plan
from shardlib.plan.tables import size
from shardlib.rng import Key
from shardlib.sharded.shard import put_together, require_same_copies
from shardlib.sharded.tree import Sharded
from shardlib.tree import T, T_co, Tree, flatten, register_node, tree_map


class Pending(NamedTuple):
    """The gradients of a step that the step after it applies, under ``offload(delay=True)``.

    Attributes:
        grads: bucket name -> the summed gradient.
        factor: what gradients are multiplied by, 0-d: from the sum to the clipped gradient of the mean loss.
        due: whether there is an update to make, 0-d.
    """

    grads: dict[str, torch.Tensor]
    factor: torch.Tensor
    due: torch.Tensor


class OptimizerState(NamedTuple):
    """The state of masters and optimizer.

    Attributes:
        masters: bucket name -> fp32 master weights (under `precision`).
        inner: the state of the gradient transformation.
        pending: gradients that the next step applies; empty unless updates are delayed.
    """

    masters: dict[str, torch.Tensor]
    inner: Any
    pending: Pending | tuple[()] = ()


class TrainState(Shown, Generic[T_co]):
    """Everything that a step reads and writes. A pytree.

    Attributes:
        step: steps taken, skipped steps included.
        params: `Sharded` parameters.
        opt: the `OptimizerState` of this rank's flat shards.
        comm: the residuals and factors of compressed exchanges, by name (see ``Plan.residuals``).
        buffers: the buffers that the loss function returns beside the loss (BatchNorm's statistics), or None.
        scale: `LossScale`, or None.
        rng: the `Key` that per-step keys are folded from.
        in_batch: as of `Sharded`.
    """

    step: int
    in_batch = False
    params: Sharded[T_co]
    opt: OptimizerState
    comm: dict[str, torch.Tensor]
    buffers: Any
    scale: LossScale | None
    rng: Key

    def __init__(
        self,
        step: int,
        params: Sharded[T_co],
        opt: OptimizerState,
        comm: dict[str, torch.Tensor],
        buffers: Any,
        scale: LossScale | None,
        rng: Key,
    ) -> None:
        self.step, self.params, self.opt = step, params, opt
        self.comm, self.buffers, self.scale, self.rng = comm, buffers, scale, rng
        self._fits: tuple[Sharded, dict[str, int]] | None = None

    def fitting(self) -> TrainState[T_co]:
        """This state, with a record that the optimizer's copies of parameters fit the parameters' present values."""
        self._fits = self.params, self.params.versions()
        return self

    def settled(self) -> TrainState:
        """This state; if its parameters were replaced since `fitting`, with copies that follow them: see `replace_params`.

        A state without such a record, such as the result of a ``tree_map``, gets masters that round to its parameters. Copies
        on disk follow where they are read, and nothing is written.

        Raises:
            TreeError: the parameters are no longer `Sharded`.
        """
        if not isinstance(self.params, Sharded):
            raise TreeError(
                f"state.params is a {type(self.params).__name__}, not Sharded; put whole parameters into a state by "
                "sl.replace_params(state, params)"
            )
        if self._fits is None:
            masters = following_masters(self.params.lent(), self.opt.masters)
            return self._with(self.params, self.opt._replace(masters=masters))
        fits = self.params is self._fits[0] and self.params.versions() == self._fits[1]
        return self if fits else self._with(self.params, _following(self.params.lent(), self.opt))

    def settled_on_disk(self) -> TrainState:
        """`settled`, with copies on disk that were written. Collective where there are some."""
        settled = self.settled()
        if settled is not self and rests(self.params.plan):
            opt = replaced_on_disk(self.params.mesh, self.opt, lambda: settled.opt)
            self.opt = opt  # of which there is one
            return self.fitting()
        return settled

    def _with(self, params: Sharded, opt: OptimizerState) -> TrainState:
        return TrainState(self.step, params, opt, self.comm, self.buffers, self.scale, self.rng).fitting()

    def take(self, by: str, remedy: str) -> None:
        """Mark this state as used up, because ``by`` has taken over its memory; ``remedy`` ends the message of later
        reads."""
        why = f"this state (step {self.step}) was donated: {by} has taken over its memory. Go on with {remedy}"
        self.params.take(
            f"{why}. States that were made from one Sharded tree share its memory: shard once for each state"
        )
        self.__dict__.clear()
        self.__dict__["_donated"] = why

    def keeping(self) -> Callable[[], None]:
        """What makes this state its holder's again after `take`. It is for callers whose memory nobody has taken over."""
        fields, params = dict(self.__dict__), self.__dict__.get("params")
        give_back = params.keeping() if isinstance(params, Sharded) else None

        def again() -> None:
            self.__dict__.clear()
            self.__dict__.update(fields)
            if give_back is not None:
                give_back()

        return again

    def go_on_as(self, after: TrainState) -> None:
        """Make this state, which was taken, the one ``after`` it: its holder was not given that one."""
        self.__dict__.clear()
        self.__dict__.update(after.__dict__)

    def lost_to(self, error: BaseException) -> None:
        """Let later reads say, if this state was taken, that no state has followed it, because of ``error``."""
        if "_donated" in self.__dict__:
            self.__dict__["_donated"] = (
                f"this state is lost: the update of the step after it was made in part, and then raised "
                f"{type(error).__name__}. Restore a checkpoint, or make the step with donate=False to keep old states"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        """A state with memory of its own, on the same mesh; steps of one leave the other alone.

        Raises:
            TreeError: anything of it is on disk.
        """
        if isinstance(self.params, Sharded) and in_files(self.params.plan):
            raise TreeError(
                "a state with anything on disk is there once, and a copy would have no files: save it by "
                "sl.checkpoint.save(folder, state), or keep it in memory with offload('host')"
            )
        state = self if self._fits is None else self.settled()
        params, opt = copy.deepcopy(state.params, memo), copied(state.opt)
        made = TrainState(state.step, params, opt, copied(state.comm), copied(state.buffers), state.scale, state.rng)
        return made if state._fits is None else made.fitting()

    def __copy__(self) -> TrainState:
        made = object.__new__(TrainState)
        made.__dict__.update(self.__dict__)
        return made

    def for_batch(self) -> TrainState:
        """This state as a part of a batch: see `Sharded.in_batch`."""
        made = copy.copy(self)
        made.in_batch = True
        return made

    def __reduce__(self) -> NoReturn:
        raise TreeError(
            "a TrainState is one rank's part and cannot be pickled (or returned by sl.launch): save it by "
            "sl.checkpoint.save(folder, state), or take out sl.unshard(state.params), a plain pytree"
        )

    def __getattr__(self, name: str) -> Any:
        if "_donated" in self.__dict__ and name in (*TrainState.__annotations__, "_fits"):
            raise DonatedStateError(self.__dict__["_donated"])
        raise AttributeError(f"TrainState has no attribute {name!r}")

    def __repr__(self) -> str:
        if "_donated" in self.__dict__:
            return "TrainState(donated)"
        return f"TrainState(step={self.step}, {self.params.plan.parameters} parameters on {self.params.mesh})"

    def shown(self) -> Iterator[Panel]:
        """What a notebook and a terminal show: bytes of this rank by field, then its parameters."""
        yield Title(repr(self))
        if "_donated" in self.__dict__:
            return
        rows = []
        fields = {"masters": self.opt.masters, "optimizer": self.opt.inner, "pending": self.opt.pending}
        for name, tree in {**fields, "residuals": self.comm, "buffers": self.buffers}.items():
            leaves = flatten(tree)[1] if tree is not None else []
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            elsewhere = sum(isinstance(leaf, Packed) for leaf in leaves)
            if tensors or elsewhere:
                held = size(sum(leaf.nbytes for leaf in tensors)) + (f", {elsewhere:,} on disk" if elsewhere else "")
                rows.append((name, f"{len(tensors) + elsewhere:,}", held))
        if self.scale is not None:
            rows.append(("loss scale", "", f"{float(self.scale.value):g}"))
        rows.append(("random key", "", repr(self.rng)))
        yield Grid(("of the state", "tensors", "this rank holds"), rows, 2)
        yield from self.params.shown()


class Metrics(TypedDict):
    """What a train step returns beside the state: see `shardlib.make_train_step`.

    Attributes:
        layer_tokens, undone, aux: there for the plans and loss functions that have them.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    finite: bool
    layer_tokens: NotRequired[int]
    undone: NotRequired[int]
    aux: NotRequired[Any]


class TrainStep(Protocol[T]):
    """``train_step(state, batch) -> (state, metrics)``, as `shardlib.make_train_step` makes it.

    Attributes:
        graph: the step as one graph, which prints itself; None without ``compile``.
    """

    graph: Any

    def __call__(self, state: TrainState[T], batch: Any, /) -> tuple[TrainState[T], Metrics]: ...


def require_state(what: str, state: Any, batch: Any) -> TrainState:
    """``state``, if it is one. ``what`` is the function that was given both, for the message.

    Raises:
        TypeError: names the slip, and the remedy.
    """
    if isinstance(state, TrainState):
        return state
    if isinstance(state, tuple) and any(isinstance(each, TrainState) for each in state):
        slip = "a tuple with a state in it: a step returns two values, state, metrics = train_step(state, batch)"
    elif isinstance(batch, TrainState):
        slip = "its arguments in the wrong order: the state comes first, train_step(state, batch)"
    elif isinstance(state, Sharded):
        slip = "parameters: give the state that make_train_step returned; sl.replace_params(state, params) puts them in"
    else:
        slip = f"{type(state).__name__} as the state: give the one that make_train_step or the last step returned"
    raise TypeError(f"{what} was given {slip}")


def _children(state: TrainState) -> tuple[Iterable[Any], Any]:
    if state.in_batch:
        return (), state
    return (state.params, state.opt, state.comm, state.buffers), (state.step, state.scale, state.rng)


def _rebuild(static: Any, children: Iterable[Any]) -> TrainState:
    if isinstance(static, TrainState):
        return static
    step, scale, rng = static
    params, opt, comm, buffers = children
    return TrainState(step, params, opt, comm, buffers, scale, rng)


register_node(TrainState, _children, _rebuild)


def replace_params(state: TrainState[T], params: Sharded[T] | T, *, donate: bool = True) -> TrainState[T]:
    """``state`` with other parameters, such as an average, or parameters from a file::

        averaged, kept = average.update(state.params, kept)
        state = sl.replace_params(state, averaged)

    fp32 masters follow the parameters; where a parameter is what its master rounds to, the master stays unchanged. The
    parameters that an optimizer returns to (`lookahead`'s slow parameters, 0/1 Adam's last common ones) follow too. Moments,
    counters and residuals stay. Assigning to ``state.params``, or writing to its tensors in place, has the same effect at the
    next step; writes through ``tensor.data`` go unnoticed. Of parameters on disk a read is a copy, and writes to it are lost.

    Args:
        params: `Sharded` by the state's plan (a ``tree_map`` over ``state.params``), or a whole pytree with the same values
            on every rank. Leaves may also be shards, put together from parts of ``state.params`` or what was computed with
            them: ``{"student": state.params["student"], "teacher": averaged}``. Other dtypes are cast to the state's.
        donate: whether the new state takes over the memory of ``state``, which may then not be used again. States on disk
            are replaced in their files.

    Raises:
        TreeError: a tree of other leaves or shapes, or sharded by another plan.
        RankMismatch: ranks that hold copies were given different values.
        IllegalComposition: 0/1 Adam's ranks have diverged at this step; or ``donate=False`` with anything on disk.
        StorageError: states on disk could not be written; all are as they were.
        RankFailure: another rank could not write them.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.sgd(0.1))
    >>> state = sl.replace_params(state, {"w": torch.zeros(2)})
    >>> sl.unshard(state.params)["w"]
    tensor([0., 0.])
    """
    plan = state.params.plan
    if not donate and in_files(plan):
        raise IllegalComposition(
            "replace_params(donate=False) keeps the old state, and what is on disk is there once: leave donate=True, or keep "
            "it in memory with offload('host')"
        )
    given = params if isinstance(params, Sharded) else put_together(params, state.params)
    if given.role != "param" or (given.plan is not plan and given.plan.layout != plan.layout):
        raise TreeError(
            "replace_params: these are not parameters sharded as the state's are; give a tree_map over state.params, or the "
            "whole pytree (sl.unshard), which is cut as the state's are"
        )
    require_same_copies(given)
    given = (given.lent() if given.shares(state.params) else given).under(plan)
    if in_files(plan):
        opt = replaced_on_disk(given.mesh, state.opt, lambda: _following(given, state.opt))
    else:
        opt = _following(given, state.opt)
    if donate:
        after = state._with(given, opt)
        state.take("replace_params", "the state that it returned, or pass donate=False to keep this one")
        return after
    own = Sharded(plan, given.mesh, "param", copied(given.buffers))
    comm, buffers = copied(state.comm), copied(state.buffers)
    return TrainState(state.step, own, copied(opt), comm, buffers, state.scale, state.rng).fitting()


# The optimizer's copies of parameters (masters, slow parameters), made to follow when a caller replaces the parameters.


def following_masters(params: Sharded, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters that round to ``params``. Elements of ``masters`` that do so already stay; the others become the parameters.

    Changes nothing in place.
    """
    bucket_of = params.plan.bucket_of
    return {
        name: _changed(master, lambda old, name=name: _rounding_to(optimizer_shard(params, bucket_of[name]), old))  # type: ignore[misc]
        for name, master in masters.items()
    }


def following_state(params: Sharded, masters: Mapping[str, torch.Tensor], state: Tree) -> Tree:
    """An optimizer's state whose `held_trees` hold ``params``. Changes nothing in place.

    Raises:
        IllegalComposition: ranks have diverged.
    """

    @functools.lru_cache(maxsize=1)  # what is elsewhere is brought here one bucket at a time
    def flat(name: str) -> torch.Tensor:
        master: Any = masters.get(name)
        if master is None:
            return optimizer_shard(params, params.plan.bucket_of[name])
        return master.unpacked() if isinstance(master, Packed) else master

    def held(name: str, old: Any) -> Any:
        named = params.plan.numbering.run_named(name)
        assert named is not None, name  # names of a bucket or a run of its leaves
        bucket, start, stop = params.plan.numbering.span(named[1])
        return _changed(old, lambda tensor: flat(bucket)[start:stop].to(tensor.dtype, copy=True))

    def followed(node: Any) -> Any:
        if not _holds(node):
            return node
        if getattr(node, "rank_local", tuple)():
            raise IllegalComposition(
                "parameters were replaced while they are rank-local. Replace them after a step that sends: "
                "sl.optim.ZeroOneSteps(...).sent(state.step) is not Sent.NOTHING"
            )
        fresh = {field: {n: held(n, old) for n, old in getattr(node, field).items()} for field in node.held_trees()}
        return type(node)(*(fresh.get(field, walk(tree)) for field, tree in zip(node._fields, node, strict=True)))

    def walk(tree: Tree) -> Tree:
        return optree.tree_map(followed, tree, is_leaf=_holds)

    return walk(state)


def _holds(node: Any) -> bool:
    return hasattr(node, "held_trees")


def _changed(held: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What ``change`` makes of a tensor; one on disk is `PendingChange` then, and one in few bits gets its values there."""
    if not isinstance(held, Packed):
        return change(held)
    if isinstance(held, OnDisk):
        return PendingChange(held, change)
    held.pack(change(held.unpacked()))
    return held


def _rounding_to(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A new master, in memory as ``master`` is."""
    result = cloned(master)
    for p, m in chunks([param, result]):
        m.copy_(torch.where(m.to(p.dtype) == p, m, p.to(m.dtype)))
    return result


def replaced_on_disk(mesh: Mesh, states: Tree, replace: Callable[[], Tree]) -> Tree:
    """What ``replace`` makes of ``states``, with those on disk written in place: on all ranks, or on none. The leaves on disk
    of ``states``, and of copies of it, are used up.

    Raises:
        RankFailure: it failed on other ranks. Where it failed, its own error is raised.
    """
    writes, made = InPlace([states]), list[Tree]()

    def work() -> None:
        writes.begin()
        after = replace()
        write_changes(after)
        made.append(without_changes(after))

    failure, problems, _ = attempted(mesh, work)
    if problems:
        writes.take_back()
        raise error_of(failure, problems, "states on disk were not replaced, and are as they were")
    for files in writes.files:
        files.version += 1
    return tree_map(lambda leaf: leaf.renewed() if isinstance(leaf, OnDisk) else leaf, made[0])


def _following(params: Sharded, opt: OptimizerState) -> OptimizerState:
    masters = following_masters(params, opt.masters)
    return opt._replace(masters=masters, inner=following_state(params, masters, opt.inner))


def copied(tree: Tree) -> Tree:
    """A copy of a state, or of a part of one, with its own memory; values that are not tensors are the same."""
    return tree_map(lambda leaf: cloned(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def rescaled(plan: Plan, comm: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """The tensors of ``TrainState.comm`` under a loss scale that changed by ``factor``.

    Residuals of gradients have the loss scale. Those of an optimizer's own means do not.
    """
    scaled = {name for channel in plan.channels if not channel.mean for name in channel.keeps}
    return {name: kept * factor if name in scaled else kept for name, kept in comm.items()}
