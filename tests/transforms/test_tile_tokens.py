"""Functions and modules in tiles of their tokens: the values of the whole, the memory of a tile, gradients handed on once."""

import weakref

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.architectures import build
from helpers.measure import Live, count_payload
from helpers.models import share
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import IllegalComposition, LossError, TreeError
from shardlib.models import huggingface
from shardlib.nn import tiled
from shardlib.plan.memory import live_bytes

MLPS = sl.tile("*.mlp", 4, along="tokens")


def weights(width=8, wide=64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(wide, width).requires_grad_(), draw(width, wide).requires_grad_()


def mlp(up, down):
    return lambda x: F.linear(F.gelu(F.linear(x, up)), down)


@pytest.mark.parametrize("tiles", [1, 3, 8, 100])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_values_and_gradients_are_those_of_the_whole(tiles, dim):
    up, down = weights()
    fn, x = mlp(up, down), torch.randn(8, 24, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.randn_like(x)
    results = []
    for run in (fn, lambda x: tiled(fn, x, tiles, dim=dim)):
        y = run(x)
        results.append((y.detach(), *torch.autograd.grad((y * scale).sum(), [x, up, down])))
    assert_close(list(results[1]), list(results[0]), 1e-12)
    with torch.no_grad():
        assert_close(tiled(fn, x, tiles, dim=dim), results[0][0], 1e-14)


def test_what_lies_between_exists_for_one_tile():
    up, down = weights(width=8, wide=256)
    fn, x = mlp(up, down), torch.randn(1, 256, 8, dtype=torch.float64, requires_grad=True)
    hidden, outer = 256 * 256 * 8, 256 * 8 * 8  # bytes of one activation inside, and of one outside or of a weight

    def peaks(run):
        with Live() as forward:
            y = run(x)
        with Live() as backward:
            torch.autograd.grad(y.sum(), [x, up, down])
        return forward.peak, backward.peak

    whole = peaks(fn)
    assert min(whole) >= 2 * hidden
    for tiles in (4, 16):
        # A tile's three or four activations; outside: output, its gradient, the input's, and twice the two weights'.
        forward, backward = peaks(lambda x, tiles=tiles: tiled(fn, x, tiles))
        assert forward <= 3 * hidden // tiles + 3 * outer and backward <= 5 * hidden // tiles + 8 * outer


@pytest.mark.parametrize("tiles", [1, 4])
def test_nothing_is_kept_after_backward(tiles):
    up, down = weights(width=8, wide=16)
    start = torch.randn(1, 16, 8, dtype=torch.float64, requires_grad=True)
    x = start * 2
    kept = weakref.ref(x.untyped_storage())
    torch.autograd.grad(tiled(mlp(up, down), x, tiles).sum(), [start, up])
    del x
    assert kept() is None


def test_what_tiles_made_may_be_written_to():
    up, down = weights(width=8, wide=16)
    x, results = torch.randn(1, 16, 8, dtype=torch.float64, requires_grad=True), []
    for tiles in (1, 4):
        y = tiled(mlp(up, down), x, tiles)
        y += x
        results.append((y.detach().clone(), *torch.autograd.grad(y.relu_().sum(), [x, up])))
    assert_close(results[1], results[0], 1e-12)


def test_names_inside_of_tiles_are_not_kept():
    block = sl.block(lambda w, x: tiled(lambda x: torch.tanh(sl.nn.checkpoint_name(x @ w, "h")), x, 2))
    w, x = torch.eye(4, dtype=torch.float64), torch.ones(1, 8, 4, dtype=torch.float64)

    def loss_fn(p, x):
        return (block(p["w"], sl.block(lambda x: sl.nn.checkpoint_name(x * 2, "h"))(x)) ** 2).sum()

    found = [
        sl.value_and_grad(loss_fn)(sl.shard({"w": w}, sl.make_mesh(), sl.chain(sl.zero(0), *remat)), x)
        for remat in ([], [sl.remat(save=["h"])])
    ]
    assert found[0][0] == found[1][0]
    assert_close(sl.unshard(found[1][1]), sl.unshard(found[0][1]), 1e-12)


def test_sums_are_added_up_and_several_tensors_go_together():
    up, down = weights()
    x = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(8, (2, 12))

    def losses(x, targets):
        y = mlp(up, down)(x)
        return F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum"), y

    results = []
    for total, y in (losses(x, targets), tiled(losses, (x, targets), 4)):
        results.append([total.detach(), y.detach(), *torch.autograd.grad(total + y.square().sum(), [x, up, down])])
    assert_close(results[1], results[0], 1e-12)


def test_dropout_draws_the_mask_of_the_whole():
    x = torch.randn(3, 20, 8, dtype=torch.float64, requires_grad=True)
    fn = lambda x: sl.dropout(x.exp(), 0.4, sl.Key(3))  # noqa: E731
    results = []
    for y in (fn(x), tiled(fn, x, 7)):
        results.append((y, *torch.autograd.grad(y.sum(), [x])))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    with pytest.raises(LossError, match="Tile along dimension 1"):
        tiled(fn, x, 2, dim=0)


def test_a_function_that_mixes_tokens_is_refused():
    x = torch.randn(2, 8, 4, 8)
    with pytest.raises(LossError, match="attention in a tile of tokens 0 to 3 of 8"):
        tiled(lambda x: sl.nn.attention(x, x, x), x, 2)
    with pytest.raises(ValueError, match="Keep the length"):
        tiled(lambda x: x[:, 1:], x, 2)
    with pytest.raises(ValueError, match="n >= 1"):
        tiled(lambda x: x, x, 0)


PLANS = {
    "stage 0": ([sl.zero(0)], {"data": 2}),
    "stage 2": ([sl.zero(2)], {"data": 2}),
    "stage 3": ([sl.zero(3)], {"data": 2}),
    "recomputed": ([sl.zero(3), sl.remat()], {"data": 2}),
    "accumulated": ([sl.zero(3), sl.accumulate(2)], {"data": 2}),
    "both": ([sl.zero(3), sl.tile(["*/mlp/*", "lm_head"], 2)], {"data": 2}),
}


def causal(kind, **changes):
    torch.manual_seed(5)
    return build(kind, vocab_size=48, intermediate_size=32, **changes).double()


def batches(rows=8):
    generator = torch.Generator().manual_seed(6)
    drawn = torch.randint(3, 48, (2, rows, 12), generator=generator)
    return [torch.where(torch.rand(tokens.shape, generator=generator) < 0.2, -100, tokens) for tokens in drawn]


def loss_of(apply):
    return lambda p, labels: apply(p, labels.clamp(min=0), labels=labels, use_cache=False).loss.double()


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_modules_of_transformers_run_in_tiles(kind, name):
    transforms, mesh = PLANS[name]
    apply, params = sl.from_module(causal(kind))
    cut, _ = sl.from_module(huggingface.with_tiled_loss(causal(kind)))
    if kind == "gpt2" and name == "both":
        transforms = [sl.zero(3), sl.tile("*/mlp/*", 2)]  # its output layer is its embedding, in another place
    wanted = training.simulate(mesh, loss_of(apply), params, batches(), sl.chain(*transforms), training.optimizer())
    found = training.simulate(mesh, loss_of(cut), params, batches(), sl.chain(*transforms, MLPS), training.optimizer())
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)  # transformers' own loss is computed in fp32
    assert_close(found[2], wanted[2], 1e-3)


def test_modules_in_tiles_are_equal_to_whole_ones_and_send_as_much():
    cut, params = sl.from_module(huggingface.with_tiled_loss(causal("llama")))
    loss_fn = loss_of(cut)

    def run(mesh, *tiles):
        sent = count_payload(mesh)
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), *tiles))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer())
        for labels in batches():
            sent()
            state, metrics = step(state, share(labels, mesh.rank, 2))
        return metrics["loss"].item(), sl.unshard(state.params), sent()

    cut, whole = sl.simulate(run, MLPS, mesh={"data": 2})[0], sl.simulate(run, mesh={"data": 2})[0]
    assert cut[0] == pytest.approx(whole[0], rel=1e-13) and cut[2] == whole[2]
    assert_close(cut[1], whole[1], 1e-9)


def test_blocks_of_stages_run_their_modules_in_tiles():
    model = causal("llama")
    loss_fn, params = sl.from_module(model, blocks=huggingface.decoder_blocks(model))
    rows = [{"input_ids": labels.clamp(min=0), "labels": labels} for labels in batches()]
    found, wanted = (
        training.simulate(
            {"pipe": 2, "data": 2}, loss_fn, params, rows,
            sl.chain(sl.zero(1), sl.pipeline("1f1b", microbatches=2), *tiles), training.optimizer(),
        )
        for tiles in ([MLPS], [])
    )  # fmt: skip
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)


class Net(torch.nn.Module):
    """A module whose MLP may be called in several ways."""

    def __init__(self, wide=4):
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(4, wide), torch.nn.Linear(wide, 4)).double()

    def forward(self, x, how="mlp"):
        if how == "mlp":
            return self.mlp(x)
        return self.mlp(input=x) if how == "by name" else F.linear(F.linear(x, self.mlp[0].weight), self.mlp[1].weight)


def test_the_plan_counts_the_inside_of_one_tile():
    """An MLP 64 times as wide as the stream: forward and backward hold three of its activations."""
    apply, params = sl.from_module(Net(256))
    hidden, weights = 1024 * 256 * 8, 2 * 4 * 256 * 8

    def live(*tiles):
        plan = sl.make_plan(
            {"net": params}, sl.abstract_mesh(data=1), sl.chain(sl.zero(0), *tiles),
            loss_fn=lambda p, x: apply(p["net"], x).square().mean(), batch=torch.zeros(1, 1024, 4, dtype=torch.float64),
        )  # fmt: skip
        return live_bytes(plan)

    whole, cut = live(), live(sl.tile("*/mlp", 8, along="tokens"))
    assert whole >= 2 * hidden and cut <= 3 * hidden // 8 + 8 * 1024 * 4 * 8 + 3 * weights


def test_tiles_of_tokens_that_cannot_be_are_refused():
    apply, params = sl.from_module(Net())

    def run(glob, how="mlp"):
        def rank(mesh):
            sharded = sl.shard({"net": params}, mesh, sl.tile(glob, 2, along="tokens"))
            return sl.value_and_grad(lambda p, x: apply(p["net"], x, how).sum())(sharded, torch.ones(2, 4).double())

        return sl.simulate(rank, mesh={"data": 1})

    run("net/mlp")
    # What is no loss may use the parameters as it likes.
    sharded = sl.shard({"net": params}, sl.make_mesh(), sl.tile("net/mlp", 2, along="tokens"))
    norms = sl.make_eval_step(lambda p: sum(leaf.square().sum() for leaf in optree.tree_leaves(p)), sharded)
    assert norms(sharded) > 0
    with pytest.raises(LossError, match=r"none of the modules that the plan runs in tiles ran:\n.*net/mlp"):
        run("net/mlp", "its weights")
    with pytest.raises(
        LossError, match=r"mlp runs in tiles of its tokens and is called with 0 arguments and \['input'\]"
    ):
        run("net/mlp", "by name")
    with pytest.raises(IllegalComposition, match="matches no module"):
        run("*.attn")
    two = {"a": params, "b": optree.tree_map(torch.clone, params), "mlp": {"0": {"weight": torch.ones(4, 4).double()}}}
    both = lambda p, x: apply(p["b"], apply(p["a"], x)).sum()  # noqa: E731

    def counted(*globs):
        parallel = sl.chain(*(sl.tile(glob, n, along="tokens") for glob, n in globs))
        sl.value_and_grad(both)(sl.shard(two, sl.make_mesh(), parallel), torch.ones(2, 4).double())

    counted(("a/mlp", 2), ("b/mlp", 2))
    with pytest.raises(LossError, match="the modules of a/ and b/ have parameters of the same names"):
        counted(("a/mlp", 2))
    with pytest.raises(LossError, match="none of the modules"):
        counted(("mlp", 2))  # another one than those in a and b
    adapted = build("llama")
    adapted.lm_head.__class__ = type("Adapted", (torch.nn.Linear,), {})
    with pytest.raises(TreeError, match="no lm_head, a plain Linear"):
        huggingface.with_tiled_loss(adapted)
    with pytest.raises(TreeError, match="it has an encoder"):
        huggingface.with_tiled_loss(build("t5"))
    with pytest.raises(TreeError, match="no lm_head"):
        huggingface.with_tiled_loss(torch.nn.Linear(2, 2))
    with pytest.raises(TreeError, match="final_logit_softcapping"):
        huggingface.with_tiled_loss(build("gemma2"))
