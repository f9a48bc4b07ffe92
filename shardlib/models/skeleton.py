"""A module without weights, into which a call puts parameters and buffers.

When backward recomputes a segment of a call, the call's parameters and buffers are put in again: `torch.utils.checkpoint`
runs a function that reads the module, long after the call and possibly during another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from shardlib.common._compat import no_modes, own_buffers, own_parameters, version_of, watch_checkpoints
from shardlib.common.environment import environment
from shardlib.common.writes import has_place, place_of
from shardlib.errors import REENTRANT, LossError, TreeError, listing
from shardlib.models.copying import Copy
from shardlib.models.layers import adapt_in_place
from shardlib.models.meta import copy_with_placeholders
from shardlib.models.observed import FirstCalls
from shardlib.models.originals import Original, ParameterHooks, hooks_of
from shardlib.models.refusals import explained, require_copies
from shardlib.nn.blocks import mode_of_modules
from shardlib.tree import leaves_of

Named = Mapping[str, torch.Tensor]
Buffers = Mapping[str, torch.Tensor | None]

_calls = threading.local()  # ``under_way``: the running calls of this thread, outermost first


def in_call() -> bool:
    """Whether a call of a skeleton runs in this thread."""
    return bool(getattr(_calls, "under_way", ()))


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Dotted name -> buffer, with buffers that are None."""
    return {
        f"{prefix}.{leaf}" if prefix else leaf: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for leaf, buffer in own_buffers(owner).items()
    }


class Skeleton:
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
        self.by_path = {
            f"{name}.{inside}".strip(".").replace(".", "/"): submodule for inside, submodule in module.named_modules()
        }
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self.first = FirstCalls(list(self._modules.values()), original.names if original else {})
        self._parameters = {
            f"{prefix}.{leaf}" if prefix else leaf: (owner, leaf)
            for prefix, owner in self._modules.items()
            for leaf, parameter in own_parameters(owner).items()
            if parameter is not None
        }
        self.paths = tuple(f"{name}.{key}".strip(".").replace(".", "/") for key in self._parameters)
        self._renew()

    def part(self, name: str) -> Skeleton:
        """The skeleton of a submodule."""
        inside = {
            key.removeprefix(f"{name}."): each for key, each in self._buffers.items() if key.startswith(f"{name}.")
        }
        module = self.module.get_submodule(name)
        return Skeleton(module, inside, self._original, self.hooks.part(name), name) if name else self

    def follow(self) -> bool:
        """Carry over what was done to the original; returns whether its buffers changed."""
        changed = {} if self._original is None else self._original.follow()
        if changed:
            device = next((buffer.device for buffer in self._buffers.values() if buffer is not None), None)
            self._buffers |= {name: None if b is None else b.detach().to(device) for name, b in changed.items()}
            self._renew()
        return bool(changed)

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

    def __call__(
        self,
        parameters: Named,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool | None = None,
        method: str = "__call__",
    ) -> Any:
        """The output of the module's ``method`` with ``parameters`` and the buffers it has.

        Args:
            training: whether the module runs in train mode; by default as `mode_of_modules` says.

        Raises:
            TreeError: the call changed a buffer (which is restored) or a parameter, or the parameters have other names.
        """
        call = _Call(self, parameters, buffers_of(self.module), training)
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

    def with_buffers(
        self,
        parameters: Named,
        buffers: Buffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool | None = None,
        method: str = "__call__",
    ) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """The module's output with ``parameters`` and copies of ``buffers``, and the buffers after the call."""
        call = _Call(self, parameters, buffers, training, fresh=True)
        out = call.run(method, args, kwargs)
        return out, call.after

    @contextmanager
    def holding(self, parameters: Named, buffers: Buffers) -> Iterator[None]:
        """A context in which the module holds these tensors; afterwards it holds the previous ones, even after an error.

        Raises:
            TreeError: a parameter was replaced.
        """
        before = [(owner, leaf, own_parameters(owner)[leaf]) for owner, leaf in self._parameters.values()]
        kept = [(owner, dict(own_buffers(owner))) for owner in self._modules.values()]
        replaced: list[str] = []
        try:
            for name, (owner, leaf) in self._parameters.items():
                own_parameters(owner)[leaf] = parameters[name]
            for name, buffer in buffers.items():
                prefix, _, leaf = name.rpartition(".")
                own_buffers(self._modules[prefix])[leaf] = buffer
            yield
            replaced = [
                name
                for name, (owner, leaf) in self._parameters.items()
                if own_parameters(owner).get(leaf) is not parameters[name]
            ]
        finally:
            for owner, leaf, parameter in reversed(before):
                own_parameters(owner)[leaf] = parameter
            for owner, previous in kept:
                if own_buffers(owner) or previous:
                    own_buffers(owner).clear()
                    own_buffers(owner).update(previous)
        if replaced:
            raise TreeError(
                f"the module replaced its parameters, which are inputs of a pure function:\n{listing(replaced)}\nMake what "
                "changes in a call a buffer: self.register_buffer(...), and sl.from_module(module, buffers=True)"
            )

    def _renew(self) -> None:
        """Give the module copies of its buffers, as writes of batch_norm do not change a buffer's version."""
        self.first.forget()
        with no_modes(), torch.inference_mode(False):
            fresh = {id(buffer): _copied(buffer) for buffer in self._buffers.values()}
            for name, buffer in self._buffers.items():
                prefix, _, leaf = name.rpartition(".")
                own_buffers(self._modules[prefix])[leaf] = fresh[id(buffer)]

    def require_names(self, parameters: Named, buffers: Buffers) -> None:
        """Refuses parameters and buffers of other names than the module's.

        Raises:
            TreeError: see above.
        """
        if parameters.keys() != self._parameters.keys():
            failures = [f"{name}: missing" for name in self._parameters if name not in parameters]
            failures += [
                f"{name}: the module has no such parameter" for name in parameters if name not in self._parameters
            ]
            raise TreeError(
                f"these are not the parameters of {type(self.module).__name__}:\n{listing(failures)}\nPass the tree that "
                "sl.from_module returned, or one of its structure"
            )
        failures = [f"{name}: no such module" for name in buffers if name.rpartition(".")[0] not in self._modules]
        if failures:
            raise TreeError(f"these are not the buffers of {type(self.module).__name__}:\n{listing(failures)}")


class _Call:
    """One call of a skeleton.

    Args:
        training: whether the module runs in train mode; None if as it is set, or as those around it say.
        fresh: whether the call runs on copies of the buffers.

    Attributes:
        after: the module's buffers after the call.
        changed: the names of buffers that the call wrote to, replaced or added.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        parameters: Named,
        buffers: Buffers,
        training: bool | None = None,
        fresh: bool = False,
    ) -> None:
        skeleton.require_names(parameters, buffers)
        self._skeleton, self._parameters, self._given = skeleton, skeleton.hooks.on(parameters), buffers
        self._training = mode_of_modules() if training is None else training
        # A compiled function reads no context: a plan with tiles refuses a loss in which no module ran in them.
        self._fresh, self._tiles = fresh, None if torch.compiler.is_compiling() else environment().modules
        self._held = {name: _copied(buffer) for name, buffer in buffers.items()} if fresh else dict(buffers)
        # Tensors made in inference mode or in compiled functions have no versions.
        self._versioned = not fresh or (torch.is_grad_enabled() and not torch.compiler.is_compiling())
        self._versions = {name: version_of(b) for name, b in self._held.items() if b is not None and self._versioned}
        self._seen: set[str] = set()  # the names of buffers that it was seen to write to, as versions do not show
        self._places = {} if torch.compiler.is_compiling() else _places(self._held)
        self.after: dict[str, torch.Tensor | None] = {}
        self.changed: set[str] = set()
        self._over = False

    def run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with (
            self._skeleton.holding(self._parameters, self._held),
            self._skeleton.in_mode(self._training),
            self._under_way(),
            self._in_tiles(),
            self._followed(),
            explained(self._skeleton.module),
            self._skeleton.first.call(self._parameters, self._held, self._seen),
        ):
            try:
                return getattr(self._skeleton.module, method)(*args, **kwargs)
            finally:
                self.after = buffers_of(self._skeleton.module)
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

    def remember(self) -> Callable[[], Any]:
        """A context to recompute in, for a checkpointed segment of the call that begins now."""
        now = buffers_of(self._skeleton.module)
        seen = {name: _copied(now[name]) for name in self._written(now, self._changed(now))}

        @contextmanager
        def again() -> Iterator[None]:
            # Recomputing repeats the segment's writes, which must not reach the call's inputs or outputs.
            buffers = dict(self._given) | seen
            written = self._written(buffers, self.changed) if self._over else set(buffers)
            buffers |= {name: _copied(buffers[name]) for name in written & buffers.keys()}
            with (
                self._skeleton.holding(self._parameters, buffers),
                self._skeleton.in_mode(self._training),
                self._under_way(),
                self._in_tiles(),
            ):
                yield

        return again

    def _in_tiles(self) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self._tiles is None
            else self._tiles.installed(self._skeleton.by_path, self._skeleton.paths)
        )

    def _followed(self) -> AbstractContextManager[None]:
        follow = None if torch.compiler.is_compiling() else environment().follows
        return nullcontext() if follow is None else follow(self._skeleton.module, self._parameters)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        outer = getattr(_calls, "under_way", ())
        _calls.under_way = (*outer, self)
        try:
            yield
        finally:
            _calls.under_way = outer


def _places(buffers: Buffers) -> dict[str, Any]:
    return {name: place_of(b) for name, b in buffers.items() if b is not None and has_place(b)}


def _copied(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()


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


def _refuse_reentrant() -> None:
    if in_call() and torch.is_grad_enabled():
        raise LossError(f"the module {REENTRANT}")


watch_checkpoints(_lasting, _refuse_reentrant)


# A module's copies without weights: one per thread and device, since a call puts tensors into the module itself.


T = TypeVar("T")


class Skeletons:
    """The skeletons of a module.

    Raises:
        TreeError: the module has attributes that cannot be copied, or hooks that cannot run.
    """

    def __init__(self, module: nn.Module, buffers: Buffers) -> None:
        # Never called, so that a thread can copy it while another one is in a call.
        self._pattern = _copied_or_refused(module, copy_with_placeholders)
        adapt_in_place(self._pattern.module)
        self._original = Original(module, self._pattern)
        self._hooks = hooks_of(module, self._pattern.copier)
        # The module's own may be written to.
        self._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
        self._local = threading.local()

    def beside(self, parameters: Named, args: Any, name: str = "") -> Skeleton:
        """This thread's skeleton of the submodule ``name``, with buffers on the device of ``parameters`` or ``args``."""
        if not hasattr(self._local, "made"):
            self._local.made = {}
        held = parameters.values() or leaves_of(args)
        device = next((value.device for value in held if isinstance(value, torch.Tensor)), None)
        made: dict[str, Skeleton] = self._local.made.setdefault(device, {})
        # A call in another one goes on with what the outer one began with, and compiled functions read no weak references.
        if made and not torch.compiler.is_compiling() and not in_call() and made[""].follow():
            self._local.made[device] = made = {"": made[""]}  # the others have the old buffers
        if name not in made:
            # Made outside of whatever surrounds the call: a trace on fake tensors, a recomputed block, inference mode.
            with no_modes(), torch.inference_mode(False):
                if not made:
                    made[""] = self._whole(device)
                made[name] = made[""].part(name)
        return made[name]

    def _whole(self, device: torch.device | None) -> Skeleton:
        copied = copy_with_placeholders(self._pattern.module)
        buffers = {name: None if buffer is None else buffer.to(device) for name, buffer in self._buffers.items()}
        whole = Skeleton(copied.module, buffers, self._original.copied_again(copied), self._hooks)
        whole.follow()
        return whole


def _copied_or_refused(module: nn.Module, copy_of: Callable[[nn.Module], T]) -> T:
    """A copy of a module.

    Raises:
        TreeError: the module has attributes that cannot be copied.
    """
    try:
        return copy_of(module)
    except Exception:
        require_copies(module)
        raise


def hollow(module: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device, tied ones still tied.

    Raises:
        TreeError: the module has attributes that cannot be copied.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return _copied_or_refused(module, Copy(module.modules(), dict(module.named_parameters()), memo))
