"""The fused transformer layer: equal to a plain one in float64, with the memory that its options promise."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels.common.saved import stochastically_rounded
from shardlib.models.transformer_layer import LayerConfig, init, slicing_rules, transformer_layer

BATCH, SEQUENCE, WIDTH, HEADS, INNER = 2, 5, 12, 3, 20
KEY = sl.Key(3)


def make(**options):
    config = LayerConfig(WIDTH, HEADS, INNER, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(1)
    params = init(config)
    for leaf in torch.utils._pytree.tree_leaves(params):
        leaf.copy_(torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * 0.4)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64)
    return config, params, x


def drop(x, p, name):
    """Multiplied by what `sl.dropout` makes of ones."""
    return x * sl.dropout(torch.ones_like(x), p, KEY.fold_in(name)).detach() if p else x


def plain(config, params, x, lengths=None):
    """The layer as it is written in the papers, an operation at a time."""

    def linear(p, x):
        return x @ p["weight"].T + p["bias"]

    def norm(p, x):
        return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"], config.eps)

    def attend(x):
        size = WIDTH // HEADS
        rows = linear(params["attn"]["qkv"], x).reshape(BATCH, SEQUENCE, HEADS, 3, size)
        q, k, v = (rows[:, :, :, i].transpose(1, 2) for i in range(3))
        scores = q @ k.transpose(-1, -2) / size**0.5
        hidden = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
        if config.causal:
            hidden |= torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        if lengths is not None:
            hidden |= torch.arange(SEQUENCE) >= lengths[:, None, None, None]
        seen = drop(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), config.attention_dropout, "attention")
        return drop(linear(params["attn"]["out"], (seen @ v).transpose(1, 2).flatten(2)), config.dropout, "attn")

    def mlp(x):
        h = F.gelu(linear(params["mlp"]["up"], x), approximate=config.approximate)
        return drop(linear(params["mlp"]["down"], h), config.dropout, "mlp")

    if config.norm == "pre":
        x = x + attend(norm(params["ln1"], x))
        return x + mlp(norm(params["ln2"], x))
    x = norm(params["ln1"], x + attend(x))
    return norm(params["ln2"], x + mlp(x))


def gradients(function, params, x):
    leaves, spec = torch.utils._pytree.tree_flatten((params, x))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*torch.utils._pytree.tree_unflatten(leaves, spec))
    return [y, *torch.autograd.grad((y.sin() * 3).sum(), leaves)]


@pytest.mark.parametrize("recompute", [(), ("norm",), ("gelu",), ("dropout",), ("norm", "gelu", "dropout")])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "approximate": "tanh"},
        {"dropout": 0.3},
        {"attention_dropout": 0.2, "causal": True},
        {"dropout": 0.3, "attention_dropout": 0.2, "lengths": True},
    ],
)
def test_is_the_plain_layer(options, norm, recompute):
    options = dict(options)
    lengths = torch.tensor([5, 3]) if options.pop("lengths", False) else None
    config, params, x = make(norm=norm, recompute=recompute, **options)
    found = gradients(lambda p, x: transformer_layer(config, p, x, KEY, lengths), params, x)
    wanted = gradients(lambda p, x: plain(config, p, x, lengths), params, x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def kept(config, params, x):
    """Bytes of the storages that backward keeps alive, beside parameters, the input and the output."""
    leaves, spec = torch.utils._pytree.tree_flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    x = x.detach().requires_grad_()
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # held, so that none is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = transformer_layer(config, torch.utils._pytree.tree_unflatten(leaves, spec), x, KEY)
    for tensor in (*leaves, x, y):
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in storages.values())


TOKENS = BATCH * SEQUENCE
FREED = {"gelu": TOKENS * INNER * 8, "dropout": TOKENS * HEADS * SEQUENCE * 8}


@pytest.mark.parametrize("norm, norms", [("pre", 2), ("post", 1)])
def test_each_option_saves_the_memory_it_promises(norm, norms):
    config, params, x = make(norm=norm, dropout=0.3, attention_dropout=0.2)
    everything = kept(config, params, x)
    freed = FREED | {"norm": norms * TOKENS * WIDTH * 8}
    for name, size in freed.items():
        assert everything - kept(dataclasses.replace(config, recompute=(name,)), params, x) == size, name
    config = dataclasses.replace(config, recompute=tuple(freed))
    assert everything - kept(config, params, x) == sum(freed.values())
    # What is left: qkv, softmax, attention's output, the sum of attention, GeLU's input; post-norm the second sum too.
    sums = 1 if norm == "pre" else 2
    assert kept(config, params, x) == TOKENS * 8 * (3 * WIDTH + HEADS * SEQUENCE + WIDTH + sums * WIDTH + INNER)


def single(config, params, x):
    return (
        dataclasses.replace(config, dtype=torch.float32),
        torch.utils._pytree.tree_map(torch.Tensor.float, params),
        x.float(),
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_stochastic_keeps_half(attention_dropout, norm):
    """Half of all, including the layer's input, which is otherwise saved unchanged."""
    config, params, x = single(*make(norm=norm, dropout=0.3, attention_dropout=attention_dropout))
    for recompute in ((), ("norm", "gelu", "dropout")):
        config = dataclasses.replace(config, recompute=recompute)
        rounded = dataclasses.replace(config, stochastic=True)
        assert 2 * kept(rounded, params, x) == kept(config, params, x) + x.nbytes
        assert torch.equal(transformer_layer(config, params, x, KEY), transformer_layer(rounded, params, x, KEY))


def test_stochastic_gradients_are_right_on_average():
    """The gradient of the last weight is linear in the saved activations; all gradients are near."""
    config, params, x = single(*make(norm="pre", dropout=0.3))
    rounded = dataclasses.replace(config, stochastic=True)
    wanted = gradients(lambda p, x: transformer_layer(config, p, x, KEY), params, x)
    torch.manual_seed(0)
    draws = [gradients(lambda p, x: transformer_layer(rounded, p, x, KEY), params, x) for _ in range(200)]
    paths = [path for path, _ in torch.utils._pytree.tree_flatten_with_path(params)[0]]
    down = 1 + [torch.utils._pytree.keystr(path) for path in paths].index("['mlp']['down']['weight']")
    found = torch.stack([draw[down] for draw in draws]).double()
    deviation = found.std(0) / len(draws) ** 0.5
    off = (found.mean(0) - wanted[down]).abs() / deviation
    assert deviation.min() > 0 and off.max() < 5 and off.square().mean() < 1.5
    for index, exact in enumerate(wanted[1:], start=1):
        assert (draws[0][index] - exact).norm() < 0.02 * exact.norm()


def test_masks_are_not_saved():
    config, params, x = make()
    without = kept(config, params, x)
    assert kept(dataclasses.replace(config, dropout=0.3), params, x) == without


def test_stochastic_rounding():
    x = torch.tensor([1.0, 1 + 2**-9, -1 - 3 * 2**-9, 3e38, 1e-40, float("inf"), float("-inf"), float("nan")])
    found = stochastically_rounded(x.repeat(4000, 1).flatten()).float().view(4000, -1)
    assert (found[:, 0] == 1).all() and (found[:, 5:7] == x[5:7]).all() and found[:, 7].isnan().all()
    for column, (low, high, share) in {1: (1, 1 + 2**-7, 0.25), 2: (-1, -1 - 2**-7, 0.75)}.items():
        assert set(found[:, column].tolist()) == {low, high}
        assert abs((found[:, column] == high).double().mean() - share) < 5 * (share * (1 - share) / 4000) ** 0.5


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_stochastic(stage):
    """Both ranks have the same batch."""
    config, params, x = single(*make())
    config = dataclasses.replace(config, stochastic=True, recompute=("norm", "gelu"))

    def loss_fn(params, batch, rng):
        return transformer_layer(config, params, batch, rng).square().mean()

    def run(mesh):
        value, grads = sl.value_and_grad(loss_fn)(sl.shard(params, mesh, sl.zero(stage)), x[:1], rng=KEY)
        return value, sl.unshard(grads)

    exact = dataclasses.replace(config, stochastic=False)
    leaves = torch.utils._pytree.tree_map(lambda p: p.clone().requires_grad_(), params)
    wanted = torch.autograd.grad(
        transformer_layer(exact, leaves, x[:1], KEY).square().mean(), torch.utils._pytree.tree_leaves(leaves)
    )
    _, found = sl.simulate(run, mesh={"data": 2})[0]
    found = torch.utils._pytree.tree_leaves(found)
    assert all((mine - right).norm() < 0.02 * right.norm() for mine, right in zip(found, wanted, strict=True))
    assert not torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sharded(stage):
    """At stage 3 parameters are handles, and saved tensors are noted by the executor too."""
    config, params, x = make(norm="post", dropout=0.3, attention_dropout=0.2, recompute=("norm", "gelu", "dropout"))

    def loss_fn(params, batch, rng):
        return transformer_layer(config, params, batch, rng).square().mean()

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.zero(stage))
        rank = mesh.rank
        value, grads = sl.value_and_grad(loss_fn)(sharded, x[rank : rank + 1], rng=KEY)
        return value, sl.unshard(grads)

    wanted, grads = sl.value_and_grad(loss_fn)(params, x, rng=KEY)
    for value, found in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-12)


SLICED = [
    {},
    {"dropout": 0.3, "attention_dropout": 0.2, "causal": True},
    {"dropout": 0.3, "attention_dropout": 0.2, "lengths": True, "recompute": ("norm", "gelu", "dropout")},
]


def sliced(mesh, stage, norm, options):
    """The value and gradients on sliced heads and slices of the MLP, and those on one device."""
    options = dict(options)
    lengths = torch.tensor([5, 3]) if options.pop("lengths", False) else None
    config, params, x = make(norm=norm, **options)
    config = dataclasses.replace(config, heads=2)

    def loss_fn(params, batch, rng):
        x, lengths = batch["x"], batch.get("lengths")
        return transformer_layer(config, params, x, rng, lengths).sin().square().mean()

    batch = {"x": x} | ({} if lengths is None else {"lengths": lengths})
    share = {name: leaf.chunk(mesh.shape["data"])[mesh.coords["data"]] for name, leaf in batch.items()}
    transform = sl.chain(sl.tensor_slicing(slicing_rules(config)), sl.zero(stage))
    value, grads = sl.value_and_grad(loss_fn)(sl.shard(params, mesh, transform), share, rng=KEY)
    return (value, sl.unshard(grads)), sl.value_and_grad(loss_fn)(params, batch, rng=KEY)


@pytest.mark.parametrize("options", SLICED)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("stage", [0, 3])
def test_sliced(stage, norm, options):
    for found, wanted in sl.simulate(sliced, stage, norm, options, mesh={"data": 2, "model": 2}):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_sliced_in_real_processes(pool, norm):
    for found, wanted in pool.run(sliced, 0, norm, SLICED[2], mesh={"data": 1, "model": 2}):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_sliced_stochastic():
    """Saved activations are rounded and parameters are not: gradients are near, but not equal."""
    config, params, x = single(*make())
    config = dataclasses.replace(config, heads=2, stochastic=True)

    def run(mesh, config):
        def loss_fn(params, batch):
            return transformer_layer(config, params, batch).square().mean()

        sharded = sl.shard(params, mesh, sl.tensor_slicing(slicing_rules(config)))
        return torch.utils._pytree.tree_leaves(sl.unshard(sl.value_and_grad(loss_fn)(sharded, x)[1]))

    found = sl.simulate(run, config, mesh={"model": 2})[0]
    wanted = sl.simulate(run, dataclasses.replace(config, stochastic=False), mesh={"model": 2})[0]
    assert all((mine - right).norm() < 0.02 * right.norm() for mine, right in zip(found, wanted, strict=True))
    assert not torch.equal(found[1], wanted[1])


def test_under_torch_func_and_the_compiler():
    """Neither allows hooks: everything is saved, and the values are the same."""
    config, params, x = make(dropout=0.3, recompute=("norm", "gelu"))

    def loss(params, x):
        return (transformer_layer(config, params, x, KEY).sin() * 3).sum()

    wanted = gradients(lambda p, x: transformer_layer(config, p, x, KEY), params, x)[-1]
    torch.testing.assert_close(torch.func.grad(loss, 1)(params, x), wanted)
    x = x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(
        loss, backend="aot_eager"
    )  # the graph breaks where shardlib.nn.sequence looks for a sequence plan
    torch.testing.assert_close(torch.autograd.grad(compiled(params, x), x)[0], wanted)


def test_refusals():
    with pytest.raises(ValueError, match="heads=5 does not divide width=12"):
        LayerConfig(12, 5)
    with pytest.raises(ValueError, match=r"recompute names \['everything'\]"):
        LayerConfig(12, 3, recompute=("everything",))
    with pytest.raises(ValueError, match=r"stochastic is for fp32, and dtype is torch\.bfloat16"):
        LayerConfig(12, 3, stochastic=True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="neither 'pre' nor 'post'"):
        LayerConfig(12, 3, norm="sandwich")
    config, params, x = make(dropout=0.1)
    with pytest.raises(ValueError, match="no rng was given"):
        transformer_layer(config, params, x)
