"""Hyper-parameters in the optimizer's state, where they can be read and written between steps and are checkpointed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

import optree
import torch

from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import is_integer, is_number
from shardlib.optim.code import CodedSchedule, call_code
from shardlib.optim.combine import require_no_axis
from shardlib.optim.schedules.base import Schedule, is_schedule, on_numbers
from shardlib.optim.shards import WHOLE, Shards
from shardlib.plan.code import code_of
from shardlib.tree import Tree


class Varying(float):
    """A number that a schedule may change at the next step. Always true, so that 0 does not disable what it controls."""

    def __bool__(self) -> bool:
        return True


class InjectState(NamedTuple):
    """``count``: steps taken (0-d float); ``hyperparams``: name -> value for the next step, 0-d float64 on the CPU.

    ``inner_state``: the optimizer's state.
    """

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    hyperparams: dict[str, torch.Tensor]
    inner_state: Tree


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation], static_args: str | tuple[str, ...] = ()
) -> Callable[..., GradientTransformation]:
    """``inject_hyperparams(adamw)(3e-4, weight_decay=0.1)``: an `adamw` whose hyper-parameters lie in its state.

    Every argument that is a float, or an int where floats are due (the parameter is annotated ``float``, alone or in a
    union, or its default is one), becomes an entry of ``hyperparams``, default values included. So does every schedule,
    which is called at each step. Write ``state.hyperparams["lr"] = 1e-4`` to set a number for all later steps. Other
    arguments are passed on. As optax.inject_hyperparams.

    Args:
        static_args: names of arguments that are passed on in any case.

    Raises:
        ValueError: a static argument that the factory does not have, or no argument to inject; also in a step, a number that
            the factory refuses.
        IllegalComposition: the optimizer reduces gradients itself.

    >>> p, g = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    >>> tx = sl.optim.inject_hyperparams(sl.optim.sgd)(0.5)
    >>> state = tx.init(p)
    >>> sorted(state.hyperparams)
    ['lr', 'momentum']
    >>> updates, state = tx.update(g, state, p)
    >>> updates["w"]
    tensor([-0.5000, -0.5000])
    """
    signature = inspect.signature(inner_factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    if unknown := sorted(static - signature.parameters.keys()):
        raise ValueError(
            f"inject_hyperparams: {inner_factory.__name__} has no argument {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(signature.parameters)}"
        )

    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name not in static}
        schedules = {
            n: on_numbers(value) for n, value in given.items() if callable(value) and not isinstance(value, type)
        }
        numbers = {name: value for name, value in given.items() if _is_number(value, signature.parameters[name])}
        if not schedules and not numbers:
            raise ValueError(
                f"inject_hyperparams: no argument of {inner_factory.__name__} is a number or a schedule: an int counts where "
                "the parameter is annotated float or defaults to one, **options do not; call it without inject_hyperparams"
            )

        def at(count: torch.Tensor, hyperparams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            scheduled = {name: schedule(count).cpu() for name, schedule in schedules.items()}
            return {
                name: scheduled[name]
                if name in scheduled
                else torch.as_tensor(value, dtype=torch.float64, device="cpu")
                for name, value in hyperparams.items()
            }

        def inner(hyperparams: Mapping[str, torch.Tensor]) -> GradientTransformation:
            now = inspect.BoundArguments(signature, dict(bound.arguments))
            values = {name: value.item() for name, value in hyperparams.items()}
            now.arguments.update(
                {name: Varying(value) if name in schedules else value for name, value in values.items()}
            )
            return inner_factory(*now.args, **now.kwargs)

        first = inner({name: schedule(0) for name, schedule in schedules.items()})
        require_no_axis("inject_hyperparams", first)

        def init(params: Tree, shards: Shards = WHOLE) -> InjectState:
            count = torch.zeros(())
            hyperparams = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in numbers.items()}
            hyperparams |= {name: schedule(count).cpu() for name, schedule in schedules.items()}
            return InjectState(count, hyperparams, first.init(params, shards=shards))

        def update(updates: Tree, state: InjectState, params: Tree, *, shards: Shards = WHOLE):
            hyperparams = at(state.count, state.hyperparams)
            updates, after = inner(hyperparams).update(updates, state.inner_state, params, shards=shards)
            return updates, InjectState(state.count + 1, hyperparams, after)

        def apply(
            params: Tree, updates: Tree, state: InjectState, scale: torch.Tensor | None, shards: Shards, copies: Tree
        ) -> InjectState:
            hyperparams = at(state.count, state.hyperparams)
            after = inner(hyperparams).apply(
                params, updates, state.inner_state, scale=scale, shards=shards, copies=copies
            )
            return InjectState(state.count + 1, hyperparams, after)

        made = GradientTransformation(init, update, first.locality, apply=apply, sends=first.sends, last=first.last)
        made.code = partial(_code, inner_factory, static_args, args, kwargs)
        return made

    return make


def _code(factory: Callable[..., Any], static_args: str | tuple[str, ...], args: Any, kwargs: Any) -> str:
    """The two calls that make a transformation: ``inject_hyperparams(adamw)(0.1)``."""
    call = call_code(factory, *args, **kwargs)
    name = factory.__name__ if factory.__module__.startswith("shardlib.optim.") else code_of(factory)
    static = f", {code_of(static_args)}" if static_args else ""
    return f"inject_hyperparams({name}{static})({call.partition('(')[2]}"


def _is_number(value: Any, parameter: inspect.Parameter) -> bool:
    if not is_number(value):
        return False
    return not is_integer(value) or isinstance(parameter.default, float) or _takes_floats(parameter.annotation)


def _takes_floats(annotation: Any) -> bool:
    """Whether an annotation is ``float`` or a union with it; it is text in modules that postpone annotations.

    >>> [_takes_floats(of) for of in (float, float | None, "float | Schedule", "Optional[float]", int, "list[float]")]
    [True, True, True, True, False, False]
    """
    if isinstance(annotation, str):
        members = re.sub(r"(?:\w+\.)*(?:Optional|Union)\[(.*)\]", r"\1", annotation)
        return "float" in map(str.strip, re.split(r"[|,]", members))
    is_union = get_origin(annotation) in (Union, UnionType)
    return annotation is float or (is_union and float in get_args(annotation))


# The hyper-parameters of a gradient transformation, found in its functions or its state, for ranks to compare.


# Steps at which ranks compare what a schedule of the user's own gives, as it may depend on what nobody can look into.
_PROBED = (0, *(digit * 10**power for power in range(7) for digit in (1, 2, 5)))


def settings(optimizer: GradientTransformation, ranks: int = 1) -> dict[str, str]:
    """Name -> value of the rates, decays and other values that the optimizer's functions close over, also indirectly.

    Of functions from outside the library only floats (such as the rates of a schedule), since other values may rightly differ
    between ranks; with several ``ranks`` also what such schedules give at some steps.
    """
    values: dict[str, str] = {}
    for name, value in _settings("optimizer", optimizer, set(), True, _PROBED if ranks > 1 else ()):
        values.setdefault(name, value)
    return values


def injected(state: Tree) -> dict[str, str]:
    """Name -> value of the hyper-parameters in an optimizer's state, where a user may change them between steps."""
    nodes = optree.tree_leaves(state, is_leaf=lambda node: isinstance(node, InjectState))
    held = enumerate(node.hyperparams for node in nodes if isinstance(node, InjectState))
    return {f"{name} ({number})": repr(float(value)) for number, values in held for name, value in values.items()}


def _settings(name: str, value: Any, met: set[int], internal: bool, probed: Sequence[int]) -> Iterator[tuple[str, str]]:
    """The settings in ``value``. ``internal``: whether it belongs to a function of this library; ``met``: ids of values
    met; ``probed``: steps at which schedules are looked at."""
    if isinstance(value, float) or (internal and isinstance(value, (int, str, complex, torch.dtype))):
        yield name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes
        return
    if id(value) in met:
        return
    met.add(id(value))
    for key, held in _contents(value):
        inside = value.__module__.startswith("shardlib.") if isinstance(value, FunctionType) else internal
        yield from _settings(f"{name}/{key}", held, met, inside, probed)
    if is_schedule(value) and not value.__module__.startswith("shardlib."):
        yield from ((f"{name} at step {step}", _given(value, step)) for step in probed)


def _given(schedule: Schedule, step: int) -> str:
    """What a schedule gives at a step, or the name of its error: a table may have fewer steps."""
    try:
        return repr(float(schedule(step)))
    except Exception as error:
        return type(error).__name__


def _contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """Names and values that a value of a known type consists of."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from enumerate(value.__defaults__ or ())
        yield from (("constant", constant) for constant in value.__code__.co_consts if isinstance(constant, float))
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield value.__name__, value.__self__
    elif isinstance(value, partial):
        yield from (("function", value.func), *enumerate(value.args), *value.keywords.items())
    elif isinstance(value, GradientTransformation):
        yield from ((name, held) for name, held in vars(value).items() if name != "code")
    elif isinstance(value, CodedSchedule):
        yield "schedule", value.schedule
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
