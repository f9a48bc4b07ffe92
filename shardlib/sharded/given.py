"""What functions take as a model's parameters: one rule for all of them; and `Local`, in which no step trains them."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.common.environment import environment
from shardlib.errors import IllegalComposition, ShardlibError, TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.specs import Window
from shardlib.plan.placement import Placement
from shardlib.plan.plan import Plan
from shardlib.sharded.tree import Sharded, require_no_shards
from shardlib.tree import Tree, flatten, unflatten


class Local:
    """A rank's leaves under a plan that gathers none: of a `Sharded` tree, or what takes their place, such as quantised ones.

    Attributes:
        plan, mesh: as in `Sharded`.
        tree: the nested tree of leaves, whose slices have no padding.
    """

    plan: Plan
    mesh: Mesh
    tree: Tree

    def __init__(self, plan: Plan, mesh: Mesh, tree: Tree) -> None:
        self.plan, self.mesh, self.tree = plan, mesh, tree

    @classmethod
    def of(cls, params: Sharded | Local, what: str) -> Local:
        """The leaves of ``params``, in their memory.

        Args:
            what: the function that asks, for the message.

        Raises:
            IllegalComposition: ranks gather parameters for their use, hold stages, or have them on disk.
        """
        if isinstance(params, Local):
            return params
        plan = params.plan
        split = sorted({axis for bucket in plan.buckets for axis in bucket.axes[: bucket.param_level]})
        why = (
            f"each rank holds a share of every parameter (ZeRO stage 3 over {', '.join(split)})"
            if split
            else "each rank holds the blocks of its stages"
            if plan.stages.axes
            else "they are on disk"
            if params.on_disk is not None
            else None
        )
        if why is not None:
            raise IllegalComposition(
                f"{what} takes parameters whole on each rank, and here {why}: shard sl.unshard(params) with sl.zero(0)"
            )
        whole = cls(plan, params.mesh, params.tree)
        cut = [_cut(leaf, *whole.window(placement).sizes[:1]) for placement, leaf in whole.leaves()]
        return whole.with_tree(unflatten(plan.shape.treedef, cut))

    def with_tree(self, tree: Tree) -> Local:
        """The same with other leaves."""
        return Local(self.plan, self.mesh, tree)

    def leaves(self) -> list[tuple[Placement, Any]]:
        """Every leaf with its placement, in the tree's order."""
        return list(zip(self.plan.leaves, flatten(self.tree)[1], strict=True))

    def window(self, placement: Placement) -> Window:
        """The elements of a whole leaf that this rank holds."""
        return placement.compute.spec.window(placement.compute.shape, self.mesh.shape, self.mesh.coords)


def _cut(leaf: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """A leaf without the rows behind the first ``rows``, its padding; of only padding one stays, as slices have it."""
    return leaf[: max(rows, 1)] if leaf.dim() and rows < len(leaf) else leaf


def given_params(what: str, given: Any) -> Any:
    """The parameters that a function was given: a plain tree, `Sharded` or `Local` ones, or those of a train state.

    Args:
        what: the function, for the message.

    Raises:
        TreeError: gradients, a module, a tuple that has parameters in it, or a part of a sharded tree.
    """
    if isinstance(given, tuple) and any(isinstance(_sharded(each), Sharded) for each in given):
        raise TreeError(
            f"{what}: a tuple of {', '.join(type(each).__name__ for each in given)}, where parameters are due; give "
            "one of them, such as the state"
        )
    if isinstance(given, torch.nn.Module):
        raise TreeError(
            f"{what}: {type(given).__name__} is a module, where parameters are due; take apply, params = "
            "sl.from_module(module)"
        )
    given = _sharded(given)
    if isinstance(given, Sharded):
        if given.role != "param":
            raise TreeError(f"{what}: these are gradients, where parameters are due; give state.params")
        _require_one(what, given)
    if not isinstance(given, Sharded | Local):
        require_no_shards(what, given)
    return given


def require_no_graph(what: str, tree: Tree, error: type[ShardlibError], variables: bool = False) -> None:
    """Refuse tensors by which a caller would differentiate, since gradients and losses are given without a graph.

    Args:
        what: has the tensors, for the message.
        error: the exception.
        variables: whether tensors may require a gradient that no operation has made, as parameters do.

    Raises:
        ShardlibError: of the class ``error``; lists them.
    """
    paths, leaves, _ = flatten(tree)
    found = [
        f"{path or 'the tree'}: shape {tuple(leaf.shape)}" + (f", of {leaf.grad_fn.name()}" if leaf.grad_fn else "")
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not (variables and leaf.grad_fn is None)
    ]
    if found:
        raise error(
            f"{what}: results have no graph, and these require gradients:\n{listing(found)}\nDetach them, make them "
            "parameters, or differentiate in the loss"
        )


def read_params(what: str, given: Any) -> Any:
    """The tree of whole leaves that a function of parameters reads: ``given``, or inside a loss that of `Sharded` ones.

    Raises:
        TreeError: sharded parameters outside of a loss, where nothing gathers them; or as `given_params`.
    """
    given = _sharded(given)
    if not isinstance(given, Sharded):
        return given
    if environment().reads is None:
        raise TreeError(
            f"{what} was given sharded parameters outside of a loss; use sl.make_eval_step or sl.unshard(params)"
        )
    return given.tree


def given_buffers(given: Any) -> Any:
    """The buffers of a train state; None of one without, and of anything else."""
    return None if _sharded(given) is given else given.buffers


def require_order(what: str, order: str, given: Any, *others: Any) -> None:
    """Refuse other arguments in the place of sharded parameters, or of a state, that are among ``others``.

    Raises:
        TreeError: states the ``order`` of the arguments of ``what``.
    """
    if not isinstance(_sharded(given), Sharded | Local | tuple) and any(
        isinstance(_sharded(each), Sharded) for each in others
    ):
        raise TreeError(
            f"{what}: {type(given).__name__} where parameters are due: its arguments are ({order}), in this order"
        )


def whole_params(what: str, given: Any) -> Any:
    """The parameters that a function was given, if they are a plain tree.

    Raises:
        TreeError: they are sharded, or as `given_params`.
    """
    params = given_params(what, given)
    if isinstance(params, Sharded | Local):
        raise TreeError(f"{what} takes whole parameters, and these are sharded; give sl.unshard(params)")
    return params


def sharded_params(what: str, given: Any) -> Sharded:
    """The parameters that a function was given, if they are sharded, of a train state too.

    Raises:
        TreeError: they are a plain tree, or at a level of torch.func, or as `given_params`; gradients are taken.
    """
    params = given if isinstance(given, Sharded) else given_params(what, given)
    if not isinstance(params, Sharded):
        raise TreeError(f"{what}: {type(params).__name__}, where a tree of sl.shard is due, or a train state")
    _require_one(what, params)
    if params.in_func:
        raise TreeError(
            f"{what}: shards inside of torch.func have no values; give what torch.func returns, or use sl.optim.vdot"
        )
    return params


def _require_one(what: str, params: Sharded) -> None:
    """Refuse several trees in one. Raises `TreeError`."""
    if params.stacked:
        raise TreeError(
            f"{what}: several trees in one (vmap, jacrev); take one, torch.utils._pytree.tree_map(lambda x: x[i], "
            "trees)"
        )


def _sharded(given: Any) -> Any:
    """The parameters of a train state, which is of a floor above; anything else unchanged."""
    params = None if isinstance(given, Sharded) else getattr(given, "params", None)
    return params if isinstance(params, Sharded) else given
