"""Checks for modules that `from_module` cannot take; the messages say what to do instead."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardlib.common._compat import pre_hooks
from shardlib.errors import TreeError, listing

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_OLD_NORMS = {
    "WeightNorm": "weight_norm",
    "SpectralNorm": "spectral_norm",
}  # a hook's class -> the function that adds it


def require_module(module: Any) -> None:
    """Refuses what is no module, and modules that cannot be called with other parameters; lists all submodules at fault.

    Raises:
        TreeError: see above.
    """
    if not isinstance(module, nn.Module):
        raise TreeError(
            f"from_module takes a torch.nn.Module and got {type(module).__name__}; a function of parameters is passed as "
            "it is: sl.make_train_step(loss_fn, params, ...)"
        )
    failures = []
    for path, owner in module.named_modules():
        name = path or "(top)"
        if isinstance(owner, _WRAPPERS):
            failures.append(f"{name}: {type(owner).__name__}; pass the wrapped module, .module")
        elif isinstance(owner, torch.jit.ScriptModule):
            failures.append(f"{name}: scripted; pass the module that it was made from")
        for leaf, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, UninitializedParameter):
                failures.append(f"{name}.{leaf}: has no shape yet; call the module once on a batch, then from_module")
            elif _is_dtensor(parameter):
                failures.append(f"{name}.{leaf}: a DTensor; pass the module before fully_shard or parallelize_module")
    if failures:
        raise TreeError(f"modules that from_module cannot take:\n{listing(failures)}")


def _is_dtensor(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor. Who made one has imported its module, which takes half as long as importing torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def require_copies(module: nn.Module) -> None:
    """Refuses modules with attributes that cannot be copied; lists all of these.

    Raises:
        TreeError: see above.
    """
    failures = []
    memo = {id(known): known for known in (*module.modules(), *module.parameters(), *module.buffers())}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:
                why = f"{type(error).__name__}: {error}" if not isinstance(value, torch.Tensor) else _computed(owner)
                failures.append(f"{path}.{name}: {why}" if path else f"{name}: {why}")
    if failures:
        raise TreeError(
            f"from_module calls copies of the module, one per thread, and these attributes cannot be copied:\n"
            f"{listing(failures)}\nIf no remedy is given: set them in forward, or give their class a __deepcopy__"
        )


def _computed(owner: nn.Module) -> str:
    """The remedy for an attribute of ``owner`` that is a tensor computed from parameters."""
    for hook in pre_hooks(owner):
        kind = type(hook)
        if kind.__name__ in _OLD_NORMS and kind.__module__.startswith("torch.nn.utils."):
            old = _OLD_NORMS[kind.__name__]
            return f"made by torch.nn.utils.{old}; use torch.nn.utils.parametrizations.{old}"
        if kind.__module__ == "torch.nn.utils.prune":
            return "made by torch.nn.utils.prune; call prune.remove(module, name) first"
    return "a tensor with a graph; compute it in forward, or detach it"


def require_all_used(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuses blocks that leave out parameters of their module; lists these.

    Raises:
        TreeError: see above.
    """
    used = {id(parameter) for block in blocks for parameter in block.parameters()}
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in used]
    if missing:
        raise TreeError(
            f"parameters that none of the blocks has, so that they would not be trained:\n{listing(missing)}\nMake the "
            "blocks of the module's own submodules (not copies), and of all of them"
        )


def require_trained(module: nn.Module) -> None:
    """Refuses parameters with ``requires_grad=False``, which would be trained without notice; not integers, which never are.

    Raises:
        TreeError: see above.
    """
    frozen = [name for name, leaf in module.named_parameters() if leaf.is_floating_point() and not leaf.requires_grad]
    if frozen:
        raise TreeError(
            f"{len(frozen)} parameters have requires_grad=False, which a pytree of tensors cannot carry:\n"
            f"{listing(frozen)}\nPass frozen=True: from_pretrained then freezes them, and sl.from_module(module, "
            "frozen=True) returns their paths last, for sl.freeze(frozen) in the plan; or call module.requires_grad_(True)"
        )


def require_no_renorm(module: nn.Module) -> None:
    """Refuses embeddings that renormalise their rows on look-up, which writes to the parameter.

    Raises:
        TreeError: see above.
    """
    renormed = [
        name or "the module itself"
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
    ]
    if renormed:
        raise TreeError(
            f"embeddings with max_norm write to their parameters as they are looked up, which a pure function cannot:\n"
            f"{listing(renormed)}\nSet embedding.max_norm = None, and for an nn.Embedding scale what is looked up in a hook: "
            "embedding.register_forward_hook(lambda module, inputs, rows: rows * (max_norm / rows.norm(dim=-1, "
            "keepdim=True).clamp(min=max_norm)).detach())"
        )


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """A context for a module's call in which torch's errors about what no pure function does say what to do instead.

    Raises:
        TreeError: the module has no forward, sets ``requires_grad`` of a parameter, or computes with an earlier call's.
    """
    try:
        yield
    except NotImplementedError as error:
        if getattr(module.forward, "__func__", None) is not nn.Module.forward:
            raise
        raise TreeError(
            f"{type(module).__name__} has no forward. Name the method to call: apply(params, x, method='encode')"
        ) from error
    except RuntimeError as error:
        for text, meant in _MEANT.items():
            if text in str(error):
                raise TreeError(f"{str(error).partition('. ')[0]}. {meant}") from error
        raise


# What torch says -> what to do in a module's call.
_MEANT = {
    "requires_grad flags of leaf": "Parameters are inputs of a pure function: a plan says what is trained, "
    "sl.freeze(globs), and for one call torch.no_grad() or weight.detach() does",
    "is a view and its base or another view of its base has been modified inplace": "If it is of a parameter, and was "
    "kept from an earlier call (self.cached = self.weight.t()), compute it in each call",
}
