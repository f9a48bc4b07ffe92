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
import torch.nn.functional as F
from helpers import layer_kernels, sparse_cases
from helpers.lockstep import TRANSFORMS, Lockstep, on_one_device, on_ranks
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib import collectives
from shardlib.collectives.sequence.base import Attention
from shardlib.collectives.sequence.ring import Ring
from shardlib.collectives.sequence.ulysses import Ulysses
from shardlib.collectives.tokens import Direct, TwoHops
from shardlib.errors import HandleError, LossError
from shardlib.execute.context import _MeetInBackward
from shardlib.execute.layer_dropping import _ignoring
from shardlib.kernels.common import operators
from shardlib.kernels.grouped_matmul import grouped_matmul
from shardlib.kernels.linear_cross_entropy import linear_cross_entropy
from shardlib.kernels.permute import permute, unpermute
from shardlib.kernels.subset import put, take


def drawn(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def of_linear():
    layers = torch.nn.Sequential(torch.nn.Linear(5, 3, dtype=torch.float64))
    return sl.models.with_quantized_linears(layers), drawn((4, 5))


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
    "a linear layer in 4 bits": of_linear,
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
RANKS = "test_derivatives.py::test_every_transform_on_ranks_is_that_of_one_device"
AROUND = "execute/test_func_around.py::test_reverse_and_reverse"
GIVEN = {
    "gelu": HERE, "norm": HERE, "norm_of_sum": HERE, "rotary": HERE, "softmax": HERE, "swiglu": HERE, "dropout": HERE,
    "dropout_onto": HERE, "linear_cross_entropy": HERE, "sparse_attention": HERE, "grouped_matmul": HERE, "permute": HERE,
    "unpermute": HERE, "unpermute_weighted": HERE, "subset_take": HERE, "subset_put": HERE,
    "tiled._TileGradient": HERE, "tiled._Take": HERE, "tiled._Put": HERE, "tiled._Whole": HERE,
    "context._MeetInBackward": HERE, "layer_dropping._Ignoring": HERE,
    "pairs._SumVarying": PAIRS, "pairs._SumInvariant": PAIRS, "pairs._Copy": PAIRS, "pairs._Gather": PAIRS,
    "pairs._GatherInvariant": PAIRS, "pairs._Split": PAIRS, "pairs._Scatter": PAIRS, "pairs._Exchange": PAIRS,
    "pairs._Permute": PAIRS, "pairs._Broadcast": PAIRS, "pairs._SumTo": PAIRS,
    "routing._Start": EXPERTS, "routing._Finish": EXPERTS,
    "ring._Ring": RANKS, "ring._RingGradients": RANKS,
    "quantized_linears._QuantizedProduct": HERE,
    "scaled._Product": "transforms/test_scaled_products.py::test_derivatives_are_those_of_the_product",
    "buffers._Gathered": AROUND, "buffers._Scattered": AROUND, "buffers._Summed": AROUND, "buffers._Shared": AROUND,
    "wholes._Leaves": AROUND, "around._Own": "execute/test_func_around.py::test_refusals",
    "units._Attach": PENALTY, "units._StandIns": PENALTY, "units._Use": PENALTY, "units._Root": STEP,
    "runs._CarryEntry": STEP,
}  # fmt: skip


# The Functions that no batch of samples comes to, and the test of what says so, or goes another way.
TILES = "test_derivatives.py::test_tiles_inside_of_torch_func"
INSIDE = "execute/test_hazards.py::test_torch_func_inside_the_loss"
NOT_MAPPED = {
    "tiled._TileGradient": TILES, "tiled._Take": TILES, "tiled._Put": TILES, "tiled._Whole": TILES,
    "units._Attach": INSIDE, "units._StandIns": INSIDE, "units._Use": INSIDE, "units._Root": INSIDE,
    "runs._CarryEntry": "execute/test_func_around.py::test_refusals",
}  # fmt: skip


def functions():
    """The library's autograd.Functions, by name, and the names of its operations with kernels."""
    names = [module.name for module in pkgutil.walk_packages(sl.__path__, "shardlib.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    made = [value for module in modules for value in vars(module).values() if inspect.isfunction(value)]
    kernels = {fn.__name__ for fn in made if fn.__module__ == operators.__name__} & operators._backwards.keys()

    def below(cls):
        for each in cls.__subclasses__():
            yield each
            yield from below(each)

    own = [each for each in below(torch.autograd.Function) if each.__module__.startswith("shardlib.")]
    whole = [each for each in own if each.forward is not torch.autograd.Function.forward]
    named = {
        f"{each.__module__.split('.')[-1]}.{each.__name__}": each
        for each in whole
        if {"forward", "backward", "dual"} & vars(each).keys()
    }
    return {name: each for name, each in named.items() if not name.startswith("operators.")}, kernels


def test_every_backward_has_an_entry():
    own, kernels = functions()
    assert own.keys() | kernels == GIVEN.keys()
    of_batches = {
        name for name, each in own.items() if each.vmap is not torch.autograd.Function.vmap or each.generate_vmap_rule
    }
    assert own.keys() - of_batches == NOT_MAPPED.keys()
    for file, test in (each.split("::") for each in {*GIVEN.values(), *NOT_MAPPED.values()} - {HERE}):
        assert f"def {test}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("name", CASES)
def test_two_derivatives_and_forward_mode(name):
    fn, inputs = CASES[name]()
    fast = sum(each.numel() for each in inputs) > 50
    assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True, fast_mode=fast)
    assert torch.autograd.gradgradcheck(fn, inputs, check_fwd_over_rev=True, fast_mode=fast)


@pytest.mark.parametrize("name", CASES)
def test_samples_and_graphs(name):
    fn, inputs = CASES[name]()
    inputs = [each.detach() for each in inputs]
    batch = [torch.stack([each, each.cos()]) for each in inputs]

    def loss(*inputs):
        out = fn(*inputs)
        return sum(each.sin().sum() for each in (out if isinstance(out, tuple) else (out,)))

    gradient = torch.func.grad(loss, tuple(range(len(inputs))))
    wanted = [torch.stack(each) for each in zip(*[gradient(*sample) for sample in zip(*batch, strict=True)])]
    found = [
        torch.vmap(gradient)(*batch),
        torch.func.grad(lambda *batch: torch.vmap(loss)(*batch).sum(), tuple(range(len(inputs))))(*batch),
        make_fx(torch.vmap(gradient), tracing_mode="fake", _allow_non_fake_inputs=True)(*map(torch.zeros_like, batch))(
            *batch
        ),
    ]
    for each in found:
        torch.testing.assert_close(list(each), wanted, rtol=1e-10, atol=1e-10)


def test_tiles_inside_of_torch_func():
    x, w = drawn((1, 4, 2), (2, 3))

    def loss(x, n):
        return sl.nn.tiled(lambda x: torch.tanh(x @ w) @ w.t(), x, n).sin().sum()

    found, wanted = (torch.func.hessian(loss)(x, n) for n in (3, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


N = 2
TARGETS = [3, 0, -100, 5]


def part(kind, whole, rank):
    """A rank's positions, along dimension 2."""
    return torch.cat([whole.narrow(2, *chunk) for chunk in kind.chunks(rank, N, whole.shape[2])], 2)


def causal_attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1) @ v


def on_rank_attended(kind, mesh, x):
    return kind.attention(*x.chunk(3, 1), Attention(causal=True), lambda q, k, v, how: causal_attention(q, k, v), mesh)


def attended(kind, xs):
    places = [part(kind, torch.arange(N * xs[0].shape[2])[None, None], rank).flatten() for rank in range(N)]
    order = torch.cat(places).argsort()
    q, k, v = torch.cat(xs, 2)[:, :, order].chunk(3, 1)
    return [part(kind, causal_attention(q, k, v), rank) for rank in range(N)]


def tokens(exchange, sizes, counts, slots):
    """Rows to their experts, which multiply their sines by their rank's number, and back."""
    experts = len(counts[0]) // len(counts)

    def on_rank(mesh, x):
        coming, way = exchange.send(mesh, x, torch.tensor(counts[mesh.rank]), slots=slots)
        return exchange.back(mesh, coming.wait().sin() * (mesh.rank + 1), way).wait()

    def define(xs):
        owners = [
            torch.arange(len(each)).div(experts, rounding_mode="floor").repeat_interleave(torch.tensor(each))
            for each in counts
        ]
        factors = [F.pad(owner + 1, (0, len(xs[0]) - len(owner)))[:, None] for owner in owners]
        return [x.sin() * factor for x, factor in zip(xs, factors, strict=True)]

    refused = () if slots else ("graph of jvp of grad",)
    return Lockstep(sizes, (3, 2), on_rank, define, refused, r"tangents of .* in a traced function.*padded=True")


LOCKSTEP = {
    "all_reduce varying": Lockstep(
        {"a": N}, (3,), lambda mesh, x: collectives.all_reduce(x, "a", dst="varying"), lambda xs: [sum(xs)] * N
    ),
    "a sum of scalars": Lockstep(
        {"a": N}, (), lambda mesh, x: collectives.all_reduce(x, "a", dst="varying"), lambda xs: [sum(xs)] * N
    ),
    "all_gather": Lockstep(
        {"a": N}, (2, 3), lambda mesh, x: collectives.all_gather(x, "a", dim=1), lambda xs: [torch.cat(xs, 1)] * N
    ),
    "reduce_scatter": Lockstep(
        {"a": N},
        (3, 4),
        lambda mesh, x: collectives.reduce_scatter(x, "a", dim=-1),
        lambda xs: list(sum(xs).chunk(N, 1)),
    ),
    "all_to_all": Lockstep(
        {"a": N},
        (2, 3),
        lambda mesh, x: collectives.all_to_all(x, "a", split_dim=0, concat_dim=1),
        lambda xs: [torch.cat([x.chunk(N)[r] for x in xs], 1) for r in range(N)],
    ),
    "permute": Lockstep(
        {"a": N}, (3,), lambda mesh, x: collectives.permute(x, "a", [(0, 1)]), lambda xs: [0 * xs[0], xs[0]]
    ),
    "broadcast": Lockstep(
        {"a": N}, (3,), lambda mesh, x: collectives.broadcast(x, "a", source=1), lambda xs: [xs[1]] * N
    ),
    "all_reduce invariant, copy": Lockstep(
        {"a": N},
        (3,),
        lambda mesh, x: collectives.copy(collectives.all_reduce(x, "a", dst="invariant"), "a"),
        lambda xs: [sum(xs)] * N,
    ),
    "all_gather invariant, split": Lockstep(
        {"a": N},
        (2, 4),
        lambda mesh, x: collectives.split(collectives.all_gather(x, "a", dst="invariant"), "a", dim=1),
        lambda xs: list(torch.cat(xs).chunk(N, 1)),
    ),
    "cross entropy of a vocabulary": Lockstep(
        {"a": N},
        (4, 3),
        lambda mesh, x: collectives.copy(
            collectives.vocab_cross_entropy(x, torch.tensor(TARGETS), "a", label_smoothing=0.1, reduction="none"), "a"
        ),
        lambda xs: (
            [F.cross_entropy(torch.cat(xs, 1), torch.tensor(TARGETS), label_smoothing=0.1, reduction="none")] * N
        ),
    ),
    "ulysses": Lockstep(
        {"a": N}, (1, 6, 2, 1), partial(on_rank_attended, Ulysses("a")), partial(attended, Ulysses("a"))
    ),
    "ring": Lockstep(
        {"a": N},
        (1, 3, 4, 1),
        partial(on_rank_attended, Ring("a")),
        partial(attended, Ring("a")),
        ("grad of grad", "jvp", "vmap of jvp", "jvp of grad", "hessian", "graph of jvp of grad"),
        r"ring attention is differentiated once.*no forward mode.*\. Take .*ulysses",
    ),
    "tokens": tokens(Direct("a"), {"a": N}, [[1, 2], [2, 0]], None),
    "tokens, padded": tokens(Direct("a"), {"a": N}, [[1, 2], [2, 0]], 2),
    "tokens in two hops": tokens(
        TwoHops("a", "b"), {"a": 2, "b": 2}, [[1, 0, 1, 1], [0, 0, 0, 2], [0] * 4, [1, 1, 1, 0]], None
    ),
    "along two axes": Lockstep(
        {"a": 2, "b": 2},
        (4,),
        lambda mesh, x: collectives.reduce_scatter(collectives.all_gather(x.exp(), "b").cos(), "a"),
        lambda xs: [
            sum(torch.cat([x.exp() for x in row]).cos() for row in (xs[:2], xs[2:])).chunk(2)[rank // 2]
            for rank in range(4)
        ],
    ),
}


@pytest.mark.parametrize("name", LOCKSTEP)
def test_every_transform_on_ranks_is_that_of_one_device(name):
    case = LOCKSTEP[name]
    names = sorted(TRANSFORMS.keys() - set(case.refused))
    wanted = on_one_device(case, names)
    for rank, found in enumerate(on_ranks(case, names)):
        for transform, value in found.items():
            torch.testing.assert_close(
                value, wanted[transform][rank], rtol=1e-10, atol=1e-10, msg=lambda text, t=transform: f"{t}: {text}"
            )
    for transform in case.refused:
        with pytest.raises(LossError, match=case.message):
            on_ranks(case, [transform])


def test_forward_mode_inside_simulated_ranks_is_refused():
    """It is the process's: the first rank to leave it would end all tangents."""

    def run(mesh):
        return torch.func.jvp(lambda x: collectives.all_gather(x, "a"), (torch.ones(2),), (torch.ones(2),))

    with pytest.raises(HandleError, match="around an exchange of simulated ranks, all_gather"):
        sl.simulate(run, mesh={"a": N})
