"""A recorder of operations as a graph, on fake tensors.

What torch's make_fx does in a millisecond for each operation takes a tenth of that here: a fake result is looked up by the
forms of what an operator is given, and is made by torch's fake mode for the first call of each kind alone. Sizes that are
known in a run alone (`shardlib.common._compat.read_sum`) are nodes; what has such a size the fake mode makes each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from shardlib.common._compat import (
    FakeTensor,
    OperatorMode,
    another_fake,
    chunk_cat_operator,
    expression_of,
    fakes_of_unknown_sizes,
    has_unknown_sizes,
    lift,
    lift_copy,
    no_dispatch,
    number_at,
    pad_operator,
    padded,
    pytree,
    set_arguments,
    sym_size,
    symbol,
    values_for,
    writes,
)
from shardlib.errors import IllegalComposition
from shardlib.execute.graph.nodes import DEVICE, draws


class InputLayout(NamedTuple):
    """How an input lies in memory: its path in a tree, its sizes and its strides."""

    path: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Lengths:
    """Sizes and strides in a trace. Those that were the same in all batches so far are numbers; those that changed alike are
    one symbol, with which the trace computes. What it asks of symbols, it asks of the batch that it is made for, and the
    graph is for all batches of which the answers are the same.

    Args:
        known: the layouts of each batch so far, of as many tensors with as many dimensions; the trace is of the last one.

    Attributes:
        mode: of the trace's fake tensors.
        vary: whether there are symbols.
    """

    def __init__(self, known: Sequence[tuple[InputLayout, ...]]) -> None:
        self.mode: Any = fakes_of_unknown_sizes()
        self._symbols: dict[tuple[int, ...], Any] = {}  # by what each was in the batches so far
        self._values: dict[tuple[int, ...], dict[Any, int] | None] = {}  # by the numbers of a batch
        self._made = [self._of_tensor(layouts) for layouts in zip(*known)]
        self.vary: bool = bool(self._symbols)

    def _of_tensor(self, layouts: Sequence[InputLayout]) -> InputLayout:
        sizes = tuple(map(self._number, zip(*(layout.sizes for layout in layouts))))
        strides: dict[int, Any] = {}
        for place in sorted(range(len(sizes)), key=lambda place: (layouts[-1].strides[place], -place)):
            strides[place] = self._stride(place, layouts, sizes, strides)
        return InputLayout(layouts[-1].path, sizes, tuple(strides[place] for place in range(len(sizes))))

    def _number(self, seen: tuple[int, ...]) -> Any:
        """A number of the trace, which was ``seen`` in the batches so far."""
        if len(set(seen)) == 1 or seen[-1] < 2:  # torch treats 0 and 1 in ways of their own
            return seen[-1]
        if seen not in self._symbols:
            self._symbols[seen] = symbol(self.mode, seen[-1], f"length_{len(self._symbols)}")
        return self._symbols[seen]

    def _stride(
        self, place: int, layouts: Sequence[InputLayout], sizes: Sequence[Any], strides: Mapping[int, Any]
    ) -> Any:
        """A stride: where it always was the product of another dimension's size and stride, as in whole memory, that."""
        seen = tuple(layout.strides[place] for layout in layouts)
        if len(set(seen)) > 1:
            for other, stride in strides.items():
                if all(now == one.sizes[other] * one.strides[other] for now, one in zip(seen, layouts)):
                    return sizes[other] * stride
        return self._number(seen)

    def fake(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A fake tensor in the place of the ``number``-th one of a batch, while `mode` is active."""
        _, sizes, strides = self._made[number]
        if all(type(each) is int for each in (*sizes, *strides)):
            return self.mode.from_tensor(tensor)
        made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def give(self, expression: Any) -> bool:
        """Whether an expression is known from a batch."""
        return expression.free_symbols.issubset(each.node._expr for each in self._symbols.values())

    def values(self, layouts: tuple[InputLayout, ...]) -> dict[Any, int] | None:
        """What each symbol is in a batch; None if the graph is not for it."""
        now = _numbers(layouts)
        if now not in self._values:
            self._values[now] = self._compared(now)
        return self._values[now]

    def _compared(self, now: tuple[int, ...]) -> dict[Any, int] | None:
        made = _numbers(self._made)
        symbols = list(self._symbols.values())
        numbers = [next(number for number, each in zip(now, made) if each is length) for length in symbols]
        if min(numbers, default=2) < 2 or (values := values_for(symbols, numbers)) is None:
            return None
        return values if all(number_at(each, values) == number for each, number in zip(made, now)) else None


def _numbers(layouts: Sequence[InputLayout]) -> tuple[Any, ...]:
    return tuple(number for layout in layouts for number in (*layout.sizes, *layout.strides))


class TensorForm(NamedTuple):
    """What a tensor is, but for its values. Sizes and strides are expressions where lengths are symbols."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Any
    plain: bool  # neither conjugated nor known to be a constant


class Fakes:
    """The fake tensors of a trace of batches with ``lengths``, and what operators are known to return."""

    lengths: Lengths
    mode: Any

    def __init__(self, lengths: Lengths) -> None:
        self.lengths, self.mode = lengths, lengths.mode
        self._known: dict[Any, Any] = {}
        self._numbers: dict[
            Any, Any
        ] = {}  # expression -> the number of the trace, None of one that is known in a run alone
        self._firsts: dict[TensorForm, torch.Tensor] = {}
        self._values: dict[TensorForm, torch.Tensor] = {}

    def result(self, key: tuple[Any, ...] | None, call: Callable[[], Any]) -> tuple[Any, Any]:
        """What a call gives, and the same with forms in place of tensors.

        Args:
            key: of calls with results of the same forms in memory of their own, or views; None for any other call.
        """
        forms = None if key is None else self._known.get(key)
        if forms is not None:
            return _mapped(self.empty, forms), forms
        result = call()
        forms = _mapped(self.form, result)
        if key is not None and _all_new(forms):
            self._known[key] = forms
        return result, forms

    def form(self, tensor: torch.Tensor) -> TensorForm | None:
        """The form of a fake tensor; None of one that is sparse, or whose sizes are known in a run alone."""
        if tensor.layout is not torch.strided:
            return None
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if has_unknown_sizes(tensor):
            shape, stride, (offset,) = (tuple(map(self.expression, each)) for each in (shape, stride, (offset,)))
            if None in shape or None in stride or offset is None:
                return None
        plain = tensor.constant is None and not tensor.is_conj() and not tensor.is_neg()  # type: ignore[attr-defined]
        return TensorForm(shape, stride, tensor.dtype, tensor.device, offset, plain)

    def expression(self, number: Any) -> Any:
        """A number, or what it is of the symbols of the batch; None of one that is known in a run alone."""
        if isinstance(number, int):
            return number
        found = expression_of(number)
        if found not in self._numbers:
            self._numbers[found] = number if self.lengths.give(found) else None
        return None if self._numbers[found] is None else found

    def empty(self, form: TensorForm) -> torch.Tensor:
        """A fake tensor."""
        empty, first = self._without_values(form), self._firsts.get(form)
        if first is None:
            first = self._firsts[form] = FakeTensor(self.mode, empty, form.device)
        return another_fake(first, empty)

    def value(self, form: TensorForm | None) -> torch.Tensor | None:
        """A tensor without values of a form, for passes."""
        if form is not None and form not in self._values:
            self._values[form] = self._without_values(form)
        return None if form is None else self._values[form]

    def _without_values(self, form: TensorForm) -> torch.Tensor:
        shape, stride = ([self._numbers.get(each, each) for each in sizes] for sizes in (form.shape, form.stride))
        with no_dispatch():
            return torch.empty_strided(shape, stride, dtype=form.dtype, device="meta")


def _mapped(function: Callable[[Any], Any], result: Any) -> Any:
    """``function`` of the tensors, or forms, that an operator returns."""
    if isinstance(result, torch.Tensor | TensorForm):
        return function(result)
    if isinstance(result, tuple | list):
        return type(result)([_mapped(function, each) for each in result])
    return result


def _all_new(forms: Any) -> bool:
    """Whether the forms of a result are all that there is to it."""
    if isinstance(forms, TensorForm):
        return forms.plain and not forms.offset
    return bool(forms) and isinstance(forms, tuple | list) and all(map(_all_new, forms))


class Recorder(OperatorMode):
    """A mode that records operations.

    Attributes:
        fakes: what it computes with.
        graph: of the operations.
        constants: tensors that operations read and that are no inputs, by the names that the graph has for them.
    """

    graph: Graph
    constants: dict[str, Any]

    records = True

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self.graph, self.constants = Graph(), dict[str, torch.Tensor]()
        self.fakes = fakes
        self.drawn: list[torch.device] = []  # of each operator that draws from a default generator
        self._read: dict[int, Node] = {}  # identity of a constant -> its node
        self._made_by: dict[Any, Callable[..., Any]] = {chunk_cat_operator: self._chunks}
        if fakes.lengths.vary:
            self._made_by[pad_operator] = padded
        self._numbers: dict[Any, Node | float] = {}  # number that is known in a run alone, as an expression -> its node

    def node_of(self, tensor: torch.Tensor) -> Node | None:
        """The node of a tensor that was recorded, if it was."""
        made_by, node, _ = getattr(tensor, "recorded", (None, None, None))
        return node if made_by is self else None

    def is_known(self, made_by: Any, node: Any) -> bool:
        """Whether a recorder's node is one here."""
        return made_by is self

    def inputs(
        self, before: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Fake tensors that are inputs of the graph; those of the batch may have other lengths in other runs."""
        made = [
            *map(self.fakes.mode.from_tensor, before),
            *(self.fakes.lengths.fake(tensor, number) for number, tensor in enumerate(batch)),
            *map(self.fakes.mode.from_tensor, after),
        ]
        nodes = [self._node("placeholder", f"input_{number}") for number in range(len(made))]
        for node, each in zip(nodes, made):
            self._note(node, each, self.fakes.form(each))
        return made

    def outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        self.graph.output([self._given(tensor, []) for tensor in tensors])

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        key: list[Any] = [func, torch.get_default_dtype()]
        given = tuple(self._given(each, key) for each in args)
        named = {}
        for name, each in kwargs.items():
            key.append(name)
            named[name] = self._given(each, key)
        known = None if None in key or writes(func) or not _FIXED.isdisjoint(func.tags) else tuple(key)
        call = self._made_by.get(func, func)
        if func is not lift:
            args, named_args = _mapped(self._without_values, (args, list(kwargs.values())))
            kwargs = dict(zip(kwargs, named_args))
        result, forms = self.fakes.result(known, lambda: call(*args, **kwargs))
        node = self._node("call_function", lift_copy if func is lift else func, given, named)
        self._note(node, result, forms)
        if draws(node) and "generator" not in named:
            device = next(each.device for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
            self.drawn.append(device)
            draw_on(device)
        return result

    def _chunks(self, tensors: Sequence[torch.Tensor], dim: int, ways: int) -> torch.Tensor:
        """Packed gradients, which torch's fake mode makes in half a millisecond for each."""
        values = [self.fakes.value(tensor.recorded[2]) for tensor in tensors]  # type: ignore[attr-defined]
        with no_dispatch():
            value = chunk_cat_operator(values, dim, ways)
        return self.fakes.empty(TensorForm(tuple(value.shape), value.stride(), value.dtype, tensors[0].device, 0, True))

    def _node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Node:
        """The node of a call, of an input, or of a constant."""
        name = target if isinstance(target, str) else target.__name__.partition(".")[0]
        node = self.graph.create_node(op, target, name=name)
        set_arguments(node, args, kwargs or {})  # which `create_node` would search for symbolic numbers, as long again
        return node

    def _given(self, value: Any, key: list[Any]) -> Any:
        """An argument as the graph has it. What results depend on is added to ``key``: None where that is not known."""
        if isinstance(value, torch.Tensor):
            if type(value) is FakeTensor:
                made_by, node, form = getattr(value, "recorded", (None, None, None))
                if not self.is_known(made_by, node):
                    raise IllegalComposition(
                        "the loss uses a tensor that it computed in another call. Compute it in each, or outside"
                    )
            else:
                node, form = self._constant(value), None
            if has_unknown_sizes(value):  # lengths may have turned out to be equal since
                form = self.fakes.form(value)
            key.append(form if form is None or form.plain else None)
            return node
        if isinstance(value, tuple | list):
            key.append(len(value))
            return [self._given(each, key) for each in value]
        if isinstance(value, torch.SymInt | torch.SymFloat):
            expression = value.node.expr
            if self._is_computed(expression):
                key.append(self.fakes.expression(value))
                return self._number(expression)
        value = as_traced(value)
        key.append((type(value), value))
        return value

    def _is_computed(self, expression: Any) -> bool:
        """Whether a graph can compute a number that is known in a run alone, and rounds it as Python does."""
        if expression.is_Integer or expression.is_Float or expression in self._numbers:
            return True
        name, args = type(expression).__name__, expression.args
        rounds = name in ("Add", "Mul") and not all(each.is_integer for each in args)  # in an order of its own
        return name in _JOINS and not rounds and all(map(self._is_computed, args))

    def _number(self, expression: Any) -> Node | float:
        """The node of a number that is known in a run alone."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Float:
            return float(expression)
        if expression not in self._numbers:
            joins = _JOINS[type(expression).__name__]
            first, *others = [self._number(each) for each in expression.args]
            if not others:
                first = self._node("call_function", joins, (first,))
            for other in others:
                first = self._node("call_function", joins, (first, other))
            self._numbers[expression] = first
        return self._numbers[expression]

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor in the place of a constant, to which torch's fake mode would write."""
        return tensor if type(tensor) is FakeTensor else self.fakes.mode.from_tensor(tensor)

    def _constant(self, tensor: torch.Tensor) -> Node:
        node = self._read.get(id(tensor))
        if node is None:
            name = f"constant_{len(self.constants)}"
            node = self._read[id(tensor)] = self._node("get_attr", name)
            self.constants[name] = tensor
            node.meta["val"] = self.fakes.value(self.fakes.form(self.fakes.mode.from_tensor(tensor)))
        return node

    def _note(self, node: Node, result: Any, forms: Any) -> None:
        """Note the node of a result, and one for each of several results."""
        if isinstance(result, torch.Tensor):
            result.recorded = self, node, forms  # type: ignore[attr-defined]
            unknown = has_unknown_sizes(result)
            node.meta["val"] = result if unknown and forms is None else self.fakes.value(forms)
            node.meta[DEVICE] = result.device
            sizes: Sequence[Any] = result.shape if unknown else ()
            for dim, size in enumerate(sizes):
                if type(size) is torch.SymInt and size.node.expr not in self._numbers:
                    self._numbers[size.node.expr] = self._node("call_function", sym_size, (node, dim))
        elif isinstance(result, torch.SymInt):
            self._numbers[result.node.expr] = node
        elif isinstance(result, tuple | list):
            values: list[Any] = [None] * len(result)
            for number, (each, form) in enumerate(zip(result, forms)):
                if each is not None:
                    item = self._node("call_function", getitem, (node, number))
                    self._note(item, each, form)
                    values[number] = item.meta.get("val")
            node.meta["val"] = values


def draw_on(device: torch.device) -> None:
    """Draw from a device's default generator, for code that looks at its state after an operator without values."""
    with no_dispatch():
        torch.empty((), device=device).random_()


# Kinds of numbers that are known in a run alone -> Python's.
_PLAIN_KINDS: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def as_traced(value: Any) -> Any:
    """A value, of which the graph has that of the trace: it is for batches alone in which a number of lengths is the same.

    Raises:
        IllegalComposition: a number that depends on values.
    """
    try:
        return _PLAIN_KINDS[type(value)](value) if type(value) in _PLAIN_KINDS else value
    except RuntimeError:
        raise IllegalComposition(
            f"the loss computes with a number known only in a run, {value}. Use sl.experts(padded=True)"
        ) from None


# How a graph computes with numbers that are known in a run alone, by the names of expressions.
_JOINS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": max, "Min": min, "ToFloat": float,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv, "FloatPow": operator.pow,
}  # fmt: skip
# Operators whose results may differ in form between calls of the same forms.
_FIXED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
