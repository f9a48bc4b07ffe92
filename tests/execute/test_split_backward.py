"""A backward split into input and weight gradients computes what one backward does, once, for every use of a weight."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.measure import WatchPeak, count_payload
from helpers.models import TINY, OwnProduct, share, tiny_gpt, token_batches
from helpers.trees import assert_close
from oracle import one_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.execute import zero_bubble
from shardlib.execute.executor import Executor
from shardlib.execute.gradients import Turn, default_options
from shardlib.models import gpt
from shardlib.tree import tree_map

WIDTH = 6
MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


# --- any use of a weight -------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A function between the parameter and the product."""

    @staticmethod
    def forward(ctx, weight):
        return 2 * weight

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def hooked(p, x):
    """Each hook must see its gradient once."""
    weight, bias = p["w"] * 1, p["b"] * 1
    for tensor in (weight, bias, p["w"], p["b"]):
        tensor.register_hook(lambda grad: grad * (1 + grad))
    return F.layer_norm(F.linear(x, weight), (WIDTH,), bias)


def penalised(p, x):
    """A gradient inside the loss."""
    y = F.linear(x, p["w"], p["b"]).tanh()
    (grad,) = torch.autograd.grad(y.square().sum(), [p["w"]], create_graph=True)
    return y + grad.square().mean()


def checkpointed(p, x):
    return checkpoint(lambda x: F.linear(x, p["w"], p["b"]).tanh(), x, use_reentrant=False)


# What a layer does with its parameters, and how many of its products the second half is left.
WAYS = {
    "linear": (lambda p, x: F.linear(x, p["w"], p["b"]), 1),
    "matmul": (lambda p, x: x @ p["w"] + p["b"], 1),
    "from the left": (lambda p, x: (p["w"] @ x.mT).mT, 1),
    "from the left, by columns": (lambda p, x: (p["w"].T @ x[0].mT).mT[None] + x, 1),
    "einsum": (lambda p, x: torch.einsum("bsi,io->bso", x, p["w"]), 1),
    "one for each row": (lambda p, x: torch.baddbmm(p["b"], x, p["w"].expand(len(x), -1, -1)), 1),
    "scaled": (lambda p, x: torch.addmm(p["b"], x.flatten(0, 1), p["w"], alpha=0.5).view_as(x), 0),
    "twice": (lambda p, x: F.linear(F.linear(x, p["w"]).tanh(), p["w"]), 2),
    "and by itself": (lambda p, x: F.linear(x, p["w"]) * p["w"].mean(), 0),
    "of two leaves": (lambda p, x: F.linear(x, torch.cat([p["w"][:3], p["v"][3:]])), 1),
    "merged": (lambda p, x: F.linear(x, p["w"] + p["v"] @ p["v"].T), 1),
    "parameters alone": (lambda p, x: x + (p["w"] @ p["v"]).sum(), 0),
    "convolution": (lambda p, x: F.conv1d(x.mT, p["w"][..., None], p["b"]).mT, 0),
    "own function": (lambda p, x: OwnProduct.apply(x, p["w"]), 0),
    "own function of a weight": (lambda p, x: x @ Doubled.apply(p["w"]), 1),
    "own checkpoint": (checkpointed, 0),
    "hooks": (hooked, 1),
    "a gradient inside": (penalised, 1),
    "unused": (lambda p, x: x + 1, 0),
}


def model(way):
    """Six blocks: all but the first and the last do the same with their parameters."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def first(p, _, batch):
        return batch @ p["w"]

    def middle(p, x, batch):
        return way(p, x).tanh()

    def last(p, x, batch):
        return (x @ p["w"]).square().mean()

    params = [{"w": draw(WIDTH, WIDTH) / 2, "b": draw(WIDTH), "v": draw(WIDTH, WIDTH) / 2} for _ in range(6)]
    return sl.sequential([first, *[middle] * 4, last]), params, [draw(8, 3, WIDTH) for _ in range(2)]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("stage", [0, 3])
def test_every_use_of_a_weight(name, stage, monkeypatch):
    way, later = WAYS[name]
    loss_fn, params, batches = model(way)
    found, real = [], zero_bubble.divide

    def divide(outputs, inputs):
        division = real(outputs, inputs)
        found.append(len(division.later))
        return division

    monkeypatch.setattr(zero_bubble, "divide", divide)
    transform = sl.chain(sl.zero(stage), sl.pipeline("zb-h1", 2, partition="count"))
    got = training.simulate({"pipe": 3, "data": 2}, loss_fn, params, batches, transform, training.optimizer())

    def by_parts(params, batch):  # neither hooks nor a penalty are linear in the batch
        copies = (tree_map(torch.clone, params) for _ in range(4))
        return sum(loss_fn(copy, share(batch, index, 4)) for index, copy in enumerate(copies)) / 4

    wanted = one_device.train(by_parts, params, batches)
    assert got[0] == pytest.approx(wanted[0], rel=1e-10, abs=0)
    assert_close(got[2], wanted[2], 1e-10)
    # Two such layers in the middle stage; one in the last, and its own product.
    assert set(found) == {2 * later, later + 1}


def test_gradients_that_reach_handles_themselves():
    """A function of the user's own may be handed a parameter that is not gathered; here by itself, and in a product."""
    _, params, batches = model(WAYS["linear"][0])
    x = batches[0].requires_grad_()

    def fn(tree):
        return (OwnProduct.apply(x, tree[3]["w"]).tanh() @ Doubled.apply(tree[4]["w"])).tanh() @ tree[4]["v"]

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), sl.pipeline("zb-v", 1, partition="count")))
        found = []
        for split in (False, True):
            executor = Executor(sharded.plan.of_stage(1), mesh, trained=True)
            gradients = executor.gradients(default_options(mesh))
            y = executor.open(sharded, gradients, fn)
            seed = torch.ones_like(y)
            if split:
                (grad,) = executor.inputs_gradient([y], [seed], [x])
                executor.weights_gradient(gradients, Turn(0, last=True))
            else:
                (grad,) = executor.differentiate([y], [seed], [x], gradients, Turn(0, last=True))
            executor.close()
            found.append({"x": grad, **gradients.result()})
        return found

    for whole, halved in sl.simulate(run, mesh={"pipe": 1, "data": 2}):
        assert all(whole[f"{block}/float64"].count_nonzero() for block in (3, 4))
        assert_close(halved, whole, 1e-12)


# --- what is computed, gathered and kept ---------------------------------------------------------------------------


class CountProducts(TorchDispatchMode):
    """Matrix products and attentions, forward and backward, by shapes."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in MATMULS or "attention" in func._opname:
            shapes = sorted(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
            self.found[func._opname, str(shapes)] += 1
        return func(*args, **(kwargs or {}))


def blocks():
    """Eight blocks: embedding, six layers, head."""
    return gpt.make_sequential(replace(TINY, layers=6)), gpt.to_blocks(tiny_gpt(layers=6)[1])


def count(schedule, *transforms):
    """All ranks' products in a step, and the bytes that each sent along "data"."""
    loss_fn, params = blocks()
    (batch,) = token_batches(1)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.pipeline(schedule, 4), *transforms))
        state, step = sl.make_train_step(loss_fn, sharded, training.optimizer())
        mine = share(batch, mesh.coords["data"], 2)
        state, _ = step(state, mine)
        sent = count_payload(mesh)
        with CountProducts() as products:
            step(state, mine)
        return products.found, sent()["data"]

    recorded = sl.simulate(run, mesh={"data": 2, "pipe": 2})
    return sum((found for found, _ in recorded), Counter()), [sent for _, sent in recorded]


@pytest.mark.pairwise
@pytest.mark.parametrize("extra", [[], [sl.remat()], [sl.remat("dots")]], ids=["keep", "full", "dots"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("schedule", "split"), [("1f1b", "zb-h1"), ("interleaved-1f1b", "interleaved-zb"), ("interleaved-1f1b", "zb-v")]
)
def test_both_halves_together_multiply_and_gather_as_often_as_one_backward(schedule, split, stage, extra):
    (wanted, sent), (found, split_sent) = (count(name, sl.zero(stage), *extra) for name in (schedule, split))
    assert found == wanted and found.total() > 500
    if split != "zb-v":  # which has its stages on other ranks
        assert split_sent == sent
    else:
        assert sum(split_sent) == sum(sent)


@pytest.mark.parametrize("extra", [[], [sl.remat()], [sl.remat("dots")]], ids=["keep", "full", "dots"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_second_half_is_one_product_for_each_weight(stage, extra, monkeypatch):
    loss_fn, params = blocks()
    second = Executor.weights_gradient
    recorded = Counter()

    def counted(self, *args):
        touched = self.touches
        with CountProducts() as products:
            second(self, *args)
        assert self.touches == touched, "gathered again"
        recorded.update(str((self.mesh.rank, op)) for (op, _), n in products.found.items() for _ in range(n))

    monkeypatch.setattr(Executor, "weights_gradient", counted)
    transform = sl.chain(sl.zero(stage), sl.pipeline("zb-h1", 2, partition="count"), *extra)
    training.simulate({"pipe": 4, "data": 1}, loss_fn, params, token_batches(1), transform, training.optimizer())
    # Two blocks a stage, of four weights each; the head has one. The first stage has no inputs, and so no halves.
    assert recorded == {"(1, 'mm')": 2 * 8, "(2, 'mm')": 2 * 8, "(3, 'mm')": 2 * 5}


def test_only_factors_are_kept_between_the_halves():
    """Factors and the small gradients of biases and norms: per layer and token, inputs of 7 widths and gradients of 9."""
    loss_fn, params = blocks()
    width, rows, layers = TINY.width, 16, (4, 7)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.pipeline("zb-v", 1, partition="count"))
        executor = Executor(sharded.plan.of_stage(1), mesh, trained=True)
        x = torch.randn(rows, TINY.sequence, width, requires_grad=True)
        with WatchPeak() as watch:
            gradients = executor.gradients(default_options(mesh))
            y = executor.open(sharded, gradients, lambda tree: loss_fn.run(tree, x, {}, *layers, None))
            before = watch.alive
            (found,) = executor.inputs_gradient([y], [torch.ones_like(y)], [x])
            del y
            return before, watch.alive - found.nbytes

    before, after = sl.simulate(run, mesh={"pipe": 1})[0]
    kept = (layers[1] - layers[0]) * (rows * TINY.sequence * 16 * width + 13 * width) * 4
    assert kept <= after < kept + 100 < before  # the roots of the buckets' gradients are scalars


# --- in plans -------------------------------------------------------------------------------------------------------


def traces_of(schedule, *transforms):
    """The traces of two stages."""
    config = replace(TINY, layers=4)
    batch = {name: torch.empty(4, 5, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    return sl.make_plan(
        gpt.to_blocks(gpt.init(config, device="meta")),
        sl.abstract_mesh(data=2, pipe=2),
        sl.chain(sl.pipeline(schedule, 4), *transforms),
        loss_fn=gpt.make_sequential(config),
        batch=batch,
    ).traces


@pytest.mark.parametrize("transforms", [(sl.zero(0),), (sl.zero(2), sl.remat())])
def test_the_halves_do_in_a_plan_what_a_whole_backward_does(transforms):
    """Each as much in forward and in backward, block by block: peaks are told in the block that they are in."""
    for whole, split in zip(traces_of("1f1b", *transforms), traces_of("zb-h1", *transforms)):
        assert split.flops == whole.flops and split.peak_in.startswith("backward of block")


def test_the_first_stage_hands_on_gradients_as_they_come():
    """Its backward is not split, as no stage waits for gradients of its inputs."""
    whole, split = (traces_of(schedule, sl.zero(1))[0] for schedule in ("1f1b", "zb-h1"))
    assert (split.live, split.peak) == (whole.live, whole.peak)
