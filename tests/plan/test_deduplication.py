"""Traces of deep functions from short forms of their plans, against traces of the whole functions."""

from dataclasses import replace

import pytest
import torch
from helpers.merging import merging
from helpers.profile import NIGHTLY
from hypothesis import event, given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.common import thresholds
from shardlib.execute.stages.tracing import Shortly, Tracing
from shardlib.models import gpt
from shardlib.optim.base import GradientTransformation
from shardlib.plan.build import build_plan
from shardlib.plan.deduplication import TraceCache, deduplicated, seen_in_traces

CONFIG = gpt.GPTConfig(vocab=256, layers=20, width=32, heads=2, sequence=16)
TOKENS = torch.zeros(4, 16, dtype=torch.int64)
TX: GradientTransformation = sl.optim.adamw(1e-3)
DISK = {"params": "disk", "folder": "anywhere"}
SLICED, SEQUENCE = sl.tensor_slicing(gpt.slicing_rules(CONFIG)), sl.sequence("model")

CHAINS = {
    "whole": (sl.zero(0),),
    "again": (sl.zero(1), sl.remat(blocks=18), sl.precision("bf16")),
    "to host": (sl.zero(2), sl.remat(blocks=10, store="host"), sl.accumulate(4)),
    "split": (sl.zero(3), sl.remat(), sl.accumulate(2)),
    "kept": (sl.zero(3, keep="forward"), sl.remat()),
    "states down": (sl.zero(1), sl.remat(), sl.offload()),
    "a share down": (sl.zero(2), sl.offload(fraction=0.5), sl.remat(store="host")),
    "parameters down": (sl.zero(3), sl.offload(params="host"), sl.accumulate(2)),
    "on disk": (sl.zero(0), sl.offload("disk", **DISK), sl.remat()),
    "slices": (SLICED, sl.zero(1), sl.remat(blocks=10, store="sharded")),
    "sequence": (SEQUENCE, sl.zero(3)),
}
AT_NIGHT = ("to host", "split", "parameters down", "on disk", "sequence")


def plan_of(config, *transforms, tree=None):
    tree = gpt.init(config, device="meta") if tree is None else tree
    mesh = sl.abstract_mesh(data=2, model=2) if transforms[0] in (SLICED, SEQUENCE) else sl.abstract_mesh(data=4)
    return build_plan(tree, mesh, sl.chain(*transforms), optimizer=TX)


def tracing(loss_fn):
    return Tracing(loss_fn, {"tokens": TOKENS, "targets": TOKENS}, None, torch.device("cpu"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) if n in AT_NIGHT else n for n in CHAINS])
def test_traces_are_those_of_the_whole(name):
    whole, plan = tracing(gpt.make_loss(CONFIG)), plan_of(CONFIG, *CHAINS[name])
    short = deduplicated(plan)
    assert short is not None and len(short.plan.buckets) < len(plan.buckets)
    assert sorted(path for paths in short.represents.values() for path in paths) == sorted(
        f"blocks/{n}" for n in range(20)
    )
    assert Shortly(whole)(plan) == whole.traced(plan).traces


@pytest.mark.parametrize(("most", "shorter"), [(100_000, True), (110_000, False)])
def test_blocks_that_are_merged_have_no_short_form(most, shorter):
    """A short form leaves out single blocks; units of several are traced as they are."""
    with merging(most):
        plan, whole = plan_of(CONFIG, sl.zero(3), sl.remat()), tracing(gpt.make_loss(CONFIG))
        assert (deduplicated(plan) is not None) == shorter
        assert ("blocks/0…1" in plan.units) != shorter
        assert (Shortly(whole)(plan) or whole.traced(plan).traces) == whole.traced(plan).traces


def test_units_that_fit_into_bytes_have_no_short_form():
    assert deduplicated(plan_of(CONFIG, sl.zero(3, keep="1MB"))) is None


# While the head's whole gradient is waited for those of blocks pile up; or it is as large as all of these, and none is waited
# for.
LARGE_HEAD = replace(CONFIG, layers=24, vocab=800)
OVER_ALL = replace(LARGE_HEAD, vocab=20000, tie=True)
PILES = {
    "whole sums": (sl.zero(1),),
    "shares": (sl.zero(2), sl.accumulate(4)),
    "gathered": (sl.zero(3), sl.remat()),
    "states down": (sl.zero(1), sl.offload()),
    "a share down": (sl.zero(1), sl.offload(fraction=0.5)),
    "accumulated here": (sl.zero(2), sl.accumulate(2), sl.offload()),
    "accumulated there": (sl.zero(3), sl.accumulate(2), sl.offload(gradients="host")),
}
STAYS = [name for name in PILES if name not in ("shares", "accumulated here")]


@pytest.mark.parametrize(("config", "name"), [*((LARGE_HEAD, name) for name in PILES), *((OVER_ALL, n) for n in STAYS)])
def test_gradients_that_pile_up_have_short_forms(config, name):
    plan, whole = plan_of(config, *PILES[name]), tracing(gpt.make_loss(config))
    assert Shortly(whole)(plan) == whole.traced(plan).traces


@pytest.mark.parametrize("chain", [(sl.zero(2), sl.accumulate(4)), (sl.zero(2), sl.accumulate(2), sl.offload())])
def test_whole_gradients_of_several_micro_batches_have_no_short_form(chain):
    """None is waited for before a micro-batch ends, so they go before the next one's come."""
    assert Shortly(tracing(gpt.make_loss(OVER_ALL)))(plan_of(OVER_ALL, *chain)) is None


def enter(params, carry, batch):
    return batch["tokens"].float() @ params["w"]


def layer(params, carry, batch):
    return torch.nn.functional.layer_norm(torch.tanh(carry @ params["w"] + params["b"]), (8,), params["g"]) + carry


def leave(params, carry, batch):
    return (carry @ params["w"]).square().mean()


def stack(layers):
    """The parameters of blocks, and the loss made of them."""
    shapes = [{"w": (16, 8)}, *[{"w": (8, 8), "b": (8,), "g": (8,)}] * layers, {"w": (8, 3)}]
    params = [{name: torch.empty(shape, device="meta") for name, shape in block.items()} for block in shapes]
    return params, sl.sequential([enter, *[layer] * layers, leave])


def short_and_whole(params, loss_fn, mesh, *transforms):
    """The traces of the short form, and those of the whole; None where there is no short form."""
    plan = build_plan(params, sl.abstract_mesh(**mesh), sl.chain(*transforms), optimizer=TX)
    whole = tracing(loss_fn)
    short = Shortly(whole)(plan)
    return short and (short, whole.traced(plan).traces)


RECOMPUTED = (
    None,
    sl.remat(),
    sl.remat("dots"),
    sl.remat(blocks=4),
    sl.remat(blocks=11),
    sl.remat(store="host", smallest=1),
)


@settings(max_examples=200 if NIGHTLY else 8)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"]),
    each=st.integers(9, 16),
    pipe=st.sampled_from([2, 4]),
    stage=st.integers(0, 3),
    again=st.sampled_from(RECOMPUTED),
    half=st.booleans(),
    offload=st.sampled_from([None, sl.offload(), sl.offload(params="host", gradients="host")]),
    threshold=st.sampled_from([1, 1 << 20]),
)
def test_traces_of_stages_are_those_of_the_whole(schedule, each, pipe, stage, again, half, offload, threshold):
    transforms = [sl.zero(stage), sl.pipeline(schedule, 4), *[t for t in (again, offload) if t]]
    transforms += [sl.precision("bf16")] * half
    blocks = stack(each * pipe * (2 if schedule in ("interleaved-1f1b", "zb-v") else 1))
    with thresholds.small(threshold):  # of a bucket for a leaf alone
        found = short_and_whole(*blocks, {"data": 2, "pipe": pipe}, *transforms)
    event("short" if found else "whole")
    assert found is None or found[0] == found[1]


@settings(max_examples=100 if NIGHTLY else 6)
@given(
    layers=st.integers(12, 40),
    data=st.sampled_from([1, 2, 8, 64]),
    stage=st.integers(0, 3),
    microbatches=st.sampled_from([1, 2, 4]),
    again=st.sampled_from(RECOMPUTED),
    offload=st.sampled_from([sl.offload(), sl.offload(params="host", gradients="host"), sl.offload("disk", **DISK)]),
)
def test_traces_with_gradients_that_leave_are_those_of_the_whole(layers, data, stage, microbatches, again, offload):
    transforms = [
        sl.zero(stage),
        sl.accumulate(microbatches),
        sl.precision("bf16"),
        offload,
        *[t for t in (again,) if t],
    ]
    found = short_and_whole(*stack(layers), {"data": data}, *transforms)
    event("short" if found else "whole")
    assert found is None or found[0] == found[1]


@pytest.mark.parametrize("config", [CONFIG, LARGE_HEAD])
def test_gradients_that_leave_hold_their_shares_alone(config):
    """Of one micro-batch, stages 1 and 2 exchange and move the same."""
    whole = tracing(gpt.make_loss(config))
    first, second = (whole.walks(plan_of(config, sl.zero(stage), sl.offload()))[0] for stage in (1, 2))
    assert first.alone == second.alone and first.summed == second.summed


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_that_leave_late_have_short_forms(stage, microbatches):
    """Shares of so many ranks are so small that none must arrive before all have left."""
    chain = [sl.zero(stage), sl.accumulate(microbatches), sl.offload(params="host", gradients="host"), sl.remat()]
    short, whole = short_and_whole(*stack(40), {"data": 64}, *chain)
    assert short == whole


@pytest.mark.parametrize(
    "transforms",
    [
        (sl.zero(0), sl.pipeline("1f1b", 4)),
        (sl.zero(3), sl.pipeline("zb-h1", 4), sl.remat()),
        (sl.zero(2), sl.pipeline("1f1b", 4, partition="count"), sl.remat(blocks=12)),
    ],
)
def test_stages_have_short_forms(transforms):
    short, whole = short_and_whole(*stack(34), {"data": 2, "pipe": 2}, *transforms)
    assert short == whole


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.nightly)])
def test_stages_of_slices_have_short_forms(schedule):
    config = replace(CONFIG, layers=24)
    sliced = sl.tensor_slicing(gpt.slicing_rules(config, blocks=True))
    chain = [sl.zero(1), sl.pipeline(schedule, 4), sliced, sl.precision("bf16")]
    params, loss_fn = gpt.to_blocks(gpt.init(config, device="meta")), gpt.make_sequential(config)
    short, whole = short_and_whole(params, loss_fn, {"data": 2, "pipe": 2, "model": 2}, *chain)
    assert short == whole


def test_a_deep_pipeline_is_traced_in_its_short_form(monkeypatch):
    walked, walks = [], Tracing.walks
    monkeypatch.setattr(Tracing, "walks", lambda self, plan: walked.append(plan) or walks(self, plan))
    params, loss_fn = stack(60)
    chain = sl.chain(sl.zero(1), sl.pipeline("1f1b", 4))
    batch = {"tokens": TOKENS, "targets": TOKENS}
    plan = sl.make_plan(params, sl.abstract_mesh(data=2, pipe=2), chain, loss_fn=loss_fn, batch=batch)
    assert sum(trace.blocks for trace in plan.traces) == 62
    assert len(walked) == 1 and len(walked[0].buckets) < 25


@pytest.mark.parametrize("moved", [sl.offload(), sl.offload(gradients="host"), sl.offload("disk", folder="anywhere")])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_memory_of_states_shows_in_no_trace_of_stages(schedule, moved):
    params, loss_fn = stack(4)
    whole, plans = tracing(loss_fn), []
    for states in ([], [moved]):
        chain = sl.chain(sl.zero(2), sl.pipeline(schedule, 4), sl.precision("bf16"), *states)
        plans.append(build_plan(params, sl.abstract_mesh(data=2, pipe=2), chain, optimizer=TX))
    here, there = plans
    assert whole.traced(here).traces == whole.traced(there).traces
    same_gradients = all(bucket.memory.grad == "device" for bucket in there.buckets)
    assert (seen_in_traces(here) == seen_in_traces(there)) == same_gradients


def deeper(params, carry, batch):
    """A block that does more from the twelfth on, which its carry shows."""
    number, x = carry
    return number + 1, torch.tanh(torch.sigmoid(x) @ params["w"] if number > 12 else x @ params["w"])


@pytest.mark.parametrize("counted", [True, False])
def test_blocks_whose_carries_differ_have_no_short_form(counted):
    """A carry that counts blocks may change what a block does where none is traced."""
    params = [{"w": torch.empty(8, 8, device="meta")} for _ in range(31)]
    first = [lambda params, carry, batch: (1, batch["tokens"].float()[:, :8] @ params["w"])]
    middle = deeper if counted else lambda params, carry, batch: (carry[0], torch.tanh(carry[1] @ params["w"]))
    last = [lambda params, carry, batch: (carry[1] @ params["w"]).sum()]
    loss_fn = sl.sequential([*first, *[middle] * 29, *last])
    for mesh, transforms in (({"data": 2}, []), ({"data": 1, "pipe": 2}, [sl.pipeline("1f1b", 4)])):
        found = short_and_whole(params, loss_fn, mesh, sl.zero(0), *transforms)
        assert found is None if counted else found[0] == found[1]


def test_one_short_form_serves_any_number_of_recomputed_blocks(monkeypatch):
    whole, walked = tracing(gpt.make_loss(CONFIG)), []
    walks = Tracing.walks
    monkeypatch.setattr(Tracing, "walks", lambda self, plan: walked.append(plan) or walks(self, plan))
    shortly = Shortly(whole)
    plans = [plan_of(CONFIG, sl.zero(0), sl.remat(blocks=blocks)) for blocks in (8, 9, 11, 12)]
    found = [shortly(plan) for plan in plans]
    assert len(walked) == 1 and len({traces[0].peak for traces in found}) == 4
    assert found[1] == whole.traced(plans[1]).traces


def test_what_has_no_short_form():
    few = replace(CONFIG, layers=8)
    assert deduplicated(plan_of(few, sl.zero(1))) is None
    staged = build_plan(gpt.to_blocks(gpt.init(CONFIG)), sl.abstract_mesh(pipe=4), sl.pipeline(microbatches=4))
    assert deduplicated(staged, gpt.make_sequential(CONFIG).functions) is None  # its stages have five blocks
    tied = gpt.init(CONFIG, device="meta")
    tied["blocks"][12]["ln1"] = tied["blocks"][3]["ln1"]
    assert deduplicated(plan_of(CONFIG, sl.zero(1), tree=tied)) is None
    frozen = deduplicated(plan_of(CONFIG, sl.zero(0), sl.freeze("blocks/1[2-9]/*")))  # of two kinds, one has many
    assert frozen is not None and len(frozen.represents) == 16
    wide = gpt.init(CONFIG, device="meta")
    wide["blocks"][10]["mlp"]["up"]["weight"] = torch.empty(256, 32, device="meta")
    other = deduplicated(plan_of(CONFIG, sl.zero(1), tree=wide))
    assert other is None or "blocks/10" in other.represents


@pytest.mark.parametrize("after", [False, True])
def test_what_comes_between_blocks_is_theirs(after):
    """Forward and backward, before each of them or after it."""

    @sl.block
    def plain(w, x):
        return torch.tanh(x @ w)

    def loss_fn(params, batch):
        x = torch.nn.functional.one_hot(batch["tokens"], 256).float()
        for layer in params["layers"]:
            x = torch.sigmoid(plain(layer["w"], x)) if after else plain(layer["w"], torch.sigmoid(x @ params["mix"]))
        return (x @ params["mix"]).square().mean()

    weight = torch.empty(256, 256, device="meta")
    params = {"layers": [{"w": weight.clone()} for _ in range(24)], "mix": weight}
    whole, plan = tracing(loss_fn), plan_of(None, sl.zero(1), tree=params)
    assert Shortly(whole)(plan) == whole.traced(plan).traces


def uneven(every):
    """A loss of which one in some blocks does more than the others, which its parameters do not show."""

    @sl.block
    def plain(w, x):
        return torch.tanh(x @ w)

    @sl.block
    def more(w, x):
        return torch.tanh(torch.sigmoid(torch.tanh(x @ w)) @ w.T)

    def loss_fn(params, batch):
        x = torch.nn.functional.one_hot(batch["tokens"], 256).float()
        for number, layer in enumerate(params["layers"], 1):
            x = (plain if number % every else more)(layer["w"], x)
        return x.square().mean()

    return {"layers": [{"w": torch.empty(256, 256, device="meta")} for _ in range(24)]}, loss_fn


@pytest.mark.parametrize("every", [pytest.param(4, marks=pytest.mark.nightly), 10, 24])
def test_blocks_that_differ_unseen_are_found_out(every):
    """The first plan is traced as a whole too, and what is found in the end."""
    params, loss_fn = uneven(every)
    whole = tracing(loss_fn)
    first, second = (plan_of(None, sl.zero(stage), tree=params) for stage in (0, 3))
    known = TraceCache(whole.traced, Shortly(whole))
    assert known(first).traces == whole.traced(first).traces
    assert known(second).traces == whole.traced(second).traces
    trusting = TraceCache(whole.traced, lambda plan: whole.traced(first).traces)
    trusting(first)
    wrong = trusting(second)
    assert wrong.traces != whole.traced(second).traces and not trusting.holds(wrong)
    assert trusting(second).traces == whole.traced(second).traces and trusting.holds(trusting(second))


def test_a_refusal_traces_the_whole_twice(monkeypatch):
    """The plan that was given, and the one that is advised."""
    config, walked = replace(CONFIG, layers=20), []
    walks = Tracing.walks
    monkeypatch.setattr(Tracing, "walks", lambda self, plan: walked.append(plan) or walks(self, plan))
    batch = {"tokens": TOKENS[:1], "targets": TOKENS[:1]}
    args = {"loss_fn": gpt.make_loss(config), "optimizer": TX, "batch": batch}
    plain = sl.make_plan(gpt.init(config, device="meta"), sl.abstract_mesh(data=2), sl.zero(1), **args)
    needed = plain.bytes("param") + plain.bytes("optimizer") + plain.traces[0].peak
    with pytest.raises(sl.errors.IllegalComposition, match="The cheapest change that fits"):
        sl.make_plan(
            gpt.init(config, device="meta"),
            sl.abstract_mesh(data=2),
            sl.zero(1),
            **args,
            device_memory=int(needed * 0.95),
        )
    whole = [len(plan.buckets) > 20 for plan in walked]
    assert sum(whole) == 1 + 2 < len(walked)
