"""The plan: what it prints, compares and predicts, before any rank runs."""

import dataclasses
import math

import pytest
import torch
from helpers.models import mlp, regression_batch, share, tiny_gpt, token_batches

import shardlib as sl
from shardlib.plan.records import Trace
from shardlib.plan.tables import count, size


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def small():
    """Two layers alike, a tie, a scalar, a size that does not divide."""
    tied = meta(6, 4)
    return {
        "embed": tied,
        "layers": [{"w": meta(8, 4), "b": meta(5)} for _ in range(2)],
        "head": {"w": tied, "gain": meta()},
        "positions": meta(3, dtype=torch.int64),
    }


TRANSFORM = sl.chain(
    sl.zero(3, axis="local", replicate="node"), sl.precision("bf16", keep="*/gain"), sl.accumulate(2), sl.freeze("*/b")
)


def small_plan(transform=TRANSFORM):
    return sl.make_plan(small(), sl.abstract_mesh(node=2, local=2), transform, optimizer=sl.optim.adamw(1e-3))


GOLDEN = """\
Plan on node=2 × local=2: 102 parameters, 4 units, 2 micro-batches per step (reduced at each)

parameter             shape   dtype     stored           gradient         optimizer
────────────────────  ──────  ────────  ───────────────  ───────────────  ───────────────
embed (tied: head/w)  6×4     bfloat16  P('local')       P('local')       P('local')
head/gain             scalar  float32   P.flat('local')  P.flat('local')  P.flat('local')
layers/0…1/b          5       bfloat16  P.flat('local')  frozen           -
layers/0…1/w          8×4     bfloat16  P('local')       P('local')       P('local')
positions             3       int64     P.flat('local')  frozen           -

unit                        leaves  elements  param  grad  gathered
──────────────────────────  ──────  ────────  ─────  ────  ────────
(top)                            2        27   40 B  48 B  2 × 80 B
head                             1         1    4 B   4 B   2 × 8 B
layers/0 … layers/1 (each)       2        37   38 B  64 B  2 × 76 B

Per rank: parameters 120 B   gradients 180 B   optimizer 536 B   total 836 B

Payload per step: node 180 B   local 840 B

sent        axis   as        when                        messages  bytes
──────────  ─────  ────────  ──────────────────────────  ────────  ─────
parameters  local  bfloat16  each micro-batch                  20  400 B
parameters  local  int64     each micro-batch                   4   64 B
parameters  local  float32   each micro-batch                   4   16 B
gradients   local  float32   each micro-batch                   8  360 B
gradients   node   float32   after the last micro-batch         4  180 B

Gathers per micro-batch: 8 (assuming each unit once forward and once backward)

accumulate(2): microbatches=2
freeze('*/b'): trainable=False on 2 leaves
precision(keep='*/gain'): reduces in float32; cast_batch=bfloat16; dtype=bfloat16 on 5 leaves; master=float32 on 5 leaves
zero(3, axis='local', replicate='node'): reduces over axis 'local' by sum; reduces over axis 'node' by sum; splits param, grad, optimizer over axis 'local'
"""  # noqa: E501


def test_a_plan_prints_all_it_says():
    """Checked by hand, say the gathers over "local": (80 + 8 + 2·76)/2 bytes, 2 × in each of 2 micro-batches."""
    assert str(small_plan()) == GOLDEN.rstrip("\n")
    assert repr(small_plan()) == str(small_plan())


@pytest.mark.parametrize(("marked", "remat", "told"), [
    (False, sl.remat(), True),
    (True, sl.remat(), False),
    (False, sl.remat(store="host"), False),  # checkpoints of the function's own keep their inputs there
])  # fmt: skip
def test_a_plan_says_that_nothing_is_recomputed(marked, remat, told):
    layer = (sl.block if marked else lambda fn: fn)(lambda params, x: torch.tanh(x @ params["w"]))

    def loss_fn(params, batch):
        return layer(params, batch).square().mean()

    params, batch, parallel = {"w": meta(4, 4)}, meta(2, 4), sl.chain(sl.zero(1), remat)
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), parallel, loss_fn=loss_fn, batch=batch)
    assert ("remat recomputes blocks, and the loss function has none" in str(plan)) == told
    assert "the loss function has none" not in str(sl.make_plan(params, sl.abstract_mesh(data=2), parallel))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_chain_has_no_order(order):
    members = TRANSFORM.transforms
    plan = small_plan(sl.chain(*(members[position] for position in order)))
    assert plan == small_plan() and str(plan) == str(small_plan())


def test_different_plans_are_unequal():
    plans = [
        small_plan(),
        small_plan(sl.chain(sl.zero(2, axis="local", replicate="node"), *TRANSFORM.transforms[1:])),
        small_plan(sl.chain(*TRANSFORM.transforms[:2], sl.accumulate(4), sl.freeze("*/b"))),
        small_plan(sl.chain(*TRANSFORM.transforms[:3])),
        dataclasses.replace(small_plan(), traces=(Trace((("layers/0",), ()), {}),)),
    ]
    assert all((a == b) == (i == j) for i, a in enumerate(plans) for j, b in enumerate(plans))


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_plan().batch_axes = ()


def test_units_come_from_the_tree():
    params = {
        "top": meta(2),
        "also": meta(2),
        "sub": {"a": meta(2), "deep": {"b": meta(2)}},
        "blocks": [{"w": meta(2)}, {"w": meta(2), "inner": [meta(2), meta(2)]}],
        "plain": [meta(2), meta(2)],
        "nested": {"h": [{"w": meta(2)}, {"w": meta(2)}], "other": meta(2)},
    }
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), stage=3)
    members = {}
    for placement in plan.placements:
        members.setdefault(placement.unit, []).append(placement.path)
    assert members == {
        "": ["also", "top"],
        "sub": ["sub/a", "sub/deep/b"],
        "blocks/0": ["blocks/0/w"],
        "blocks/1": ["blocks/1/inner/0", "blocks/1/inner/1", "blocks/1/w"],
        "plain": ["plain/0", "plain/1"],
        "nested": ["nested/other"],
        "nested/h/0": ["nested/h/0/w"],
        "nested/h/1": ["nested/h/1/w"],
    }


def test_specs_of_each_stage_are_the_designs_table():
    """Rows of DESIGN's table: parameters, gradients, optimizer state; C whole, S split."""
    whole, split = sl.P(), sl.P("data")
    table = {0: (whole, whole, whole), 1: (whole, whole, split), 2: (whole, split, split), 3: (split, split, split)}
    for stage, wanted in table.items():
        (placement,) = sl.make_plan({"w": meta(8, 3)}, sl.abstract_mesh(data=4), stage=stage).placements
        assert (placement.param.spec, placement.grad.spec, placement.optimizer.spec) == wanted


def test_stage_is_short_for_zero():
    mesh = sl.abstract_mesh(data=4)
    for stage in (0, 1, 2, 3):
        assert sl.make_plan(small(), mesh, stage=stage) == sl.make_plan(small(), mesh, sl.zero(stage))
    assert sl.make_plan(small(), mesh) == sl.make_plan(small(), mesh, sl.zero(0))
    both = sl.make_plan(small(), mesh, sl.accumulate(2), stage=2)
    assert both == sl.make_plan(small(), mesh, sl.chain(sl.zero(2), sl.accumulate(2)))


def test_bytes_need_to_be_known():
    plan = sl.make_plan(small(), sl.abstract_mesh(data=2), stage=1)
    with pytest.raises(ValueError, match="made without an optimizer; pass optimizer="):
        plan.bytes("optimizer")
    with pytest.raises(ValueError, match="role 'activations' is not one of param, grad, optimizer"):
        plan.bytes("activations")


def test_the_optimizers_state_is_asked_for():
    mesh = sl.abstract_mesh(data=2)
    for tx, copies in [(sl.optim.sgd(0.1), 0), (sl.optim.sgd(0.1, momentum=0.9), 1), (sl.optim.adam(0.1), 2)]:
        assert sl.make_plan({"w": meta(10, 3)}, mesh, sl.zero(2), optimizer=tx).bytes("optimizer") == copies * 4 * 15
        mixed = sl.make_plan({"w": meta(10, 3)}, mesh, sl.chain(sl.zero(0), sl.precision("bf16")), optimizer=tx)
        assert mixed.bytes("optimizer") == (copies + 1) * 4 * 30  # and the masters


def test_the_smallest_and_of_equal_ones_the_last_stay_gathered():
    params = {"blocks": [{"w": meta(size)} for size in (100, 300, 100, 100)]}

    def planned(keep):
        return sl.make_plan(params, sl.abstract_mesh(data=2), sl.zero(3, keep=keep))

    assert set(planned("forward").kept) == {f"blocks/{number}" for number in range(4)}
    assert planned(1000).kept == {"blocks/3": 400, "blocks/2": 400}
    assert "Gathered from forward to backward: blocks/2, blocks/3: 800 B" in str(planned(1000))
    assert planned(1000).gathers.count("blocks/2") == 1 and planned(1000).gathers.count("blocks/0") == 2
    assert "Gathered from forward to backward: none fits: 0 B" in str(planned(399))


def test_what_backward_has_used_is_released():
    """The first block takes most when backward computes it again, as the last thing that it does."""

    def first(params, carry, batch):
        return (batch["x"] @ params["w"]).repeat(1, 40).tanh().sin().mean(1, keepdim=True)

    def layer(params, carry, batch):
        return torch.tanh(carry * params["w"].sum())

    def last(params, carry, batch):
        return (carry * params["w"].sum()).mean()

    params = [{"w": meta(8, 64)}, *({"w": meta(64, 64)} for _ in range(4)), {"w": meta(8)}]
    loss_fn, batch = sl.sequential([first, *[layer] * 4, last]), {"x": torch.ones(64, 8)}

    def planned(keep):
        transform = sl.chain(sl.zero(3, keep=keep), sl.remat())
        return sl.make_plan(params, sl.abstract_mesh(data=2), transform, loss_fn=loss_fn, batch=batch)

    kept, plain = planned("forward"), planned(None)
    assert "backward of block 1" in plain.traces[0].live_in and kept.live_bytes == plain.live_bytes
    assert len(kept.gathers) == 6 < len(plain.gathers)


def test_touches_are_traced():
    """A unit used at both ends is gathered more often; one whose values backward does not need, once."""
    loss_fn, params = tiny_gpt()
    batch = share(token_batches(1)[0], 0, 4)
    plan = sl.make_plan(params, sl.abstract_mesh(data=4), stage=3, loss_fn=loss_fn, batch=batch)
    assert plan.gathers == ("embed", "blocks/0", "blocks/1", "head", "head", "blocks/1", "blocks/0")
    guess = sl.make_plan(params, sl.abstract_mesh(data=4), stage=3)
    assert sorted(guess.gathers) == sorted([*plan.units, *plan.units])
    assert "(as traced)" in str(plan) and "(assuming each unit once forward and once backward)" in str(guess)
    tied = tiny_gpt(tie=True)
    plan = sl.make_plan(tied[1], sl.abstract_mesh(data=4), stage=3, loss_fn=tied[0], batch=batch)
    assert plan.gathers.count("embed") >= 2


def test_a_loss_that_reads_values_says_it_was_not_traced():
    def loss_fn(params, batch):
        loss = mlp([6, 4])[0](params, batch)
        return loss if loss.item() > 0 else 2 * loss

    _, params = mlp([6, 4])
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), stage=3, loss_fn=loss_fn, batch=regression_batch(2, 6, 4))
    assert plan.traces is None and "not traced: the loss reads values" in str(plan)


def test_planning_leaves_parameters_and_batch_alone():
    loss_fn, params = tiny_gpt()
    before = [leaf.clone() for layer in params["blocks"] for leaf in layer["mlp"]["up"].values()]
    sl.make_plan(params, sl.abstract_mesh(data=4), stage=3, loss_fn=loss_fn, batch=token_batches(1)[0])
    after = [leaf for layer in params["blocks"] for leaf in layer["mlp"]["up"].values()]
    assert all(torch.equal(a, b) and b.grad is None and not b.requires_grad for a, b in zip(before, after))


def test_an_abstract_mesh_holds_no_shards():
    with pytest.raises(sl.errors.IllegalComposition, match=r"abstract_mesh\(data=2\) has no ranks .* use sl.make_plan"):
        sl.shard({"w": torch.ones(2)}, sl.abstract_mesh(data=2))


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (123456, "123.5k"), (7_500_000_000, "7.5B"), (10**12, "1T")],
)
def test_counts_are_short(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123456, "123.5 kB"), (2 * 10**9, "2 GB")]
)
def test_sizes_are_decimal(number, text):
    assert size(number) == text


def test_every_parameter_is_placed_once():
    plan = small_plan()
    assert plan.parameters == 24 + 2 * (32 + 5) + 1 + 3
    assert sorted(path for bucket in plan.buckets for path in bucket.paths) == sorted(p.path for p in plan.placements)
    assert {p.path: p.aliases for p in plan.placements if p.aliases} == {"embed": ("head/w",)}
    assert all(sum(map(math.prod, bucket.shapes)) <= bucket.owned * bucket.ways for bucket in plan.buckets)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_held_and_sent_as_planned(stage):
    def loss_fn(params, buffers, batch):
        mean = batch.mean(0)
        loss = ((batch - buffers["running_mean"]) @ params["w"]).square().mean()
        after = {"running_mean": 0.9 * buffers["running_mean"] + 0.1 * mean, "steps": buffers["steps"] + 1}
        return loss, after | {"last": buffers["last"] + 1}

    params = {"w": torch.randn(6, 4, dtype=torch.float64)}
    buffers = {"running_mean": torch.zeros(6, dtype=torch.float64), "steps": torch.zeros((), dtype=torch.int64)}
    buffers["last"] = torch.zeros(6, dtype=torch.float64)  # equal on all ranks: not sent
    batch = torch.randn(4, 6, dtype=torch.float64)
    options = {"loss_fn": loss_fn, "batch": batch, "buffers": buffers}
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), stage=stage, **options)
    assert plan.bytes("buffers") == 2 * 6 * 8 + 8 and "buffers 104 B" in str(plan)

    def run(mesh):
        state, step = sl.make_train_step(
            loss_fn, sl.shard(params, mesh, stage=stage), sl.optim.adamw(1e-3), buffers=buffers
        )
        state, _ = step(state, batch + mesh.rank)
        return dict(mesh.traffic.payload), state.buffers

    for payload, after in sl.simulate(run, mesh={"data": 2}):
        assert payload == plan.payload()
        torch.testing.assert_close(after["running_mean"], 0.1 * (batch.mean(0) + 0.5))
        assert after["steps"] == 1
