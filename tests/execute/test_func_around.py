"""torch.func around value_and_grad and eval steps on sharded parameters: equal to one device, at every stage."""

from functools import partial

import pytest
import torch
from helpers.models import mlp, mlp_loss, regression_batch, share
from helpers.trees import assert_close
from optree import tree_map
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition, LossError, TreeError
from shardlib.tree import leaves_of

CASES = pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
TOLERANCE = 1e-12
PARAMS, BATCH = mlp([6, 5, 4])[1], regression_batch(8, 6, 4)
DIRECTION = tree_map(torch.cos, PARAMS)


def weighted(params, batch):
    """A `Mean` whose weights differ from rank to rank."""
    x, y = batch
    counted = (x[:, 0] > 0).double()
    errors = (torch.tanh(x @ params["layers"][0]["weight"].t()).sum(1) - y.sum(1)).square()
    return sl.Mean((errors * counted).sum(), counted.sum()) + 0.1 * sl.Mean(leaves_of(params)[0].square().sum(), 1)


def mean_of(loss):
    return (
        sum(term.total / term.weight for term in getattr(loss, "terms", [loss])) if not torch.is_tensor(loss) else loss
    )


def on_ranks(fn, stage, ranks, batch=BATCH, more=()):
    """``fn(sharded parameters, sharded direction, this rank's batch)`` on simulated ranks; Sharded results whole."""

    def run(mesh):
        chain = sl.chain(sl.zero(stage), *more)
        params, along = (sl.shard(tree, mesh, chain) for tree in (PARAMS, DIRECTION))
        found = fn(params, along, share(batch, mesh.rank, ranks))
        return [sl.unshard(each) if isinstance(each, sl.Sharded) else each for each in found]

    return sl.simulate(run, mesh={"data": ranks})


def value(loss_fn, batch):
    return lambda params: sl.value_and_grad(loss_fn)(params, batch)[0]


def gradient(loss_fn, batch):
    return lambda params: sl.value_and_grad(loss_fn)(params, batch)[1]


def of_gradients(direction, params, batch, loss_fn):
    """The direction in the layout of gradients: that of a gradient of a linear function."""
    linear = lambda params, batch: sum(  # noqa: E731
        (leaf * along).sum() for leaf, along in zip(leaves_of(params), leaves_of(DIRECTION))
    )
    return sl.value_and_grad(linear)(params, batch)[1]


@CASES
@pytest.mark.parametrize("loss_fn", [mlp_loss, weighted])
def test_reverse_and_reverse(stage, ranks, loss_fn):
    """The gradient, a Hessian-vector product by two reverse passes, and a step of MAML."""

    def fn(params, along, batch):
        v = of_gradients(along, params, batch, loss_fn)
        slope = grad(value(loss_fn, batch))(params)
        curved = grad(lambda p: sl.optim.vdot(gradient(loss_fn, batch)(p), v))(params)
        inner = lambda p: tree_map(lambda a, b: a - 0.1 * b, p, grad(value(loss_fn, batch))(p))  # noqa: E731
        through = grad(lambda p: value(loss_fn, batch)(inner(p)))(params)
        return slope, curved, through, sl.optim.vdot(v, v), sl.value_and_grad(loss_fn)(params, batch)[1]

    plain = lambda params: mean_of(loss_fn(params, BATCH))  # noqa: E731
    inner = lambda p: tree_map(lambda a, b: a - 0.1 * b, p, grad(plain)(p))  # noqa: E731
    dot = lambda a, b: sum((x * y).sum() for x, y in zip(leaves_of(a), leaves_of(b)))  # noqa: E731
    wanted = (
        grad(plain)(PARAMS),
        grad(lambda p: dot(grad(plain)(p), DIRECTION))(PARAMS),
        grad(lambda p: plain(inner(p)))(PARAMS),
    )
    for slope, curved, through, product, today in on_ranks(fn, stage, ranks):
        for got, want in zip((slope, curved, through), wanted):
            assert_close(got, want, TOLERANCE)
        assert product.item() == pytest.approx(dot(DIRECTION, DIRECTION).item(), rel=TOLERANCE)
        assert_close(today, slope, TOLERANCE)


@CASES
def test_maps(stage, ranks):
    """Gradients for each of several batches, and the Jacobian of several numbers of all ranks."""

    def numbers(params, batch):
        loss = mlp_loss(params, batch)
        return {"a": sl.Mean(loss, 1), "b": sl.Mean(loss**2, 1)}

    def fn(params, along, batch):
        x, y = batch[0].view(2, -1, 6), batch[1].view(2, -1, 4)
        each = vmap(lambda x, y: gradient(mlp_loss, (x, y))(params))(x, y)
        evaluate = sl.make_eval_step(numbers, params)
        stacked = jacrev(lambda p: evaluate(p, batch)["a"] * torch.arange(1.0, 3.0).double())(params)
        value, pull = vjp(lambda p: evaluate(p, batch)["b"], params)
        with pytest.raises(TreeError, match=r"unshard: several trees in one \(vmap, jacrev\); take one"):
            sl.unshard(stacked)
        one = lambda trees, i: pytree.tree_map(lambda buffer: buffer[i], trees)  # noqa: E731
        return one(each, 0), one(each, 1), one(stacked, 1), pull(torch.ones_like(value))[0]

    found = on_ranks(fn, stage, ranks)
    mean = lambda p: sum(mlp_loss(p, share(BATCH, r, ranks)) for r in range(ranks)) / ranks  # noqa: E731
    square = lambda p: sum(mlp_loss(p, share(BATCH, r, ranks)) ** 2 for r in range(ranks)) / ranks  # noqa: E731
    parts = [[part.chunk(ranks)[r].view(2, -1, part.shape[1]) for part in BATCH] for r in range(ranks)]
    sample = lambda p, i: sum(mlp_loss(p, (x[i], y[i])) for x, y in parts) / ranks  # noqa: E731
    samples = [grad(sample)(PARAMS, i) for i in range(2)]
    for *each, second, squared in found:
        assert_close(squared, grad(square)(PARAMS), TOLERANCE)
        assert_close(second, tree_map(lambda leaf: 2 * leaf, grad(mean)(PARAMS)), TOLERANCE)
        for got, want in zip(each, samples, strict=True):
            assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize(
    "more", [[sl.accumulate(2)], [sl.remat()], [sl.freeze("layers/0/*")]], ids=["2", "remat", "frozen"]
)
def test_chains(more):
    def fn(params, along, batch):
        return (grad(value(mlp_loss, batch))(params),)

    wanted = grad(lambda params: mlp_loss(params, BATCH))(PARAMS)
    for (slope,) in on_ranks(fn, 3, 2, more=more):
        paths = range(2) if "freeze" in str(more) else range(4)
        for path in range(2, 4) if len(paths) == 2 else paths:
            assert_close(leaves_of(slope)[path], leaves_of(wanted)[path], TOLERANCE)


def forward(mesh, stage, loss_fn, wanted_of):
    """Hessian-vector products by forward over reverse, and a tangent of the loss, on a rank of its own process."""
    params, along = (sl.shard(tree, mesh, stage=stage) for tree in (PARAMS, DIRECTION))
    batch = share(BATCH, mesh.rank, mesh.size)
    _, curved = jvp(gradient(loss_fn, batch), (params,), (along,))
    _, tangent = jvp(value(loss_fn, batch), (params,), (along,))
    return sl.unshard(curved), tangent


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_forward_mode_in_processes(pool, stage):
    plain = lambda params: mlp_loss(params, BATCH)  # noqa: E731
    wanted = jvp(grad(plain), (PARAMS,), (DIRECTION,))[1], jvp(plain, (PARAMS,), (DIRECTION,))[1]
    for curved, tangent in pool.run(forward, stage, mlp_loss, None, mesh={"data": 2}):
        assert_close(curved, wanted[0], TOLERANCE)
        assert tangent.item() == pytest.approx(wanted[1].item(), rel=TOLERANCE)


def test_forward_mode_of_simulated_ranks_is_refused():
    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=3)
        return jvp(value(mlp_loss, share(BATCH, mesh.rank, 2)), (params,), (params,))

    with pytest.raises(HandleError, match=r"forward mode .* around an exchange of simulated ranks"):
        sl.simulate(run, mesh={"data": 2})


def test_plain_trees():
    """As on a mesh of one, but with derivatives of the batch too."""
    slope = grad(lambda params: sl.value_and_grad(mlp_loss)(params, BATCH)[0])(PARAMS)
    assert_close(slope, grad(lambda params: mlp_loss(params, BATCH))(PARAMS), TOLERANCE)
    evaluate = sl.make_eval_step(lambda params, x: x @ params["layers"][0]["weight"].t(), PARAMS)
    found = jacrev(lambda x: evaluate(PARAMS, x))(BATCH[0][:1])
    assert torch.equal(found[0, :, 0], PARAMS["layers"][0]["weight"])


def test_refusals():
    def run(mesh):
        params, batch = sl.shard(PARAMS, mesh, stage=3), share(BATCH, mesh.rank, 2)
        rows = sl.make_eval_step(lambda params, batch: batch[0] @ params["layers"][0]["weight"].t(), params)
        with pytest.raises(LossError, match=r"an eval step returned of this rank's rows is differentiated.*sl.Mean"):
            grad(lambda p: rows(p, batch).sum())(params)
        with pytest.raises(TreeError, match="pass None for it in in_dims"):
            vmap(value(mlp_loss, batch))(sl.shard({"w": torch.ones(4)}, mesh, stage=3))
        with pytest.raises(TreeError, match=r"unshard: shards inside of torch.func.*sl.optim.vdot"):
            grad(lambda p: leaves_of(sl.unshard(p))[0].sum())(params)
        with pytest.raises(TreeError, match="vdot of a tree of role 'param' and one of role 'grad'"):
            grad(lambda p: sl.optim.vdot(p, gradient(mlp_loss, batch)(p)))(params)
        state, step = sl.make_train_step(mlp_loss, params, sl.optim.sgd(0.1))
        with pytest.raises(HandleError, match="around a train step, to which its result is a constant"):
            grad(lambda x: step(state, (x, batch[1]))[1]["loss"])(batch[0])
        with pytest.raises(HandleError, match="reads a further sharded tree"):
            grad(value(lambda p, x: mlp_loss(p, x) + leaves_of(params)[0].sum(), batch))(sl.shard(PARAMS, mesh))
        refused = {
            "offload": sl.chain(sl.zero(3), sl.offload(params="host")),
            "sequence": sl.sequence("data", "ulysses"),
            "onebit": sl.chain(sl.zero(1), sl.onebit(feedback=False)),
            "reproducible": sl.chain(sl.zero(1), sl.reproducible(2)),
            "fp8": sl.chain(sl.zero(1), sl.precision("fp8")),
        }
        for name, transform in refused.items():
            with pytest.raises(IllegalComposition, match=rf"(?s)around value_and_grad's function.*{name}.*sl\.unshard"):
                grad(value(mlp_loss, batch))(sl.shard(PARAMS, mesh, transform))

    sl.simulate(run, mesh={"data": 2})


def test_forward_mode_of_torch_itself():
    params = sl.shard(PARAMS, sl.make_mesh(), stage=3)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(BATCH[0], BATCH[0].cos())
        tangent = forward_ad.unpack_dual(value(mlp_loss, (x, BATCH[1]))(params)).tangent
    wanted = jvp(lambda x: mlp_loss(PARAMS, (x, BATCH[1])), (BATCH[0],), (BATCH[0].cos(),))[1]
    assert tangent.item() == pytest.approx(wanted.item(), rel=TOLERANCE)


def test_shards_that_are_read_inside_belong_to_no_level():
    params, x = sl.shard({"w": torch.ones(4)}, sl.make_mesh(), stage=3), torch.arange(4.0)
    assert torch.equal(grad(lambda x: (params["w"] * x).sum())(x), torch.ones(4))
    assert torch.equal(grad(lambda p: (p["w"] * x).square().sum())(params)["w"], 2 * x.square())
    assert torch.equal(sl.value_and_grad(lambda p, x: (p["w"] * x).sum())(params, x)[1]["w"], x)


def test_uses_of_slices_that_fit_and_are_wrong_are_refused():
    """A first call is looked at around torch.func too, where no step may ever have run."""

    def loss_fn(params, batch):
        first, last = params["layers"]
        scores = torch.nn.functional.linear(batch[0], first["weight"]).softmax(-1)
        return (torch.nn.functional.linear(scores, last["weight"]) - batch[1]).square().mean()

    params = mlp([6, 8, 4])[1]

    def run(mesh):
        rules = {"layers/0/*": "column", "layers/1/*": "row"}
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), sl.tensor_slicing(rules, axis="model")))
        for fn in (value(loss_fn, BATCH), lambda params: sl.make_eval_step(loss_fn, params)(params, BATCH)):
            with pytest.raises(HandleError, match="softmax takes all outputs of layers/0/weight together"):
                grad(fn)(sharded)

    sl.simulate(run, mesh={"data": 1, "model": 2})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_writes_to_parameters_are_refused(stage, ranks):
    """They would change the shards that were given, or what is gathered of them, without a sign."""

    def loss_fn(params, batch):
        params["layers"][0]["weight"].data.mul_(0.5)
        return mlp_loss(params, batch)

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        with pytest.raises(HandleError, match="mul_ writes to parameter layers/0/weight"):
            grad(value(loss_fn, share(BATCH, mesh.rank, ranks)))(sharded)
        return sl.unshard(sharded)

    for whole in sl.simulate(run, mesh={"data": ranks}):
        assert_close(whole, PARAMS, 0)


EXPERTS = {
    "w": torch.randn(4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 2,
    "router": {"weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)},
    "experts": {
        name: torch.randn(4, *shape, generator=torch.Generator().manual_seed(7 + len(name)), dtype=torch.float64) / 2
        for name, shape in {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}.items()
    },
}


def of_experts(params, batch, router):
    x, routing = sl.nn.moe(params, torch.tanh(batch[0] @ params["w"].t()), sl.nn.MoEConfig(router))
    return (x - batch[1]).square().mean() + 0.1 * routing.aux["z"]


WITH_EXPERTS = {
    "one axis": ({"expert": 2}, sl.experts(), sl.zero(1, axis="expert")),
    "two hops, padded": (
        *({"data": 2, "expert": 2}, sl.experts(("data", "expert"), padded=True)),
        *(sl.zero(3, axis=("data", "expert")), sl.accumulate(2), sl.remat()),
    ),
    "replicas": (
        *({"expert": 2}, sl.experts(spare=1)),
        *(sl.zero(3, axis="expert"), sl.freeze(["router/seats", "router/replicas"])),
    ),
}


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts(name):
    """Tokens travel in both reverse passes: the gradient, half the gradient of its square, and a step of MAML."""
    mesh, *transforms = WITH_EXPERTS[name]
    whole = sl.nn.routers.Capacity(4.0) if "padded" in name else None  # which takes all tokens
    loss_fn = partial(of_experts, router=sl.nn.routers.top_k(2, renormalise="chosen", capacity=whole))
    places = {"seats": torch.tensor([3, 1, 2, 0]), "replicas": torch.tensor([1, -1, -1, 0])}
    router = EXPERTS["router"] | (places if "replicas" in name else {})

    def stepped(params, grads):
        return tree_map(lambda a, b: a - 0.1 * b if a.is_floating_point() else a, params, grads)

    def run(mesh):
        params = sl.shard(EXPERTS | {"router": router}, mesh, sl.chain(*transforms))
        mine = share(BATCH, mesh.rank, mesh.size)
        slope = grad(value(loss_fn, mine))(params)
        curved = grad(lambda p: sl.optim.vdot(*[gradient(loss_fn, mine)(p)] * 2) / 2)(params)
        inner = lambda p: stepped(p, grad(value(loss_fn, mine))(p))  # noqa: E731
        through = grad(lambda p: value(loss_fn, mine)(inner(p)))(params)
        return [sl.unshard(each) for each in (slope, curved, through)]

    def plain(params):
        return loss_fn(params | {"router": router | params["router"]}, BATCH)

    square = lambda p: sum(leaf.square().sum() for leaf in leaves_of(grad(plain)(p))) / 2  # noqa: E731
    through = lambda p: plain(stepped(p, grad(plain)(p)))  # noqa: E731
    wanted = [grad(fn)(EXPERTS) for fn in (plain, square, through)]
    for found in sl.simulate(run, mesh=mesh):
        for got, want in zip(found, wanted, strict=True):
            got["router"] = {"weight": got["router"]["weight"]}
            assert_close(got, want, TOLERANCE)


def test_other_uses_of_experts_are_refused():
    def run(mesh):
        params = sl.shard(EXPERTS, mesh, sl.experts())
        loss_fn = lambda params, batch: params["experts"]["up"].square().mean()  # noqa: E731
        with pytest.raises(HandleError, match="experts/up is used outside of a layer of experts"):
            grad(value(loss_fn, BATCH))(params)

    sl.simulate(run, mesh={"expert": 2})
