"""Inputs that must be the same on several ranks and are not: each kind is named, in the first step and later."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.models import TINY, mlp, regression_batch, tiny_gpt, token_batches

import shardlib as sl
from shardlib.errors import RankMismatch
from shardlib.execute.agreement import EVERY
from shardlib.models import gpt
from shardlib.plan.loss_scale import LossScale

LOSS, PARAMS = mlp([6, 8, 4])
BATCH = regression_batch(8, 6, 4)
RULES = {"layers/0/*": "column", "layers/1/weight": "row"}
SLICED = sl.tensor_slicing(RULES)


def refusals(fn, mesh, pool=None):
    """The messages of all ranks; each must raise, as the others would wait for it."""

    def run(mesh):
        try:
            fn(mesh)
        except RankMismatch as error:
            return str(error)
        return "passed"

    found = sl.simulate(run, mesh=mesh)
    if pool is not None:
        assert pool.run(run, mesh=mesh) == found
    assert len(set(found)) == 1
    return found[0]


def reordered(batch):
    """The same rows in another order: every plain sum is as it was."""
    x, y = batch
    return x.flip(0), y.flip(0)


def trained(mesh, transform, batch_of, steps, optimizer=None, **options):
    params = sl.shard(PARAMS, mesh, transform)
    state, step = sl.make_train_step(LOSS, params, optimizer or sl.optim.sgd(0.01), **options)
    for number in range(steps):
        state, _ = step(state, batch_of(number))
    return state


# --- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [reordered, lambda batch: (-batch[0], -batch[1]), lambda batch: (batch[0].float(), batch[1])]
)
def test_a_batch_with_the_same_sum(change, pool):
    def run(mesh):
        trained(mesh, SLICED, lambda number: change(BATCH) if mesh.rank else BATCH, 1)

    message = refusals(run, {"model": 2}, pool)
    assert "the ranks' batches differ" in message and "rank 0: checksum" in message and "rank 1: checksum" in message


@pytest.mark.parametrize("first", [1, 3, 16, 20])
def test_other_batches_from_some_step_on(first, pool):
    """Contents are read in the first step and every 16th."""
    done = []

    def run(mesh):
        done.clear()

        def batch_of(number):
            if mesh.rank == 0:
                done.append(number)
            return reordered(BATCH) if mesh.rank == 1 and number >= first else BATCH

        trained(mesh, SLICED, batch_of, 40)

    message = refusals(run, {"model": 2}, pool if first == 3 else None)
    assert (
        "the ranks' batches differ" in message and "axis 'model' work on one batch: pass all ranks the same" in message
    )
    assert len(done) == -(-first // EVERY) * EVERY + 1


def test_other_shapes_are_seen_in_any_step():
    """A leaf whose shape changes no collective, as the loss only counts its rows."""

    def loss_fn(params, batch):
        return LOSS(params, batch[:2]) * batch[2].numel()

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, SLICED), sl.optim.sgd(0.01))
        for number in range(4):
            state, _ = step(state, (*BATCH, torch.ones(2 + (mesh.rank == 1 and number == 3))))

    assert "2: rank 0: float32 [2]; rank 1: float32 [3]" in refusals(run, {"model": 2})


def test_every_group_that_differs_is_named():
    """Ranks 1 and 3 have each other's batch: differences of the two groups are the same but for the sign."""
    other = reordered(BATCH)

    def run(mesh):
        data, model = mesh.coords["data"], mesh.coords["model"]

        def batch_of(number):
            return (BATCH, other)[data ^ (model if number else 0)]

        trained(mesh, sl.chain(SLICED, sl.zero(1)), batch_of, 20)

    message = refusals(run, {"data": 2, "model": 2})
    assert "rank 0: checksum" in message and "rank 3: checksum" in message  # of both groups, on all ranks
    assert "choose it by mesh.coords['data'] alone" in message


def test_stages_of_a_pipeline_with_different_batches():
    loss_fn, batches = gpt.make_sequential(TINY), token_batches(3)

    def run(mesh):
        params = sl.shard(gpt.to_blocks(tiny_gpt()[1]), mesh, sl.pipeline("1f1b", 2))
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.01))
        for number in range(20):
            state, _ = step(state, batches[2 if mesh.rank == 1 and number > 1 else 0])

    message = refusals(run, {"pipe": 2})
    assert "tokens: rank 0: checksum" in message and "axis 'pipe' work on one batch" in message


@pytest.mark.parametrize(
    ("shape", "transform", "message"),
    [
        ({"model": 2}, SLICED, "Ranks along axis 'model' work on one batch: pass all ranks the same."),
        (
            {"data": 2, "model": 2},
            sl.chain(SLICED, sl.zero(2)),
            "Ranks along axis 'model' work on one batch: choose it by mesh.coords['data'] alone.",
        ),
        (
            {"copies": 2, "data": 2, "model": 2},
            sl.chain(SLICED, sl.zero(2, replicate="copies")),
            "Ranks along axis 'model' work on one batch: choose it by mesh.coords['copies'] and mesh.coords['data'] alone.",
        ),
    ],
)
def test_the_message_says_by_what_a_batch_is_chosen(shape, transform, message):
    assert message in refusals(
        lambda mesh: trained(mesh, transform, lambda number: (BATCH[0] + mesh.rank, BATCH[1]), 1), shape
    )


def test_ranks_along_two_axes_share_one_batch():
    config = replace(TINY, vocab=30)  # which two ranks share
    loss_fn, batches = gpt.make_sequential(config), token_batches(2)

    def run(mesh):
        transform = sl.chain(sl.pipeline("1f1b", 2), sl.tensor_slicing(gpt.slicing_rules(config, blocks=True)))
        params = sl.shard(gpt.to_blocks(tiny_gpt(vocab=30)[1]), mesh, transform)
        state, step = sl.make_train_step(loss_fn, params, sl.optim.sgd(0.01))
        step(state, batches[mesh.rank == 3])

    message = refusals(run, {"pipe": 2, "model": 2})
    assert "rank 0, 1, 2: checksum" in message and "Ranks along axes 'pipe' and 'model' work on one batch" in message


def test_shares_of_a_batch_may_differ(pool):
    def run(mesh):
        state = trained(mesh, sl.zero(3), lambda number: (BATCH[0] + mesh.rank, BATCH[1]), 18)
        return state.step

    assert sl.simulate(run, mesh={"data": 2}) == pool.run(run, mesh={"data": 2}) == [18, 18]


# --- what else must be the same ---------------------------------------------------------------------------------

OPTIONS = {
    "rate": (lambda rank: {"optimizer": sl.optim.adamw(1e-3 * (1 + rank))}, "/value: rank 0: 0.001; rank 1: 0.002"),
    "schedule": (
        lambda rank: {"optimizer": sl.optim.sgd(sl.optim.cosine_decay_schedule(0.1, 100 + rank))},
        "decay_steps: rank 0: 100; rank 1: 101",
    ),
    "a user's schedule": (
        lambda rank: {"optimizer": sl.optim.sgd((lambda base: lambda count: base)(0.1 + rank))},
        "/base: rank 0: 0.1; rank 1: 1.1",
    ),
    "a user's schedule of steps": (  # of the rank's rows, say, which are a whole number that may rightly differ
        lambda rank: {"optimizer": sl.optim.sgd((lambda steps: lambda count: 0.1 * (1 - count / steps))(300 + rank))},
        "at step 50: rank 0: 0.08333333333333334; rank 1: 0.08338870431893688",
    ),
    "a chain": (
        lambda rank: {"optimizer": sl.optim.chain(sl.optim.clip_by_global_norm(1.0 + rank), sl.optim.sgd(0.1))},
        "max_norm: rank 0: 1.0; rank 1: 2.0",
    ),
    "rng": (lambda rank: {"rng": rank}, "rng: rank 0: Key(seed=0, slot=0); rank 1: Key(seed=1, slot=0)"),
    "nonfinite": (lambda rank: {"nonfinite": ("raise", "skip")[rank]}, "nonfinite: rank 0: raise; rank 1: skip"),
}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", OPTIONS)
def test_train_steps_made_with_other_options(kind, stage, pool):
    options, message = OPTIONS[kind]

    def run(mesh):
        trained(mesh, sl.zero(stage), lambda number: BATCH, 1, **options(mesh.rank))

    assert message in refusals(run, {"data": 2}, pool if stage else None)


def test_other_buffers():
    def run(mesh):
        buffers = {"mean": torch.tensor([1.0, -1.0] if mesh.rank else [-1.0, 1.0])}
        sl.make_train_step(lambda p, b, x: (LOSS(p, x), b), sl.shard(PARAMS, mesh), sl.optim.sgd(0.1), buffers=buffers)

    assert "buffers/mean: rank 0: checksum" in refusals(run, {"data": 2})


@pytest.mark.parametrize("stage", [0, 3])
def test_states_of_other_steps(stage):
    """Ranks have restored different checkpoints."""

    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=stage)
        state, step = sl.make_train_step(LOSS, params, sl.optim.sgd(0.1))
        for _ in range(2):
            state, _ = step(state, BATCH)
        if mesh.rank == 1:
            state.step = 7
        step(state, BATCH)

    assert "step: rank 0: 2; rank 1: 7" in refusals(run, {"data": 2})


def test_other_loss_scales():
    def run(mesh):
        transform = sl.chain(sl.zero(1), sl.precision("fp16"))
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, transform), sl.optim.sgd(0.1))
        state, _ = step(state, BATCH)
        state.scale = LossScale(2.0 ** (8 + mesh.rank))
        step(state, BATCH)

    assert "loss scale: rank 0: LossScale(value=256.0" in refusals(run, {"data": 2})


def test_hyper_parameters_written_on_one_rank():
    def run(mesh):
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.inject_hyperparams(sl.optim.sgd)(0.1))
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=1), tx)
        state, _ = step(state, BATCH)
        if mesh.rank == 1:
            state.opt.inner[1].hyperparams["lr"].fill_(0.5)
        step(state, BATCH)

    assert "lr (0): rank 0: 0.1; rank 1: 0.5" in refusals(run, {"data": 2})


def test_other_keys_for_gradients():
    def run(mesh):
        grad_fn = sl.value_and_grad(lambda p, x, rng: LOSS(p, x))
        for number in range(3):
            grad_fn(sl.shard(PARAMS, mesh), BATCH, rng=sl.Key(mesh.rank if number == 2 else 0))

    assert "rng: rank 0: Key(seed=0, slot=0); rank 1: Key(seed=1, slot=0)" in refusals(run, {"data": 2})


# --- parameters and plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_permuted_on_one_rank(stage):
    """Rows in another order, or signs in pairs: the sum is the same."""
    weight = torch.arange(24.0).view(4, 6)
    flipped = weight.clone()
    flipped[1, :2] *= -1
    for other in (weight.flip(0), weight[:, [1, 0, 2, 3, 4, 5]], flipped):
        message = refusals(
            lambda mesh, w=other: sl.shard({"w": w if mesh.rank else weight}, mesh, stage=stage), {"data": 2}
        )
        assert "the ranks' initial values differ" in message and "w: rank 0: checksum" in message


def test_rules_that_slice_other_leaves():
    """The rules slice different leaves, in the same number and style, so that the plans print the same."""
    params = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}

    def run(mesh):
        sl.shard(params, mesh, sl.tensor_slicing({"ab"[mesh.rank]: sl.column(gather=True)}))

    assert "a specs: rank 0: " in refusals(run, {"model": 2})


def test_a_policy_function_is_no_difference(pool):
    """A policy function has another address in each process."""

    def run(mesh):
        def policy(context, op, *args, **kwargs):
            return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

        block = sl.block(lambda p, x: F.linear(x, p["w"]))
        params = sl.shard({"w": torch.ones(2, 2)}, mesh, sl.chain(sl.zero(0), sl.remat(policy)))
        value, _ = sl.value_and_grad(lambda p, x: block(p, x).sum())(params, torch.ones(1, 2))
        return value.item()

    assert pool.run(run, mesh={"data": 2}) == [4.0, 4.0]
