"""A module's copies without weights: one per thread and device, since a call puts tensors into the module itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from shardlib.common._compat import no_modes
from shardlib.models.adapted import adapt_in_place
from shardlib.models.copying import Copy
from shardlib.models.originals import Original
from shardlib.models.parameter_hooks import hooks_of
from shardlib.models.placeholders import copy_with_placeholders
from shardlib.models.refusals import require_copies
from shardlib.models.skeleton import Buffers, Named, Skeleton, in_call
from shardlib.tree import leaves_of

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
