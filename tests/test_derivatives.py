"""Every backward of the library's own: right twice and in forward mode, or refused by the operation's name.

`GIVEN` has an entry for each autograd.Function that the library defines, so that a new one without its derivatives fails.
"""

import importlib
import inspect
import pkgutil
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import layer_kernels, sparse_cases

import shardlib as sl
from shardlib.collectives.sequence.ring import _Ring
from shardlib.errors import LossError
from shardlib.execute.meeting import _MeetInBackward
from shardlib.execute.thinning import _ignoring
from shardlib.kernels.common import operators
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy
from shardlib.kernels.permute import permute, unpermute
from shardlib.kernels.subset import put, take


def drawn(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


POSITIONS = torch.tensor([[3, 0], [-1, 4], [2, 7], [1, 5]])  # 7 is no row
INDEX = torch.tensor([[3, 0, 4], [1, 2, 0]])


def of_layer(name):
    case = layer_kernels.CASES[name]
    values = layer_kernels.inputs(case, (2, 5), torch.float64, "contiguous", 3)
    return case.kernel, [value.requires_grad_() for value in values]


def of_sparse_attention():
    case = sparse_cases.make(length=12, heads=2, key_heads=1, batch=1, bias_heads=2, causal=True, masked=True)
    inputs = [value.double().requires_grad_() for value in case.tensors.values()]
    return lambda q, k, v, bias: sl.nn.sparse_attention(q, k, v, case.layout, bias=bias, **case.settings), inputs


def of_tiles():
    mlp = lambda x, w: torch.tanh(x @ w) @ w.t()  # noqa: E731
    return lambda x, w: sl.nn.tiled(lambda x: mlp(x, w), x, 3), drawn((1, 4, 2), (2, 3))


# A function and its inputs, by the operation.
CASES = {
    **{name: partial(of_layer, name) for name in layer_kernels.CASES},
    "linear cross entropy": lambda: (
        lambda x, w: linear_cross_entropy(x, w, torch.tensor([0, 4, -100, 2])),
        drawn((4, 3), (5, 3)),
    ),
    "sparse attention": of_sparse_attention,
    "permute": lambda: (lambda x: permute(x * x, POSITIONS, 6), drawn((4, 3))),
    "unpermute": lambda: (lambda rows: unpermute(rows * rows, POSITIONS), drawn((6, 3))),
    "unpermute weighted": lambda: (lambda rows, w: unpermute(rows, POSITIONS, w), drawn((6, 3), (4, 2))),
    "grouped matmul": lambda: (
        lambda x, w, b: grouped_matmul(x, w, torch.tensor([2, 2, 5]), b),
        drawn((6, 3), (3, 2, 3), (3, 2)),
    ),
    "take": lambda: (lambda x: take(x * x, INDEX), drawn((2, 5, 3))),
    "put": lambda: (lambda x, rows: put(x * x, INDEX, rows * rows), drawn((2, 5, 3), (2, 3, 3))),
    "tiles": of_tiles,
    "a meeting of ranks": lambda: (lambda rows: _MeetInBackward.apply(rows * rows, lambda: None), drawn((2, 3))),
    "a block that is ignored": lambda: (lambda x: _ignoring(2 * x, x * x), drawn((3,))),
}
# Every autograd.Function of the library, and every operation with kernels: `HERE` if a case goes through it, else the test of
# its derivatives.
HERE = "here"
PAIRS = "collectives/test_collectives.py::test_values_and_two_derivatives"
EXPERTS = "collectives/test_token_exchanges.py::test_rows_go_to_their_experts_and_back"
PENALTY = "execute/test_hazards.py::test_a_penalty_on_the_gradient_by_parameters"
STEP = "execute/test_transforms_of_torch.py::test_backward_inside_the_loss_is_refused"
AROUND = "execute/test_func_around.py::test_reverse_and_reverse"
GIVEN = {
    "gelu": HERE, "norm": HERE, "norm_of_sum": HERE, "rotary": HERE, "softmax": HERE, "swiglu": HERE, "dropout": HERE,
    "dropout_onto": HERE, "linear_cross_entropy": HERE, "sparse_attention": HERE, "grouped_matmul": HERE, "permute": HERE,
    "unpermute": HERE, "unpermute_weighted": HERE, "subset_take": HERE, "subset_put": HERE,
    "tiles._Gradient": HERE, "tiles._Take": HERE, "tiles._Put": HERE, "tiles._Whole": HERE,
    "meeting._MeetInBackward": HERE, "thinning._Ignoring": HERE,
    "pairs._SumVarying": PAIRS, "pairs._SumInvariant": PAIRS, "pairs._Copy": PAIRS, "pairs._Gather": PAIRS,
    "pairs._GatherInvariant": PAIRS, "pairs._Split": PAIRS, "pairs._Scatter": PAIRS, "pairs._Exchange": PAIRS,
    "pairs._Permute": PAIRS, "pairs._Broadcast": PAIRS, "pairs._SumTo": PAIRS,
    "journey._Depart": EXPERTS, "journey._Arrive": EXPERTS,
    "ring._Ring": "test_derivatives.py::test_ring_attention_is_refused_by_its_name",
    "buffers._Gathered": AROUND, "buffers._Scattered": AROUND, "buffers._Summed": AROUND, "buffers._Shared": AROUND,
    "wholes._Leaves": AROUND, "around._Own": "execute/test_func_around.py::test_refusals",
    "units._Attach": PENALTY, "units._StandIns": PENALTY, "units._Use": PENALTY, "units._Root": STEP, "entry._Entry": STEP,
}  # fmt: skip


def functions():
    """The names of the library's autograd.Functions and of its operations with kernels."""
    names = [module.name for module in pkgutil.walk_packages(sl.__path__, "shardlib.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    made = [value for module in modules for value in vars(module).values() if inspect.isfunction(value)]
    kernels = {fn.__name__ for fn in made if fn.__module__ == operators.__name__} & operators._backwards.keys()

    def below(cls):
        for each in cls.__subclasses__():
            yield each
            yield from below(each)

    own = [each for each in below(torch.autograd.Function) if each.__module__.startswith("shardlib.")]
    named = {f"{each.__module__.split('.')[-1]}.{each.__name__}" for each in own if "backward" in vars(each)}
    return named - {"operators.Forward", "operators.Backward", "boundaries.Once"} | kernels


def test_every_backward_has_an_entry():
    assert functions() == GIVEN.keys()
    for file, test in (each.split("::") for each in set(GIVEN.values()) - {HERE}):
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("name", CASES)
def test_two_derivatives_and_forward_mode(name):
    fn, inputs = CASES[name]()
    fast = sum(each.numel() for each in inputs) > 50
    assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True, fast_mode=fast)
    assert torch.autograd.gradgradcheck(fn, inputs, check_fwd_over_rev=True, fast_mode=fast)


def test_tiles_inside_of_torch_func():
    x, w = drawn((1, 4, 2), (2, 3))

    def loss(x, n):
        return sl.nn.tiled(lambda x: torch.tanh(x @ w) @ w.t(), x, n).sin().sum()

    found, wanted = (torch.func.hessian(loss)(x, n) for n in (3, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("derivative", [torch.func.grad, lambda fn: lambda q: torch.func.jvp(fn, (q,), (q,))])
def test_ring_attention_is_refused_by_its_name(derivative):
    """The second derivative is in tests/training/test_sequence.py."""
    attended = derivative(lambda q: _Ring.apply(q, q, q, None, "seq", True, 1.0).sum())
    with pytest.raises(LossError, match=r"ring attention is differentiated once.*no forward mode.*\. Take .*ulysses"):
        attended(torch.ones(1, 2, 4, 8))
