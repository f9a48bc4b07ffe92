"""The module that was copied: what is done to it afterwards is done to its copies, as long as it lives; its hooks; and a look
at the first calls of a copy, for writes that no version counter sees and for uses of the original's parameters.

``module.eval()``, ``module.dropout.p = 0``, a hook or a changed configuration are seen by the next call of a copy. Parameters
are not followed: those of a call are its arguments.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardlib.common._compat import (
    NO_ATTRIBUTES,
    FakeTensor,
    own_buffers,
    own_children,
    own_parameters,
    post_accumulate_hooks,
    read_backward_hooks,
    version_of,
)
from shardlib.common.originals import Names, function_of_user, names_of, register
from shardlib.common.writes import Observer, has_place, owner_of, place_of
from shardlib.common.writes import written as written_to
from shardlib.errors import TreeError, listing
from shardlib.models.copying import Copied, Copy, joined

_log = logging.getLogger("shardlib.models")
_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))  # compared as they are


class Original:
    """A module that was copied, known by weak references.

    Args:
        copied: the copy.

    Attributes:
        names: of its parameters.
        calls: see `CopiedModule`.
    """

    calls: int
    names: Names

    def __init__(self, module: nn.Module, copied: Copied) -> None:
        self.calls = 0
        register(self)
        self._placeholders, self.names = copied.placeholders, names_of(module)
        paths = {id(part): name for name, part in module.named_modules()}
        self._objects = [
            _FollowedObject(reference, made, _State(value), paths.get(id(value), type(value).__name__))
            for value, made in copied.copier.pairs
            if (reference := _reference(value, copied.copier)) is not None
        ]

    def copied_again(self, copied: Copied) -> Original:
        """The same module as the original of another copy, which was made of the first one."""
        again = copy.copy(self)
        register(again)
        again._placeholders = copied.placeholders
        again._objects = [
            _FollowedObject(each.original, copied.copier(each.copy), each.seen, each.path) for each in self._objects
        ]
        return again

    def follow(self) -> dict[str, torch.Tensor | None]:
        """Carry over to the copy what was done to the module since; returns the buffers that changed, by name. Raises
        `TreeError`: submodules, parameters, their ``requires_grad`` or their hooks changed."""
        self.calls += 1
        living = self._living()
        changed = [(value, each) for value, each in living if each.seen.differs(value)]
        if not changed:
            return {}
        _require_same_parts(changed)
        modules = {each.path: value for value, each in living if isinstance(value, nn.Module)}
        tensors = {
            joined(path, name): tensor
            for path, module in modules.items()
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
            if tensor is not None
        }
        known: dict[int, Any] = {id(value): each.copy for value, each in living}
        known |= {id(tensors[name]): each for name, each in self._placeholders.items() if name in tensors}
        copier = Copy(modules.values(), tensors, known)
        buffers: dict[str, torch.Tensor | None] = {}
        for value, each in changed:
            each.carry(value, copier)
            buffers |= {joined(each.path, name): own_buffers(value)[name] for name in each.seen.written(value)}
            each.seen = _State(value)
        return buffers

    def differs(self) -> bool:
        """See `CopiedModule`."""
        return any(each.seen.differs(value) for value, each in self._living())

    def _living(self) -> list[tuple[Any, _FollowedObject]]:
        return [(value, each) for each in self._objects if (value := each.original()) is not None]


@dataclass(slots=True, eq=False)
class _FollowedObject:
    """An object with attributes in the original, its copy, and what the former held when it was last looked at."""

    original: Callable[[], Any]
    copy: Any
    seen: _State
    path: str

    def carry(self, value: Any, copier: Copy) -> None:
        """Give the copy the attributes that the original was given, or that were changed in place."""
        mine, theirs = vars(self.copy), vars(value)
        for key in self.seen.changed(value):
            if key not in theirs:
                mine.pop(key, None)
            elif not (isinstance(theirs[key], torch.Tensor) and theirs[key].grad_fn):  # a result of a call
                mine[key] = copier(theirs[key])


class _State:
    """What an object held at some time, by identity.

    Values that could be replaced by others of the same identity are kept alive, or are watched by weak references.
    """

    __slots__ = ("_alive", "_buffers", "_containers", "_died", "_ids", "_inside", "_names", "parts")

    def __init__(self, value: Any) -> None:
        held = vars(value)
        self._died = False
        self._names, self._ids = [*held], [*map(id, held.values())]
        self._containers = tuple(
            key for key, inside in held.items() if _changes_in_place(inside) and key not in NO_ATTRIBUTES
        )
        self._inside = [_elements(held[key]) for key in self._containers]
        self.parts, self._buffers = _parts(value), _versions(value)
        self._alive = [self._kept(each) for each in held.values()]

    def _kept(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        try:
            return weakref.ref(value, self._forget)
        except TypeError:
            return None

    def _forget(self, _: Any) -> None:
        self._died = True

    def differs(self, value: Any) -> bool:
        """Whether the object holds something else now. This runs in every call for every submodule, hence the flat code."""
        held = vars(value)
        return (
            self._died
            or [*map(id, held.values())] != self._ids
            or [*map(_elements, map(held.get, self._containers))] != self._inside
            or (self.parts is not None and _parts(value) != self.parts)
            or (self._buffers != () and _versions(value) != self._buffers)
        )

    def changed(self, value: Any) -> list[str]:
        """The names of attributes that are others now, were changed in place, or are gone."""
        held = vars(value)
        before = dict(zip(self._names, self._ids))
        names = [key for key in held.keys() | before.keys() if before.get(key) != id(held.get(key, _MISSING))]
        names += [
            key for key, inside in zip(self._containers, self._inside) if key in held and _elements(held[key]) != inside
        ]
        return [key for key in names if key not in NO_ATTRIBUTES]

    def written(self, value: Any) -> list[str]:
        """The names of the module's own buffers that were written to or are others now."""
        return [version[0] for version in _versions(value) if version not in self._buffers]


def _reference(value: Any, copier: Copy) -> Callable[[], Any] | None:
    """What returns an object as long as it lives; of one that knows no weak references, if it keeps no weights alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None if copier.holds_parts(value) else lambda: value


def _changes_in_place(value: Any) -> bool:
    """Whether a value that has no attributes to follow may hold something else one day."""
    if isinstance(value, tuple):
        return any(map(_changes_in_place, value))
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter)
    return isinstance(value, dict | list | set | deque | np.ndarray) or bool(_slots(value))


def _elements(value: Any, depth: int = 4) -> Any:
    """What a value holds that may change in place: by identity, or as it is; of a large one, such as a vocabulary, the
    size."""
    if type(value) in _TABLES and not value:  # most often, a module's seven tables of hooks
        return ()
    if isinstance(value, torch.Tensor):
        return 0 if value.is_inference() else version_of(value)
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.size <= _FEW else value.size
    inside = _slots(value) or value or ()
    if len(inside) > _FEW:
        return len(inside)
    return tuple(
        each
        if isinstance(each, _PLAIN)
        else (id(each), _elements(each, depth - 1))
        if depth and _changes_in_place(each)
        else id(each)
        for each in ((*inside.keys(), *inside.values()) if isinstance(inside, dict) else inside)
    )


_FEW = 64
_TABLES = {dict, OrderedDict, list, set}


def _slots(value: Any) -> dict[str, Any]:
    """What an object without a dictionary has in its slots."""
    state = None if hasattr(value, "__dict__") else object.__getstate__(value)
    return state[1] if isinstance(state, tuple) else {}


def _parts(value: Any) -> Any:
    """Of a module: its children, and of its own parameters whether each is trained and has hooks."""
    if not isinstance(value, nn.Module):
        return None
    children, held = own_children(value), own_parameters(value)
    return _elements(children) if children else (), [
        (name, leaf.requires_grad, _elements(hooks) if (hooks := read_backward_hooks(leaf)) else ())
        if leaf is not None
        else (name, False, ())
        for name, leaf in held.items()
    ]


def _versions(value: Any) -> tuple[tuple[str, int, int], ...]:
    """Of a module: which its own buffers are, and how often each was written to."""
    held = own_buffers(value) if isinstance(value, nn.Module) else {}
    return tuple(
        (name, id(leaf), 0 if leaf is None or leaf.is_inference() else version_of(leaf)) for name, leaf in held.items()
    )


def _require_same_parts(changed: Iterable[tuple[Any, _FollowedObject]]) -> None:
    failures = []
    for value, each in changed:
        if isinstance(value, nn.Module):
            (before, parameters), (now, parameters_now) = each.seen.parts, _parts(value)
            if before != now or [name for name, *_ in parameters] != [name for name, *_ in parameters_now]:
                failures.append(f"{each.path or '(top)'}: its submodules or parameters")
            failures += [
                f"{joined(each.path, name)}: its requires_grad or its hooks"
                for (name, *was), (_, *is_now) in zip(parameters, parameters_now)
                if was != is_now
            ]
    if failures:
        raise TreeError(
            f"the module was changed after from_module:\n{listing(failures)}\nCall sl.from_module(module) again; sl.freeze "
            "in a plan says what is trained"
        )


# Hooks on a module's parameters (``parameter.register_hook``), which are run on the gradients of every call.
# A call has the gradient of one rank's share of a micro-batch, times a factor that a step divides by later. So that a hook
# does to the sum what it does to the parts, it must be linear, such as a mask for the rows of an embedding that stay.


Hook = Callable[[torch.Tensor], torch.Tensor | None]


class ParameterHooks:
    """The hooks of a module's parameters. ``hooks``: by the parameters' names."""

    def __init__(self, hooks: Mapping[str, Sequence[Hook]]) -> None:
        self._hooks = hooks
        self._linear: set[Hook] = set()

    def part(self, name: str) -> ParameterHooks:
        """The hooks of a submodule's parameters, by their names in it."""
        inside = [key for key in self._hooks if key.startswith(f"{name}.")]
        return ParameterHooks({key.removeprefix(f"{name}."): self._hooks[key] for key in inside})

    def on(self, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parameters of a call, those with hooks as views on which these run. Raises `HandleError`: this rank has a slice
        of one alone; `TreeError`, in backward: a hook is not linear."""
        if not self._hooks or not torch.is_grad_enabled():
            return parameters
        views: dict[int, torch.Tensor] = {}  # by the parameter's identity, so that tied ones stay one
        for name, hooks in self._hooks.items():
            parameter = parameters[name]
            if id(parameter) not in views and parameter.requires_grad:
                views[id(parameter)] = view = parameter.view_as(parameter)  # which gathers it
                for hook in hooks:
                    view.register_hook(partial(self._run, name, hook))
        return {name: views.get(id(parameter), parameter) for name, parameter in parameters.items()}

    def _run(self, name: str, hook: Hook, gradient: torch.Tensor) -> torch.Tensor | None:
        if hook not in self._linear and not isinstance(gradient, FakeTensor):
            _require_linear(name, hook, gradient.detach())
            self._linear.add(hook)
        return hook(gradient)


def hooks_of(module: nn.Module, copier: Copy) -> ParameterHooks:
    """The hooks of a module's parameters, in which placeholders stand for its tensors. Raises `TreeError`: hooks that run
    after a gradient was accumulated; lists the parameters. ``copier``: what copied the module."""
    named = dict(module.named_parameters(remove_duplicate=False))
    if after := [name for name, leaf in named.items() if post_accumulate_hooks(leaf)]:
        raise TreeError(
            f"parameters with hooks that run after their gradient was accumulated:\n{listing(after)}\nLet the optimizer do "
            "it, sl.optim.chain(...), or use parameter.register_hook"
        )
    hooks = {name: copier([*held.values()]) for name, leaf in named.items() if (held := read_backward_hooks(leaf))}
    return ParameterHooks(hooks)


def _require_linear(name: str, hook: Hook, gradient: torch.Tensor) -> None:
    """Raise `TreeError` for a hook for which h(r - 3 g) is not h(r) - 3 h(g)."""

    def result(gradient: torch.Tensor) -> torch.Tensor:
        changed = hook(gradient.clone())
        return gradient if changed is None else changed

    noise = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32) - 0.5
    other = noise.to(gradient) * gradient.abs().amax()
    found, wanted = result(other - 3 * gradient), result(other) - 3 * result(gradient)
    rounding = 64 * torch.finfo(gradient.dtype).eps * float(gradient.abs().amax())
    if not torch.allclose(found, wanted, rtol=0, atol=rounding):
        raise TreeError(
            f"the hook on parameter {name} is not linear, and a step runs it on parts of the gradient. Let the optimizer do "
            "it: sl.optim.chain(sl.optim.clip_by_global_norm(...), ...)"
        )


class FirstCalls:
    """The first calls of a module, one in each mode: what it writes to its inputs through ``.data``, or by operators that do
    not say so, and whether it reads the parameters of the module that it is a copy of. Later calls are taken to write to the
    same buffers.

    Args:
        modules: all of the module's parts.
        originals: the names of the parameters that have others in their place.
    """

    def __init__(self, modules: Sequence[nn.Module], originals: Names) -> None:
        self._modules, self._originals = modules, originals
        self._written: dict[tuple[bool, ...], set[str]] = {}  # by mode: names of buffers

    def call(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor | None], written: set[str]
    ) -> AbstractContextManager[None]:
        """A context for one call, which adds to ``written`` the names of buffers that it writes to. Raises `HandleError`: the
        call writes to a parameter; names it. TreeError: the call reads a parameter of the original; names it, and the
        function that does."""
        if torch.compiler.is_compiling():
            return nullcontext()
        mode = tuple(module.training for module in self._modules)
        if mode not in self._written:
            return self._watched(mode, parameters, buffers, written)
        written |= self._written[mode]
        return nullcontext()

    def forget(self) -> None:
        """Look at calls again, of which one was refused: it may be another that a later call in its mode makes."""
        self._written.clear()

    @contextmanager
    def _watched(self, mode: Any, parameters: Any, buffers: Any, written: set[str]) -> Iterator[None]:
        plain = {name: leaf for name, leaf in parameters.items() if has_place(leaf)}
        before = {name: (_place_and_version(leaf), leaf.detach()) for name, leaf in plain.items()}
        attributes = [dict(vars(module)) for module in self._modules]
        held = [(name, buffer) for name, buffer in buffers.items() if buffer is not None and has_place(buffer)]

        def writes(tensor: torch.Tensor, operator: str) -> None:
            if (name := owner_of(tensor, held)) is not None:
                written.add(name)
            elif (name := owner_of(tensor, plain.items())) is not None:
                raise written_to(operator, name)

        def reads(tensor: torch.Tensor) -> None:
            if (name := self._originals.get(tensor)) is not None:
                raise TreeError(
                    f"{name} itself is used, not the parameter that is due, by {function_of_user()}. Reach it through the "
                    "module or a closure, not through a global or a class"
                )

        with Observer(writes, reads if self._originals else None):
            yield
        if changed := [name for name, leaf in plain.items() if _place_and_version(leaf) != before[name][0]]:
            for name in changed:
                plain[name].data = before[name][1]  # what was assigned to .data is undone
            raise written_to("the module", *changed)
        self._written[mode] = set(written)
        kept = {
            f"{type(module).__name__}.{key}"
            for module, was in zip(self._modules, attributes)
            for key, value in vars(module).items()
            if key not in NO_ATTRIBUTES
            and value is not was.get(key)
            and _is_result(value, {*map(id, parameters.values())})
        }
        if kept:
            _log.warning(
                "apply runs a copy of the module, and left differentiated results in its %s, which the module itself does "
                "not get. A loss that reads them, such as the losses of layers, has them returned: apply(params, x, "
                "method=lambda module, x: (module(x), module.layer.loss))",
                ", ".join(sorted(kept)),
            )


def _is_result(value: Any, parameters: Collection[int]) -> bool:
    """Whether a value is, or a container holds, what a call computed from its parameters, of which these are the ids."""
    if isinstance(value, dict | list | tuple):
        return any(_is_result(each, parameters) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor) and value.grad_fn is not None and id(value) not in parameters


def _place_and_version(leaf: torch.Tensor) -> tuple[Any, ...]:
    """What a write in place, or an assignment to ``.data``, changes of a tensor."""
    return place_of(leaf), 0 if leaf.is_inference() else version_of(leaf)
