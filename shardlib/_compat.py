"""What differs between the supported torch versions (2.11 and later), in one place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpointing
from torch.autograd.graph import GradientEdge, _engine_run_backward

# 2.13 renamed the single-tensor collectives and warns at each call of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_FIRST = 2**63  # above every sequence number autograd gives out


def run_first(tensor: torch.Tensor) -> torch.Tensor:
    """Let backward run the node that made ``tensor`` as soon as its gradients are complete.

    Autograd's queue prefers the node made last, so one made before the forward pass would wait for all the others.
    Versions without the setter run it late: right, with less overlap.
    """
    set_number: Any = getattr(tensor.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(_FIRST)
    return tensor


def grad(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    seeds: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` that never dispatches on the inputs' type: some are handles, meant as graph leaves."""
    return _engine_run_backward(
        tuple(outputs), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


def saving_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """How a tensor saved now is packed and unpacked; None where it is kept as it is."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has bf16 dot products; False where this torch cannot tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16"))


def watch_checkpoints(
    lasting: Callable[[Callable[..., Any]], Callable[..., Any]], before_reentrant: Callable[[], None]
) -> None:
    """Have `torch.utils.checkpoint` compute ``lasting(fn)`` again in place of ``fn``, for as long as the process lives.

    ``lasting`` is called where the checkpoint is, ``before_reentrant`` before one with ``use_reentrant=True``. (A
    ``context_fn`` would do, if all who call `checkpoint` passed one on.)
    """
    record, reentrant = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction.apply

    def watched(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return record(lasting(fn), *args, **kwargs)

    def watched_reentrant(*args: Any) -> Any:
        before_reentrant()
        return reentrant(*args)

    checkpointing._checkpoint_without_reentrant_generator = watched
    checkpointing.CheckpointFunction.apply = watched_reentrant  # type: ignore[method-assign]
