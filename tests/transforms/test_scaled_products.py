"""`sl.precision("fp8")`: matrix products by parameters in 8 bits, against a plain second implementation in fp32."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition

BITS = sl.precision("fp8", leaves={"head": "bf16"})


def rounded(x, kind):
    largest = x.abs().amax().float()
    scale = torch.where(largest == 0, 1.0, largest / torch.finfo(kind).max)
    return (x.float() / scale).to(kind).float() * scale


class Product(torch.autograd.Function):
    """x · wᵀ whose factors are e4m3, and whose gradients' are e5m2."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (rounded(x, torch.float8_e4m3fn) @ rounded(w, torch.float8_e4m3fn).t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, w = (rounded(each, torch.float8_e4m3fn) for each in ctx.saved_tensors)
        grad, dtype = rounded(grad, torch.float8_e5m2), grad.dtype
        return (grad @ w).to(dtype), (grad.t() @ x).to(dtype)


def model(params, batch, layer):
    hidden = torch.tanh(layer(batch["x"], params["first"]["w"], params["first"]["b"]))
    hidden = torch.tanh(layer(hidden, params["second"]["w"], params["second"]["b"]))
    return (F.linear(hidden, params["head"]) - batch["y"]).float().square().mean()


def plain(params, batch):
    return model(params, batch, lambda x, w, b: Product.apply(x, w) + b)


WAYS = {
    "linear": F.linear,
    "linear by name": lambda x, w, b: F.linear(x, bias=b, weight=w),
    "a view": lambda x, w, b: x @ w.t() + b,
    "mm": lambda x, w, b: torch.mm(x, w.t()) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "block": sl.block(F.linear),
}


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 3


PARAMS = {
    "first": {"w": numbers(24, 10, seed=0), "b": numbers(24, seed=1)},
    "second": {"w": numbers(16, 24, seed=2), "b": numbers(16, seed=3)},
    "head": numbers(3, 16, seed=4),
}
BATCH = {"x": numbers(8, 10, seed=5), "y": numbers(8, 3, seed=6)}


def share(rank, ranks):
    rows = len(BATCH["x"]) // ranks
    return {name: leaf[rank * rows : (rank + 1) * rows] for name, leaf in BATCH.items()}


def wanted(ranks, loss_fn=plain):
    """The mean of the ranks' losses, and its gradients in fp32."""
    tree = {
        k: v.bfloat16() if torch.is_tensor(v) else {n: t.bfloat16() for n, t in v.items()} for k, v in PARAMS.items()
    }
    leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(tree)]
    loss, sums = 0.0, [torch.zeros(leaf.shape) for leaf in leaves]
    for rank in range(ranks):
        batch = {name: leaf.bfloat16() for name, leaf in share(rank, ranks).items()}
        value = loss_fn(tree, batch) / ranks
        loss += value.item()
        for total, grad in zip(sums, torch.autograd.grad(value, leaves), strict=True):
            total += grad.float()
    return loss, sums


def gradients(loss_fn, chain, **axes):
    def run(mesh):
        ranks, rank = mesh.shape.get("data", 1), mesh.coords.get("data", 0)
        loss, grads = sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, chain), share(rank, ranks))
        return loss.item(), torch.utils._pytree.tree_leaves(sl.unshard(grads))

    return sl.simulate(run, mesh=axes)[0]


def check(found, expected, tolerance):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for grad, want in zip(found[1], expected[1], strict=True):
        assert (grad.float() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 3])
def test_products_by_parameters_are_in_8_bits(stage, way):
    loss_fn = lambda params, batch: model(params, batch, WAYS[way])  # noqa: E731
    for ranks in (1, 2):
        check(gradients(loss_fn, sl.chain(sl.zero(stage), BITS), data=ranks), wanted(ranks), 2**-7)
    in_16_bits = wanted(2, lambda params, batch: model(params, batch, F.linear))
    with pytest.raises(AssertionError):  # the difference is seen
        check(in_16_bits, wanted(2), 2**-7)


def test_recomputed_blocks_multiply_in_8_bits_too():
    loss_fn = lambda params, batch: model(params, batch, sl.block(F.linear))  # noqa: E731
    for remat in (sl.remat(), sl.remat("dots")):
        check(gradients(loss_fn, sl.chain(sl.zero(3), remat, BITS), data=2), wanted(2), 2**-7)


def test_a_slice_has_a_scale_of_its_own():
    """Of a column slice; rows are summed in the dtype of activations, so that only whole numbers of scales compare."""

    def by_slices(params, batch):
        def layer(x, w, b):
            halves = [Product.apply(x, half) for half in w.chunk(2)]
            return torch.cat(halves, -1) + b

        first = torch.tanh(layer(batch["x"], params["first"]["w"], params["first"]["b"]))
        parts = zip(first.chunk(2, -1), params["second"]["w"].chunk(2, 1))
        hidden = torch.tanh(sum(Product.apply(x, w) for x, w in parts) + params["second"]["b"])
        return (F.linear(hidden, params["head"]) - batch["y"]).float().square().mean()

    loss_fn = lambda params, batch: model(params, batch, F.linear)  # noqa: E731
    slices = sl.tensor_slicing({"first/*": "column", "second/*": "row"}, axis="model")
    found = gradients(loss_fn, sl.chain(slices, sl.zero(0), BITS), data=1, model=2)
    check(found, wanted(1, by_slices), 2**-6)


def test_what_is_refused():
    assert str(BITS) == "sl.precision('fp8', leaves={'head': 'bf16'})"
    with pytest.raises(IllegalComposition, match="autocast casts to 16 bits"):
        sl.precision("fp8", autocast=True)
    with pytest.raises(IllegalComposition, match=r"8 bits have one scale.*\n.*first/w\n.*leaves="):
        sl.make_plan(PARAMS, sl.abstract_mesh(data=2), sl.chain(sl.zero(3), sl.tile("first/w", 4), sl.precision("fp8")))
    compiled = torch.compile(lambda x, w, b: F.linear(x, w, b), backend="eager")
    for layer, what in ((sl.block(compiled), "block"), (compiled, "function")):
        with pytest.raises(HandleError, match=rf"a compiled {what} .* in fp8"):
            gradients(
                lambda params, batch, layer=layer: model(params, batch, layer), sl.chain(sl.zero(1), BITS), data=1
            )


def test_derivatives_are_those_of_the_product():
    """To second order, in forward mode, and mapped: the exact product's, where no factor is rounded."""
    x, w = torch.tensor([[1.0, -2.0], [0.5, 4.0]]), torch.tensor([[2.0, 1.0, 0.25], [-4.0, 8.0, 1.0]])
    x, w = x * 448 / 4, w * 448 / 8  # powers of two of the scales
    for fn in (lambda x, w: sl.nn.scaled_matmul(x, w), lambda x, w: sl.nn.scaled_matmul(w.t(), x.t()).t()):
        exact = lambda x, w: x @ w  # noqa: E731
        assert torch.equal(fn(x, w), exact(x, w))
        of = lambda product: torch.func.jvp(product, (x, w), (x, w))  # noqa: E731
        assert all(torch.equal(a, b) for a, b in zip(of(fn), of(exact)))
        mapped = lambda product: torch.func.vmap(product, (0, None))(torch.stack([x, 2 * x]), w)  # noqa: E731
        assert torch.equal(mapped(fn), mapped(exact))
        for order in (torch.func.grad, lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())):
            found, want = (order(lambda x, p=product: p(x, w).sum().square())(x) for product in (fn, exact))
            torch.testing.assert_close(found, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows, inner, columns", [(0, 4, 3), (2, 0, 3), (5, 17, 9)])
def test_any_size(rows, inner, columns):
    x, w = numbers(rows, inner, seed=7).requires_grad_(), numbers(inner, columns, seed=8).requires_grad_()
    y = sl.nn.scaled_matmul(x, w)
    assert y.shape == (rows, columns)
    for found, want in zip(torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad((x @ w).sum(), (x, w))):
        assert found.shape == want.shape
        torch.testing.assert_close(found, want, rtol=0.2, atol=0.1)
