"""Everything that differs between the supported torch versions (2.11 and later), and every use of torch's private parts.

Names for hot paths are bound directly, at import, so that no Python call comes in between.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.fx
import torch.utils._pytree
import torch.utils.checkpoint as checkpointing
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._utils import _flatten_dense_tensors, _rebuild_tensor_v2, _rebuild_tensor_v3, _unflatten_dense_tensors
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

# The attention operators that keep no scores, for recompute policies.
FUSED_ATTENTIONS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

split_copied: Any = torch.split_with_sizes_copy  # in torch's stubs it returns nothing

# Tensors and their memory.
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")  # the same while the storage lives
is_view = torch.Tensor._is_view
read_backward_hooks = torch.Tensor._backward_hooks.__get__  # type: ignore[union-attr]
post_accumulate_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
wrapper_subclass = torch.Tensor._make_wrapper_subclass
graph_task = torch._C._current_graph_task_id  # of the backward that runs in this thread; −1 if none does
flatten_dense_tensors, unflatten_dense_tensors = _flatten_dense_tensors, _unflatten_dense_tensors
chunk_cat = (
    torch._chunk_cat
)  # each tensor in as many chunks of its first dimension, padded: [chunks, elements of one of all]
lift, lift_copy = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
)  # a tensor from values in code
has_unknown_sizes: Callable[[torch.Tensor], bool] = attrgetter("_has_symbolic_sizes_strides")
sym_size = torch.ops.aten.sym_size.int
set_arguments: Callable[..., None] = torch.fx.Node._update_args_kwargs  # of a node of a graph
chunk_cat_operator = torch.ops.aten._chunk_cat.default
add_to_each_ = torch._foreach_add_
pad_operator = torch.ops.aten.constant_pad_nd.default
# Operators of which torch.ops has private names alone.
unique, grouped_product = torch.ops.aten._unique2.default, torch.ops.aten._grouped_mm.default
scaled_product = torch.ops.aten._scaled_mm_v2.default  # of 8-bit factors
to_copy, unsafe_view = torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default
writes: Callable[[Any], bool] = attrgetter(
    "_schema.is_mutable"
)  # whether an operator says that it writes to its arguments

# As torch.compiler.disable, but the compiler, which takes seconds to import, is imported by the first call.
outside_of_graphs = torch._disable_dynamo

# Contexts of operations, and queries about the present context.
no_modes = _disable_current_modes
no_dispatch = torch._C._DisableTorchDispatch  # the same, at once, without what subclasses of tensors do
# The modes of selective recompute policies.
SELECTIVE_MODES = checkpointing._CachingTorchDispatchMode, checkpointing._CachedTorchDispatchMode
without_top_mode = _pop_mode_temporarily  # without the mode that was entered last
no_torch_function = torch._C.DisableTorchFunctionSubclass
no_autocast = partial(torch._C._ExcludeDispatchKeyGuard, _AUTOCAST)
autocasts = torch._C._is_any_autocast_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many are at work
profiling = torch.autograd._profiler_enabled
jit_trace = torch._C._get_tracing_state  # None outside of torch.jit.trace
is_zero_tensor: Callable[[torch.Tensor], bool] = methodcaller("_is_zerotensor")  # one of forward mode, without memory
below_autograd = torch._C._AutoDispatchBelowAutograd
# Raises for a false condition, with a message: at once on the CPU, later on a device, for which nothing waits.
require_async: Callable[[torch.Tensor, str], None] = torch._assert_async
next_number = torch.autograd._get_sequence_nr  # that autograd gives to its next node, of this thread
func_transform = torch._C._functorch.peek_interpreter_stack  # the innermost of torch.func, or None
# Whether a tensor belongs to a level of torch.func, where it may stand for several.
of_func: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
without_func = temporarily_clear_interpreter_stack  # a context outside of torch.func's transforms
forward_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)  # below 0 outside forward mode

pytree = torch.utils._pytree
torch_nodes = torch.utils._pytree.SUPPORTED_NODES  # class -> how torch's pytrees flatten it
default_store = dist.distributed_c10d._get_default_store
clone_store: Callable[[dist.Store], dist.Store] = methodcaller("clone")  # another connection; not in torch's stubs

# 2.13 renamed the single-tensor collectives and warns at each call of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """A context in which autocast casts parameters anew for each use."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def recording() -> bool:
    """Whether a mode records operations into a graph: make_fx's, torch.export's, or one that says so by ``records``."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return proxies or any(getattr(mode, "records", False) for mode in _get_current_dispatch_mode_stack())


def another_fake(fake: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """A fake tensor like ``fake``, which nothing has been done with, in the memory of a tensor on the device "meta".

    In a third of the time that `FakeTensor` takes, which checks its arguments.
    """
    made = torch.Tensor._make_subclass(
        FakeTensor,
        empty,
        False,
        dispatch_device=True,
        device_for_backend_keys=fake.fake_device,  # type: ignore[attr-defined]
    )
    made.__dict__.update(fake.__dict__)
    return made


def fakes_of_unknown_sizes() -> FakeTensorMode:
    """A mode of fake tensors, whose sizes may be known in a run alone. No code but `read_sum` takes numbers from them."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False),
        static_shapes=True,
    )


def padded(tensor: torch.Tensor, pad: list[Any], value: float = 0) -> torch.Tensor:
    """`constant_pad_nd`, which torch's fake mode runs for the lengths of the trace alone."""
    from torch._refs import constant_pad_nd

    return constant_pad_nd(tensor, pad, value)


def symbol(mode: FakeTensorMode, number: int, name: str) -> Any:
    """A size in a trace that is another number in other runs, 2 or more; in the trace's own it is ``number``."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    mode.cache_enabled = False  # results with symbols take longer to look up there than to make
    env: Any = mode.shape_env
    made = env.create_symbol(number, ConstantSource(name), DimDynamic.DYNAMIC)
    env.var_to_hint_override[made] = number
    return env.create_symintnode(made, hint=number)


def values_for(symbols: Sequence[Any], numbers: Sequence[int]) -> dict[Any, Any] | None:
    """What to put for each of a trace's symbols, for `number_at`; None where what the trace asked of them, as Python does for
    an if, would be answered in another way."""
    import sympy

    values = {each.node._expr: sympy.Integer(number) for each, number in zip(symbols, numbers, strict=True)}
    guards = symbols[0].node.shape_env.guards if symbols else []
    return values if all(guard.expr.xreplace(values) == sympy.true for guard in guards) else None


def number_at(number: Any, values: Mapping[Any, Any]) -> int:
    """A size, or an expression of it, for a run in which symbols have these values."""
    return number if isinstance(number, int) else int(expression_of(number).xreplace(values))


def expression_of(number: Any) -> Any:
    """What a number of a trace is, which can be hashed: itself, or an expression of symbols."""
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat) else number


def can_read_numbers(tensor: torch.Tensor) -> TypeGuard[FakeTensor]:
    """Whether numbers of a tensor in a trace can be taken for sizes, which are then known in a run alone."""
    return type(tensor) is FakeTensor and tensor.fake_mode.shape_env is not None


def read_sum(tensor: torch.Tensor, likely: int) -> int:
    """The sum of numbers that are not negative. In a trace it is known in a run alone, and `estimated` takes it to be
    ``likely``."""
    if not can_read_numbers(tensor):
        return sum(tensor.tolist())
    mode: Any = tensor.fake_mode
    before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        number: Any = tensor.sum().item()
    finally:
        mode.allow_scalar_outputs = before
    torch._check(number >= 0)
    mode.shape_env.var_to_hint_override[number.node.expr] = likely
    return number


def estimated(number: Any) -> int:
    """A number of elements; where sizes are known in a run alone, what it is likely to be."""
    if isinstance(number, int):
        return number
    return int(number.node.expr.xreplace(number.node.shape_env.var_to_hint_override))


def require(condition: Any, error: Callable[[], Exception]) -> None:
    """Raise ``error()`` for a false condition. One that is known in a run alone a trace takes to hold."""
    if condition is False:
        raise error()
    if condition is not True:
        torch._check(condition)


_whole: list[Any] = []


def whole_in_graphs(function: Any) -> Any:
    """A decorator of autograd.Functions of tensors and constants that torch.compile takes as they are, once `admit` has run.

    So they may have a ``jvp``, and `torch.func` inside of a compiled function sees them.
    """
    _whole.append(function)
    return function


def constant_in_graphs(fn: Any) -> Any:
    """A decorator of functions that torch.compile calls while it traces, and of which a graph has the result.

    As torch.compiler.assume_constant_result, which imports the compiler.
    """
    fn._dynamo_marked_constant = True
    return fn


@constant_in_graphs
def admit() -> None:
    """Tell torch.compile, which traces a caller, about Functions that are `whole_in_graphs`."""
    while _whole:
        torch.compiler.allow_in_graph(_whole.pop())


def differentiated(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires a gradient, at any level of torch.func."""
    while not tensor.requires_grad and not torch.compiler.is_dynamo_compiling() and of_func(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def without_derivatives(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor without derivatives is below the innermost levels of torch.func that differentiate."""
    while of_func(tensor) and not torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def traced(tensor: torch.Tensor) -> bool:
    """Whether operations on a tensor are recorded into a graph, or compute shapes alone."""
    # Without a mode, as in eager, this takes a tenth of a microsecond.
    return type(tensor) is FakeTensor or (
        torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING))
    )


def applying(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, at once, for calls outside of torch.func's transforms."""
    return vars(torch._C._FunctionBase)["apply"].__get__(None, function)


def transformed() -> bool:
    """Whether forward mode or torch.func is at work, so that a tensor may have a tangent, or be a batch of tensors.

    What is compiled is one function to both.
    """
    return not torch.compiler.is_compiling() and (func_transform() is not None or forward_level() >= 0)


def number_of_derivative() -> int:
    """The sequence number of autograd's node that is running; −1 if none is."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


_FIRST = 2**63  # above every sequence number that autograd assigns


def run_first(tensor: torch.Tensor) -> torch.Tensor:
    """Make backward run the node that made ``tensor`` as soon as its gradients are complete.

    Autograd's queue prefers the node made last, so a node made before the forward pass would wait for all the others.
    Torch versions without the setter run the node late, which is correct, with less overlap.
    """
    set_number: Any = getattr(tensor.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(_FIRST)
    return tensor


@contextmanager
def without_modes(hidden: tuple[type[TorchDispatchMode], ...]) -> Iterator[None]:
    """A context without the dispatch modes of these types."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes() as modes:  # the one that was entered last is the first
        kept = [mode for mode in reversed(modes) if not isinstance(mode, hidden)]
        for mode in kept:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in kept:
                _pop_mode()


class OperatorMode(TorchDispatchMode, ABC):
    """A mode that takes each operator which runs in it: see `_take`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ASKS_DEVICE:  # dispatched wherever torch reads the device of a fake tensor
            return args[0].device
        # Autograd takes composite operators apart before a mode sees them, and inference_mode leaves out autograd.
        if torch.is_inference_mode_enabled():
            _push_mode(self)
            try:
                parts = func.decompose(*args, **(kwargs or {}))
            finally:
                _pop_mode()
            if parts is not NotImplemented:
                return parts
        return self._take(func, args, kwargs or {})

    @abstractmethod
    def _take(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator, which is no composite one."""


_ASKS_DEVICE = torch.ops.prim.device.default


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor's memory, which views share. A function, since torch.compile can trace it."""
    return tensor._version


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own dictionary of parameters, without those of its children; entries may be replaced."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own dictionary of buffers, without those of its children; entries may be replaced."""
    return module._buffers


def own_children(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """A module's own dictionary of children."""
    return module._modules


# Entries of a module's dictionary that are no attributes which its calls read.
NO_ATTRIBUTES = frozenset(
    (
        *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_compiled_call_impl"),
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)


def with_children_of_its_own(module: Any) -> Any:
    """A shallow copy of a module, whose children can be replaced without changing the module."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def pre_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The hooks that are called before a module's forward."""
    return list(module._forward_pre_hooks.values())


def is_operator(value: Any) -> bool:
    """Whether ``value`` is an operator of torch's, with a schema."""
    return isinstance(value, torch._ops.OpOverload)


def arguments_of(operator: Any) -> list[tuple[str, bool]]:
    """The name of each argument of an operator, and whether the operator says that it writes to it.

    Nothing for operators of a higher order, whose arguments are functions.
    """
    schema = getattr(operator, "_schema", None)
    return [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments] if schema else []


_COMPILING = threading.Lock()  # simulated ranks, which are threads, compile one at a time


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these strides, which an operator has given it that may be taken apart into others."""
    if tensor.stride() == strides:
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    places = sorted(range(tensor.dim()), key=order.__getitem__)
    made = tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(places)
    if any(size > 1 and got != wanted for size, got, wanted in zip(made.shape, made.stride(), strides)):
        raise ValueError(f"strides {strides} of a result of shape {tuple(tensor.shape)}")
    return made


def compiled_by_inductor(
    graph: torch.fx.Graph, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], device: torch.device
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A graph of operators, without derivatives, as code of torch's compiler, which empties the list that it is given.

    Args:
        inputs, results: tensors of the forms of the graph's.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with _COMPILING, no_modes(), without_func(), mode:
        fakes, wanted = (
            [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device) for each in values]
            for values in (inputs, results)
        )
        whole = torch.fx.GraphModule({}, graph)

        def laid_out(*given: torch.Tensor) -> list[torch.Tensor]:
            return [_laid_out(each, value.stride()) for each, value in zip(whole(*given), wanted, strict=True)]

        module = make_fx(laid_out, decomposition_table=select_decomp_table())(*fakes)
    output = next(iter(reversed(module.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(wanted)))  # whose strides are kept
    # Code is kept on disk where a context says what its shapes depend on: nothing.
    with _COMPILING, no_modes(), torch.no_grad(), tracing(TracingContext(mode)):
        code: Any = compile_fx_inner(module, fakes)

    def run(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:  # with a name, as graphs need one
        return code(tensors)

    return run


def is_compiled(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is a result of torch.compile."""
    return hasattr(fn, "_torchdynamo_orig_callable")


def compiled_call(value: Any) -> Any:
    """What a function that torch.compile returned calls; of a module, the function that `Module.compile` made; else None."""
    if isinstance(value, torch.nn.Module):
        return value.__dict__.get("_compiled_call_impl")
    return value._torchdynamo_orig_callable if compiler_of(value) else None


def compiler_of(value: Any) -> Callable[[Any], Any] | None:
    """What compiles a function with the arguments with which ``value`` was compiled; None for what torch.compile did not
    return, such as a function that wraps its result and has its attributes."""
    if not isinstance(value, FunctionType) or getattr(value, "_torchdynamo_wrapper_id", None) != id(value):
        return None
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
    return cells["self"].cell_contents if "self" in cells else None


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Have a module call ``call`` when it is called, as `Module.compile` does."""
    module._compiled_call_impl = call


def is_compiler(value: Any) -> bool:
    """Whether ``value`` belongs to torch's compiler, as what `compiler_of` returns does."""
    return type(value).__module__.startswith("torch._dynamo") and not isinstance(value, torch.nn.Module)


def factor_of_product(node: Any) -> Any:
    """The factor (alpha) by which a graph node of addmm or baddbmm multiplies its product; 1 for other nodes."""
    return getattr(node, "_saved_alpha", 1)


def grad(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    seeds: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` without dispatch on the type of inputs: handles among them stand for leaves of the graph."""
    return _engine_run_backward(
        tuple(outputs), tuple(seeds), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )


def saving_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The present pack and unpack hooks for saved tensors; None without hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has bf16 dot products; False if this version of torch cannot tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16"))


def watch_checkpoints(
    change: Callable[[Callable[..., Any], Sequence[Any], bool], tuple[Callable[..., Any], Sequence[Any]]],
    before_reentrant: Callable[[], None] | None = None,
) -> None:
    """Make every `torch.utils.checkpoint` keep and recompute what ``change`` returns, for the rest of the process.

    When a checkpoint of ``fn(*args)`` is made, ``change(fn, args, has_context)`` returns the function that backward calls in
    place of ``fn``, and the arguments that are kept for it. ``has_context`` is whether recomputation has a context of its own
    (a policy's). ``before_reentrant()`` is called before a checkpoint with ``use_reentrant=True``. Watchers add up.
    (A ``context_fn`` would do if all callers of `checkpoint` accepted one.)
    """
    record, reentrant = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction.apply

    def watched(
        fn: Any, preserve: Any = True, context_fn: Any = checkpointing.noop_context_fn, *args: Any, **kw: Any
    ) -> Any:
        (check, debug, early), args = args[:3], args[3:]
        again, kept = change(fn, args, context_fn is not checkpointing.noop_context_fn)
        return record(again, preserve, context_fn, check, debug, early, *kept, **kw)

    checkpointing._checkpoint_without_reentrant_generator = watched  # type: ignore[assignment]

    def watched_reentrant(*args: Any) -> Any:
        assert before_reentrant is not None
        before_reentrant()
        return reentrant(*args)

    if before_reentrant is not None:
        checkpointing.CheckpointFunction.apply = watched_reentrant  # type: ignore[method-assign]


class _Described:
    """What a pickled contiguous tensor looks like to a pickler."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.dtype, self.sizes = dtype, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        stride = tuple(math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))
        layout: tuple[Any, ...] = (self.dtype, 0, self.sizes, stride, False, OrderedDict())
        return (
            (_rebuild_tensor_v2, layout) if _typed_storage(self.dtype) else (_rebuild_tensor_v3, (*layout, self.dtype))
        )


class _TensorPickler(pickle.Pickler):
    """Pickles a `_Described` as `torch.save` pickles tensors: its dtype stands where the storage would be."""

    def __init__(self, file: io.BytesIO, described: _Described) -> None:
        super().__init__(file, protocol=2)
        self._described = described
        self._storage = True

    def persistent_id(self, value: Any) -> Any:
        # The first dtype stands for the storage, a second one (of `_rebuild_tensor_v3`) for itself.
        if value is not self._described.dtype or not self._storage:
            return None
        self._storage = False
        numel = math.prod(self._described.sizes)
        if typed := _typed_storage(value):
            return "storage", typed, "0", "cpu", numel
        return "storage", torch.UntypedStorage, "0", "cpu", numel * value.itemsize


def _typed_storage(dtype: torch.dtype) -> Any:
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else None


def pickled_tensor(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor whose elements are entry "0", as in the files of `torch.save`."""
    file = io.BytesIO()
    described = _Described(dtype, sizes)
    _TensorPickler(file, described).dump(described)
    return file.getvalue()


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where an item of a checkpoint lies, as `torch.distributed.checkpoint` notes it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # a third of a second to import

    return _StorageInfo(file, offset, length)


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a DTensor's dimension that a later axis of the mesh cuts first, into ``split_factor`` parts."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)
