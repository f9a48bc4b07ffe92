"""Leaves in tiles train as whole ones over stages, axes and transforms, and send what the plan says."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import count_payload
from helpers.models import share, tiny_gpt, token_batches
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition
from shardlib.execute.batches import batch_index
from shardlib.execute.counting import LiveBytes
from shardlib.execute.graph.analysis import peak_of_wholes
from shardlib.models import gpt
from shardlib.plan.memory import live_bytes

CONFIG = gpt.GPTConfig(vocab=32, layers=2, width=16, heads=4, sequence=8, dtype=torch.float64)
RULES = gpt.slicing_rules(CONFIG)
ALL = ["*/mlp/*", "*/attn/*", "head/weight", "embed/tokens"]
TILES = sl.tile(ALL, 2)
BATCHES = token_batches(3, rows=16, config=CONFIG)

# name -> (transforms, mesh)
PLANS = {
    "stage 0": ([sl.zero(0), TILES], {"data": 2}),
    "stage 2": ([sl.zero(2), TILES], {"data": 2}),
    "stage 3": ([sl.zero(3), TILES], {"data": 4}),
    "four tiles": ([sl.zero(3), sl.tile(ALL, 4)], {"data": 2}),
    "without prefetch": ([sl.zero(3, prefetch=False), TILES], {"data": 2}),
    "hybrid": ([sl.zero(3, replicate="node"), TILES], {"node": 2, "data": 2}),
    "slices": ([sl.zero(3), sl.tensor_slicing(RULES), TILES], {"data": 2, "model": 2}),
    "megatron": ([sl.zero(3), sl.tensor_slicing(RULES), sl.sequence("model", "megatron"), TILES], {"data": 2, "model": 2}),
    "ulysses": ([sl.zero(3), sl.sequence("seq"), TILES], {"data": 2, "seq": 2}),
    "ring": ([sl.zero(3), sl.sequence("seq", "ring"), TILES], {"data": 2, "seq": 2}),
    "recomputed": ([sl.zero(3), sl.remat(), TILES], {"data": 2}),
    "recomputed but for products": ([sl.zero(3), sl.remat("dots"), TILES], {"data": 2}),
    "accumulated": ([sl.zero(3), sl.accumulate(2), TILES], {"data": 2}),
    "accumulated, sent at the end": ([sl.zero(3), sl.accumulate(2, sync="last"), TILES], {"data": 2}),
    "frozen": ([sl.zero(3), sl.freeze("*/mlp/up/*"), TILES], {"data": 2}),
    "reproducible": ([sl.zero(3), sl.reproducible(4), TILES], {"data": 2}),
}  # fmt: skip


def whole(transforms):
    return [each for each in transforms if type(each) is not type(TILES)]


def trained(mesh, transforms, blocks=False, compile=False, **changes):
    """Losses, norms and parameters of the model, or of its blocks."""
    config = replace(CONFIG, **changes)
    loss_fn, params = tiny_gpt(**config.__dict__)
    job = (gpt.make_sequential(config), gpt.to_blocks(params)) if blocks else (loss_fn, params)
    return training.simulate(mesh, *job, BATCHES, sl.chain(*transforms), training.optimizer(1.0), compile=compile)


@pytest.mark.parametrize("name", PLANS)
def test_a_model_in_tiles_trains_as_whole(name):
    transforms, mesh = PLANS[name]
    found, wanted = trained(mesh, transforms), trained(mesh, whole(transforms))
    assert found[0] == pytest.approx(wanted[0], rel=1e-12) and found[1] == pytest.approx(wanted[1], rel=1e-10)
    assert_close(found[2], wanted[2], 1e-9)  # Adam divides by roots of second moments
    assert_close(found[2]["head"], wanted[2]["head"], 1e-12)


GRAPHS = PLANS | {
    "host": ([sl.zero(3), sl.offload(params="host", gradients="host"), sl.accumulate(2), TILES], {"data": 2}),
    "hybrid, accumulated": ([sl.zero(3, replicate="node"), sl.accumulate(2), TILES], {"node": 2, "data": 2}),
    "in bf16, recomputed": ([sl.zero(3), sl.precision("bf16"), sl.remat(), TILES], {"data": 2}),
    "in int8": ([sl.zero(3), sl.quantize("int8", "int8", feedback=False), TILES], {"data": 2}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_equal(name):
    transforms, mesh = GRAPHS[name]
    found, wanted = (trained(mesh, transforms, compile=compile, dtype=torch.float32) for compile in (True, False))
    assert found[:2] == wanted[:2]
    assert_same(found[2], wanted[2])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tiles_in_stages(schedule):
    transforms = [sl.zero(3), sl.pipeline(schedule, microbatches=4), sl.tile(["*/mlp/*", "*/attn/*", "3/weight"], 2)]
    mesh = {"pipe": 2, "data": 2}
    found, wanted, graphs = (
        trained(mesh, transforms, blocks=True),
        trained(mesh, whole(transforms), blocks=True),
        trained(mesh, transforms, blocks=True, compile=True),
    )
    assert found[0] == pytest.approx(wanted[0], rel=1e-12) and found[1] == pytest.approx(wanted[1], rel=1e-10)
    assert graphs[:2] == found[:2]
    assert_same(graphs[2], found[2])


@pytest.mark.parametrize("remat", [None, "full", "dots"])
def test_what_a_graph_holds_is_what_a_step_without_holds(remat):
    """Of a leaf two tiles, and of gradients one; less than without a graph, whose peak is the plan's."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (512, 128), "down": (128, 512)}
    blocks = [{k: torch.randn(*v, generator=draw) / 20 for k, v in shapes.items()} for _ in range(3)]
    x = torch.randn(64, 128, generator=draw)
    block = sl.block(lambda p, x: x + F.linear(F.gelu(F.linear(x, p["up"])), p["down"]))

    def loss_fn(params, x):
        for params_i in params["blocks"]:
            x = block(params_i, x)
        return x.square().mean()

    def run(mesh, compile):
        transform = sl.chain(sl.zero(3), sl.tile("*", 4), *([] if remat is None else [sl.remat(remat)]))
        state, step = sl.make_train_step(
            loss_fn, sl.shard({"blocks": blocks}, mesh, transform), sl.optim.sgd(0.1), compile=compile
        )
        for _ in range(2):
            state, _ = step(state, x)
        with LiveBytes() as live:
            step(state, x)
        return live.peak, step.graph

    (peak, stage), *_ = sl.simulate(run, True, mesh={"data": 2})
    (graph,) = stage.graphs.values()
    wholes = peak_of_wholes(graph)
    assert wholes.units == 2 and wholes.bytes == 2 * 512 * 128 * 4 // 4
    assert peak <= sl.simulate(run, False, mesh={"data": 2})[0][0]


@pytest.mark.parametrize(
    ("transforms", "changes", "tolerance"),
    [
        ([sl.tile("embed/tokens", 4)], {"tie": True}, 1e-12),  # a tied table is looked up and scores
        ([sl.quantize("int8"), TILES], {"dtype": torch.float32}, 1e-3),
        ([sl.quantize(gradients="int8", feedback=False), TILES], {"dtype": torch.float32}, 1e-3),
    ],
)
def test_tied_tables_and_tiles_that_are_compressed(transforms, changes, tolerance):
    found, wanted = (trained({"data": 2}, [sl.zero(3), *some], **changes) for some in (transforms, whole(transforms)))
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)


@pytest.mark.parametrize("name", ["stage 3", "four tiles", "hybrid", "slices", "recomputed", "accumulated", "ulysses"])
def test_what_is_sent_is_what_the_plan_says(name):
    transforms, mesh = PLANS[name]
    loss_fn, params = tiny_gpt(**CONFIG.__dict__)

    def run(mesh):
        sent = count_payload(mesh)
        sharded = sl.shard(params, mesh, sl.chain(*transforms))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(1.0))
        mine = [share(batch, batch_index(sharded.plan, mesh), sharded.plan.batch_ranks) for batch in BATCHES]
        counted = []
        for batch in mine:
            sent()
            state, _ = step(state, batch)
            counted.append(sent())
        return counted[1:], mine[0]

    results = sl.simulate(run, mesh=mesh)
    plan = sl.make_plan(
        params, sl.abstract_mesh(**mesh), sl.chain(*transforms), loss_fn=loss_fn, batch=results[0][1],
        optimizer=training.optimizer(1.0),
    )  # fmt: skip
    assert any("tile" in unit for unit in plan.gathers)
    for counted, _ in results:
        assert counted == [plan.payload()] * 2


def test_each_tile_is_gathered_once_each_way_and_their_unit_stays():
    """The rest of the unit, used before, between and after the tiles of its layers, is not gathered again for each."""
    shapes = {"scale": (8,), "up": (32, 8), "b": (32,), "down": (8, 32), "c": (8,)}
    params = {"a": {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}}

    def loss_fn(params, x):
        p = params["a"]
        return F.linear(F.linear(x * p["scale"], p["up"], p["b"]).tanh(), p["down"], p["c"]).square().mean()

    def plan(*tiles):
        transform, batch = sl.chain(sl.zero(3), *tiles), torch.empty(4, 8, device="meta")
        return sl.make_plan(params, sl.abstract_mesh(data=2), transform, loss_fn=loss_fn, batch=batch)

    cut = plan(sl.tile(["a/up", "a/down"], 4))
    for layer in ("a/up", "a/down"):
        assert [cut.gathers.count(f"{layer} (tile {tile} of 4)") for tile in range(4)] == [2] * 4
    assert cut.gathers.count("a") == 1 and cut.payload()["data"] < plan().payload()["data"]  # backward needs no bias


@pytest.mark.parametrize("tiles", [4, 16])
def test_what_is_gathered_at_a_time_is_two_tiles(tiles):
    """A layer whose weight is nearly all there is, beside six activations: the tile in use, and the one after it."""
    params = {"layer": {"weight": torch.empty(1024, 256, dtype=torch.float64, device="meta")}}
    batch = torch.empty(1, 256, dtype=torch.float64, device="meta")

    def loss_fn(params, x):
        return F.linear(x, params["layer"]["weight"]).square().mean()

    def live(*transforms):
        plan = sl.make_plan(
            params, sl.abstract_mesh(data=4), sl.chain(sl.zero(3), *transforms), loss_fn=loss_fn, batch=batch
        )
        return live_bytes(plan)

    whole, activations = 1024 * 256 * 8, 6 * 1024 * 8
    assert live() > whole
    assert live(sl.tile("*", tiles)) <= 2 * whole // tiles + activations


def test_what_comes_from_another_memory_comes_in_tiles():
    """Also where it is whole there; with a state that is split otherwise it is refused."""
    params = {"w": torch.empty(32, 8, device="meta")}
    parallel = sl.chain(sl.zero(0), sl.offload(params="host"), sl.tile("w", 4))
    for ranks in (1, 2):
        plan = sl.make_plan(params, sl.abstract_mesh(data=ranks), parallel)
        tiles = [f"w (tile {number} of 4)" for number in range(4)]
        assert plan.gathers == (*tiles, *reversed(tiles))
    assert "not gathered" in str(sl.make_plan(params, sl.abstract_mesh(data=1), sl.chain(sl.zero(0), sl.tile("w", 4))))
    with pytest.raises(IllegalComposition, match=r"w: its optimizer state is split over axis 'data' too.*zero\(3"):
        sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(1), *parallel.transforms[1:]))


def test_a_checkpoint_knows_nothing_of_tiles(tmp_path):
    loss_fn, params = tiny_gpt(**CONFIG.__dict__)
    kinds = {"cut": [sl.zero(3), sl.tile(ALL, 4)], "uncut": [sl.zero(3)], "whole": [sl.zero(1), sl.tile(ALL, 2)]}

    def run(mesh, kind, source=None):
        sharded = sl.shard(params, mesh, sl.chain(*kinds[kind]))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer(1.0))
        if source is not None:
            return sl.unshard(sl.checkpoint.restore(tmp_path / source, state).params)
        state, _ = step(state, share(BATCHES[0], mesh.coords["data"], mesh.shape["data"]))
        with sl.checkpoint.Manager(tmp_path / kind) as manager:
            manager.save(state)
        return sl.unshard(state.params)

    for kind in kinds:
        saved = sl.simulate(run, kind, mesh={"data": 2})[0]
        for other in kinds:
            for ranks in (1, 4):
                assert_same(sl.simulate(run, other, kind, mesh={"data": ranks})[0], saved)


LAYERS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "product": lambda x, w, b: x @ w,
    "addmm": lambda x, w, b: torch.addmm(b[: w.shape[1]], x.flatten(0, 1), w),
    "matmul": lambda x, w, b: torch.matmul(x, w),
    "look-up": lambda x, w, b: F.embedding((x[..., 0] * 1000).long().abs() % 24, w, padding_idx=5),
    "cross entropy": lambda x, w, b: sl.nn.linear_cross_entropy(
        x, w, (x[..., 0] * 1000).long().abs() % 24 - (x[..., 1] > 1).long() * 200, ignore_index=-1, reduction="none"
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_layer_in_tiles(name, ranks):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    width = 24 if name in ("product", "addmm", "matmul") else 6
    x, scale = draw(6, 3, width), draw(4096)
    if name == "cross entropy":
        x[..., 1] = 0
    params = {"a": {"w": draw(24, 6), "b": draw(24)}, "x": {"scale": draw(width)}}

    def loss_fn(params, x):
        y = sl.block(LAYERS[name])(x * params["x"]["scale"].exp(), params["a"]["w"], params["a"]["b"])
        return (y.flatten() * scale[: y.numel()]).square().sum() / 6

    def grads(mesh, *tiles):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), *tiles))
        _, found = sl.value_and_grad(loss_fn)(sharded, x.chunk(ranks)[mesh.coords["data"]])
        return sl.unshard(found)

    mesh = {"data": ranks}
    tile = sl.tile("a/w", 4)
    wanted, *found = (sl.simulate(grads, *extra, mesh=mesh)[0] for extra in ([], [tile], [tile, sl.remat("dots")]))
    for each in found:
        assert_close(each, wanted, 1e-12)


def test_other_uses_of_a_leaf_in_tiles_are_refused():
    params = {"a": {"w": torch.ones(8, 4)}}
    parallel = sl.chain(sl.zero(3), sl.tile("*", 2))

    def run(mesh, loss_fn):
        sl.value_and_grad(loss_fn)(sl.shard(params, mesh, parallel), torch.ones(2, 8))

    uses = [
        lambda p, x: (p["a"]["w"] * 2).sum(),
        lambda p, x: (p["a"]["w"] @ torch.ones(4)).sum(),
        lambda p, x: F.linear(torch.ones(1, 4), p["a"]["w"].t()).sum(),
        lambda p, x: F.embedding(torch.tensor([1]), p["a"]["w"], sparse=True).sum(),
        lambda p, x: (x @ p["a"]["w"] @ p["a"]["w"].T).sum(),
    ]
    for use in uses:
        with pytest.raises(HandleError, match="a/w, which is gathered in 2 tiles"):
            sl.simulate(run, use, mesh={"data": 2})
    assert sl.simulate(
        lambda mesh: run(mesh, lambda p, x: (x @ p["a"]["w"]).sum() * len(p["a"]["w"])), mesh={"data": 2}
    )


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (6,), (2, 3, 4)])
def test_targets_of_another_shape_than_the_tokens_are_refused(shape):
    """A product with a mask would broadcast them."""
    sharded = sl.shard({"w": torch.ones(8, 4)}, sl.make_mesh(), sl.chain(sl.zero(3), sl.tile("w", 2)))
    targets = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="targets"):
        sl.value_and_grad(lambda p, x: sl.nn.linear_cross_entropy(x, p["w"], targets))(sharded, torch.ones(2, 3, 4))


def test_tiles_that_do_not_fit_are_refused_together():
    params = {"a": {"w": torch.ones(12, 4), "v": torch.ones(7, 4), "b": torch.ones(3)}}
    plan = lambda *transforms, **mesh: sl.make_plan(params, sl.abstract_mesh(**mesh), sl.chain(*transforms))  # noqa: E731
    with pytest.raises(IllegalComposition, match=r"(?s)a/v: 7 rows do not divide.*a/w: 12 rows .*give n=3"):
        plan(sl.zero(3), sl.tile("*", 4), data=2)
    with pytest.raises(IllegalComposition, match="keeps residuals of whole leaves"):
        plan(sl.zero(3), sl.tile("a/w", 3), sl.quantize(gradients="int8"), data=2)
    with pytest.raises(IllegalComposition, match="optimizer state is split over axis 'node' too"):
        plan(sl.zero(3), sl.zero(1, axis="node"), sl.tile("a/w", 3), data=2, node=2)
    with pytest.raises(IllegalComposition, match="matches no weight"):
        plan(sl.zero(3), sl.tile("a/b", 3), data=2)
    with pytest.raises(IllegalComposition, match="both claim"):
        plan(sl.zero(3), sl.tile("a/w", 3), sl.tile("*/w", 2), data=2)
    with pytest.raises(IllegalComposition, match="at least 2 tiles"):
        sl.tile("*", 1)
    assert "used whole instead of in tiles: a/w" in str(plan(sl.zero(2), sl.tile("a/w", 5), data=2))
