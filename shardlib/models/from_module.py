"""Any `nn.Module` as a pure function of its parameters."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardlib.errors import TreeError
from shardlib.models.meta import initialised, reset_buffers
from shardlib.models.refusals import require_all_used, require_module, require_no_renorm, require_trained
from shardlib.models.skeleton import Buffers, Skeletons, buffers_of, hollow
from shardlib.nn.blocks import Sequential, sequential
from shardlib.rng import Key
from shardlib.tree import Tree


def from_module(
    module: nn.Module, buffers: bool = False, blocks: Sequence[nn.Module] | None = None, frozen: bool = False
) -> tuple[Any, ...]:
    """Turn a module into ``(apply, params)``, or with ``buffers=True`` into ``(apply, params, buffers)``.

    ``apply(params, *args, **kwargs)`` calls the module; with buffers ``apply(params, buffers, *args, **kwargs)``
    returns ``(output, buffers)``. ``params`` is a nested dictionary by module path in which a ModuleList or
    Sequential is a list; its tensors are the module's own. Tied parameters stay tied. ``apply`` keeps the module's
    structure and mode (train or eval) as they are now. What the module writes to its buffers in a call, in place or by
    assignment, is in the returned ``buffers`` and nowhere else; other attributes that it changes (``self.calls += 1``)
    are not state: each thread's copy of the module has its own, and no checkpoint keeps them. `torch.utils.checkpoint` in
    the module works with ``use_reentrant=False``: backward sees what the call saw, and writes to no buffer again.

    With ``blocks`` the result is ``(loss_fn, params)``: an `shardlib.sequential`, which `shardlib.pipeline` can cut into
    stages, and a list of trees, one per block. A block is a module of the module's own submodules, called as
    ``block(carry, batch) -> carry``; the first carry is None and the last block returns the loss (the module's own
    ``forward`` is not called). `shardlib.models.huggingface.decoder_blocks` makes them for transformers' decoders.

    With ``frozen=True`` one more value comes last, the paths of parameters with ``requires_grad=False`` for
    `shardlib.freeze`: ``apply, params, frozen = from_module(model, frozen=True)`` and ``sl.freeze(frozen)`` in the plan. So
    a model of peft trains its adapters as it comes.

    BatchNorm normalises each rank's share (and micro-batch) by itself, as in DistributedDataParallel. Its running
    statistics pass from micro-batch to micro-batch; after a step `shardlib.make_train_step` makes them, as all floating
    buffers, the mean over the ranks that share the batch out: of variances too, which is not the variance of the whole
    batch. Integers (``num_batches_tracked``) are each rank's own.

    A module on the meta device has no values yet: then ``params`` is a function that makes them, to be passed to
    `shardlib.shard`, which runs it leaf by leaf. It calls each submodule's ``reset_parameters``, and then the
    ``_init_weights`` of the model that the submodule is in (so transformers' models say what they start from). Normal and
    uniform numbers are drawn by the seed that `torch.manual_seed` set, the same on every mesh, and each rank draws only
    its own; ``lambda: params(rng=key)`` draws by a key, another for a second model.

    Parameters that the loss does not use (a head that is not asked for) are decayed by `shardlib.optim.adamw`, and not by
    torch's: freeze those that `shardlib.unused_params` names.

    Raises:
        TreeError: not a module, or one that cannot be copied; parameters with ``requires_grad=False`` and not
            ``frozen=True``, on the meta device without a way to initialise them, or in none of the blocks; an embedding
            with ``max_norm``; blocks together with ``buffers=True``. From ``apply`` and ``loss_fn``: a tree of other
            parameters, or a buffer changed and ``buffers=True`` was not given.

    >>> apply, params = sl.from_module(torch.nn.Linear(4, 2))
    >>> apply(params, torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    require_module(module)
    if blocks is not None:
        if buffers:
            raise TreeError(
                "a loss made of blocks hands no buffers on; use from_module without buffers=True, or blocks="
            )
        require_all_used(module, blocks)
        module = Blocks(blocks)
    if not frozen:
        require_trained(module)
    require_no_renorm(module)
    held = buffers_of(module)
    if any(buffer is not None and buffer.is_meta for buffer in held.values()):
        held |= reset_buffers(module)
    skeletons = Skeletons(module, held)
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    params: Any = partial(_initialise, hollow(module)) if on_meta else _tree(module)

    still = [_glob(n) for n, leaf in module.named_parameters(remove_duplicate=False) if not leaf.requires_grad]
    last = (still,) if frozen else ()

    if isinstance(module, Blocks):
        return _in_sequence(module, skeletons), params, *last

    if not buffers:

        def apply(params: Tree, *args: Any, **kwargs: Any) -> Any:
            given = flat(params)
            return skeletons.beside(given, args)(given, args, kwargs)

        return apply, params, *last

    def apply_with_buffers(params: Tree, buffers: Buffers, *args: Any, **kwargs: Any) -> Any:
        given = flat(params)
        return skeletons.beside(given, args).with_buffers(given, buffers, args, kwargs)

    fresh = {name: None if buffer is None else buffer.detach().clone() for name, buffer in held.items()}
    return apply_with_buffers, params, fresh, *last


class Blocks(nn.ModuleList):
    """Modules that are called one after the other, each with a tree of its own."""


def _in_sequence(blocks: Blocks, skeletons: Skeletons) -> Sequential:
    def one(index: int, module: nn.Module) -> Callable[..., Any]:
        def run(params: Tree, carry: Any, batch: Any, **rng: Any) -> Any:
            given = flat(params)
            return skeletons.beside(given, (carry, batch), str(index))(given, (carry, batch), rng)

        run.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]  # whether it takes rng
        return run

    return sequential([one(index, module) for index, module in enumerate(blocks)])


def _own_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Dotted name -> parameter, detached; a tied parameter is one tensor under several names."""
    detached: dict[int, torch.Tensor] = {}
    return {
        name: detached.setdefault(id(parameter), parameter.detach())
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _tree(module: nn.Module) -> Tree:
    """A module's parameters as nested dictionaries and lists."""
    named = _own_parameters(module)
    if not isinstance(module, Blocks):
        return _nest(named)
    # Not `_nest` of all: a block without parameters has a tree too.
    parts: list[dict[str, torch.Tensor]] = [{} for _ in module]
    for name, tensor in named.items():
        block, _, rest = name.partition(".")
        parts[int(block)][rest] = tensor
    return [_nest(part) for part in parts]


def _nest(named: dict[str, torch.Tensor]) -> Tree:
    """``{"h.0.weight": ...}`` -> ``{"h": [{"weight": ...}]}``; keys 0..n-1 make a list."""
    tree: dict[str, Any] = {}
    for name, tensor in named.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = tensor
    return _lists(tree)


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    values = {key: _lists(value) for key, value in node.items()}
    if values and list(values) == [str(index) for index in range(len(values))]:
        return list(values.values())
    return values


def flat(tree: Tree, prefix: str = "") -> dict[str, torch.Tensor]:
    """The inverse of `_nest`."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _initialise(hollow: nn.Module, rng: Key | None = None) -> Tree:
    return _tree(initialised(hollow, Key(torch.initial_seed()) if rng is None else rng))


def _glob(name: str) -> str:
    """A pattern that matches the parameter of this dotted name alone."""
    return glob.escape(name.replace(".", "/"))
