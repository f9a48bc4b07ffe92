"""Hooks on a module's parameters (``parameter.register_hook``), which are run on the gradients of every call.

A call has the gradient of one rank's share of a micro-batch, times a factor that a step divides by later. So that a hook does
to the sum what it does to the parts, it must be linear, such as a mask for the rows of an embedding that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from shardlib.common._compat import FakeTensor, post_accumulate_hooks, read_backward_hooks
from shardlib.errors import TreeError, listing
from shardlib.models.copying import Copy

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class ParameterHooks:
    """The hooks of a module's parameters.

    Args:
        hooks: by the parameters' names.
    """

    def __init__(self, hooks: Mapping[str, Sequence[Hook]]) -> None:
        self._hooks = hooks
        self._linear: set[Hook] = set()

    def part(self, name: str) -> ParameterHooks:
        """The hooks of a submodule's parameters, by their names in it."""
        inside = [key for key in self._hooks if key.startswith(f"{name}.")]
        return ParameterHooks({key.removeprefix(f"{name}."): self._hooks[key] for key in inside})

    def on(self, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parameters of a call, those with hooks as views on which these run.

        Raises:
            HandleError: this rank has a slice of one alone.
            TreeError: in backward: a hook is not linear.
        """
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
    """The hooks of a module's parameters, in which placeholders stand for its tensors.

    Args:
        copier: what copied the module.

    Raises:
        TreeError: hooks that run after a gradient was accumulated; lists the parameters.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    if after := [name for name, leaf in named.items() if post_accumulate_hooks(leaf)]:
        raise TreeError(
            f"parameters with hooks that run after their gradient was accumulated:\n{listing(after)}\nGradients are values "
            "here, not attributes: let the optimizer do it, sl.optim.chain(...), or use parameter.register_hook"
        )
    hooks = {name: copier([*held.values()]) for name, leaf in named.items() if (held := read_backward_hooks(leaf))}
    return ParameterHooks(hooks)


def _require_linear(name: str, hook: Hook, gradient: torch.Tensor) -> None:
    """Refuse a hook for which h(r - 3 g) is not h(r) - 3 h(g).

    Raises:
        TreeError: see above.
    """

    def result(gradient: torch.Tensor) -> torch.Tensor:
        changed = hook(gradient.clone())
        return gradient if changed is None else changed

    noise = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32) - 0.5
    other = noise.to(gradient) * gradient.abs().amax()
    found, wanted = result(other - 3 * gradient), result(other) - 3 * result(gradient)
    if not torch.allclose(
        found, wanted, rtol=0, atol=64 * torch.finfo(gradient.dtype).eps * float(gradient.abs().amax())
    ):
        raise TreeError(
            f"the hook on parameter {name} is not linear, and a step runs it on parts of the gradient, before sums over "
            "ranks and micro-batches. Let the optimizer do it: sl.optim.chain(sl.optim.clip_by_global_norm(...), ...)"
        )
