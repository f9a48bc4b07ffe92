"""What a state has of one parameter, whole: the parameter itself, its master, moments and gradients, to read and to write."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.checkpoint.agreement import gathered
from shardlib.checkpoint.fragments import (
    GRADS,
    MASTERS,
    PARAMS,
    Fragment,
    decoded,
    needed_fragments,
    owned_fragments,
    sharded_fragments,
)
from shardlib.checkpoint.reading import Fill, joined
from shardlib.checkpoint.replicated import diverged_axis
from shardlib.checkpoint.trees import CheckpointTrees, params_of, trees_of
from shardlib.collectives import primitives
from shardlib.errors import IllegalComposition, TreeError, listing
from shardlib.mesh.specs import IndexMap
from shardlib.optim.on_disk import InPlace, in_files
from shardlib.optim.train_state import OptimizerState, TrainState
from shardlib.plan.plan import Plan
from shardlib.sharded.checksum import checksums
from shardlib.sharded.tree import Sharded

_LABELS = {PARAMS: "param", MASTERS: "master", GRADS: "grad"}


def read_leaf(state: TrainState | Sharded, path: str) -> dict[str, torch.Tensor]:
    """Name -> whole tensor of what a state has for the parameter at ``path``, on the CPU. Collective.

    The names are "param", "master" (its fp32 copy, under `precision`) and those of the optimizer's fields that have an
    element for each of the parameter's: "mu" and "nu" of Adam, "trace" of SGD's momentum. Where a chain has several of one
    name, they are told apart by what stands before: "0/mu". It does not matter how the state is laid out: over ranks, in
    host memory, on disk or in few bits.

    Args:
        state: a `TrainState`; or `Sharded` parameters, with "param" alone, or gradients, with "grad".
        path: such as "blocks/0/weight".

    Raises:
        TreeError: there is no such parameter.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adam(1e-3))
    >>> sl.checkpoint.read_leaf(state, "w")
    {'param': tensor([1., 1.]), 'mu': tensor([0., 0.]), 'nu': tensor([0., 0.])}
    """
    params = state.params if isinstance(state, TrainState) else state
    path = _leaf(params.plan, path)
    pieces = [each._replace(data=each.data.detach().cpu()) for each in _owned(state, path)]
    whole: dict[str, torch.Tensor] = {}
    for of_rank in gathered(params.mesh, pieces):
        for name, start, data, window in of_rank:
            if name not in whole:
                whole[name] = torch.empty(window.shape, dtype=data.dtype)
            whole[name].view(-1)[IndexMap(window, start).flat(len(data))] = data
    labels = _labels(whole, path)
    return {labels[name]: whole[name] for name in sorted(whole, key=_order)}


def write_leaf(
    state: TrainState | Sharded, path: str, values: Mapping[str, torch.Tensor], *, donate: bool = True
) -> TrainState | Sharded:
    """``state`` with other whole tensors for the parameter at ``path``, under the names of `read_leaf`. Collective.

    A parameter and its master are one: give either, and both follow. What is not named stays as it is.

    Args:
        values: the same on every rank. Other dtypes are cast to the state's.
        donate: whether the new state takes over the memory of ``state``, which may then not be used again. Parameters and
            gradients by themselves are copied.

    Raises:
        TreeError: no such parameter, names that the state does not have for it, or other shapes.
        RankMismatch: ranks were given different values.
        IllegalComposition: the ranks of an optimizer that reduces gradients itself have diverged; or ``donate=False`` with
            anything on disk.

    >>> state, _ = sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, sl.optim.adam(1e-3))
    >>> state = sl.checkpoint.write_leaf(state, "w", {"nu": torch.full((2,), 0.5)})
    >>> sl.checkpoint.read_leaf(state, "w")["nu"]
    tensor([0.5000, 0.5000])
    """
    if isinstance(state, Sharded):
        made = copy.deepcopy(state)
        _write(sharded_fragments(made), made, path, values, {})
        return made
    if not donate and in_files(state.params.plan):
        raise IllegalComposition("write_leaf(donate=False): what is on disk is there once; leave donate=True")
    settled = state.settled_on_disk()
    if not donate:
        settled = copy.deepcopy(settled)
    trees = trees_of(settled)
    if diverged_axis(trees) is not None:
        raise IllegalComposition(
            "write_leaf: ranks' parameters differ after a step that sent nothing. Write after one that sends: "
            "sl.optim.ZeroOneSteps(...).sent(state.step) is not Sent.NOTHING"
        )
    _write(needed_fragments(trees), trees.params, path, values, trees.packed)
    params, opt, comm = settled.params.next(), settled.opt, settled.comm
    after = TrainState(settled.step, params, opt, comm, settled.buffers, settled.scale, settled.rng).fitting()
    if donate:
        state.take("write_leaf", "the state that it returned, or pass donate=False to keep this one")
    return after


@dataclass(frozen=True)
class _WholeTensors:
    """Whole tensors by name, in the place of saved ones."""

    whole: Mapping[str, torch.Tensor]

    def fill(self, fragment: Fragment, name: str) -> None:
        index = IndexMap(fragment.window, fragment.start).flat(fragment.data.numel())
        fragment.data.copy_(self.whole[name].detach().cpu().reshape(-1)[index])


def _write(
    fragments: Iterable[Fragment],
    params: Sharded,
    path: str,
    values: Mapping[str, torch.Tensor],
    packed: Mapping[int, Any],
) -> None:
    """Fill the fragments of the parameter, views of the state, on all ranks."""
    plan, mesh = params.plan, params.mesh
    path = _leaf(plan, path)
    held = list(_of(fragments, plan, path))
    names = gathered(mesh, [fragment.name for fragment in held])
    label_of = _labels({name: None for of_rank in names for name in of_rank}, path)
    shape = plan.everywhere.placement_of[path].compute.shape
    there = label_of.values()
    problems = [f"{name}: not there; there are {', '.join(there)}" for name in values if name not in there]
    problems += [
        f"{name}: shape {tuple(value.shape)}, the parameter's is {tuple(shape)}"
        for name, value in values.items()
        if tuple(value.shape) != tuple(shape)
    ]
    if {"param", "master"} <= values.keys():
        problems.append("param and master: they are one, so give the master alone")
    if problems:
        raise TreeError(f"write_leaf: values of {path} do not fit:\n{listing(problems)}\nread_leaf has the names")
    primitives.require_equal(mesh, "values", checksums(dict(values)), "Give write_leaf the same on every rank.")
    given = {name: values[label] for name, label in label_of.items() if label in values}
    one = {PARAMS + path, MASTERS + path}
    for name in one & given.keys():
        given |= dict.fromkeys(one, given[name])
    writes = InPlace(packed.values())
    saved: Any = _WholeTensors(given)
    fills = [Fill(fragment, ((fragment.name, 1.0),)) for fragment in held if fragment.name in given]
    with torch.no_grad():
        writes.begin()
        for fill in joined(fills, packed):
            fill.run(saved)


def _owned(state: TrainState | Sharded, path: str) -> Iterator[Fragment]:
    """Ranges of what the state has for a leaf, each on one rank."""
    if isinstance(state, Sharded):
        params, packed = params_of(state)
        trees = CheckpointTrees(params, OptimizerState({}, ()), {}, None, {}, packed, {})
        fragments = sharded_fragments(params, owned=True)
    else:
        trees = trees_of(state.settled())
        fragments = owned_fragments(trees, diverged_axis(trees))
    return decoded(trees, _of(fragments, trees.params.plan, path))


def _leaf(plan: Plan, path: str) -> str:
    """The path by which a plan knows a leaf: of tied ones the first."""
    known = dict(zip(plan.everywhere.shape.paths, plan.everywhere.leaves, strict=True))
    if path not in known:
        raise TreeError(f"there is no parameter {path!r} in the state, which has\n{listing(sorted(known))}")
    return known[path].path


def _of(fragments: Iterable[Fragment], plan: Plan, path: str) -> Iterator[Fragment]:
    """The fragments of a leaf, and not of one whose path ends as this one's does."""
    longer = tuple(f"/{other}" for other in plan.everywhere.placement_of if other.endswith(f"/{path}"))
    for fragment in fragments:
        if fragment.name.endswith(f"/{path}") and not fragment.name.endswith(longer):
            yield fragment


def _labels(names: Mapping[str, Any], path: str) -> dict[str, str]:
    """The name that users know for each tensor's."""
    prefixes = {name: name.removesuffix(path) for name in names}
    trees = {name: prefix.removeprefix("opt/inner/").strip("/") for name, prefix in prefixes.items()}
    last = Counter(tree.rpartition("/")[2] for tree in trees.values())
    return {
        name: _LABELS.get(prefixes[name]) or (short if last[short := tree.rpartition("/")[2]] == 1 else tree)
        for name, tree in trees.items()
    }


def _order(name: str) -> tuple[int, str]:
    """The parameter first, then its master."""
    return next((at for at, prefix in enumerate(_LABELS) if name.startswith(prefix)), len(_LABELS)), name
