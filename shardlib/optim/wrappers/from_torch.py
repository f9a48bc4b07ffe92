"""Elementwise optimizers of torch as gradient transformations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation, require_params, scaled, write_copies
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import on_numbers
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, flatten, leaves_of, tree_map, unflatten

Optimizer = Callable[..., torch.optim.Optimizer]


class TorchState(NamedTuple):
    """``count``: steps taken (0-d float); ``elements``: name -> tree like the parameters; ``numbers``: name -> 0-d float64.

    The names are those of the torch optimizer's state, which torch makes in the first step. So until then ``elements`` and
    ``numbers`` are not read.
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    elements: dict[str, Tree]
    numbers: dict[str, torch.Tensor]


class Kinds(NamedTuple):
    """The contents of an optimizer's state for a parameter.

    ``elements``: name of a tensor like the parameter -> dtype (None for the parameter's). ``numbers``: name of a number ->
    example of its type.
    """

    elements: dict[str, torch.dtype | None]
    numbers: dict[str, Any]


@coded
def from_torch(optimizer_class: Optimizer, **options: Any) -> GradientTransformation:
    """A ``torch.optim.Optimizer`` as a gradient transformation: ``from_torch(torch.optim.NAdam, lr=1e-3)``.

    It runs on shards, and is made anew at each step, so it must be elementwise and keep all it knows in its state. This is
    probed: for some steps a parameter is updated whole, and in several parts that know nothing of each other, with equal
    results. ``lr`` may be a schedule.

    Raises:
        TypeError: an optimizer instead of its class.
        IllegalComposition: the optimizer is not elementwise (Muon, Adafactor), keeps numbers in its groups, or needs a
            closure (LBFGS), sparse gradients (SparseAdam) or anything but parameters and gradients; says why.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.from_torch(torch.optim.NAdam, lr=0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.1056,  0.1056])
    """
    given: object = optimizer_class
    if isinstance(given, torch.optim.Optimizer):
        name = type(given).__name__
        raise TypeError(
            f"from_torch takes the class, not an optimizer of parameters: from_torch(torch.optim.{name}, lr=...)"
        )
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    rate = on_numbers(options.pop("lr")) if callable(options.get("lr")) else None

    def make(params: list[torch.Tensor], count: torch.Tensor) -> torch.optim.Optimizer:
        now = options if rate is None else {**options, "lr": float(rate(count))}
        return optimizer_class(params, **now)

    # A schedule may begin at 0, where no parameter moves.
    kinds = _probe(name, partial(optimizer_class, **(options if rate is None else {**options, "lr": 0.01})))

    def init(params: Tree, _: Shards) -> TorchState:
        elements = {
            kind: tree_map(lambda p, dtype=dtype: torch.zeros_like(p, dtype=dtype), params)
            for kind, dtype in kinds.elements.items()
        }
        numbers = {kind: torch.zeros((), dtype=torch.float64) for kind in kinds.numbers}
        return TorchState(torch.zeros(()), elements, numbers)

    def step(params: Tree, grads: Tree, state: TorchState) -> TorchState:
        """Run one step, which writes to the parameters and to the trees of the state; returns the new state."""
        _, leaves, treedef = flatten(params)
        inputs = [_as_parameter(leaf, grad) for leaf, grad in zip(leaves, leaves_of(grads), strict=True)]
        columns = {kind: leaves_of(tree) for kind, tree in state.elements.items()}
        if not inputs:
            # A rank without parameters (of another stage) must advance the numbers too, since it may be the one to save them.
            none = torch.zeros(0, dtype=torch.float64)
            inputs = [_as_parameter(none, none)]
            columns = {kind: [none.to(dtype)] for kind, dtype in kinds.elements.items()}
        tx = make(inputs, state.count)
        if state.count > 0:
            for index, leaf in enumerate(inputs):
                tx.state[leaf].update({kind: column[index] for kind, column in columns.items()})
                tx.state[leaf].update(dict(_numbers_back(state.numbers, kinds)))
        tx.step()
        held = inputs[: len(leaves)]
        after = {kind: unflatten(treedef, [tx.state[leaf][kind] for leaf in held]) for kind in kinds.elements}
        first = tx.state[inputs[0]]
        numbers = {kind: torch.as_tensor(first[kind]).to(torch.float64, copy=True) for kind in kinds.numbers}
        return TorchState(state.count + 1, after, numbers)

    def update(updates: Tree, state: TorchState, params: Tree, *, shards: Shards) -> tuple[Tree, TorchState]:
        require_params(name, params)
        moved = tree_map(torch.clone, params)
        after = step(moved, tree_map(torch.clone, updates), tree_map(torch.clone, state))
        return tree_map(torch.sub, moved, params), after

    def apply(
        params: Tree, updates: Tree, state: TorchState, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> TorchState:
        after = step(params, scaled(updates, scale), state)
        write_copies(copies, params)
        return after

    return GradientTransformation(init, update, Locality.ELEMENTWISE, apply=apply)


def _as_parameter(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """A leaf tensor of autograd in the memory of ``leaf``, with ``grad`` as its gradient."""
    parameter = leaf.detach().requires_grad_()
    parameter.grad = grad.detach().to(leaf.dtype)
    return parameter


def _numbers_back(numbers: dict[str, torch.Tensor], kinds: Kinds) -> Iterator[tuple[str, Any]]:
    """The numbers in the types that the optimizer's state has them in."""
    for name, value in numbers.items():
        like = kinds.numbers[name]
        yield name, value.to(like.dtype, copy=True) if isinstance(like, torch.Tensor) else type(like)(value.item())


_STEPS = 3


def _probe(name: str, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Kinds:
    """The contents of the optimizer's state. Raises `IllegalComposition` for an optimizer that is not elementwise."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(24, generator=generator, dtype=torch.float64)
    grads = torch.randn(_STEPS, 24, generator=generator, dtype=torch.float64)
    grads[0] -= start * (grads[0] @ start) / (start @ start)  # for one that looks at the angle to the parameter
    grads[-1] *= 30  # for one that clips what is large
    whole = [start.view(4, 6).clone()]
    runs = [run.clone() for run in start.split([1, 2, 21])]
    try:
        states = [_run(make, whole, grads)]
        states += [[_run(make, [run], rows, anew=True)[0] for run, rows in zip(runs, grads.split([1, 2, 21], dim=1))]]
    except Exception as error:
        raise IllegalComposition(
            f"from_torch: {name} does not step on parameters and gradients alone ({type(error).__name__}: {error}). Use one "
            "of shardlib.optim, or a GradientTransformation"
        ) from error
    elements = {
        kind: None if value.dtype == start.dtype else value.dtype
        for kind, value in states[0][0].items()
        if isinstance(value, torch.Tensor) and value.shape == whole[0].shape
    }
    numbers = {
        kind: value
        for kind, value in states[0][0].items()
        if kind not in elements and isinstance(value, (bool, int, float, torch.Tensor))
    }
    different = [kind for kind in elements if not _same([s[kind] for s in states[0]], [s[kind] for s in states[1]])]
    different += [
        kind
        for kind, value in numbers.items()
        if torch.as_tensor(value).dim() or any(torch.as_tensor(s[kind] != value).any() for s in states[1])
    ]
    different += ["the parameters"] if not _same(whole, runs) else []
    if different:
        raise IllegalComposition(
            f"from_torch: {name} does not update each element alone: {', '.join(different)} differ when parts of a parameter "
            "are updated by themselves, by an optimizer that each step makes with their state. Use one of shardlib.optim, or "
            "a GradientTransformation with the locality it needs"
        )
    if lost := [k for k, v in states[0][0].items() if k not in elements and k not in numbers and v is not None]:
        raise IllegalComposition(
            f"from_torch: {name} keeps {', '.join(lost)}, which are neither tensors like the parameters nor numbers; leave "
            "out the option that needs them"
        )
    return Kinds(elements, numbers)


def _run(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    leaves: list[torch.Tensor],
    grads: torch.Tensor,
    anew: bool = False,
) -> list[dict[str, Any]]:
    """The optimizer's state of each of ``leaves`` after a step for each row of ``grads``, which change ``leaves`` in
    place. ``anew``: whether each step has an optimizer of its own, with the state of the one before."""
    sizes = [leaf.numel() for leaf in leaves]
    inputs = [_as_parameter(leaf, torch.zeros_like(leaf)) for leaf in leaves]
    tx = make(inputs)
    for number, row in enumerate(grads):
        if anew and number:
            states = tx.state
            tx = make(inputs)
            for leaf in inputs:
                tx.state[leaf].update(states[leaf])
        for leaf, grad in zip(inputs, row.split(sizes), strict=True):
            leaf.grad = grad.view(leaf.shape).clone()
        tx.step()
    return [dict(tx.state[leaf]) for leaf in inputs]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether both lists have the same elements, up to the rounding of float64.

    torch computes the ends of a tensor by other instructions than its middle.
    """
    a, b = (torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) for tensors in (first, second))
    return torch.allclose(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
