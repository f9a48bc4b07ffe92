"""Offload: states in the host's memory train to the last bit as without, by the same kernels."""

import math
import re

import optree
import pytest
import torch
from helpers.models import mlp, regression_batch, share, tiny_gpt
from helpers.offloaded import MAX_NORM, OVERFLOWING, assert_alike, trained, tx
from helpers.optimizer_cases import CASES, VECTORS, batches, model
from helpers.profile import NIGHTLY
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition

STEPS = 50 if NIGHTLY else 24
# name -> (transforms, mesh, steps)
PLANS = {
    "one device": ([sl.zero(0)], {"data": 1}, 8),
    "stage 0, fp16": ([sl.zero(0), OVERFLOWING], {"data": 2}, STEPS),
    "stage 1, fp16": ([sl.zero(1), OVERFLOWING], {"data": 2}, STEPS),
    "stage 2, fp16": ([sl.zero(2), OVERFLOWING, sl.accumulate(2)], {"data": 2}, STEPS),
    "stage 3, fp16": ([sl.zero(3), OVERFLOWING], {"data": 2}, STEPS),
    "pipeline, fp16": ([sl.pipeline("1f1b", microbatches=2), sl.zero(1), OVERFLOWING], {"pipe": 2, "data": 2}, STEPS),
    "int8": ([sl.zero(3), sl.quantize("int8", "int8")], {"data": 2}, STEPS),
    "1-bit": ([sl.zero(1), sl.onebit()], {"data": 2}, STEPS),
    "stage 3, bf16": ([sl.zero(3), sl.precision("bf16", reduce_dtype="bf16")], {"data": 2}, 8),
    "without masters": ([sl.zero(1), sl.precision("bf16", master=False)], {"data": 2}, 8),
    "hybrid": ([sl.zero(3, axis="local", replicate="node")], {"node": 2, "local": 2}, 8),
    "frozen": ([sl.zero(2), sl.freeze(["*mlp*"])], {"data": 2}, 8),
    "reproducible": ([sl.zero(2), sl.reproducible(4)], {"data": 2}, 8),
    "pipeline": ([sl.pipeline("1f1b", microbatches=4), sl.zero(2)], {"pipe": 2, "data": 2}, 8),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same_to_the_last_bit(plan):
    wanted = trained(*PLANS[plan])
    short = PLANS[plan][2] < STEPS
    ways = [{}, {"params": "host", "gradients": "host"}, {"speculate": True}]
    further = [
        {"fraction": 0.5},
        {"params": "host", "fraction": 0.5},
        {"params": "host", "fraction": 0.5, "speculate": True},
    ]
    for options in [*ways, *further] if short else ways:
        assert_alike(trained(*PLANS[plan], sl.offload(**options)), wanted)
    if "fp16" in plan:
        norms = wanted[1]
        finite = [number for number in norms if math.isfinite(number)]
        assert len(finite) < len(norms), "no step was skipped"
        assert min(finite) < MAX_NORM < max(finite), "clipping must act in some steps and not in others"


def states_of(name, transform):
    def run(mesh):
        loss_fn, params = model()
        frozen = [sl.freeze(VECTORS)] if CASES[name].matrices else []
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(1), *frozen, *transform))
        state, step = sl.make_train_step(loss_fn, sharded, CASES[name].make())
        for batch in batches(4):
            state, _ = step(state, share(batch, mesh.rank, mesh.size))
        return sl.unshard(state.params), state.opt.inner

    return sl.simulate(run, mesh={"data": 2})


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_has_the_same_state(name):
    wanted = states_of(name, [])
    for rank, other in zip(states_of(name, [sl.offload()]), wanted, strict=True):
        assert_same(rank, other)
    if CASES[name].make().separable:
        for options in ({"fraction": 0.5}, {"speculate": True}):
            for rank, other in zip(states_of(name, [sl.offload(**options)]), wanted, strict=True):
                assert_same(rank, other)
    else:
        with pytest.raises(
            IllegalComposition, match=r"states of 1 of 2 buckets on the device.* use offload\(fraction=1"
        ):
            states_of(name, [sl.offload(fraction=0.5)])


def test_what_may_be_updated_bucket_by_bucket():
    clip, adamw = sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-3)
    assert adamw.separable and sl.optim.chain(clip, clip, adamw).separable
    assert sl.optim.chain(sl.optim.clip_by_value(1.0), adamw).separable
    # The norm of what another transformation has changed is known only when all of it has been changed.
    assert not sl.optim.chain(sl.optim.clip_by_value(1.0), clip, adamw).separable
    assert not sl.optim.chain(clip, sl.optim.lamb(1e-3)).separable
    assert not sl.optim.onebit_adam(1e-3, 10).separable


def test_states_lie_where_the_plan_says():
    loss_fn, params = tiny_gpt()
    sharded = sl.shard(params, sl.make_mesh(), sl.chain(sl.precision("bf16"), sl.offload(fraction=0.3)))
    plan = sl.make_plan(
        params, sl.make_mesh(), sl.chain(sl.precision("bf16"), sl.offload(fraction=0.3)), optimizer=tx()
    )
    state, _ = sl.make_train_step(loss_fn, sharded, tx())
    where = {bucket.name: bucket.memory.optimizer for bucket in plan.buckets}
    assert list(where.values()) == ["device", "device", "host", "host"], "the last units' gradients come first"
    for memory in ("device", "host"):
        names = {name for name, place in where.items() if place == memory}
        held = sum(
            tensor.nbytes
            for tree in (state.opt.masters, state.opt.inner[1].mu, state.opt.inner[1].nu)
            for name, tensor in tree.items()
            if name in names
        )
        assert held == plan.bytes("optimizer", memory) > 0
    assert plan.bytes("optimizer") == plan.bytes("optimizer", "host") + plan.bytes("optimizer", "device")
    assert plan.bytes("param", "host") == 0 < plan.bytes("param", "device")
    below = sl.make_plan(
        params, sl.make_mesh(), sl.chain(sl.precision("bf16"), sl.offload(params="host")), optimizer=tx()
    )
    assert below.bytes("param", "host") == plan.bytes("param", "device") and below.bytes("param", "device") == 0
    assert plan.bytes("total", "host") > plan.bytes("optimizer", "host")


def test_the_plan_counts_what_moves():
    _, params = mlp([8, 16, 4], torch.float32)
    count = sum(leaf.numel() for layer in params["layers"] for leaf in layer.values())
    mesh = sl.abstract_mesh(data=4)

    def moved(*transforms):
        return sl.make_plan(params, mesh, sl.chain(*transforms)).transfers()

    assert moved(sl.zero(0)) == {"down": 0, "up": 0}
    assert moved(sl.zero(0), sl.offload()) == {"down": 4 * count, "up": 4 * count}
    mixed = sl.precision("bf16", reduce_dtype="bf16")
    assert moved(sl.zero(0), mixed, sl.offload()) == {"down": 2 * count, "up": 2 * count}  # the paper's 4P
    assert moved(sl.zero(1), mixed, sl.offload()) == {"down": count // 2, "up": count // 2}
    # Of parameters on the host each unit comes up once forward and once backward.
    down = sl.offload(params="host")
    assert moved(sl.zero(0), mixed, down) == {"down": 2 * count, "up": 4 * count}
    assert moved(sl.zero(3), mixed, down) == {"down": count // 2, "up": count}
    # At stage 1 new parameters are gathered on the device before they are stored.
    assert moved(sl.zero(1), mixed, down) == {"down": count // 2 + 2 * count, "up": 4 * count + count // 2}
    # Gradients that are accumulated on the host go there after each micro-batch, if no exchange is left for the last one.
    summed = sl.offload(gradients="host")
    assert moved(sl.zero(2), sl.accumulate(3), summed) == {"down": 3 * count, "up": count}
    assert moved(sl.zero(1), sl.accumulate(3), summed) == {"down": count, "up": count}
    text = str(sl.make_plan(params, mesh, sl.chain(sl.zero(0), mixed, sl.offload()), optimizer=tx()))
    assert re.search(r"gradients +down +bfloat16 +when summed +2 +424 B", text)
    assert "In host memory: parameters 0 B" in text and "in host memory" in text


@pytest.mark.parametrize("saved", [[], [sl.offload()], [sl.offload(params="host")]])
@pytest.mark.parametrize("restored", [[], [sl.offload(fraction=0.5)], [sl.offload(params="host")]])
def test_a_checkpoint_is_restored_with_and_without(saved, restored, tmp_path):
    loss_fn, params = mlp([6, 9, 4], torch.float32)
    data = regression_batch(4, 6, 4, torch.float32)

    def start(transforms):
        return sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), sl.chain(*transforms)), sl.optim.adamw(0.1))

    state, step = start([sl.zero(0), *saved])
    state, _ = step(state, data)
    sl.checkpoint.save(tmp_path, state)
    state, _ = step(state, data)
    fresh, again = start([sl.zero(0), *restored])
    fresh, _ = again(sl.checkpoint.restore(tmp_path, fresh), data)
    assert_same(sl.unshard(fresh.params), sl.unshard(state.params))


@pytest.mark.parametrize("donate", [True, False])
def test_replaced_parameters_are_what_the_next_step_starts_from(donate):
    loss_fn, params = mlp([6, 9, 4], torch.float32)
    data = regression_batch(4, 6, 4, torch.float32)

    def run(*transforms):
        sharded = sl.shard(params, sl.make_mesh(), sl.chain(sl.zero(0), *transforms))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(0.1), donate=donate)
        old = state
        state, _ = step(state, data)
        if not donate:
            assert_same(sl.unshard(old.params), params)
        state = sl.replace_params(state, optree.tree_map(lambda leaf: leaf * 2, params), donate=donate)
        state, _ = step(state, data)
        return sl.unshard(state.params)

    assert_same(run(sl.offload()), run())


@pytest.mark.parametrize("fraction", [-0.1, 1.5, True, "0.5"])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(IllegalComposition, match="use a number from 0 to 1"):
        sl.offload(fraction=fraction)


def test_an_unknown_memory_is_refused():
    with pytest.raises(IllegalComposition, match=r"optimizer='tape'\): use 'device', 'host' or 'disk'"):
        sl.shard({"w": torch.ones(2)}, sl.make_mesh(), sl.offload("tape"))
