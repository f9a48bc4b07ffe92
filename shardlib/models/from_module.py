"""Any `nn.Module` as a pure function of its parameters."""

from __future__ import annotations

import glob
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, overload

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardlib.errors import TreeError, listing
from shardlib.models.copying import buffers_of, meta_copy
from shardlib.models.functional_module import Buffers, FunctionalCopies, FunctionalModule
from shardlib.models.meta import initialised, reset_buffers, sharing
from shardlib.nn.blocks import Sequential, sequential
from shardlib.rng import Key
from shardlib.sharded.given import given_buffers, given_params, read_params
from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import unshard
from shardlib.tree import Tree


class ModuleParams(Protocol):
    """A module's parameters: a dictionary of trees, or a list of them. Of a module on the meta device, a function that
    makes one."""

    def __getitem__(self, key: Any, /) -> Any: ...


class Apply(Protocol):
    """``apply(params, *args, **kwargs)``: see `from_module`."""

    def __call__(self, params: Any, /, *args: Any, **kwargs: Any) -> Any: ...


class ApplyWithBuffers(Protocol):
    """``apply(params, buffers, *args, **kwargs) -> (output, buffers)``: see `from_module`."""

    def __call__(self, params: Any, buffers: Buffers, /, *args: Any, **kwargs: Any) -> tuple[Any, Buffers]: ...


@overload
def from_module(
    module: nn.Module, buffers: Literal[False] = False, blocks: None = None, frozen: Literal[False] = False
) -> tuple[Apply, ModuleParams]: ...
@overload
def from_module(
    module: nn.Module, buffers: Literal[False] = False, blocks: None = None, *, frozen: Literal[True]
) -> tuple[Apply, ModuleParams, list[str]]: ...
@overload
def from_module(
    module: nn.Module, buffers: Literal[True], blocks: None = None, frozen: Literal[False] = False
) -> tuple[ApplyWithBuffers, ModuleParams, Buffers]: ...
@overload
def from_module(
    module: nn.Module, buffers: Literal[True], blocks: None = None, *, frozen: Literal[True]
) -> tuple[ApplyWithBuffers, ModuleParams, Buffers, list[str]]: ...
@overload
def from_module(
    module: nn.Module, buffers: Literal[False] = False, *, blocks: Sequence[nn.Module], frozen: Literal[False] = False
) -> tuple[Sequential, list[ModuleParams]]: ...
@overload
def from_module(
    module: nn.Module, buffers: Literal[False] = False, *, blocks: Sequence[nn.Module], frozen: Literal[True]
) -> tuple[Sequential, list[ModuleParams], list[str]]: ...
@overload
def from_module(
    module: nn.Module, buffers: bool = False, blocks: Sequence[nn.Module] | None = None, frozen: bool = False
) -> tuple[Any, ...]: ...
def from_module(
    module: nn.Module, buffers: bool = False, blocks: Sequence[nn.Module] | None = None, frozen: bool = False
) -> tuple[Any, ...]:
    """A module as ``(apply, params)``, or with ``buffers=True`` as ``(apply, params, buffers)``.

    ``apply(params, *args, **kwargs)`` calls the module; with buffers ``apply(params, buffers, *args, **kwargs)``
    returns ``(output, buffers)``. ``params`` is a nested dictionary by module path in which a ModuleList or Sequential is a
    list; it shares the module's tensors. Tied parameters stay tied. ``apply`` runs a copy of the module, in which functions
    that hold parts of it (closures, decorated methods) hold the copies, and keeps the module's structure. As long as the
    module lives, what is done to it is done to its copies: ``module.eval()``, ``module.dropout.p = 0``, hooks.
    ``apply.config`` is the module's configuration, if it has one, as models of transformers do.
    ``apply(..., training=False)`` runs in eval mode, whatever the module's, as `make_eval_step` does, and
    ``apply(..., method="encode")`` calls another method than forward, and ``method=f`` calls ``f(module, ...)``.

    Writes of the module to its buffers in a call, in place or by assignment, appear in the returned ``buffers`` only. Other
    attributes that it changes (``self.calls += 1``) are not state: each thread has its own copy of the module, and
    checkpoints do not store them. `torch.utils.checkpoint` in the module works with
    ``use_reentrant=False``: backward recomputes from what the call read, and does not write to buffers again.

    With ``blocks`` the result is ``(loss_fn, params)``: an `shardlib.sequential`, which `shardlib.pipeline` can cut into
    stages, and a list of trees, one per block. A block is a module made of submodules of ``module``, called as
    ``block(carry, batch) -> carry``; the first carry is None and the last block returns the loss (the ``forward`` of
    ``module`` is not called). `shardlib.models.huggingface.decoder_blocks` makes blocks of transformers' decoders.

    With ``frozen=True`` the last value is the list of paths of parameters with ``requires_grad=False``, for
    `shardlib.freeze`: ``apply, params, frozen = from_module(model, frozen=True)`` and ``sl.freeze(frozen)`` in the plan. So
    a model of peft trains its adapters without further changes.

    BatchNorm normalises each rank's share of the batch (and each micro-batch) separately, as in DistributedDataParallel. Its
    running statistics pass from micro-batch to micro-batch. After a step `shardlib.make_train_step` averages them over the
    ranks that share the batch; the mean of variances is not the variance of the whole batch. Integer buffers
    (``num_batches_tracked``) are rank-local; a checkpoint has each rank's, where they differ. Other floating ones are equal
    on all ranks, or ``buffer_kinds=`` says what they are. An embedding with ``scale_grad_by_freq`` divides by how often a row
    occurs in a rank's share, and in a micro-batch.

    A module on the meta device has no values yet. Then ``params`` is a function that initialises them, to be passed to
    `shardlib.shard`, which runs it leaf by leaf; parameters that have values keep them. It calls each submodule's
    ``reset_parameters``, then the ``_init_weights`` of the model that contains the submodule (which is how transformers'
    models initialise). Normal and uniform numbers are drawn by the seed of `torch.manual_seed`, the same on every mesh, and
    each rank draws only its shards; ``lambda: params(rng=key)`` draws by a key, such as another one for a second model.

    Moments and weight decay of `shardlib.optim.adamw` also move parameters that a step's loss does not use (such as a head
    whose turn it is not), unlike torch's: wrap it in `shardlib.optim.skip_unused`, or freeze those that
    `shardlib.unused_params` names.

    Raises:
        TreeError: ``module`` is no module or cannot be copied; a parameter has ``requires_grad=False`` without
            ``frozen=True``, is on the meta device without a way to initialise it, or is in none of the blocks; an embedding
            has ``max_norm``; blocks are given together with ``buffers=True``. From ``apply`` and ``loss_fn``: the tree has
            other parameters, or the module changed a buffer without ``buffers=True``.

    >>> apply, params = sl.from_module(torch.nn.Linear(4, 2))
    >>> apply(params, torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    _require_module(module)
    if blocks is not None:
        if buffers:
            raise TreeError("a loss made of blocks returns no buffers; leave out buffers=True, or blocks=")
        _require_all_used(module, blocks)
        module = BlockList(blocks)
    if not frozen:
        _require_trained(module)
    _require_no_renorm(module)
    held = _with_real_values(module, buffers_of(module))
    copies = FunctionalCopies(module, held)
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    params: Any = partial(initialise, sharing(module)) if on_meta else _tree(module)

    # Globs that match only the parameter of a name.
    names = [name for name, leaf in module.named_parameters(remove_duplicate=False) if not leaf.requires_grad]
    last = ([glob.escape(name.replace(".", "/")) for name in names],) if frozen else ()

    if isinstance(module, BlockList):
        return _in_sequence(module, copies), params, *last

    # How a module is called, unless its forward has arguments of these names.
    how = {"training", "method"} - inspect.signature(module.forward).parameters.keys()

    def call(params: Tree, buffers: Buffers | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, called = flat(read_params("apply", params)), {name: kwargs.pop(name) for name in how & kwargs.keys()}
        return copies.beside(given, args)(given, args, kwargs, buffers, **called)

    def apply(params: Tree, *args: Any, **kwargs: Any) -> Any:
        return call(params, None, args, kwargs)

    def apply_with_buffers(params: Tree, buffers: Buffers, *args: Any, **kwargs: Any) -> Any:
        return call(params, dict(buffers), args, kwargs)  # None would be a call without buffers

    made: Any = apply_with_buffers if buffers else apply
    made.config = getattr(module, "config", None)
    if not buffers:
        return made, params, *last
    values = {name: None if buffer is None else buffer.detach().clone() for name, buffer in held.items()}
    return made, params, values, *last


def _with_real_values(module: nn.Module, buffers: dict[str, Any]) -> dict[str, Any]:
    """A module's buffers, all of which have initial values if some are on the meta device."""
    on_meta = any(buffer is not None and buffer.is_meta for buffer in buffers.values())
    return buffers | reset_buffers(module) if on_meta else buffers


class BlockList(nn.ModuleList):
    """Modules that are called one after the other, each with its own tree of parameters."""


def _in_sequence(blocks: BlockList, copies: FunctionalCopies) -> Sequential:
    def block_function(index: int, module: nn.Module) -> Callable[..., Any]:
        def run(params: Tree, carry: Any, batch: Any, **rng: Any) -> Any:
            given = flat(params)
            return copies.beside(given, (carry, batch), str(index))(given, (carry, batch), rng)

        run.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]  # whether it takes rng
        return run

    return sequential([block_function(index, module) for index, module in enumerate(blocks)])


def _tree(module: nn.Module) -> Tree:
    """A module's parameters, detached, as nested dictionaries and lists; a tied one is one tensor in several places."""
    detached: dict[int, torch.Tensor] = {}
    named = {
        name: detached.setdefault(id(parameter), parameter.detach())
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    if not isinstance(module, BlockList):
        return _nest(named)
    # Block by block: `_nest` of all would leave out a block without parameters, which has an empty tree.
    by_block: list[dict[str, torch.Tensor]] = [{} for _ in module]
    for name, tensor in named.items():
        block, _, rest = name.partition(".")
        by_block[int(block)][rest] = tensor
    return [_nest(of_block) for of_block in by_block]


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
    """Dotted name -> tensor, for nested dictionaries and lists; the inverse of `_nest`."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    named: dict[str, torch.Tensor] = {}
    for key, value in items:
        named |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return named


def initialise(module: nn.Module, rng: Key | None = None, names: Collection[str] | None = None) -> Tree:
    """A module's parameters, those on the meta device (called ``names``) as `initialised` draws them, by default by torch's
    seed."""
    return _tree(initialised(module, Key(torch.initial_seed()) if rng is None else rng, names))


def state_dict(
    module: nn.Module, params: Tree, buffers: Buffers | None = None, *, blocks: Sequence[nn.Module] | None = None
) -> dict[str, Any]:
    """``module.state_dict()`` with ``params``, for ``load_state_dict``, ``save_pretrained`` and files.

    The module does not change; ``module.load_state_dict(sl.models.state_dict(module, state.params))`` writes to it. If
    ``params`` are `Sharded`, all ranks must call this, as `shardlib.unshard`, and each gets the whole dictionary, with the
    parameters of other stages and slices; write files on one rank. Tied parameters are one tensor under each of their names.

    Args:
        module: the argument of `from_module`.
        params: as `from_module` returned them: a tree, or `Sharded`, or a `TrainState` of them.
        buffers: as ``apply`` returned them; by default those of the state, if ``params`` are one that has buffers, else the
            buffers of ``module`` (``buffers={}`` for these in any case).
        blocks: the argument of `from_module`, or blocks made of the module in the same way.

    Raises:
        TreeError: ``params`` or ``buffers`` are those of another module, or of other blocks.
    """
    _require_module(module)
    buffers = given_buffers(params) if buffers is None else buffers
    _require_buffers(module, buffers)
    params = given_params("state_dict", params)
    named = flat(unshard(params) if isinstance(params, Sharded) else params)
    if blocks is not None:
        _require_all_used(module, blocks)
        names = {id(leaf): name for name, leaf in BlockList(blocks).named_parameters(remove_duplicate=False)}
        if missing := sorted(set(names.values()) - named.keys()):
            raise TreeError(
                f"these parameters are not those of the {len(blocks)} blocks: {missing[0]} is not among them. Pass the trees "
                "and the blocks of sl.from_module(module, blocks=...)"
            )
        named = {name: named[names[id(leaf)]] for name, leaf in module.named_parameters(remove_duplicate=False)}
    copied = meta_copy(module)
    held = _with_real_values(module, buffers_of(copied) | dict(buffers or {}))
    function = FunctionalModule(copied, {})
    function.require_names(named, held)
    with function.holding(named, held), torch.no_grad():
        return copied.state_dict()


# What cannot be taken. The messages list all submodules at fault.


def _require_buffers(module: nn.Module, buffers: Any) -> None:
    """Raise `TreeError` for buffers that are no dictionary from names to tensors, such as a state's that has a loss's own
    beside the module's."""
    if buffers is None:
        return
    named = buffers if isinstance(buffers, Mapping) else {f"(all, a {type(buffers).__name__})": buffers}
    if wrong := [f"{name}" for name, leaf in named.items() if not isinstance(leaf, torch.Tensor | None)]:
        raise TreeError(
            f"these are not the buffers of {type(module).__name__}:\n{listing(wrong)}\nPass buffers=, the part of "
            "state.buffers that sl.from_module returned"
        )


def _require_module(module: Any) -> None:
    """Raise `TreeError` for what is no module, and for modules that cannot be called with other parameters."""
    if not isinstance(module, nn.Module):
        raise TreeError(
            f"from_module takes a torch.nn.Module and got {type(module).__name__}; pass a function of parameters as it is: "
            "sl.make_train_step(loss_fn, params, ...)"
        )
    failures = []
    for path, owner in module.named_modules():
        name = path or "(top)"
        if isinstance(owner, nn.DataParallel | nn.parallel.DistributedDataParallel):
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


def _require_all_used(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise `TreeError` for blocks that leave out parameters of their module."""
    used = {id(parameter) for block in blocks for parameter in block.parameters()}
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in used]
    if missing:
        raise TreeError(
            f"parameters that none of the blocks has:\n{listing(missing)}\nMake the blocks of all of the module's own "
            "submodules, not of copies"
        )


def _require_trained(module: nn.Module) -> None:
    """Raise `TreeError` for parameters with ``requires_grad=False``, which would be trained; not integers."""
    frozen = [name for name, leaf in module.named_parameters() if leaf.is_floating_point() and not leaf.requires_grad]
    if frozen:
        raise TreeError(
            f"{len(frozen)} parameters have requires_grad=False, which a pytree of tensors cannot carry:\n{listing(frozen)}\n"
            "Pass frozen=True: from_pretrained then freezes them, and sl.from_module returns their paths for sl.freeze; or "
            "call module.requires_grad_(True)"
        )


def _require_no_renorm(module: nn.Module) -> None:
    """Raise `TreeError` for embeddings that renormalise their rows on look-up, which writes to the parameter."""
    renormed = [
        name or "the module itself"
        for name, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
    ]
    if renormed:
        raise TreeError(
            f"embeddings with max_norm write to their parameters as they are looked up:\n{listing(renormed)}\nSet "
            "embedding.max_norm = None, and scale the rows in a hook: embedding.register_forward_hook(lambda module, inputs, "
            "rows: rows * (max_norm / rows.norm(dim=-1, keepdim=True).clamp(min=max_norm)).detach())"
        )
