"""Wrong arguments of kernels' functions are refused by name, with a remedy that works."""

import numpy as np
import pytest
import torch

import shardlib as sl
from shardlib.kernels import adamw, frozen_adam, lion
from shardlib.kernels.counter import random_bits
from shardlib.kernels.dropout import DropoutDraw
from shardlib.kernels.dropout import dropout as dropout_kernel
from shardlib.kernels.exact_sum import digits_of_squares
from shardlib.kernels.gelu import gelu
from shardlib.kernels.global_norm import sum_of_squares
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy as chunked
from shardlib.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from shardlib.kernels.permute import permute, unpermute
from shardlib.kernels.rotary import rotary
from shardlib.kernels.routing import by_expert, top_k
from shardlib.kernels.softmax import softmax
from shardlib.kernels.subset import put, take
from shardlib.kernels.swiglu import swiglu

KEY = sl.Key(3)
STEP = {"lr": torch.tensor(0.1), "weight_decay": 0.1}
ADAM = {"b1": 0.9, "b2": 0.9, "eps": 1e-8, "weight_decay": 0.1}


def x(*shape):
    return torch.ones(shape or (2, 4))


def layer(dtype=torch.float32):
    return {"x": x(3, 4), "weight": x(5, 4), "targets": torch.zeros(3, dtype=torch.int64)}


def assigned():
    """Two tokens, each with an expert of its own."""
    return torch.tensor([[1], [0]])


def heads():
    return {name: x(1, 2, 16, 8) for name in "qkv"} | {"layout": sl.sparse.dense(16, block=16)}


# Function -> its tensors by name, and other arguments.
FUNCTIONS = {
    layer_norm: ({"x": x(), "weight": x(4), "bias": x(4)}, {}),
    rms_norm: ({"x": x(), "weight": x(4)}, {}),
    add_layer_norm: ({"x": x(), "residual": x(), "weight": x(4), "bias": x(4)}, {}),
    add_rms_norm: ({"x": x(), "residual": x(), "weight": x(4)}, {}),
    gelu: ({"x": x(), "bias": x(4)}, {}),
    swiglu: ({"gate": x(), "up": x()}, {}),
    softmax: ({"x": x(1, 1, 2, 4), "lengths": torch.tensor([2])}, {}),
    rotary: ({"x": x(), "cos": x(2, 2), "sin": x(2, 2)}, {}),
    top_k: ({"scores": x()}, {"k": 2}),
    by_expert: ({"experts": assigned()}, {"count": 2}),
    permute: ({"x": x(), "positions": assigned()}, {}),
    unpermute: ({"rows": x(), "positions": assigned(), "weights": x(2, 1)}, {}),
    take: ({"x": x(2, 3, 4), "index": assigned()}, {}),
    put: ({"x": x(2, 3, 4), "index": assigned(), "rows": x(2, 1, 4)}, {}),
    grouped_matmul: ({"x": x(), "weight": x(3, 5, 4), "offsets": torch.tensor([1, 1, 2])}, {}),
    sl.dropout: ({"x": x(), "bias": x(4), "residual": x()}, {"p": 0.1, "key": KEY}),
    dropout_kernel: ({"x": x(), "bias": x(4), "residual": x()}, {"draw": DropoutDraw(0.1, 3)}),
    sl.nn.linear_cross_entropy: (layer(), {}),
    chunked: (layer(), {}),
    sl.nn.sparse_attention: ({name: v for name, v in heads().items() if name in "qkv"}, {"layout": heads()["layout"]}),
    sum_of_squares: ({"x": x()}, {}),
    digits_of_squares: ({"x": x()}, {}),
    random_bits: ({"index": torch.arange(3)}, {"seed": 3}),
    adamw.adamw_: ({"param": x(), "grad": x(), "mu": x(), "nu": x()}, {"factors": adamw.factors_at(1, 0.1, **ADAM)}),
    adamw.adam_direction_: (
        {"param": x(), "grad": x(), "mu": x(), "nu": x()}, {"factors": adamw.direction_at(1, **ADAM)}
    ),
    lion.lion_: ({"param": x(), "grad": x(), "mu": x()}, {"factors": lion.factors_at(0.1, 0.9, 0.9, 0.1)}),
    frozen_adam.frozen_step_: ({"param": x(), "mu": x(), "nu": x()}, STEP | {"eps": 1e-8}),
    frozen_adam.local_momentum_: ({"grad": x(), "mu": x()}, {"b1": 0.9}),
}  # fmt: skip
WRONG = {
    "None": (lambda tensor: None, "is None; pass a tensor"),
    "number": (lambda tensor: 3.0, r"is a float; pass a tensor: torch\.as_tensor\("),
    "list": (lambda tensor: tensor.tolist(), r"is a list; pass a tensor: torch\.as_tensor\("),
    "numpy": (lambda tensor: np.ones(tensor.shape), r"is a ndarray; pass a tensor: torch\.as_tensor\("),
    "int": (lambda tensor: tensor.int(), r"is torch\.int32"),
    "bool": (lambda tensor: tensor.bool(), r"is torch\.bool"),
    "complex": (lambda tensor: torch.complex(tensor.float(), tensor.float()), r"is torch\.complex64"),
    "sparse": (lambda tensor: tensor.to_sparse(), r"has the layout torch\.sparse_coo; pass \w+\.to_dense\(\)"),
    "other device": (lambda tensor: tensor.to("meta"), "on meta.*: move them to one device"),
}
CASES = [(function, name) for function, (tensors, _) in FUNCTIONS.items() for name in tensors]


def optional(function, name):
    return name in ("bias", "lengths", "weights") or (name == "residual" and function in (sl.dropout, dropout_kernel))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("function, name", CASES, ids=[f"{function.__name__} {name}" for function, name in CASES])
def test_a_wrong_tensor_is_named(function, name, wrong):
    tensors, options = FUNCTIONS[function]
    made, message = WRONG[wrong]
    given = {other: tensor.clone() for other, tensor in tensors.items()} | {name: made(tensors[name])}
    if wrong == "None" and optional(function, name):
        function(**given, **options)
        return
    if wrong == "other device":
        if len(tensors) == 1:
            return  # it serves the device that it is on
        with pytest.raises(ValueError, match=rf"{name} {message}"):
            function(**given, **options)
        return
    with pytest.raises(TypeError, match=rf"{name} {message}"):
        function(**given, **options)


@pytest.mark.parametrize("function", FUNCTIONS, ids=[function.__name__ for function in FUNCTIONS])
def test_strided_tensors_are_accepted(function):
    tensors, options = FUNCTIONS[function]
    whole = {name: tensor.clone() for name, tensor in tensors.items()}
    plain = function(**whole, **options)
    separate = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in tensors.items()}
    assert not any(tensor.is_contiguous() for tensor in separate.values() if tensor.numel() > 1)
    found = function(**separate, **options)
    if found is not None:
        torch.testing.assert_close(found, plain)
    torch.testing.assert_close(separate, whole)  # some are written to


def test_remedies_work():
    ints = torch.ones(2, 4, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"layer_norm: x is torch.int32; pass floating-point numbers: x\.float\(\)"):
        layer_norm(ints, x(4))
    assert layer_norm(ints.float(), x(4)).shape == (2, 4)
    with pytest.raises(TypeError, match=r"x is torch.complex64; pass real numbers, such as torch.view_as_real\(x\)"):
        gelu(torch.ones(2, 4, dtype=torch.complex64))
    assert gelu(torch.view_as_real(torch.ones(2, 4, dtype=torch.complex64))).shape == (2, 4, 2)
    with pytest.raises(TypeError, match=r"targets is torch.int32, not int64; pass int64: targets.to\(torch.int64\)"):
        sl.nn.linear_cross_entropy(x(3, 4), x(5, 4), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"x is a list; .*; weight is None; pass a tensor"):  # all at once
        layer_norm([1.0], None)


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
def test_tensors_without_rows_are_refused(function):
    with pytest.raises(ValueError, match=r"x has no dimensions; pass \[\.\.\., columns\], such as x.reshape\(1\)"):
        function(torch.tensor(1.0), x(1))
    assert function(torch.tensor(1.0).reshape(1), x(1)).shape == (1,)


def test_an_output_layer_that_does_not_fit():
    targets = torch.zeros(3, dtype=torch.int64)
    for function in (sl.nn.linear_cross_entropy, chunked):
        for weight in (x(5, 3), x(0, 4), x(4), x(5, 4).double()):
            with pytest.raises(ValueError, match=r"they must be \[\.\.\., width\] and \[V, width\], of one dtype"):
                function(x(3, 4), weight, targets)
        with pytest.raises(ValueError, match=r"targets have shape \(2,\), and x of shape \(3, 4\) asks for \(3,\)"):
            function(x(3, 4), x(5, 4), targets[:2])
        assert function(x(0, 4), x(5, 4), targets[:0], reduction="sum") == 0


def test_a_number_in_place_of_a_key():
    result = r"key is 3, and no key; pass the loss function's rng, or sl.Key\(3\), folded with the step"
    for call in (
        lambda key: sl.dropout(x(), 0.1, key),
        lambda key: sl.init.normal(key, (3,)),
        lambda key: sl.init.kaiming_uniform(key, (3, 3)),
    ):
        with pytest.raises(TypeError, match=result):
            call(3)
        call(sl.Key(3).fold_in(0))
    with pytest.raises(TypeError, match="sparse_attention: rng is 3, and no key"):
        sl.nn.sparse_attention(**heads(), dropout=0.1, rng=3)
    with pytest.raises(TypeError, match="key is None, and no key"):
        sl.dropout(x(), 0.1, None)
    assert torch.equal(sl.dropout(x(), 0.0, None), x())
    for p in (None, "0.1", 1.0, -0.1):
        with pytest.raises(ValueError, match=r"dropout probability .* is outside \[0, 1\)"):
            sl.dropout(x(), p, KEY)


def test_no_layout():
    with pytest.raises(TypeError, match=r"layout is a Tensor: pass a pattern of sl\.sparse, or "):
        sl.nn.sparse_attention(**heads() | {"layout": x(1, 1)})
    sl.nn.sparse_attention(**heads() | {"layout": sl.sparse.bigbird(16, block=16)})
