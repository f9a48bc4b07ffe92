"""Sharded trees that a function reads beside its parameters: whole and frozen, however the function comes by them."""

import itertools

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers.measure import CountingGroup, WatchGathered
from helpers.trees import assert_close
from torch import nn

import shardlib as sl
from shardlib.errors import DonatedStateError, HandleError, IllegalComposition, RankMismatch, TreeError

RATE = 0.1
TOLERANCE = 1e-10


def net(seed, *sizes):
    torch.manual_seed(seed)
    pairs = itertools.pairwise(sizes)
    layers = [{"w": torch.randn(b, a).double() / 2, "b": torch.randn(b).double()} for a, b in pairs]
    return {"layers": layers}


def run(params, x):
    for layer in params["layers"]:
        x = torch.tanh(F.linear(x, layer["w"], layer["b"]))
    return x


STUDENT, TEACHER = net(0, 5, 7, 3), net(1, 5, 7, 3)
BATCHES = [torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]


def distilled(params, teacher, x):
    """A loss with a gradient through a part of the teacher."""
    y = run(params, x)
    return (y - run(teacher, x)).square().mean() + run({"layers": teacher["layers"][1:]}, F.pad(y, (0, 4))).mean()


def descended(loss, params, *rest):
    """Loss and parameters after a step of torch's."""
    leaves, tree = optree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(optree.tree_unflatten(tree, leaves), *rest)
    grads = torch.autograd.grad(value, leaves)
    return value.item(), optree.tree_unflatten(tree, [(p - RATE * g).detach() for p, g in zip(leaves, grads)])


def state_of(tree, mesh, stage):
    return sl.make_train_step(lambda p, x: run(p, x).mean(), sl.shard(tree, mesh, stage=stage), sl.optim.sgd(RATE))[0]


WAYS = {
    "closure": (lambda t: None, lambda t, b: t),
    "state": (lambda t: None, lambda t, b: t.params),
    "batch": (lambda t: {"teacher": t}, lambda t, b: b["teacher"]),
    "state in batch": (lambda t: {"teacher": t}, lambda t, b: b["teacher"].params),
    "tree_map": (lambda t: None, lambda t, b: optree.tree_map(lambda leaf: leaf * 1, t)),
    "part": (lambda t: None, lambda t, b: {key: t[key] for key in t}),
}


def train(mesh, transform, stage, way):
    teacher = state_of(TEACHER, mesh, stage) if way.startswith("state") else sl.shard(TEACHER, mesh, stage=stage)
    give, read = WAYS[way]

    def loss_fn(params, batch):
        return distilled(params, read(teacher, batch["more"]), batch["x"])

    state, step = sl.make_train_step(loss_fn, sl.shard(STUDENT, mesh, transform), sl.optim.sgd(RATE))
    losses = []
    for x in BATCHES:
        state, metrics = step(state, {"x": x.chunk(mesh.size)[mesh.rank], "more": give(teacher)})
        losses.append(metrics["loss"].item())
    evaluate = sl.make_eval_step(lambda p, x, t: distilled(p, read(teacher, {"teacher": t}), x), state)
    return losses, sl.unshard(state.params), evaluate(state, BATCHES[0], teacher)


def expected():
    losses, params = [], STUDENT
    for x in BATCHES:
        loss, params = descended(distilled, params, TEACHER, x)
        losses.append(loss)
    return losses, params, distilled(params, TEACHER, BATCHES[0])


TRANSFORMS = {
    **{f"stage {stage}": sl.zero(stage) for stage in range(4)},
    "micro-batches": sl.chain(sl.zero(2), sl.accumulate(2)),
    "whole gradients": sl.chain(sl.zero(3), sl.accumulate(4, sync="last")),
}


def check(results):
    losses, params, value = expected()
    for found in results:
        assert found[0] == pytest.approx(losses, rel=TOLERANCE, abs=0)
        assert_close(found[1], params, TOLERANCE)
        assert_close(found[2], value.detach(), TOLERANCE)


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_teacher_is_whole_however_a_loss_comes_by_it(transform, stage, way):
    check(sl.simulate(train, TRANSFORMS[transform], stage, way, mesh={"data": 2}))


@pytest.mark.parametrize(("transform", "stage"), [("stage 0", 3), ("stage 3", 3), ("micro-batches", 0)])
def test_in_processes(pool, transform, stage):
    check(pool.run(train, TRANSFORMS[transform], stage, "state in batch", mesh={"data": 2}))


def test_sliced_alike():
    slicing = sl.tensor_slicing({"layers/0": sl.column(), "layers/1": sl.row()}, axis="model")
    params, teacher = net(2, 5, 8, 3), net(3, 5, 8, 3)

    def loss(p, t, x):
        y = run(p, x)
        return (y - run(t, x)).square().mean() + run(t, F.pad(y, (0, 2))).mean()

    def run_on(mesh):
        sliced = sl.shard(teacher, mesh, sl.chain(sl.zero(3), slicing))
        ours = sl.shard(params, mesh, sl.chain(sl.zero(3), slicing))
        mine = BATCHES[0].chunk(2)[mesh.coords["data"]]
        value, grads = sl.value_and_grad(lambda p, x: loss(p, sliced, x))(ours, mine)
        with pytest.raises(IllegalComposition, match=r"sliced over model, along which .* batches differ"):
            whole = sl.shard(params, mesh, sl.zero(0, replicate="model"))
            sl.value_and_grad(lambda p, x: loss(p, sliced, x))(whole, mine)
        return value.item(), optree.tree_map(lambda p, g: p - RATE * g, sl.unshard(ours), sl.unshard(grads))

    wanted = descended(loss, params, teacher, BATCHES[0])
    for found in sl.simulate(run_on, mesh={"data": 2, "model": 2}):
        assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE)
        assert_close(found[1], wanted[1], TOLERANCE)


def critic(params, x):
    return run(params, x).mean(dim=1)


def generator_loss(g, d, z):
    return F.softplus(-critic(d, run(g, z))).mean()


def discriminator_loss(d, g, z, x):
    return F.softplus(critic(d, run(g, z))).mean() + F.softplus(-critic(d, x)).mean()


@pytest.mark.parametrize("stage", range(4))
def test_both_halves_of_a_gan(stage):
    first, second = net(4, 5, 6, 4), net(5, 4, 6, 2)
    reals = [x[:, :4] for x in BATCHES]

    def run_on(mesh):
        def step(loss_fn, state):
            return sl.make_train_step(loss_fn, sl.shard(state, mesh, stage=stage), sl.optim.sgd(RATE))

        g, g_step = step(lambda p, b: generator_loss(p, b["other"], b["z"]), first)
        d, d_step = step(lambda p, b: discriminator_loss(p, b["other"].params, b["z"], b["x"]), second)
        for z, x in zip(BATCHES, reals):
            mine = {"z": z.chunk(mesh.size)[mesh.rank], "x": x.chunk(mesh.size)[mesh.rank]}
            d, _ = d_step(d, mine | {"other": g})
            g, _ = g_step(g, mine | {"other": d.params})
        return sl.unshard(g), sl.unshard(d)

    g, d = first, second
    for z, x in zip(BATCHES, reals):
        _, d = descended(discriminator_loss, d, g, z, x)
        _, g = descended(generator_loss, g, d, z)
    for found in sl.simulate(run_on, mesh={"data": 2}):
        assert_close(found, (g, d), TOLERANCE)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_as_the_target(stage):
    """Its values are others in every step, and its plan the same."""

    def run_on(mesh):
        state, step = sl.make_train_step(
            lambda p, b: distilled(p, b["target"], b["x"]), sl.shard(STUDENT, mesh, stage=stage), sl.optim.sgd(RATE)
        )
        average = sl.optim.ema(0.5, debias=False)
        kept = average.init(state.params)
        for x in BATCHES:
            target, kept = average.update(state.params, kept)
            state, _ = step(state, {"x": x.chunk(mesh.size)[mesh.rank], "target": target})
        return sl.unshard(state)

    params, target = STUDENT, optree.tree_map(torch.zeros_like, STUDENT)
    for x in BATCHES:
        target = optree.tree_map(lambda t, p: (t + p) / 2, target, params)
        _, params = descended(distilled, params, target, x)
    for found in sl.simulate(run_on, mesh={"data": 2}):
        assert_close(found, params, TOLERANCE)


def test_modules():
    torch.manual_seed(0)
    module, teacher = (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(2))

    def run_on(mesh):
        apply, params = sl.from_module(module)
        further, whole = sl.from_module(teacher)
        ours, theirs = sl.shard(params, mesh, stage=3), sl.shard(whole, mesh, stage=3)
        with pytest.raises(TreeError, match=r"apply .* outside of a loss.*sl\.make_eval_step"):
            further(theirs, BATCHES[0])
        state, step = sl.make_train_step(
            lambda p, x: (apply(p, x) - further(theirs, x)).square().mean(), ours, sl.optim.sgd(RATE)
        )
        return step(state, BATCHES[0])[1]["loss"]

    wanted = (module(BATCHES[0]) - teacher(BATCHES[0])).square().mean().detach()
    for found in sl.simulate(run_on, mesh={"data": 2}):
        assert_close(found, wanted, TOLERANCE)


def test_the_parameters_themselves_train():
    def run_on(mesh):
        ours = sl.shard(STUDENT, mesh, stage=3)
        _, grads = sl.value_and_grad(lambda p, x: (run(p, x) * run(ours, x)).mean())(ours, BATCHES[0])
        return optree.tree_map(lambda p, g: p - RATE * g, STUDENT, sl.unshard(grads))

    _, wanted = descended(lambda p, x: run(p, x).square().mean(), STUDENT, BATCHES[0])
    for found in sl.simulate(run_on, mesh={"data": 2}):
        assert_close(found, wanted, TOLERANCE)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tree_that_is_read_later_and_not_in_every_step(stage):
    reads = [False, True, True, False, True]

    def run_on(mesh):
        teacher, now = sl.shard(TEACHER, mesh, stage=3), [False]

        def loss_fn(params, x):
            return distilled(params, teacher, x) if now[0] else run(params, x).mean()

        state, step = sl.make_train_step(loss_fn, sl.shard(STUDENT, mesh, stage=stage), sl.optim.sgd(RATE))
        for now[0], x in zip(reads, itertools.cycle(BATCHES)):
            state, _ = step(state, x.chunk(mesh.size)[mesh.rank])
        return sl.unshard(state)

    params = STUDENT
    for read, x in zip(reads, itertools.cycle(BATCHES)):
        loss = (lambda p, x: distilled(p, TEACHER, x)) if read else (lambda p, x: run(p, x).mean())
        _, params = descended(loss, params, x)
    for found in sl.simulate(run_on, mesh={"data": 2}):
        assert_close(found, params, TOLERANCE)


def test_units_are_released_after_their_use():
    """Of a teacher as of the parameters."""
    sizes = [8, 32, 8, 32, 8, 32, 8]
    layers, teacher = net(6, *sizes)["layers"], net(7, *sizes)["layers"]
    bytes_of = [8 * sum(leaf.numel() for leaf in layer.values()) for layer in layers]

    def run_on(mesh):
        counter = mesh._groups["data"] = CountingGroup(mesh.group("data"))
        theirs = sl.shard(teacher, mesh, stage=3)

        def loss_fn(params, x):
            # The teacher's inputs have gradients, so that backward gathers its weights again.
            return run({"layers": theirs}, run({"layers": params}, x)).square().mean()

        state, step = sl.make_train_step(loss_fn, sl.shard(layers, mesh, stage=3), sl.optim.sgd(RATE))
        peaks = []
        for _ in range(3):
            with WatchGathered([counter]) as watch:
                state, _ = step(state, torch.ones(2, 8).double())
            peaks.append(watch.peak)
        return peaks[1:]  # the first step does not know what it will read

    for peaks in sl.simulate(run_on, mesh={"data": 2}):
        assert max(peaks) <= 3 * max(bytes_of)


def test_what_cannot_be_read_is_refused():
    def write(params, teacher, x):
        teacher["layers"][0]["w"].mul_(2)
        return run(params, x).mean()

    def run_on(mesh):
        ours = sl.shard(STUDENT, mesh, stage=2)
        for stage in (0, 3):
            teacher = sl.shard(TEACHER, mesh, stage=stage)
            with pytest.raises(HandleError, match=r"layers/0/w.*p\.clone\(\)"):
                sl.value_and_grad(lambda p, x, t=teacher: write(p, t, x))(ours, BATCHES[0])
        _, grads = sl.value_and_grad(lambda p, x: run(p, x).mean())(ours, BATCHES[0])
        with pytest.raises(TreeError, match=r"sl\.unshard\(gradients\)"):
            sl.value_and_grad(lambda p, x: run(p, x).mean() + grads["layers"][0]["w"].sum())(ours, BATCHES[0])
        with pytest.raises(IllegalComposition, match="shard both on one mesh"):
            sl.value_and_grad(lambda p, x: distilled(p, teacher, x))(STUDENT, BATCHES[0])
        state = state_of(TEACHER, mesh, 3)
        sl.replace_params(state, state.params)
        with pytest.raises(DonatedStateError):
            sl.value_and_grad(lambda p, x: distilled(p, state.params, x))(ours, BATCHES[0])

    sl.simulate(run_on, mesh={"data": 2})


def test_a_rank_that_does_not_read_it_is_refused():
    def run_on(mesh):
        teacher = sl.shard(TEACHER, mesh, stage=3)
        loss = (lambda p, x: distilled(p, teacher, x)) if mesh.rank else (lambda p, x: run(p, x).mean())
        sl.value_and_grad(loss)(sl.shard(STUDENT, mesh, stage=3), BATCHES[0])

    with pytest.raises(RankMismatch, match="read a further sharded tree, and the others end the"):
        sl.simulate(run_on, mesh={"data": 2})


def test_stages_and_plans():
    """A pipeline reads what is not gathered; a plan is traced without the ranks."""

    def run_on(mesh, stage):
        teacher = sl.shard(TEACHER, mesh, sl.zero(stage, replicate="pipe"))
        loss_fn = sl.sequential(
            [
                lambda p, carry, x: run({"layers": [p]}, x),
                lambda p, carry, x: (run({"layers": [p]}, carry) - run(teacher, x)).square().mean(),
            ]
        )
        transform = sl.chain(sl.zero(0), sl.pipeline(schedule="1f1b", microbatches=2))
        state, step = sl.make_train_step(loss_fn, sl.shard(STUDENT["layers"], mesh, transform), sl.optim.sgd(RATE))
        plan = sl.make_plan(
            STUDENT, sl.abstract_mesh(data=2), stage=3, loss_fn=lambda p, x: distilled(p, teacher, x), batch=BATCHES[0]
        )
        assert len(plan.gathers) == 3  # of the parameters alone
        return step(state, BATCHES[0].chunk(2)[mesh.coords["data"]])[1]["loss"]

    wanted = (run(STUDENT, BATCHES[0]) - run(TEACHER, BATCHES[0])).square().mean()
    for found in sl.simulate(run_on, 2, mesh={"data": 2, "pipe": 2}):
        assert_close(found, wanted, TOLERANCE)
    with pytest.raises(IllegalComposition, match=r"in stages: shard it with sl\.zero\(2\)"):
        sl.simulate(run_on, 3, mesh={"data": 2, "pipe": 2})
