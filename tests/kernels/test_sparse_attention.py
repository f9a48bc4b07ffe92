"""Block-sparse attention: every implementation against dense masked softmax in float64, and every way to a gradient."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import kernels, sparse_cases
from helpers.dense_attention import dense_attention
from helpers.sparse_cases import Case, check_padding, make
from hypothesis import example, given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.common import thresholds
from shardlib.kernels.sparse_attention import ComputedBlocks, Options, cpu
from shardlib.sparse import Layout

NAMES = (*kernels.WITH_AMX, kernels.CUT, "reference")


def served_by(name):
    return contextlib.nullcontext(name) if name == "reference" else kernels.served_by(name)


def check(case, name):
    with served_by(name) as using:
        sparse_cases.check(case, using)


cases = st.fixed_dictionaries(
    {
        "length": st.integers(1, 100),
        "size": st.sampled_from((1, 8, 16, 24, 40, 64)),
        "key_heads": st.integers(1, 2),
        "heads": st.sampled_from((2, 4, 6)),
        "batch": st.integers(1, 2),
        "block": st.sampled_from((16, 32, 64)),
        "dtype": st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        "shared": st.booleans(),
        "density": st.sampled_from((0.0, 0.2, 0.6, 1.0)),
        "masked": st.booleans(),
        "bias_heads": st.sampled_from((0, 1)),
        "causal": st.booleans(),
        "scale": st.sampled_from((None, 0.3)),
        "transposed": st.booleans(),
        "seed": st.integers(0, 2**30),
    }
)

# The gradient of k is what is left of larger terms, and so are its errors.
CANCELLING = {
    "length": 66, "size": 64, "key_heads": 2, "heads": 4, "batch": 2, "block": 16, "dtype": torch.bfloat16,
    "shared": False, "density": 0.2, "masked": False, "bias_heads": 0, "causal": False, "scale": None,
    "transposed": False, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(drawn=cases)
@example(drawn=CANCELLING | {"length": 2, "size": 24, "shared": True, "scale": 0.3})
@example(drawn=CANCELLING | {"key_heads": 1, "heads": 2, "batch": 1, "block": 64, "bias_heads": 1, "seed": 107617})
def test_drawn_cases(name, drawn):
    check(make(**drawn), name)


# float64 is served by plain torch alone.
SERVED = [(name, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for name in NAMES]


@pytest.mark.parametrize(("name", "dtype"), [*SERVED, ("reference", torch.float64)])
@pytest.mark.parametrize("size", [16, 128, 256])
def test_sizes_and_dtypes(name, dtype, size):
    check(make(length=200, size=size, dtype=dtype, bias_heads=0 if dtype == torch.float64 else 4, causal=True), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", [sl.Key(7), sl.Key(2**64 - 3, 5), sl.Key(2**40 + 1, 2**22 + 3)])
def test_dropout_is_that_of_the_generator(name, key):
    """Indices of scores may take more than 32 bits, as slots count whole tensors of scores."""
    check(make(dropout=0.25, rng=key, bias_heads=4, masked=True, causal=True), name)


@pytest.mark.parametrize("name", NAMES)
def test_queries_that_see_nothing(name):
    case = make(length=48, density=0.0)
    with served_by(name) as using:
        assert not any(value.any() for value in case(sl.nn.sparse_attention, using=using).values())
        case = make(length=48, density=1.0, key_mask=torch.zeros(2, 48, dtype=torch.bool), bias_heads=4)
        assert not any(value.any() for value in case(sl.nn.sparse_attention, using=using).values())


@pytest.mark.parametrize("name", kernels.WITH_AMX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_outside_the_blocks_are_not_touched(name, dtype):
    """Values that are not finite reach exactly the queries that see them."""
    layout = Layout.from_dense(torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 1]]), 16)
    case = make(length=48, layout=layout, dtype=dtype)
    case.tensors["k"][:, :, 16:32] = math.nan
    with served_by(name) as using:
        found = case(sl.nn.sparse_attention, using=using)
    for part in ("out", "q"):
        assert found[part][:, :, 16:32].isnan().all()
        assert found[part][:, :, :16].isfinite().all() and found[part][:, :, 32:].isfinite().all()
    assert found["k"][:, :, :16].isfinite().all() and found["k"][:, :, 16:].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_masked_keys_that_are_not_finite_are_as_in_torch(name):
    with served_by(name) as using:
        check_padding(using)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [16, 64])
def test_a_causal_layout_needs_no_argument_in_the_call(name, block):
    """No query sees a later key: what these are changes nothing, in the blocks on the diagonal too."""
    case = make(length=100, layout=sl.sparse.dense(100, block=block, causal=True))
    check(case, name)
    q, k, v = case.tensors.values()
    with served_by(name) as using:
        found = sl.nn.sparse_attention(q, k, v, case.layout, using=using)
        assert torch.equal(found, sl.nn.sparse_attention(q, k, v, case.layout, causal=True, using=using))
        open_layout = sl.sparse.dense(100, block=block)
        torch.testing.assert_close(found, sl.nn.sparse_attention(q, k, v, open_layout, causal=True, using=using))
        for x in (k, v):
            x[:, :, 50:] += 1
        later = sl.nn.sparse_attention(q, k, v, case.layout, using=using)
    assert torch.equal(later[:, :, :50], found[:, :, :50]) and not torch.equal(later, found)
    torch.testing.assert_close(sl.nn.attention(q, k, v, layout=case.layout), later)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_do_not_overflow(name):
    case = make(length=64, density=1.0, scale=40.0)
    check(Case({n: x.bfloat16() for n, x in case.tensors.items()}, case.layout, case.settings), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scales_that_are_not_positive(name, scale):
    check(make(length=40, masked=True, scale=scale), name)


def test_a_dense_layout_is_torchs_attention():
    case = make(length=150, key_heads=4, layout=sl.sparse.dense(150), causal=True)
    q, k, v = case.tensors.values()
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(sl.nn.sparse_attention(q, k, v, case.layout, causal=True), wanted)


@pytest.mark.parametrize("name", kernels.WITH_AMX)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_work_is_the_density(name, block):
    length = 64 * 9
    q = torch.empty(2, 4, length, 16)
    layouts = [
        sl.sparse.fixed(length, block=block, heads=4, patterns=4),
        sl.sparse.variable(length, block=block, random=2, windows=[2, 3], heads=4),
        sl.sparse.bigbird(length, block=block),
        sl.sparse.longformer(length, block=block, global_blocks=[0, 5]),
        sl.sparse.sliding_window(length, block=block),
        sl.sparse.dense(length, block=block),
    ]
    with kernels.served_by(name):
        for layout in layouts:
            blocks = ComputedBlocks(layout.row_offsets, layout.columns)
            assert cpu.work(q, q[:, :2], blocks, Options(block, 1.0)) == pytest.approx(layout.density, rel=1e-12)
        # Under a causal mask, whole tiles of 16 queries by 16 keys: none above those on the diagonal, of any block.
        causal = cpu.work(q, q, ComputedBlocks(layout.row_offsets, layout.columns), Options(block, 1.0, causal=True))
        assert causal == pytest.approx((length + 16) / (2 * length), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(dtype):
    case = make(length=2100, key_heads=4, dtype=dtype, layout=sl.sparse.bigbird(2100), bias_heads=1, causal=True)
    results = []
    for threads in (1, 2, 3):
        with kernels.threads(threads):
            results.append(case(sl.nn.sparse_attention, using="cpu"))
    for other in results[1:]:
        assert all(torch.equal(results[0][part], other[part]) for part in other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_threads_than_heads(dtype):
    """The queries of a head are then shared out."""
    with kernels.threads(3):
        check(make(length=300, heads=2, key_heads=1, batch=1, bias_heads=2, causal=True, dtype=dtype), "portable")


@pytest.mark.parametrize("shared", [True, False])
def test_plain_torch_with_few_scores_at_a_time(shared):
    case = make(length=100, shared=shared, density=0.6, bias_heads=1, causal=True, masked=True).wide()
    wanted = case(sl.nn.sparse_attention)
    with thresholds.small(600):  # rows of up to seven blocks, of 256 scores each
        found = case(sl.nn.sparse_attention)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_laptop_takes_65536_tokens():
    """Scores would take 17 GB in fp32. Some rows are compared."""
    length, size = 2**16, 16
    layout = sl.sparse.bigbird(length)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, size, generator=generator, requires_grad=True) for _ in range(3))
    out = sl.nn.sparse_attention(q, k, v, layout, causal=True)
    rows, columns = layout.pairs()
    loss = torch.zeros(())
    for row in (5, 2**14, 2**15 + 3, length - 1):
        blocks = columns[rows == row // 16].long()
        keys = (blocks[:, None] * 16 + torch.arange(16)).flatten()
        keys = keys[keys <= row]
        weights = (k[0, 0, keys] @ q[0, 0, row] / 4).softmax(dim=0)
        torch.testing.assert_close(out[0, 0, row], weights @ v[0, 0, keys], rtol=1e-5, atol=1e-6)
        loss = loss + (weights @ v[0, 0, keys]).sum()
    wanted = torch.autograd.grad(loss, (q, k, v))
    chosen = torch.zeros_like(out)
    chosen[:, :, [5, 2**14, 2**15 + 3, length - 1]] = 1
    for found, gradient in zip(torch.autograd.grad(out, (q, k, v), chosen), wanted):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


def loss(attention, case):
    def of(q, k, v, bias):
        return (attention(q, k, v, case.layout, bias=bias, **case.settings).sin() ** 2).sum()

    return of


@pytest.fixture
def small():
    case = make(length=40, heads=2, key_heads=1, batch=1, bias_heads=2, causal=True, masked=True)
    return case, tuple(case.tensors.values())


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_func_grad(small):
    case, inputs = small
    found, wanted = (
        torch.func.grad(loss(f, case), (0, 1, 2, 3))(*inputs) for f in (sl.nn.sparse_attention, dense_attention)
    )
    close(found, wanted)


def test_vmap_of_grad(small):
    case, (q, k, v, bias) = small
    batched = torch.stack([q, 2 * q, -q]), torch.stack([k, k, v], dim=2), v, bias
    found, wanted = (
        torch.func.vmap(torch.func.grad(loss(f, case), (0, 1, 2, 3)), (0, 2, None, None))(*batched)
        for f in (sl.nn.sparse_attention, dense_attention)
    )
    close(found, wanted)


def test_compiled_without_a_break(small):
    case, inputs = small
    inputs = [x.requires_grad_() for x in inputs]
    compiled = torch.compile(loss(sl.nn.sparse_attention, case), fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, loss(dense_attention, case)))
    close(found, wanted)


def test_opcheck(small):
    case, (q, k, v, bias) = small
    rest = case.layout.row_offsets, case.layout.columns, case.settings["key_mask"], bias
    arguments = q, k, v, *rest, 16, 0.25, True, 0.1, 3, 0, None
    torch.library.opcheck(torch.ops.shardlib.sparse_attention.default, arguments)
    out, lse = torch.ops.shardlib.sparse_attention(*arguments)
    torch.library.opcheck(torch.ops.shardlib.sparse_attention_backward.default, (*arguments, out, lse, q))


@pytest.mark.parametrize("stage", [0, 3])
def test_in_a_sharded_model(stage):
    """Parameters under ZeRO, the relative bias one of them."""
    generator = torch.Generator().manual_seed(0)
    params = {"qkv": torch.randn(8, 24, generator=generator), "bias": torch.randn(2, 63, generator=generator)}
    batch = torch.randn(2, 32, 8, generator=generator)
    layout = sl.sparse.sliding_window(32, causal=False)

    def run(attention, mesh):
        def loss_fn(params, batch):
            q, k, v = (batch @ params["qkv"]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return attention(q, k, v, layout, bias=params["bias"] * 1.0).square().mean()

        value, grads = sl.value_and_grad(loss_fn)(sl.shard(params, mesh, sl.zero(stage)), batch[mesh.rank :][:1])
        return value, sl.unshard(grads)

    attentions = sl.nn.sparse_attention, dense_attention
    for found, wanted in zip(*(sl.simulate(lambda mesh, f=f: run(f, mesh), mesh={"data": 2}) for f in attentions)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_wrong_arguments_reach_no_kernel():
    q, layout = torch.zeros(2, 4, 40, 8), sl.sparse.dense(40)

    def refused(error, match, q=q, k=q, v=q, layout=layout, **settings):
        with pytest.raises(error, match=match):
            sl.nn.sparse_attention(q, k, v, layout, **settings)

    refused(ValueError, r"q has shape \(4, 40, 8\)", q=q[0])
    refused(ValueError, r"q has shape \(2, 4, 40, 512\)", q=q.repeat(1, 1, 1, 64))
    refused(ValueError, r"v has shape \(2, 4, 39, 8\).*requires \(2, heads, 40, 8\)", v=q[:, :, 1:])
    refused(TypeError, "q is torch.float32 and k is torch.bfloat16: cast one", k=q.bfloat16())
    refused(TypeError, "q is torch.int32", q=q.int(), k=q.int(), v=q.int())
    refused(ValueError, "4 heads of q, 3 of k and 3 of v", k=q[:, 1:], v=q[:, 1:])
    refused(ValueError, "has 3 blocks of 16, and the layout has 4: make it for length=40", layout=sl.sparse.dense(50))
    refused(ValueError, "the layout has 2 heads and q has 4", layout=sl.sparse.fixed(40, heads=2))
    refused(ValueError, r"key_mask has shape \(2, 39\)", key_mask=torch.ones(2, 39, dtype=torch.bool))
    refused(TypeError, "key_mask is torch.float32, not bool", key_mask=torch.ones(2, 40))
    refused(ValueError, r"bias has shape \(4, 40\), not .* = \(1 or 4, 79\)", bias=torch.zeros(4, 40))
    refused(TypeError, "bias is torch.bfloat16 and q torch.float32", bias=torch.zeros(4, 79, dtype=torch.bfloat16))
    refused(ValueError, "layout on cpu, key_mask on meta", key_mask=torch.ones(2, 40, dtype=torch.bool, device="meta"))
    refused(ValueError, r"dropout probability 1.0 is outside \[0, 1\)", dropout=1.0)
    refused(ValueError, "dropout=0.1 without rng", dropout=0.1)
    causal = sl.sparse.dense(40, causal=True)
    refused(ValueError, "the layout is causal: make it with causal=False, or leave", layout=causal, causal=False)
    with pytest.raises(ValueError, match="the layout is causal: make it with causal=False"):
        sl.nn.attention(q, q, q, layout=causal, causal=False)
    refused(TypeError, r"layout is a Tensor: pass .*Layout.from_dense\(matrix, block\)", layout=torch.ones(3, 3))
    with pytest.raises(TypeError, match="layout is a Tensor"):
        sl.nn.attention(q, q, q, layout=torch.ones(3, 3))
    refused(TypeError, "float64 is served by plain torch", q=q.double(), k=q.double(), v=q.double(), using="cpu")
