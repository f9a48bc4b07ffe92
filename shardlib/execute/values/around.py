"""What functions of sharded parameters are to torch.func and forward mode around them.

A loss, and every `Mean`, is one number of all ranks, from which they all compute the same; so its derivative with respect to
a shard is this rank's part of the whole derivative, at every stage. Gradients are shards, or equal on all ranks, as the plan
says, and are differentiated as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch

from shardlib.collectives.buffers import AxisLink, shared, summed
from shardlib.errors import HandleError, IllegalComposition, LossError, listing
from shardlib.execute.batches import as_tensors, cast, split_batch
from shardlib.execute.losses import Outcome, is_mean, read_loss, wants
from shardlib.execute.stages.one import keys_of
from shardlib.execute.values.function import Function
from shardlib.execute.values.keeping import recomputed
from shardlib.mesh.mesh import Mesh
from shardlib.nn.functional import Mean
from shardlib.plan.plan import Plan
from shardlib.rng import Key, seeding_torch
from shardlib.sharded.tree import Sharded
from shardlib.tree import Tree, flatten, tree_map, unflatten

# What a step as a function of values does not have, by the name of the transform that asks for it.


def require_values(plan: Plan, what: str, otherwise: str) -> None:
    """Refuse a plan that a step as a function of values cannot run.

    Args:
        what: what needs such a step.
        otherwise: what works with every plan.

    Raises:
        IllegalComposition: names the transforms, and a remedy for each.
    """
    reductions, remat = plan.reductions, plan.step.remat
    found = {
        "progressive_layer_drop, random_ltd: leave them out": plan.step.has_drops,
        # Whole tiles would wait together for backward.
        "tile: use remat(), or more ranks on the axis of zero": bool(plan.step.module_tiles)
        or any(bucket.tiles > 1 for bucket in plan.buckets),
        "remat(blocks=): recompute all blocks": remat is not None and remat.blocks is not None,
        "remat(store=): keep inputs of blocks on the device": remat is not None and bool(remat.store),
        "pipeline: leave it out, or use more ranks on the axis of zero": plan.stages.axis is not None,
        # Parts are checked in a step's first run.
        "sequence: use tensor_slicing over that axis": plan.step.sequence is not None,
        "precision('fp8'): use 'bf16'": any(placement.scaled for placement in plan.placements),
        "hierarchical: use replicate=": reductions.second_level is not None,
        # Residuals are part of a state, and what is rounded has no derivative.
        "onebit, quantize, powersgd: send what is not compressed": bool(reductions.codecs or reductions.packings),
    }
    lacks = [*_of_a_step(plan), *(each for each, there in found.items() if there)]
    if lacks:
        raise IllegalComposition(f"{what} does not go together with\n{listing(lacks)}\nOr {otherwise}")


def require_graph(plan: Plan) -> None:
    """Refuse a plan that a graph does not have. Raises `IllegalComposition`, with all transforms."""
    lacks = []
    if plan.step.layer_drop is not None:
        lacks.append("progressive_layer_drop: leave it out, or use random_ltd")
    if plan.step.tokens is not None and plan.step.tokens.spare:
        lacks.append("experts(spare=): leave spare out")
    if plan.stages.axis is not None:
        lacks += _of_a_step(plan)
        if plan.reductions.codecs:
            lacks.append("onebit, quantize(gradients=), powersgd: send what is not compressed, or leave out pipeline")
    if lacks:
        raise IllegalComposition(f"compile=True does not go together with\n{listing(lacks)}\nOr leave it out")


def _of_a_step(plan: Plan) -> list[str]:
    """What a step does with gradients that are complete, and that one micro-batch alone, or one stage, does not."""
    found = {
        "offload: keep parameters, gradients and states on the device": bool(plan.step.ahead)
        or any(set(bucket.memory) != {"device"} for bucket in plan.buckets),
        "reproducible: leave it out": plan.step.tree,
        "an optimizer that sums over an axis itself: use sl.optim.adamw": plan.reductions.owner is not None,
    }
    return [each for each, there in found.items() if there]


_WITHOUT = "differentiate a plain function of sl.unshard(params)"


class Around:
    """A function of sharded parameters, bound to a plan, for transforms of torch.func around it.

    Args:
        what: the function, as a user calls it.

    Raises:
        IllegalComposition: a plan with transforms that functions of values do not have.
    """

    def __init__(self, fn: Callable[..., Any], plan: Plan, mesh: Mesh, what: str, trained: bool) -> None:
        require_values(plan, f"torch.func, or forward mode, around {what}", _WITHOUT)
        self._plan, self._mesh, self._what = plan, mesh, what
        self.function: Function = Function(fn, plan, mesh, trained, recomputed(plan) if trained else None)
        self._batch = [AxisLink(mesh, axis, "losses") for axis in plan.batch_axes if mesh.shape[axis] > 1]

    def value_and_grad(self, params: Sharded, batch: Any, buffers: Any, rng: Key | None) -> tuple[Any, Any, Sharded]:
        """The loss, aux and the gradients of `shardlib.value_and_grad`, all of them differentiable."""
        plan, function, stored = self._plan, self.function, params.buffers
        if plan.step.loss_scale is not None:
            raise HandleError(
                f"torch.func around {self._what} does not scale losses: use sl.precision('bf16') instead of fp16"
            )
        if buffers is not None:
            raise HandleError(f"torch.func around {self._what} takes no buffers: close over them in the loss function")
        microbatches = split_batch(as_tensors(batch, self._mesh.device), plan, self._mesh)
        outcomes: list[Outcome] = []
        pulls = []
        for microbatch, key in zip(microbatches, keys_of(plan, self._mesh, microbatches, rng)):
            outcome, pull = differentiated(partial(self._outcome, stored, microbatch, key), function.slots())
            outcomes.append(outcome)
            pulls.append(pull)
        totals, weights = self._over_ranks(outcomes)
        seeds = torch.where(weights == 0, 0.0, 1 / weights)
        value = (totals * seeds).sum()
        for link in self._batch:
            seeds = shared(seeds, link)
        held: dict[str, torch.Tensor] = {}
        for pull, outcome in zip(pulls, outcomes):
            cotangents = [seed.to(mean.total.dtype) for seed, mean in zip(seeds.unbind(), outcome.means)]
            held = {name: held[name] + new if held else new for name, new in pull(cotangents).items()}
        grads = Sharded(plan, self._mesh, "grad", function.reduced(held, {}))
        aux = None if outcomes[-1].aux is None else self._means(_added([outcome.aux for outcome in outcomes]))
        return value, aux, grads

    def _outcome(
        self, stored: Mapping[str, torch.Tensor], microbatch: Any, key: Key | None, slots: Mapping[str, torch.Tensor]
    ) -> Outcome:
        with seeding_torch(key, self._mesh.device):
            return self.function.outcome(stored, slots, microbatch, key)

    def evaluate(self, params: Sharded, args: Sequence[Any]) -> Any:
        """The result of `shardlib.make_eval_step`'s function, differentiable."""
        given = [tree_map(lambda leaf: cast(leaf, self._plan), as_tensors(arg, self._mesh.device)) for arg in args]
        return self._means(self.function(params.buffers, {}, *given), own=True)

    def _over_ranks(self, outcomes: Sequence[Outcome]) -> tuple[torch.Tensor, torch.Tensor]:
        """The totals and the weights of a loss's means, over micro-batches and ranks, in float64."""
        totals = sum(torch.stack([mean.total.double() for mean in outcome.means]) for outcome in outcomes)
        weights = sum(outcome.weights for outcome in outcomes)
        return self._summed(totals), self._summed(weights)

    def _summed(self, values: Any) -> torch.Tensor:
        for link in self._batch:
            values = summed(values, link)
        return values

    def _means(self, tree: Tree, own: bool = False) -> Tree:
        """A result with each `Mean` as a number over all ranks; other tensors are this rank's own."""

        def value(leaf: Any) -> Any:
            if is_mean(leaf):
                device = self._mesh.device
                pair = [torch.as_tensor(number, device=device).reshape(()).double() for number in leaf]
                total, weight = self._summed(torch.stack(pair)).unbind()
                return total / weight
            return _Own.apply(leaf, self._what) if own and self._batch and _is_floating(leaf) else leaf

        return optree.tree_map(value, tree, is_leaf=is_mean)


def differentiated(
    loss: Callable[[Mapping[str, torch.Tensor]], Outcome], slots: dict[str, torch.Tensor]
) -> tuple[Outcome, Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]]:
    """A loss's outcome, and the function from gradients of its totals to those of slots, where torch.func may be around."""
    form: list[tuple[Any, list[Any]]] = []

    def run(slots: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outcome = loss(slots)
        _, leaves, treedef = flatten(outcome)
        form.append((treedef, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
        return [mean.total for mean in outcome.means], [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    differentiated: Any = torch.func.vjp(run, slots, has_aux=True)
    _, pull, tensors = differentiated
    treedef, others = form[0]
    rest = iter(tensors)
    leaves = [next(rest) if other is None else other for other in others]
    return unflatten(treedef, leaves), lambda cotangents: pull(list(cotangents))[0]


class _Own(torch.autograd.Function):
    """A result of this rank alone, of which no gradient is taken: ranks would add up those of different numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, what: str) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise LossError(
            f"what {ctx.what} returned of this rank's rows is differentiated. Return sl.Mean(total, weight), or use "
            "forward mode"
        )

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
        return x.view_as(x)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _added(trees: Sequence[Tree]) -> Tree:
    """The last of several results, with each `Mean` in it summed over all of them."""

    def value(*leaves: Any) -> Any:
        if not is_mean(leaves[-1]):
            return leaves[-1]
        return Mean(*(sum(values) for values in zip(*leaves)))

    return optree.tree_map(value, *trees, is_leaf=is_mean)


def plain_value_and_grad(
    loss_fn: Callable[..., Any], params: Tree, batch: Any, rng: Key | None
) -> tuple[Any, Any, Tree]:
    """The loss, aux and the gradients of a plain tree's floating leaves, on one device."""
    paths, leaves, treedef = flatten(params)
    floating = {path: leaf for path, leaf in zip(paths, leaves) if leaf.is_floating_point()}
    extra = {"rng": rng} if rng is not None and wants(loss_fn, "rng") else {}
    device = leaves[0].device

    def loss(given: Mapping[str, torch.Tensor]) -> Outcome:
        tree = unflatten(treedef, [given.get(path, leaf) for path, leaf in zip(paths, leaves)])
        with seeding_torch(rng, device):
            return read_loss(loss_fn(tree, as_tensors(batch, device), **extra), False)

    outcome, pull = differentiated(loss, floating)
    seeds = torch.where(outcome.weights == 0, 0.0, 1 / outcome.weights)
    value = (torch.stack([mean.total.double() for mean in outcome.means]) * seeds).sum()
    found = pull([seed.to(mean.total.dtype) for seed, mean in zip(seeds.unbind(), outcome.means)])
    aux = optree.tree_map(lambda leaf: leaf[0] / leaf[1] if is_mean(leaf) else leaf, outcome.aux, is_leaf=is_mean)
    return value, aux, unflatten(treedef, [found.get(path) for path in paths])
