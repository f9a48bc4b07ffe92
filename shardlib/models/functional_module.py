"""A module as a function of its parameters: a copy without weights, into which a call puts parameters and buffers.

When backward recomputes a segment of a call, the call's parameters and buffers are put in again: `torch.utils.checkpoint`
runs a function that reads the module, long after the call and possibly during another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from shardlib.common._compat import no_modes, own_buffers, own_parameters, version_of, watch_checkpoints
from shardlib.common.environment import environment
from shardlib.common.writes import has_place, place_of
from shardlib.errors import REENTRANT, LossError, TreeError, listing
from shardlib.models.copying import buffers_of, clones, copied_or_refused, copy_with_placeholders, joined
from shardlib.models.original import FirstCalls, Original, ParameterHooks, hooks_of
from shardlib.models.peft import adapt_in_place
from shardlib.nn.blocks import mode_of_modules
from shardlib.tree import leaves_of

Parameters = Mapping[str, torch.Tensor]
Buffers = Mapping[str, torch.Tensor | None]

_calls = threading.local()  # ``under_way``: the running calls of this thread, outermost first


class FunctionalModule:
    """A module of one thread, to be called with any parameters and buffers.

    Args:
        module: a copy that is called here alone.
        buffers: those of the module, by name.
        original: the module that was copied.
        hooks: those of its parameters.
        name: the name of the module in a larger one; "" if it is not part of one.

    Attributes:
        by_path: path of a submodule's parameters -> submodule.
        paths: of the parameters.
        first: looks at the first calls.
    """

    module: Any
    hooks: ParameterHooks

    def __init__(
        self,
        module: nn.Module,
        buffers: Buffers,
        original: Original | None = None,
        hooks: ParameterHooks | None = None,
        name: str = "",
    ) -> None:
        self.module, self.hooks = module, hooks or ParameterHooks({})
        self._buffers, self._original = dict(buffers), original
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self.first: FirstCalls = FirstCalls(list(self._modules.values()), original.names if original else {})
        self._parameters = {
            joined(prefix, leaf): (owner, leaf)
            for prefix, owner in self._modules.items()
            for leaf, parameter in own_parameters(owner).items()
            if parameter is not None
        }

        for owner in self._modules.values():
            owner.__dict__["register_parameter"] = partial(_register, owner)
            if type(owner) is nn.ParameterList:
                owner.__class__ = _Parameters

        def path(inside: str) -> str:
            return f"{name}.{inside}".strip(".").replace(".", "/")

        self.by_path: dict[str, Any] = {path(inside): submodule for inside, submodule in module.named_modules()}
        self.paths: tuple[str, ...] = tuple(map(path, self._parameters))
        self._renew()

    def part(self, name: str) -> FunctionalModule:
        """A submodule."""
        inside = {
            key.removeprefix(f"{name}."): each for key, each in self._buffers.items() if key.startswith(f"{name}.")
        }
        module = self.module.get_submodule(name)
        return FunctionalModule(module, inside, self._original, self.hooks.part(name), name) if name else self

    def follow(self) -> bool:
        """Carry over what was done to the original; returns whether its buffers changed."""
        changed = {} if self._original is None else self._original.follow()
        if changed:
            device = next((buffer.device for buffer in self._buffers.values() if buffer is not None), None)
            self._buffers |= {name: None if b is None else b.detach().to(device) for name, b in changed.items()}
            self._renew()
        return bool(changed)

    def __call__(
        self,
        parameters: Parameters,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffers: Buffers | None = None,
        training: bool | None = None,
        method: str | Callable[..., Any] = "__call__",
    ) -> Any:
        """The output of the module's ``method``, or of a function of it, with ``parameters`` and the buffers it has; with
        copies of ``buffers``, if they are given, the output and the buffers after the call. ``training``: whether the module
        runs in train mode; by default as `mode_of_modules` says.

        Raises:
            TreeError: the call changed a buffer without ``buffers``, or a parameter, or the parameters have other names.
        """
        call = _Call(self, parameters, buffers, training)
        if buffers is not None:
            return call.run(method, args, kwargs), call.after
        try:
            out = call.run(method, args, kwargs)
        finally:
            if call.changed:
                self._renew()
        if call.changed:
            raise TreeError(
                f"the module changed its buffers, which a pure function cannot:\n{listing(sorted(call.changed))}\nUse apply, "
                "params, buffers = sl.from_module(module, buffers=True) (not with blocks), or module.eval()"
            )
        return out

    @contextmanager
    def in_mode(self, training: bool | None) -> Iterator[None]:
        """A context in which all of the module's parts are in train or eval mode; None leaves each in its own."""
        changed = [] if training is None else [each for each in self._modules.values() if each.training is not training]
        for each in changed:
            each.training = training is True
        try:
            yield
        finally:
            for each in changed:
                each.training = not training

    @contextmanager
    def holding(self, parameters: Parameters, buffers: Buffers) -> Iterator[None]:
        """A context in which the module holds these tensors; afterwards it holds the previous ones, even after an error.
        Raises `TreeError`: a parameter was replaced."""
        before = [(owner, leaf, own_parameters(owner)[leaf]) for owner, leaf in self._parameters.values()]
        kept = [(owner, dict(own_buffers(owner))) for owner in self._modules.values()]
        replaced: list[str] = []
        marked = [] if torch.compiler.is_compiling() else _marked(parameters.values())
        try:
            for name, (owner, leaf) in self._parameters.items():
                own_parameters(owner)[leaf] = parameters[name]
            self._put(buffers)
            yield
            replaced = [
                name
                for name, (owner, leaf) in self._parameters.items()
                if own_parameters(owner).get(leaf) is not parameters[name]
            ]
        finally:
            for tensor in marked:
                del tensor._is_param
            for owner, leaf, parameter in reversed(before):
                own_parameters(owner)[leaf] = parameter
            for owner, previous in kept:
                if own_buffers(owner) or previous:
                    own_buffers(owner).clear()
                    own_buffers(owner).update(previous)
        if replaced:
            raise TreeError(
                f"the module replaced its parameters, which are inputs of a pure function:\n{listing(replaced)}\nMake what "
                "changes a buffer: self.register_buffer(...), and sl.from_module(module, buffers=True)"
            )

    def _put(self, buffers: Buffers) -> None:
        for name, buffer in buffers.items():
            prefix, _, leaf = name.rpartition(".")
            own_buffers(self._modules[prefix])[leaf] = buffer

    def _renew(self) -> None:
        """Give the module copies of its buffers, as writes of batch_norm do not change a buffer's version."""
        self.first.forget()
        with no_modes(), torch.inference_mode(False):
            copies = {id(buffer): None if buffer is None else buffer.clone() for buffer in self._buffers.values()}
            self._put({name: copies[id(buffer)] for name, buffer in self._buffers.items()})

    def require_names(self, parameters: Parameters, buffers: Buffers) -> None:
        """Raise `TreeError` for parameters and buffers of other names than the module's."""
        if parameters.keys() != self._parameters.keys():
            failures = [f"{name}: missing" for name in self._parameters if name not in parameters]
            failures += [
                f"{name}: the module has no such parameter" for name in parameters if name not in self._parameters
            ]
            raise TreeError(
                f"these are not the parameters of {type(self.module).__name__}:\n{listing(failures)}\nPass the tree that "
                "sl.from_module returned"
            )
        failures = [f"{name}: no such module" for name in buffers if name.rpartition(".")[0] not in self._modules]
        if failures:
            raise TreeError(f"these are not the buffers of {type(self.module).__name__}:\n{listing(failures)}")


class _Call:
    """One call of a module.

    Args:
        buffers: of the call, which runs on copies of them; None for those that the module has.
        training: whether the module runs in train mode; None if as it is set, or as those around it say.

    Attributes:
        after: the module's buffers after the call.
        changed: the names of buffers that the call wrote to, replaced or added.
    """

    def __init__(
        self, module: FunctionalModule, parameters: Parameters, buffers: Buffers | None, training: bool | None
    ) -> None:
        compiling, fresh = torch.compiler.is_compiling(), buffers is not None
        given = buffers_of(module.module) if buffers is None else buffers
        module.require_names(parameters, given)
        self._module, self._parameters, self._given = module, module.hooks.on(parameters), given
        self._training = mode_of_modules() if training is None else training
        # A compiled function reads no context: a plan with tiles refuses a loss in which no module ran in them.
        self._tiles = None if compiling else environment().modules
        self._held = clones(given) if fresh else dict(given)
        # Tensors made in inference mode or in compiled functions have no versions.
        self._versioned = not fresh or (torch.is_grad_enabled() and not compiling)
        self._versions = {name: version_of(b) for name, b in self._held.items() if b is not None and self._versioned}
        self._seen: set[str] = set()  # the names of buffers that it was seen to write to, as versions do not show
        self._places = {} if compiling else _places(self._held)
        self.after: dict[str, torch.Tensor | None] = {}
        self.changed: set[str] = set()
        self._over = False

    def run(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        follow = None if torch.compiler.is_compiling() else environment().follows
        module = self._module.module
        with (
            self._inside(self._held),
            nullcontext() if follow is None else follow(module, self._parameters),
            _explained(module),
            self._module.first.call(self._parameters, self._held, self._seen),
        ):
            try:
                if callable(method):
                    return method(module, *args, **kwargs)
                return getattr(module, method)(*args, **kwargs)
            finally:
                self.after = buffers_of(module)
                self.changed = self._changed(self.after) | self._seen
                self._over = True

    def _changed(self, now: Buffers) -> set[str]:
        return {
            name
            for name, buffer in now.items()
            if buffer is not self._held.get(name)
            or (buffer is not None and name in self._places and place_of(buffer) != self._places[name])
            or (buffer is not None and name in self._versions and version_of(buffer) != self._versions[name])
        }

    def _written(self, buffers: Buffers, changed: set[str]) -> set[str]:
        """Names of buffers that may have been written to, when those of ``changed`` show it."""
        return changed | self._seen if self._versioned else set(buffers)

    def remember(self) -> Callable[[], AbstractContextManager[None]]:
        """A context to recompute in, for a checkpointed segment of the call that begins now."""
        now = buffers_of(self._module.module)
        seen = clones({name: now[name] for name in self._written(now, self._changed(now))})

        @contextmanager
        def again() -> Iterator[None]:
            # Recomputing repeats the segment's writes, which must not reach the call's inputs or outputs.
            buffers = dict(self._given) | seen
            written = self._written(buffers, self.changed) if self._over else set(buffers)
            with self._inside(buffers | clones({name: buffers[name] for name in written & buffers.keys()})):
                yield

        return again

    @contextmanager
    def _inside(self, buffers: Buffers) -> Iterator[None]:
        """A context in which the module holds the call's parameters and these buffers, and runs in its mode and tiles."""
        module, outer = self._module, getattr(_calls, "under_way", ())
        tiles = nullcontext() if self._tiles is None else self._tiles.installed(module.by_path, module.paths)
        with module.holding(self._parameters, buffers), module.in_mode(self._training), tiles:
            _calls.under_way = (*outer, self)
            try:
                yield
            finally:
                _calls.under_way = outer


def _marked(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Let tensors be parameters for isinstance, which modules ask: a list of parameters that is made of others would have
    copies. Returns those that were none before."""
    others: list[Any] = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    for tensor in others:
        tensor._is_param = True
    return [*{id(tensor): tensor for tensor in others}.values()]


class _Parameters(nn.ParameterList):
    """A list of parameters, a part of which is a list: another module would not take them."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return super().__getitem__(index)


def _register(owner: nn.Module, name: str, parameter: Any) -> None:
    """What ``owner.name = parameter`` does: of a parameter of the call an attribute, as of other tensors."""
    if isinstance(parameter, nn.Parameter) and not issubclass(type(parameter), nn.Parameter):
        owner.__dict__[name] = parameter
    else:
        type(owner).register_parameter(owner, name, parameter)


def _places(buffers: Buffers) -> dict[str, Any]:
    return {name: place_of(b) for name, b in buffers.items() if b is not None and has_place(b)}


@contextmanager
def _explained(module: nn.Module) -> Iterator[None]:
    """A context for a module's call in which torch's errors about what no pure function does say what to do instead. Raises
    `TreeError`: the module has no forward, sets ``requires_grad`` of a parameter, or computes with an earlier call's."""
    try:
        yield
    except NotImplementedError as error:
        if getattr(module.forward, "__func__", None) is not nn.Module.forward:
            raise
        name = type(module).__name__
        raise TreeError(f"{name} has no forward. Name a method: apply(params, x, method='encode')") from error
    except (RuntimeError, ValueError) as error:
        for text, meant in _MEANT.items():
            if text in str(error):
                raise TreeError(f"{str(error).partition('. ')[0]}. {meant}") from error
        raise


# What torch says -> what to do in a module's call.
_MEANT = {
    "requires_grad flags of leaf": "Parameters are inputs of a pure function: use sl.freeze(globs) in the plan, "
    "torch.no_grad() or weight.detach()",
    "Cannot assign non-leaf Tensor to parameter": "A module made in forward takes no parameters of the call: give them to "
    "a function, F.linear(x, self.weight), or keep them in a list of Python",
    "is a view and its base or another view of its base has been modified inplace": "If it is of a parameter and was kept "
    "from an earlier call (self.cached = self.weight.t()), compute it in each call",
}


def _lasting(fn: Callable[..., Any], args: Any, has_context: bool) -> tuple[Callable[..., Any], Any]:
    """``fn``, a checkpointed segment of the running calls, such that it can run again after the calls are over."""
    calls = getattr(_calls, "under_way", ())
    if not calls:
        return fn, args
    contexts = [call.remember() for call in calls]

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return fn(*args, **kwargs)

    return again, args


def _in_call() -> bool:
    return bool(getattr(_calls, "under_way", ()))


def _refuse_reentrant() -> None:
    if _in_call() and torch.is_grad_enabled():
        raise LossError(f"the module {REENTRANT}")


watch_checkpoints(_lasting, _refuse_reentrant)


class FunctionalCopies:
    """A module's copies without weights: one per thread and device, since a call puts tensors into the module itself. Raises
    `TreeError`: the module has attributes that cannot be copied, or hooks that cannot run."""

    def __init__(self, module: nn.Module, buffers: Buffers) -> None:
        # Never called, so that a thread can copy it while another one is in a call.
        self._pattern = copied_or_refused(module, copy_with_placeholders)
        adapt_in_place(self._pattern.module)
        self._original = Original(module, self._pattern)
        self._hooks = hooks_of(module, self._pattern.copier)
        self._buffers = clones(buffers)  # the module's own may be written to
        self._local = threading.local()

    def beside(self, parameters: Parameters, args: Any, name: str = "") -> FunctionalModule:
        """This thread's copy of the submodule ``name``, with buffers on the device of ``parameters`` or ``args``."""
        if not hasattr(self._local, "made"):
            self._local.made = {}
        held = parameters.values() or leaves_of(args)
        device = next((value.device for value in held if isinstance(value, torch.Tensor)), None)
        made: dict[str, FunctionalModule] = self._local.made.setdefault(device, {})
        # A call in another one goes on with what the outer one began with, and compiled functions read no weak references.
        follows = made and not torch.compiler.is_compiling() and not _in_call()
        if not follows and name in made:
            return made[name]
        # Copied outside of whatever surrounds the call: a trace on fake tensors, a recomputed block, inference mode.
        with no_modes(), torch.inference_mode(False):
            if follows and made[""].follow():
                self._local.made[device] = made = {"": made[""]}  # the others have the old buffers
            if not made:
                made[""] = self._whole(device)
            if name not in made:
                made[name] = made[""].part(name)
        return made[name]

    def _whole(self, device: torch.device | None) -> FunctionalModule:
        copied = copy_with_placeholders(self._pattern.module)
        buffers = {name: None if buffer is None else buffer.to(device) for name, buffer in self._buffers.items()}
        whole = FunctionalModule(copied.module, buffers, self._original.copied_again(copied), self._hooks)
        whole.follow()
        return whole
