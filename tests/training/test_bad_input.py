"""Bad input is refused on every rank, with the leaf or argument, the sizes and a remedy, and changes no state."""

import os
import re
import time

import pytest
import torch
from helpers.models import mlp, regression_batch
from helpers.pool import Pool
from helpers.trees import assert_close, assert_same, copy_of
from torch.distributed.device_mesh import DeviceMesh

import shardlib as sl
from shardlib.errors import (
    BatchError,
    LossError,
    MeshError,
    NonFiniteError,
    RankFailure,
    RankMismatch,
    SpecError,
    TreeError,
)

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
LOSS, PARAMS = mlp([6, 9, 4])
BATCH = regression_batch(8, 6, 4)


def raised_by(fn, mesh, error):
    """The message of the error that every simulated rank raises; ranks that do not raise fail the test."""

    def run(mesh):
        with pytest.raises(error) as caught:
            fn(mesh)
        return str(caught.value)

    return sl.simulate(run, mesh=mesh)


def assert_message(messages, *parts):
    for message in messages:
        for part in parts:
            assert part in message, f"{part!r} is not in: {message}"


# --- meshes ----------------------------------------------------------------------------------------------------


def test_a_world_that_does_not_fit_the_mesh():
    with pytest.raises(
        MeshError, match=r"the mesh data=2 × model=3 has 6 ranks and 1 process runs; .*--nproc-per-node=6"
    ):
        sl.make_mesh(data=2, model=3)


def test_a_world_that_does_not_fit_the_mesh_in_real_processes(pool):
    def run(mesh):
        with pytest.raises(MeshError) as caught:
            sl.make_mesh(data=3)
        return str(caught.value)

    assert_message(pool.run(run, mesh={"data": 4}), "data=3 has 3 ranks and 4 processes run;", "--nproc-per-node=3")


@pytest.mark.parametrize("size", [0, -2, 1.5, "2"])
def test_an_invalid_size(size):
    with pytest.raises(MeshError, match="axis sizes must be positive integers: data="):
        sl.abstract_mesh(data=size)


def test_what_is_not_a_mesh():
    with pytest.raises(MeshError, match=r"dict is not a mesh; pass sl.make_mesh"):
        sl.shard(PARAMS, {"data": 2})


def test_a_device_mesh_without_names(pool):
    def run(mesh):
        with pytest.raises(MeshError, match=r"no dimension names; pass mesh_dim_names="):
            sl.shard(PARAMS, DeviceMesh("cpu", torch.arange(4)))
        return True

    assert pool.run(run, mesh={"data": 4}) == [True] * 4


def test_an_unknown_axis():
    with pytest.raises(
        sl.errors.IllegalComposition,
        match=r"axis 'model', which .*data=2.* does not have; use 'data' instead: zero\(1\)",
    ):
        sl.make_plan(PARAMS, sl.abstract_mesh(data=2), sl.zero(1, axis="model"))


BLOCKS = [{"w": torch.zeros(8, 8)}, {"w": torch.zeros(8, 8)}]
PIPE, SLICES = sl.pipeline("1f1b", microbatches=2), sl.tensor_slicing({"*w": "column"})


@pytest.mark.parametrize(
    ("mesh", "transforms", "result", "mended"),
    [
        # A mesh without an axis for the batch: one of size 1, or none.
        (
            {"pipe": 2, "model": 2},
            [PIPE, SLICES, sl.zero(2)],
            "add data=1 to the mesh, or leave zero out",
            [PIPE, SLICES],
        ),
        ({"pipe": 2, "model": 2}, [PIPE, SLICES, sl.onebit()], "add data=1 .* or leave onebit out", [PIPE, SLICES]),
        ({"pipe": 2, "model": 2}, [PIPE, SLICES, sl.powersgd()], "leave powersgd out", [PIPE, SLICES]),
        ({"pipe": 2, "model": 2}, [PIPE, SLICES, sl.quantize(gradients="int8")], "leave quantize out", [PIPE, SLICES]),
        (
            {"pipe": 2, "model": 2},
            [PIPE, SLICES, sl.sequence("seq")],
            "add seq=1 .* leave sequence out",
            [PIPE, SLICES],
        ),
        ({"data": 2}, [sl.zero(1), SLICES], "add model=1 to the mesh, or leave tensor_slicing out", [sl.zero(1)]),
        ({"data": 2}, [sl.zero(1), PIPE], "add pipe=1 to the mesh, or leave pipeline out", [sl.zero(1)]),
        # An axis by another name.
        ({"dp": 2}, [sl.zero(3)], r"use 'dp' instead: zero\(3, axis='dp'\)", [sl.zero(3, axis="dp")]),
        (
            {"dp": 2},
            [sl.zero(1, axis="dp"), sl.onebit()],
            r"use 'dp' instead: onebit\('dp'",
            [sl.zero(1, axis="dp"), sl.onebit(axis="dp")],
        ),
        (
            {"tp": 2, "rack": 2},
            [SLICES, sl.zero(1, axis="rack")],
            r"use 'tp' instead: tensor_slicing\({'\*w': 'column'}, axis='tp'\)",
            [sl.tensor_slicing({"*w": "column"}, axis="tp"), sl.zero(1, axis="rack")],
        ),
        (
            {"rack": 2, "node": 2},
            [sl.zero(1, axis="node", replicate="data")],
            r"use 'rack' instead: zero\(1, axis='node', replicate='rack'\)",
            [sl.zero(1, axis="node", replicate="rack")],
        ),
        (
            {"pipe": 2, "model": 2},
            [PIPE, SLICES, sl.sequence("seq", kind="megatron")],
            r"use 'model' instead: sequence\('model', kind='megatron'\)",
            [PIPE, SLICES, sl.sequence("model", kind="megatron")],
        ),
    ],
)
def test_the_remedies_for_an_unknown_axis_work(mesh, transforms, result, mended):
    with pytest.raises(sl.errors.IllegalComposition, match=result) as raised:
        sl.make_plan(BLOCKS, sl.abstract_mesh(**mesh), sl.chain(*transforms))
    sl.make_plan(BLOCKS, sl.abstract_mesh(**mesh), sl.chain(*mended))
    if added := re.search(r"add (\w+)=1", str(raised.value)):
        more = [] if "zero" in sl.chain(*transforms).name else [sl.zero(0)]  # without which nothing sums gradients
        sl.make_plan(BLOCKS, sl.abstract_mesh(**{added[1]: 1, "data": 1} | mesh), sl.chain(*transforms, *more))


def test_all_unknown_axes_are_named_and_each_gets_one_of_its_own():
    with pytest.raises(sl.errors.IllegalComposition) as raised:
        sl.make_plan(BLOCKS, sl.abstract_mesh(dp=2), sl.chain(sl.zero(3), SLICES))
    first, second = str(raised.value).splitlines()
    assert first.endswith("use 'dp' instead: zero(3, axis='dp')")
    assert second.endswith("add model=1 to the mesh, or leave tensor_slicing out")
    sl.make_plan(BLOCKS, sl.abstract_mesh(dp=2, model=1), sl.chain(sl.zero(3, axis="dp"), SLICES))


@pytest.mark.parametrize(
    "make",
    [
        lambda **axis: sl.optim.onebit_adam(1e-3, freeze_step=2, **axis),
        lambda **axis: sl.optim.onebit_lamb(1e-3, freeze_step=2, **axis),
        lambda **axis: sl.optim.zero_one_adam(1e-3, var_freeze_step=2, **axis),
    ],
)
def test_the_remedy_for_an_optimizers_axis_works(make):
    with pytest.raises(sl.errors.IllegalComposition, match=r"which the mesh .dp. does not have; name 'dp' with axis="):
        sl.make_plan(BLOCKS, sl.abstract_mesh(dp=2), sl.zero(0, axis="dp"), optimizer=make())
    sl.make_plan(BLOCKS, sl.abstract_mesh(dp=2), sl.zero(0, axis="dp"), optimizer=make(axis="dp"))
    both = sl.chain(PIPE, SLICES)
    with pytest.raises(sl.errors.IllegalComposition, match="does not have; add data=1 to the mesh"):
        sl.make_plan(BLOCKS, sl.abstract_mesh(pipe=2, model=2), both, optimizer=make())
    sl.make_plan(BLOCKS, sl.abstract_mesh(data=1, pipe=2, model=2), both, optimizer=make())


def test_an_axis_that_nothing_uses():
    with pytest.raises(
        sl.errors.IllegalComposition, match=r"no transform uses axis 'model' \(size 4\).*replicate=axis"
    ):
        sl.make_plan(PARAMS, sl.abstract_mesh(data=2, model=4), sl.zero(1))


def test_a_repeated_axis():
    with pytest.raises(SpecError, match=r"P\('data', 'data'\) uses axis 'data' twice"):
        sl.P("data", "data")
    with pytest.raises(
        sl.errors.IllegalComposition, match="cannot both split and replicate over axis 'data'; name two axes"
    ):
        sl.zero(3, replicate="data")


# --- transforms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "3", None, True])
def test_an_invalid_stage(stage):
    with pytest.raises(sl.errors.IllegalComposition, match=r"zero\(stage=.*\): use 0, 1, 2, 3"):
        sl.zero(stage)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (lambda: (sl.zero(1), sl.zero(2)), r"zero\(1\).*zero\(2\).* both claim\n.*reduction over axis 'data'"),
        (lambda: (sl.offload(), sl.offload(params="host")), r"both claim\n.*\nKeep one, with the arguments of both"),
        (lambda: (sl.accumulate(2), sl.accumulate(4)), r"the schedule's microbatches: 2 against 4"),
        (
            lambda: (sl.zero(), sl.precision("bf16"), sl.precision("fp16")),
            r"the dtype of layers/0/bias: float16 against bfloat16",
        ),
        (lambda: (sl.zero(1), sl.accumulate(2, sync="each")), r"use sync='last'.* or stage 2 or 3"),
        (
            lambda: (sl.zero(), sl.freeze("decoder/*")),
            r"freeze\('decoder/\*'\) matches no parameter; paths .* layers/0/bias",
        ),
    ],
)
def test_transforms_that_do_not_compose(transforms, message):
    with pytest.raises(sl.errors.IllegalComposition, match=message):
        sl.make_plan(PARAMS, sl.abstract_mesh(data=2), sl.chain(*transforms()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sl.accumulate(0), r"accumulate\(n=0\): use an integer of at least 1"),
        (lambda: sl.accumulate(2, sync="never"), r"sync='never'\): use 'each' or 'last'"),
        (lambda: sl.tile("*", 2.0), r"tile\(n=2\.0\): give at least 2 tiles"),
        (lambda: sl.remat(blocks=1.0), r"blocks=1\.0\): give a number of blocks"),
        (lambda: sl.offload("disk", folder=["a", "./a"]), r"names a folder twice"),
        (lambda: sl.precision("fp4"), r"precision\(compute='fp4'\): use 'bf16', 'fp16', 'fp32' or 'fp8'"),
        (lambda: sl.remat("some"), r"remat\(policy='some'\): use 'full', 'dots', 'auto' or a policy function"),
    ],
)
def test_an_argument_out_of_range(make, message):
    with pytest.raises(sl.errors.IllegalComposition, match=message):
        make()


def test_an_optimizer_without_locality_on_shards():
    tx = sl.optim.GradientTransformation(lambda p: (), lambda u, s, p: (u, s))

    def run(mesh):
        sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=1), tx)

    assert_message(raised_by(run, {"data": 2}, sl.errors.IllegalComposition), "no locality", "Locality.ELEMENTWISE")


# --- parameters ------------------------------------------------------------------------------------------------


def test_leaves_that_are_not_tensors_come_together():
    params = {"w": torch.ones(2), "lr": 0.1, "name": "gpt", "mask": torch.eye(3).to_sparse()}
    messages = raised_by(lambda mesh: sl.shard(params, mesh, stage=3), {"data": 2}, TreeError)
    assert_message(
        messages, "3 parameter leaves", "lr: float", "name: str", "mask: layout torch.sparse_coo; call .to_dense()"
    )


def test_leaves_on_another_device():
    params = {"w": torch.ones(2), "far": torch.ones(3, 2, device="meta"), "too": torch.ones(1, device="meta")}
    messages = raised_by(lambda mesh: sl.shard(params, mesh, stage=3), {"data": 2}, TreeError)
    assert_message(
        messages,
        "2 parameters on the meta device have no values for cpu",
        "far: shape (3, 2)",
        "the function that",
    )


def stepping(stage, loss_fn=LOSS, transform=None, **options):
    """A function of a mesh that makes a train step, and its state."""

    def make(mesh):
        chain = sl.zero(stage) if transform is None else sl.chain(sl.zero(stage), transform)
        return sl.make_train_step(loss_fn, sl.shard(PARAMS, mesh, chain), sl.optim.adamw(1e-3), **options)

    return make


def refused_by_step(make, bad, error, ranks=2, good=BATCH):
    """Messages of a step with a bad batch (a function of the rank); the state must be as before, and usable."""

    def run(mesh):
        state, step = make(mesh)
        state, _ = step(state, good)
        before = copy_of((sl.unshard(state.params), state.opt))
        with pytest.raises(error) as caught:
            step(state, bad(mesh.rank))
        assert_same((sl.unshard(state.params), state.opt), before)
        after, _ = step(state, good)
        twin, twin_step = make(mesh)
        for _ in range(2):
            twin, _ = twin_step(twin, good)
        assert_close(sl.unshard(after.params), sl.unshard(twin.params), 0)
        return str(caught.value)

    return sl.simulate(run, mesh={"data": ranks})


@STAGES
def test_a_leaf_that_changed_its_shape(stage):
    def run(mesh):
        state, step = stepping(stage)(mesh)
        wrong = sl.shard({"layers": [*PARAMS["layers"][:1], mlp([9, 5])[1]["layers"][0]]}, mesh, stage=stage)
        state.params = wrong
        step(state, BATCH)

    assert_message(raised_by(run, {"data": 2}, TreeError), "another plan", "make a step")


# --- batches and losses ----------------------------------------------------------------------------------------


@STAGES
def test_a_batch_that_accumulate_cannot_split(stage):
    messages = refused_by_step(
        stepping(stage, transform=sl.accumulate(4)), lambda rank: regression_batch(6, 6, 4), BatchError
    )
    for rank, message in enumerate(messages):
        assert_message([message], f"rank {rank}'s batch", "0: dimension 0 of shape (6, 6)", "1: dimension 0 of shape (6, 4)",
                    "4 micro-batches", "multiple")  # fmt: skip


def test_a_batch_on_another_device():
    messages = refused_by_step(stepping(3), lambda rank: tuple(t.to("meta") for t in BATCH), BatchError)
    assert_message(messages, "0: on meta, the mesh is on cpu; move it with .to('cpu')")


def by_last_column(kind):
    """A loss that goes wrong in the given way when the batch's last column is 9."""

    def loss_fn(params, batch):
        loss = LOSS(params, batch)
        if batch[0][0, -1] != 9:
            return loss
        return {"vector": loss * torch.ones(3), "number": 1.0, "detached": loss.detach(), "nothing": None}[kind]

    return loss_fn


@STAGES
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("vector", ("loss must be a scalar tensor and is a tensor of shape (3,)", ".mean()", "sl.Mean(total, weight)")),
        ("number", ("must be a scalar tensor and is float",)),
        ("nothing", ("must be a scalar tensor and is NoneType",)),
        ("detached", ("does not depend on any trained parameter", ".detach()", "freeze()")),
    ],
)
def test_a_loss_that_cannot_be_differentiated(stage, kind, parts):
    x, y = BATCH
    bad = (torch.full_like(x, 9), y)
    assert_message(refused_by_step(stepping(stage, by_last_column(kind)), lambda rank: bad, LossError), *parts)


@STAGES
def test_the_remedies_for_losses_work(stage):
    def squares(params, batch):
        first, last = params["layers"]
        x = torch.tanh(torch.nn.functional.linear(batch[0], first["weight"], first["bias"]))
        return (torch.nn.functional.linear(x, last["weight"], last["bias"]) - batch[1]).square()

    def handed_out(params, batch):
        return squares(params, batch).mean(), squares(params, batch)

    forms = {
        "mean": lambda p, b: squares(p, b).mean(),
        "Mean": lambda p, b: sl.Mean(squares(p, b).sum(), squares(p, b).numel()),
        "one element": lambda p, b: squares(p, b).mean().view(1, 1),
    }

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        value, aux = sl.value_and_grad(handed_out)(sharded, BATCH)[0]
        assert aux.shape == BATCH[1].shape and not aux.requires_grad
        return [value.item(), *(sl.value_and_grad(loss_fn)(sharded, BATCH)[0].item() for loss_fn in forms.values())]

    losses = sl.simulate(run, mesh={"data": 1})[0]
    assert losses == [pytest.approx(LOSS(PARAMS, BATCH).item(), rel=1e-12)] * 4


def poisoned(rank):
    """Rank 1's share holds an infinity; rank 0's is fine."""
    x, y = BATCH
    return (x, y) if rank == 0 else (x, torch.full_like(y, torch.inf))


@STAGES
def test_a_loss_that_is_not_finite_on_one_rank(stage):
    messages = refused_by_step(stepping(stage), poisoned, NonFiniteError)
    assert_message(messages, "step 1: the gradient of layers/0/bias is not finite (loss inf)", "nonfinite='skip'")
    assert len(set(messages)) == 1


@STAGES
def test_a_gradient_that_is_not_finite_names_the_first_leaf(stage):
    def loss_fn(params, batch):
        return LOSS(params, batch[:2]) + (params["layers"][1]["bias"][0] * 0 + batch[2]).sqrt()

    good, bad = ((*BATCH, torch.tensor(value, dtype=torch.float64)) for value in (1.0, 0.0))
    messages = refused_by_step(stepping(stage, loss_fn), lambda rank: bad, NonFiniteError, good=good)
    assert_message(messages, "step 1: the gradient of layers/1/bias is not finite")


@STAGES
@pytest.mark.parametrize("weighted", [False, True], ids=["scalar", "Mean"])
def test_a_batch_without_rows_on_one_rank(stage, weighted):
    """Named where the loss is a mean over nothing; a sum over nothing is as good as any."""

    def mean(params, batch):
        return sl.Mean(LOSS(params, batch) * len(batch[0]), len(batch[0])) if weighted else LOSS(params, batch)

    def total(params, batch):
        return sl.Mean(
            LOSS(params, batch) * len(batch[0]) if len(batch[0]) else params["layers"][0]["bias"].sum() * 0, 1
        )

    def short(rank):
        return tuple(part[: 0 if rank else 8] for part in BATCH)

    messages = refused_by_step(stepping(stage, mean), short, BatchError)
    assert_message(messages, "step 1: batches without rows", "rank 1: 0 (0, 6), 1 (0, 4)", "return sl.Mean of sums")
    assert not any("rank 0:" in message for message in messages)

    def run(mesh):
        state, step = stepping(stage, total)(mesh)
        return step(state, short(mesh.rank))[1]["finite"]

    assert all(sl.simulate(run, mesh={"data": 2}))


@STAGES
def test_skipping_what_is_not_finite(stage):
    def run(mesh):
        state, step = stepping(stage, nonfinite="skip")(mesh)
        before = copy_of((sl.unshard(state.params), state.opt))
        state, metrics = step(state, poisoned(mesh.rank))
        assert not metrics["finite"] and state.step == 1
        assert_same((sl.unshard(state.params), state.opt), before)
        state, metrics = step(state, BATCH)
        return metrics["finite"] and state.step == 2

    assert sl.simulate(run, mesh={"data": 2}) == [True, True]


@pytest.mark.parametrize("donate", [True, False])
def test_a_skipped_step_leaves_buffers_as_they_were(donate):
    def loss_fn(params, buffers, batch):
        return (params["w"] * batch).sum(), {"mean": batch.mean(), "calls": buffers["calls"] + 1}

    buffers = {"mean": torch.ones(()), "calls": torch.zeros((), dtype=torch.int64)}
    state, step = sl.make_train_step(
        loss_fn, {"w": torch.ones(2)}, sl.optim.sgd(0.1), buffers=buffers, donate=donate, nonfinite="skip"
    )
    state, metrics = step(state, torch.tensor([1.0, float("inf")]))
    assert not metrics["finite"] and state.step == 1
    assert_same(state.buffers, buffers)
    state, _ = step(state, torch.tensor([1.0, 3.0]))
    assert_same(state.buffers, {"mean": torch.tensor(2.0), "calls": torch.tensor(1)})


def test_an_invalid_policy():
    with pytest.raises(ValueError, match="nonfinite='ignore': use 'raise' or 'skip'"):
        sl.make_train_step(LOSS, PARAMS, sl.optim.sgd(0.1), nonfinite="ignore")


def test_a_loss_with_rng_and_none_given():
    def loss_fn(params, batch, rng):
        return LOSS(params, batch)

    with pytest.raises(TreeError, match=r"has a parameter rng and none was given; pass rng=sl.Key\(seed\)"):
        sl.value_and_grad(loss_fn)(PARAMS, BATCH)


# --- ranks that differ -----------------------------------------------------------------------------------------


def other(rank, change):
    """The parameters, changed on rank 1."""
    params = {"layers": [dict(layer) for layer in PARAMS["layers"]]}
    if rank == 1:
        change(params["layers"][0])
    return params


DIFFERENCES = {
    "values": (
        lambda p: p.update(bias=p["bias"] + 1e-9),
        "initial values differ",
        "layers/0/bias: rank 0",
        "same seed",
    ),
    "dtype": (lambda p: p.update(bias=p["bias"].float()), "layers/0/bias", "torch.float32", "Build the same model"),
    "shape": (lambda p: p.update(bias=torch.ones(8)), "layers/0/bias: rank 0", "(9,)", "rank 1", "(8,)"),
    "missing": (lambda p: p.pop("bias"), "layers/0/bias: rank 0", "rank 1: (absent)"),
    "more": (lambda p: p.update(extra=torch.ones(2)), "layers/0/extra: rank 0: (absent)"),
}


def shard_differently(mesh, kind, stage):
    sl.shard(other(mesh.rank, DIFFERENCES[kind][0]), mesh, stage=stage)


def shard_with_other_microbatches(mesh):
    sl.shard(PARAMS, mesh, sl.chain(sl.zero(2), sl.accumulate(1 + mesh.rank)))


@STAGES
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_ranks_whose_parameters_differ(kind, stage):
    messages = raised_by(lambda mesh: shard_differently(mesh, kind, stage), {"data": 2}, RankMismatch)
    assert_message(messages, *DIFFERENCES[kind][1:])


def test_ranks_whose_micro_batches_differ():
    messages = raised_by(shard_with_other_microbatches, {"data": 2}, RankMismatch)
    assert_message(messages, "micro-batches: rank 0: 1; rank 1: 2")


def test_real_ranks_that_differ_all_say_so(pool):
    """Nothing hangs: each of the real processes answers, again and again in the same groups."""
    for kind in DIFFERENCES:
        outcomes = pool.outcomes(shard_differently, kind, 3, mesh={"data": 2})
        assert [type(error) for _, error in outcomes] == [RankMismatch] * 2
        assert_message([str(error) for _, error in outcomes], *DIFFERENCES[kind][1:])
    outcomes = pool.outcomes(shard_with_other_microbatches, mesh={"data": 4})
    assert [type(error) for _, error in outcomes] == [RankMismatch] * 4


# --- ranks that die --------------------------------------------------------------------------------------------


def test_a_rank_that_raises_under_launch_is_named():
    def run(mesh):
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=3), sl.optim.sgd(0.1))
        x, y = BATCH
        step(state, (x, y) if mesh.rank == 0 else (x, y[:3]))

    before = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1 raised:.*size of tensor.*\(2 ranks; the others were stopped\)"):
        sl.launch(run, mesh={"data": 2}, timeout=60)
    assert time.monotonic() - before < 50


def test_a_rank_that_dies_under_launch_is_named():
    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=3)
        if mesh.rank == 1:
            print("the last words", flush=True)
            os._exit(7)
        sl.unshard(params)

    with pytest.raises(RankFailure, match=r"(?s)rank 1 exited with code 7. Its last output:.*the last words"):
        sl.launch(run, mesh={"data": 2}, timeout=60)


def test_survivors_name_the_rank_that_died():
    """Without a launcher that stops them, each survivor's collective fails and names the rank that died."""

    def run(mesh):
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=2), sl.optim.sgd(0.1))
        state, _ = step(state, BATCH)
        if mesh.rank == 1:
            os._exit(7)
        step(state, BATCH)

    pool = Pool(3, timeout=20)
    try:
        outcomes = pool.outcomes(run, mesh={"data": 3})
    finally:
        pool.stop()
    for rank in (0, 2):
        assert isinstance(outcomes[rank][1], RankFailure)
        assert_message(
            [str(outcomes[rank][1])], f"on axis 'data' (size 3) failed on rank {rank}", "rank 1 no longer answers"
        )


def test_a_rank_alone_with_a_bad_batch_does_not_hang_the_others():
    """With torchrun, nothing stops the other ranks at once."""

    def run(mesh):
        state, step = sl.make_train_step(LOSS, sl.shard(PARAMS, mesh, stage=3), sl.optim.sgd(0.1))
        x, y = BATCH
        state, _ = step(state, (x, y))
        step(state, (x, y) if mesh.rank == 0 else (x, y[:3]))

    pool = Pool(2, timeout=4, patience=30)
    try:
        (_, waited), (_, raised) = pool.outcomes(run, mesh={"data": 2})
    finally:
        pool.stop()
    assert_message([str(raised)], "size of tensor")
    assert isinstance(waited, RankFailure)
    assert_message([str(waited)], "on axis 'data' (size 2) failed on rank 0", "Look at the output of")


def test_a_rank_that_is_stuck_is_named_within_the_timeout():
    def run(mesh):
        if mesh.rank == 0:
            time.sleep(9)
        else:
            sl.collectives.all_gather(torch.ones(100), "data")

    pool = Pool(2, timeout=3, patience=30)
    try:
        outcomes = pool.outcomes(run, mesh={"data": 2})
    finally:
        pool.stop()
    assert outcomes[0] == (True, None)
    assert_message(
        [str(outcomes[1][1])],
        "all_gather(100 × float32) on axis 'data'",
        "rank 0 has not made this call",
        "rank 0 waits in no collective",
        "time.sleep(9)",
    )
