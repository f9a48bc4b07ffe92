"""Progressive layer drop: against loops that leave out the same layers, equal on every mesh, and nothing sent for what is
left out."""

import functools
import math
from collections import Counter

import pytest
import torch
from helpers import drops
from helpers.decoders import cut, decoder, in_float64, label_batches
from helpers.drops import BERT, GPT, RATE, SEED, SLICES, STEPS, in_list, looped, tokens, trained
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition, LossError, TreeError
from shardlib.models import bert, gpt
from shardlib.plan.claims import LeafInfo
from shardlib.plan.drops import LayerDrop
from shardlib.plan.layers import layers_of

DROP = sl.progressive_layer_drop(0.5, 5.0)  # at step 0 nothing, from step 1 on as at the end


def kept_at(step, layers=4):
    return drops.kept_at(step, LayerDrop(0.5, 5.0, tuple(map(str, range(layers)))))


def gpt_loss(params, batch, step):
    return drops.gpt_loss(params, batch, kept_at(step))


def bert_loss(params, batch, step):
    return drops.bert_loss(params, batch, kept_at(step))


# The schedule.


@pytest.mark.parametrize(("step", "theta"), [(0, 1.0), (100, 0.9524), (693, 0.75), (1000, 0.6839), (5000, 0.5034)])
def test_the_schedule_over_time(step, theta):
    assert round(LayerDrop(0.5, 0.001, ("a",)).theta_at(step), 4) == theta


def test_the_schedule_over_depth():
    drop = LayerDrop(0.5, 1.0, tuple("abcdefghijkl"))
    keep = drop.keep(1000)
    assert keep["l"] == pytest.approx(0.5) and keep["a"] == pytest.approx(1 - 0.5 / 12)
    assert drop.share(1000) == pytest.approx(sum(keep.values()) / 12) == pytest.approx(0.729, abs=5e-4)


def test_layers_are_kept_as_often_as_the_schedule_says():
    drop, steps = LayerDrop(0.3, 1.0, tuple("abcde")), 4000
    counts = Counter()
    pairs = Counter()
    for step in range(100, 100 + steps):
        kept = drop.kept(step, sl.Key(3).fold_in(step))
        counts.update(path for path, runs in kept.items() if runs)
        pairs.update(one + other for one in "abcde" for other in "abcde" if one < other and kept[one] and kept[other])
    keep = drop.keep(100)
    for path, p in keep.items():
        assert abs(counts[path] - p * steps) < 4 * math.sqrt(p * (1 - p) * steps)
    for (one, other), count in pairs.items():  # layers are drawn on their own
        p = keep[one] * keep[other]
        assert abs(count - p * steps) < 4 * math.sqrt(p * (1 - p) * steps)


def test_the_steps_here_leave_out_layers():
    """What the tests below rest on."""
    runs = [[runs for runs, *_ in kept_at(step)] for step in range(STEPS)]
    assert all(runs[0]) and sum(not each for step in runs for each in step) >= 3 and len(set(map(tuple, runs))) >= 3
    assert not all(each for each, *_ in kept_at(100))


# Equal to a loop, on every mesh.

CASES = {
    "one device": ({"data": 1}, ()),
    "stage 0": ({"data": 2}, (sl.zero(0),)),
    "stage 1": ({"data": 2}, (sl.zero(1), sl.accumulate(2))),
    "stage 2": ({"data": 2}, (sl.zero(2), sl.accumulate(2, sync="each"))),
    "stage 3": ({"data": 4}, (sl.zero(3),)),
    "stage 3, one after the other": ({"data": 2}, (sl.zero(3, prefetch=False), sl.accumulate(4, sync="last"))),
    "recomputed": ({"data": 2}, (sl.zero(3), sl.remat(), sl.accumulate(2))),
    "some recomputed": ({"data": 2}, (sl.zero(2), sl.remat("dots", blocks=2))),
    "summed in a tree": ({"data": 2}, (sl.zero(1), sl.reproducible(4))),
    "slices": ({"data": 2, "model": 2}, (sl.zero(3), SLICES, sl.remat())),
    "tiles": ({"data": 2}, (sl.zero(3), sl.tile("blocks/*/mlp/up/weight", 2))),
    "offloaded": ({"data": 2}, (sl.zero(3), sl.offload(params="host"))),
}
STAGES = {
    "1f1b": ({"data": 2, "pipe": 2}, (sl.zero(2), sl.pipeline("1f1b", 4))),
    "stages of stage 3": ({"data": 2, "pipe": 2}, (sl.zero(3), sl.pipeline("1f1b", 2), sl.remat())),
    "interleaved": ({"pipe": 2}, (sl.pipeline("interleaved-1f1b", 4, chunks=2),)),
    "split backward": ({"data": 2, "pipe": 2}, (sl.zero(3), sl.pipeline("zb-h1", 4))),
    "a layer a stage": ({"pipe": 6}, (sl.pipeline("gpipe", 2, partition="count"),)),
}


RESUMED = ("stage 1", "stage 2", "stage 3", "recomputed", "tiles", "1f1b", "split backward")
RUNS = [(case, 0) for case in (*CASES, *STAGES)] + [(case, 100) for case in RESUMED]


@functools.cache
def expected_from(first):
    return looped(gpt_loss, gpt.init(GPT), tokens(), first)


@pytest.mark.parametrize(("case", "first"), RUNS)
def test_equal_to_a_loop_on_every_mesh(case, first):
    """From the start, and resumed at a step that leaves out layers."""
    mesh, transforms = (CASES | STAGES)[case]
    staged = case in STAGES
    params, loss_fn = gpt.init(GPT), gpt.make_sequential(GPT) if staged else gpt.make_loss(GPT)
    params = gpt.to_blocks(params) if staged else params
    run = functools.partial(trained, transform=sl.chain(DROP, *transforms), loss_fn=loss_fn, params=params, first=first)
    for numbers, after, *_ in sl.simulate(lambda mesh: run(mesh, batch=tokens()), mesh=mesh):
        assert_close((numbers, in_list(after) if staged else after), expected_from(first), 1e-10)


@pytest.mark.parametrize(
    ("kind", "mesh", "others"),
    [
        ("ring", {"seq": 2}, (sl.zero(1, axis="seq"),)),
        ("ulysses", {"data": 2, "seq": 2}, (sl.zero(3, axis=("data", "seq")),)),
        ("megatron", {"data": 2, "model": 2}, (sl.zero(1), SLICES)),
    ],
)
def test_tokens_of_sequences_that_are_cut_are_counted_once(kind, mesh, others):
    """The tokens that layers see are those of whole sequences, whose parts ranks have."""
    transform = sl.chain(DROP, sl.sequence("model" if kind == "megatron" else "seq", kind), *others)
    run = functools.partial(trained, transform=transform, loss_fn=gpt.make_loss(GPT), params=gpt.init(GPT))
    wanted = [drops.layer_tokens(kept_at(step)) for step in range(STEPS)]
    for numbers, _, _, counted in sl.simulate(lambda mesh: run(mesh, batch=tokens()), mesh=mesh):
        assert_close(numbers, expected_from(0)[0], 1e-10)
        assert counted == wanted and wanted[0] == 256


def test_equal_to_a_loop_in_processes(pool):
    expected = looped(gpt_loss, gpt.init(GPT), tokens())
    transform = sl.chain(DROP, sl.zero(3), SLICES)
    loss_fn, params, batch = gpt.make_loss(GPT), gpt.init(GPT), tokens()
    ran = pool.run(trained, transform, loss_fn, params, batch, mesh={"data": 2, "model": 2})
    for numbers, params, *_ in ran:
        assert_close((numbers, params), expected, 1e-10)


def test_a_bert():
    batch, params = tokens(), bert.init(BERT)
    expected = looped(bert_loss, params, batch)  # a tied embedding is two leaves there, each with half of the gradient
    loss_fn = bert.make_loss(BERT)
    transform = sl.chain(DROP, sl.zero(3))
    (numbers, *_), *_ = sl.simulate(lambda mesh: trained(mesh, transform, loss_fn, params, batch), mesh={"data": 2})
    assert_close(numbers[0, 0], expected[0][0, 0], 1e-10)
    step_loss = sl.value_and_grad(loss_fn)
    plan = sl.shard(params, sl.make_mesh(), DROP)
    for step in range(6):
        key = sl.Key(SEED).fold_in(step)
        loss, _ = step_loss(plan, batch, step=step, rng=key)
        assert_close(loss, bert_loss(params, batch, step), 1e-10)


COMPRESSED = {
    "one bit": ({"data": 2}, (sl.zero(1), sl.onebit("data"))),
    "one bit of each micro-batch": ({"data": 2}, (sl.zero(3), sl.onebit("data"), sl.accumulate(2, sync="each"))),
    "low rank": ({"data": 2}, (sl.zero(0), sl.powersgd(2))),
    "stages": (
        {"data": 2, "pipe": 2},
        (sl.zero(1), sl.onebit("data"), sl.pipeline("interleaved-1f1b", 4, chunks=2)),
    ),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(case):
    """What its first micro-batch computes for the trace sends no residual."""
    mesh, transforms = COMPRESSED[case]
    loss_fn, params = gpt.make_loss(GPT), gpt.init(GPT)
    if "pipe" in mesh:
        loss_fn, params = gpt.make_sequential(GPT), gpt.to_blocks(params)

    def run(mesh):
        def make():
            sharded = sl.shard(params, mesh, sl.chain(DROP, *transforms))
            return sl.make_train_step(loss_fn, sharded, sl.optim.adamw(RATE), rng=SEED, donate=False)

        (state, step), batch = make(), drops.share(mesh, tokens())
        for _ in range(4):  # the next one leaves out two layers
            state, _ = step(state, batch)
        resumed, step_again = state, make()[1]
        for _ in range(2):
            (state, _), (resumed, _) = step(state, batch), step_again(resumed, batch)
            assert_same((resumed.params.buffers, resumed.comm), (state.params.buffers, state.comm))
        return len(state.comm)

    assert all(sl.simulate(run, mesh=mesh))


def test_what_is_used_outside_of_a_layer_that_is_left_out_is_sent_or_kept():
    """In one bit: what ranks send and keep adds up to the gradients."""
    plain, params = linear_blocks(sl.block(lambda p, x: x + x.sin() @ p["w"]))

    def loss_fn(params, batch):
        beside = sum((p["w"] * batch[:, None]).square().sum((1, 2)).mean() for p in params["layers"])
        return plain(params, batch) + 0.1 * beside

    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    optimizer = sl.optim.sgd(0.01)
    plan = {"data": 2}, sl.chain(sl.progressive_layer_drop(0.2, 10.0), sl.zero(1), sl.onebit("data"))
    result = sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=optimizer, steps=3, rng=SEED)
    assert not result, result


# transformers' decoders, and blocks of a user's.


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders_of_transformers(kind):
    module = in_float64(decoder(kind)).train()
    loss_fn, params = cut(module)
    batch = label_batches(1, 8)[0]

    def by_hand(params, batch, step):
        carry, kept = None, kept_at(step)
        for number, (block, p) in enumerate(zip(loss_fn.blocks, params, strict=True)):
            after = block(p, carry, batch)
            if 1 <= number <= len(kept):
                runs, keep, _ = kept[number - 1]
                after = carry + (after - carry) / keep if runs else carry
            carry = after
        return carry.total / carry.weight

    expected = looped(by_hand, params, batch)
    for transforms, mesh in [((sl.zero(3), sl.remat()), {"data": 2}), ((sl.pipeline("1f1b", 2),), {"pipe": 2})]:
        ran = sl.simulate(
            lambda mesh, t=transforms: trained(mesh, sl.chain(DROP, *t), loss_fn, params, batch), mesh=mesh
        )
        for numbers, after, *_ in ran:
            assert_close((numbers, after), expected, 1e-10)


def linear_blocks(layer):
    """A loss of four of these layers on a residual stream."""

    def loss_fn(params, batch):
        x = batch
        for p in params["layers"]:
            x = layer(p, x)
        return (x * params["out"]).square().mean()

    return loss_fn, {"layers": [{"w": torch.eye(3).double() * n} for n in range(4)], "out": torch.ones(3).double()}


def test_a_carry_of_several_tensors():
    layer = sl.block(lambda p, carry: (carry[0] + carry[0].sin() @ p["w"], carry[1] + p["w"].square().sum()))

    def loss_fn(params, batch):
        carry = (batch, torch.zeros((), dtype=torch.float64))
        for p in params["layers"]:
            carry = layer(p, carry)
        return carry[0].square().mean() + carry[1]

    def by_hand(params, batch, step):
        x, extra = batch, torch.zeros((), dtype=torch.float64)
        for p, (runs, keep, _) in zip(params["layers"], kept_at(step), strict=True):
            if runs:
                x, extra = x + (x.sin() @ p["w"]) / keep, extra + p["w"].square().sum() / keep
        return x.square().mean() + extra

    params = {"layers": linear_blocks(layer)[1]["layers"]}
    batch = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    expected = looped(by_hand, params, batch, steps=4)
    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), DROP), sl.optim.sgd(RATE), rng=SEED)
    for loss, grad_norm in expected[0]:
        state, metrics = step(state, batch)
        assert_close((metrics["loss"], metrics["grad_norm"]), (loss, grad_norm), 1e-10)
    assert_close(sl.unshard(state.params), expected[1], 1e-10)


def test_parameters_used_outside_of_a_layer_that_is_left_out():
    """The step is repeated with all exchanges, on every rank."""
    layer = sl.block(lambda p, x: x + x.sin() @ p["w"])
    plain, params = linear_blocks(layer)

    def loss_fn(params, batch):
        return plain(params, batch) + 0.1 * sum(p["w"].square().sum() for p in params["layers"])

    def by_hand(params, batch, step):
        x = batch
        for p, (runs, keep, _) in zip(params["layers"], kept_at(step), strict=True):
            x = x + (x.sin() @ p["w"]) / keep if runs else x
        return (x * params["out"]).square().mean() + 0.1 * sum(p["w"].square().sum() for p in params["layers"])

    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    expected = looped(by_hand, params, batch)
    for stage in range(4):

        def run(mesh, stage=stage):
            sharded = sl.shard(params, mesh, sl.chain(DROP, sl.zero(stage)))
            state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(RATE), rng=SEED)
            numbers = []
            for _ in range(STEPS):
                state, metrics = step(state, batch.chunk(2)[mesh.coords["data"]])
                numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            return torch.tensor(numbers, dtype=torch.float64), sl.unshard(state.params)

        for found in sl.simulate(run, mesh={"data": 2}):
            assert_close(found, expected, 1e-10)


def test_evaluation_uses_all_layers():
    params, batch = gpt.init(GPT), tokens()
    sharded = sl.shard(params, sl.make_mesh(), DROP)
    state, step = sl.make_train_step(gpt.make_loss(GPT), sharded, sl.optim.sgd(0.0), rng=SEED, donate=False)
    for _ in range(4):
        state, _ = step(state, batch)
    evaluate = sl.make_eval_step(gpt.make_loss(GPT), state.params)
    assert_close(evaluate(state, batch), gpt.make_loss(GPT)(params, batch), 1e-12)


# What is sent, counted from outside.


def payloads(transform, mesh, loss_fn, params, first=0):
    """For each step: bytes that were sent by axis (the most of any rank), what the plan says, and the units left out."""
    batch = tokens()
    ran = sl.simulate(lambda mesh: trained(mesh, transform, loss_fn, params, batch, first), mesh=mesh)
    for number in (0, 1, 4):  # these leave out none, one and two layers
        sent = {axis: max(counted[number][axis] for _, _, counted, _ in ran) for axis in ran[0][2][number]}
        rows = {name: value.chunk(mesh.get("data", 1))[0] for name, value in batch.items()}
        traced = {"loss_fn": loss_fn, "batch": rows, "optimizer": sl.optim.sgd(RATE)}
        plan = sl.make_plan(params, sl.abstract_mesh(**mesh), transform, **traced, step=first + number, rng=SEED)
        yield sent, plan.payload(), plan.left_out


SENT = {
    "stage 1": ({"data": 2}, (sl.zero(1),)),
    "stage 3": ({"data": 2}, (sl.zero(3), sl.accumulate(2))),
    "slices": ({"data": 2, "model": 2}, (sl.zero(3), SLICES, sl.remat())),
    "stages": ({"data": 2, "pipe": 2}, (sl.zero(2), sl.pipeline("1f1b", 4))),
}


@pytest.mark.parametrize("case", SENT)
def test_nothing_is_sent_for_what_is_left_out(case):
    mesh, transforms = SENT[case]
    staged = "pipe" in mesh
    params = gpt.to_blocks(gpt.init(GPT)) if staged else gpt.init(GPT)
    loss_fn = gpt.make_sequential(GPT) if staged else gpt.make_loss(GPT)
    of_steps = list(payloads(sl.chain(DROP, *transforms), mesh, loss_fn, params))
    assert all(sent == planned for sent, planned, _ in of_steps)
    if not staged:  # of stages the most of any rank is counted
        whole, one, two = (next(s["data"] for s, _, out in of_steps if len(out) == number) for number in range(3))
        assert whole - one == one - two > 0
        of_layer = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(params["blocks"][0]))
        ranks, sliced = mesh["data"], "model" in mesh
        if not sliced:  # at stage 3 gathered twice and reduced, for each micro-batch
            times = 2 * 3 if case == "stage 3" else 1
            assert whole - one == times * of_layer * (ranks - 1) // ranks


def test_the_expected_share_is_in_the_plan():
    plan = sl.make_plan(gpt.init(GPT), sl.abstract_mesh(data=2), sl.chain(sl.zero(), sl.progressive_layer_drop()))
    assert plan.step.layer_drop.share(10**6) == pytest.approx(1 - 0.5 * 5 / 8)
    assert "in the end 68.8% of 4 layers (blocks/0 … blocks/3)" in str(plan)


# What is refused.


def test_a_post_norm_bert_is_refused():
    config = bert.BERTConfig(vocab=32, layers=2, width=16, heads=2, sequence=8)
    state, step = sl.make_train_step(
        bert.make_loss(config), sl.shard(bert.init(config), sl.make_mesh(), DROP), sl.optim.sgd(RATE)
    )
    with pytest.raises(IllegalComposition, match=r"post-norm BERT.*pre_norm=True"):
        step(state, tokens())


def test_layers_that_are_no_blocks_are_refused():
    loss_fn, params = linear_blocks(lambda p, x: x + x.sin() @ p["w"])
    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), DROP), sl.optim.sgd(RATE))
    with pytest.raises(LossError, match=r"layers/0 … layers/3.*mark the layers' function with sl\.block"):
        step(state, torch.ones(2, 3).double())


def of_four(run):
    """A loss of four layers and a head, of which ``run(params, x)`` runs the layers."""
    params = {"blocks": [{"w": torch.eye(4) / (2 + n)} for n in range(4)], "out": torch.ones(4)}
    return lambda p, b: (run(p, b) @ p["out"]).square().mean(), params


@sl.block
def one_layer(p, x):
    return x + torch.tanh(x @ p["w"])


@sl.block
def two_layers(ps, x):
    for p in ps:
        x = x + torch.tanh(x @ p["w"])
    return x


@sl.block
def around(outer, x, layers):
    for p in layers:
        x = one_layer(p, x)
    return x * outer.sum()


def closed(p, x):
    """Layers in a block that is none, and takes no parameters of theirs."""
    return sl.block(lambda out, x: around.__wrapped__(out, x, p["blocks"]))(p["out"], x)


def in_order(p, x, order, marked=(0, 1, 2, 3)):
    for n in order:
        x = (one_layer if n in marked else one_layer.__wrapped__)(p["blocks"][n], x)
    return x


def trained_on(mesh, loss_fn, params, batch, others=()):
    """Losses, gradient norms and parameters of a batch that is one tensor."""
    sharded = sl.shard(params, mesh, sl.chain(DROP, *others))
    state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(RATE), rng=SEED)
    numbers = []
    for _ in range(STEPS):
        state, metrics = step(state, batch.chunk(mesh.shape["data"])[mesh.coords["data"]])
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return torch.tensor(numbers, dtype=torch.float64), sl.unshard(state.params)


MARK = r"mark the layers' function with sl\.block"
REFUSED = {
    "two in a block": (
        lambda p, x: two_layers(p["blocks"][2:], two_layers(p["blocks"][:2], x)),
        r"two_layers is a block of 2 layers, blocks/0, blocks/1.*Make each an sl\.block with its own parameters",
    ),
    "blocks in a block": (
        lambda p, x: around(p["out"], x, p["blocks"]),
        r"around is a block of 4 layers, blocks/0, blocks/1, blocks/2, blocks/3",
    ),
    "blocks in a block that is none": (
        closed,
        r"one_layer, the layer blocks/0, runs within a block that is no layer.*outside of other blocks",
    ),
    "another layer in a layer": (
        lambda p, x: sl.block(lambda mine, x: one_layer(p["blocks"][1], x + mine["w"].sum()))(p["blocks"][0], x),
        r"one_layer, the layer blocks/1, runs within the layer blocks/0",
    ),
    "some are no blocks": (
        lambda p, x: in_order(p, x, range(4), (1, 3)),
        rf"not run as blocks: blocks/0, blocks/2\. Either {MARK}.*layers=\['blocks/1', 'blocks/3'\]",
    ),
    "none is a block": (lambda p, x: in_order(p, x, range(4), ()), rf"none of them \(blocks/0 … blocks/3\).*{MARK}"),
    "some are copies": (
        lambda p, x: one_layer({"w": p["blocks"][3]["w"] * 1}, in_order(p, x, range(3))),
        rf"did not run as blocks: blocks/3\. Either {MARK}.*called with a layer's parameters",
    ),
    "in another order": (
        lambda p, x: in_order(p, x, (3, 2, 1, 0)),
        r"blocks/0, blocks/1, blocks/2, blocks/3, and ran in another order.*layers=\['blocks/3', 'blocks/2', 'bl",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("drop", [DROP, sl.random_ltd(2)], ids=["layers", "tokens"])
def test_layers_that_are_not_each_one_block_are_refused(kind, stage, drop):
    run, message = REFUSED[kind]
    loss_fn, params = of_four(run)

    def step(mesh):
        sharded = sl.shard(params, mesh, sl.chain(drop, sl.zero(stage)))
        state, train_step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(RATE))
        for _ in range(2):
            state, _ = train_step(state, torch.ones(2, 3, 4))

    with pytest.raises(LossError, match=message):
        sl.simulate(step, mesh={"data": 2})


@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_within_a_layer_are_parts_of_it(stage):
    """And parts of a layer that are blocks share its draw; a layer may run more than once."""
    branch = sl.block(lambda p, x: torch.tanh(x @ p["w"]))
    whole = sl.block(lambda p, x: x + branch(p, x))
    half = sl.block(lambda p, x: x + torch.tanh(x @ p["w"]))

    def run(p, x):
        for each in p["blocks"]:
            x = half(each, whole(each, x))
        return x

    def by_hand(params, batch, step):
        x = batch
        for p, (runs, keep, _) in zip(params["blocks"], kept_at(step), strict=True):
            for _ in range(2):
                x = x + torch.tanh(x @ p["w"]) / keep if runs else x
        return (x @ params["out"]).square().mean()

    loss_fn, params = of_four(run)
    params = torch.utils._pytree.tree_map(torch.Tensor.double, params)
    batch = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    expected = looped(by_hand, params, batch)

    run_on = functools.partial(trained_on, loss_fn=loss_fn, params=params, batch=batch)
    for found in sl.simulate(lambda mesh: run_on(mesh, others=(sl.zero(stage), sl.remat())), mesh={"data": 2}):
        assert_close(found, expected, 1e-10)


def with_memory(p, memory, h):
    return h + torch.tanh((h + memory) @ p["w"])


STREAMS = {
    "second": lambda layer, p, x, memory: layer(p, memory, x),
    "first": lambda layer, p, x, memory: layer(p, x, memory),
    "both by keyword": lambda layer, p, x, memory: layer(p, h=x, memory=memory),
}


@pytest.mark.parametrize("call", STREAMS)
@pytest.mark.parametrize("drop", [DROP, sl.random_ltd(2)], ids=["layers", "tokens"])
def test_a_layer_with_two_arguments_that_may_be_its_stream_is_refused(call, drop):
    """At the first step, which leaves out no layer."""
    layer = sl.block(with_memory)

    def run(p, x):
        for each in p["blocks"]:
            x = STREAMS[call](layer, each, x, x * 0 + 100.0)
        return x

    loss_fn, params = of_four(run)
    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), drop), sl.optim.sgd(RATE))
    with pytest.raises(
        LossError, match=r"(memory and h|h and memory) of one form, .*Pass the residual stream by position"
    ):
        step(state, torch.ones(2, 3, 4))


def test_the_residual_stream_is_the_argument_by_position():
    """Others of its form by keyword, of another form anywhere; one value twice is one."""
    layer = sl.block(lambda p, one, x, again, memory: one * x + torch.tanh((x + memory * again) @ p["w"]))

    def by_keyword(p, x):
        for each in p["blocks"]:
            x = layer(each, 1, x, again=x * 1, memory=x * 0 + 100.0)
        return x

    def by_hand(params, batch, step):
        x = batch
        for p, (runs, keep, _) in zip(params["blocks"], kept_at(step), strict=True):
            x = x + torch.tanh((x + 100.0 * x) @ p["w"]) / keep if runs else x
        return (x @ params["out"]).square().mean()

    def twice(p, x):
        for each in p["blocks"]:
            x = layer(each, 1, x, x, memory=x * 0 + 100.0)
        return x

    batch = torch.linspace(-0.01, 0.01, 8, dtype=torch.float64).view(2, 4)
    for how in (by_keyword, twice):
        loss_fn, params = of_four(how)
        params = torch.utils._pytree.tree_map(torch.Tensor.double, params)
        expected = looped(by_hand, params, batch)
        (numbers, after, *_), *_ = sl.simulate(
            lambda mesh, f=loss_fn, p=params: trained_on(mesh, f, p, batch), mesh={"data": 1}
        )
        assert_close((numbers, after), expected, 1e-10)


def test_a_layer_that_returns_another_form_is_refused():
    loss_fn, params = linear_blocks(sl.block(lambda p, x: (x @ p["w"]).flatten()[:3]))
    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), DROP), sl.optim.sgd(RATE))
    with pytest.raises(LossError, match=r"a layer that can be left out, takes \(\[2, 3\]\) and returns \(\[3\]\)"):
        step(state, torch.ones(2, 3).double())


def test_a_layer_that_takes_a_dictionary_and_returns_a_tensor_is_refused():
    layer = sl.block(lambda p, x: x["x"] @ p["w"])
    params = {"layers": [{"w": torch.ones(3, 3)} for _ in range(2)]}

    def loss_fn(params, batch):
        return sum(layer(p, {"x": batch}).sum() for p in params["layers"])

    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), DROP), sl.optim.sgd(RATE))
    with pytest.raises(LossError, match=r"in the structures .*'x'.* and PyTreeSpec\(\*.*layers=\["):
        step(state, torch.ones(2, 3))


def test_a_layer_without_a_stream_is_refused():
    layer = sl.block(lambda p, n: p["w"].sum() * n)
    params = {"layers": [{"w": torch.ones(2)} for _ in range(2)]}

    def loss_fn(params, batch):
        return sum(layer(p, 2) for p in params["layers"])

    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), DROP), sl.optim.sgd(RATE))
    with pytest.raises(LossError, match="the residual stream"):
        step(state, torch.ones(2, 3))


def test_gradients_by_themselves_need_the_step():
    sharded = sl.shard(gpt.init(GPT), sl.make_mesh(), DROP)
    with pytest.raises(TreeError, match=r"pass step= and rng="):
        sl.value_and_grad(gpt.make_loss(GPT))(sharded, tokens())


def info(*paths):
    return [LeafInfo(path, (len(path.rpartition("/")[2]), 3), torch.float32) for path in paths]


@pytest.mark.parametrize(
    ("paths", "globs", "found"),
    [
        (["embed/w", "blocks/0/w", "blocks/1/w", "head/w"], (), ("blocks/0", "blocks/1")),
        (["0/table", "1/w", "2/w", "3/out"], (), ("1", "2")),
        (["b/0/x/w", "b/1/moe/0/w", "b/1/moe/1/w", "b/2/x/w"], (), ("b/0", "b/2")),
        (["b/0/mlp", "b/1/moe/0/w", "b/2/mlp"], ("b/*",), ("b/0", "b/1", "b/2")),
        (["a/0/x/w", "a/1/x/w", "b/0/y", "b/1/y"], ("a/*", "b/*"), ("a/0", "a/1", "b/0", "b/1")),
        (["a/0/x/w", "a/1/x/w", "b/0/y", "b/1/y"], ("b/*", "a/*"), ("b/0", "b/1", "a/0", "a/1")),
        (["a/0/w", "a/1/w", "a/2/w", "a/3/w"], ("a/[3]", "a/1", "a/*"), ("a/3", "a/1", "a/0", "a/2")),
        ([f"h/{n}/w" for n in range(12)], ("h/1", "h/11"), ("h/1", "h/11")),
    ],
)  # fmt: skip
def test_which_layers_may_be_left_out(paths, globs, found):
    assert layers_of("drop", info(*paths), globs) == found


@pytest.mark.parametrize("globs", [(), ("*",), ("?/*",), ("b/*", "?/1")])
def test_layers_of_several_lists_need_their_order(globs):
    paths = ["b/0/x/w", "b/1/x/w", "a/0/y", "a/1/y"]
    with pytest.raises(IllegalComposition, match=r"several lists: .*Name the lists in that order.*layers=\['.*/\*'"):
        layers_of("drop", info(*paths), globs)


def test_layers_are_numbered_in_the_order_of_their_globs():
    """Dictionaries have their keys sorted: the decoder's before the encoder's."""
    params = {side: [{"w": torch.eye(4)} for _ in range(2)] for side in ("encoder", "decoder")}
    names = ["encoder/0", "encoder/1", "decoder/0", "decoder/1"]
    for make in (lambda **given: sl.progressive_layer_drop(0.5, 10.0, **given), functools.partial(sl.random_ltd, 3)):
        with pytest.raises(IllegalComposition, match=r"several lists: decoder/\*, encoder/\*"):
            sl.make_plan(params, sl.abstract_mesh(data=1), make())
        with pytest.raises(IllegalComposition, match="a set has no order"):
            make(layers={"encoder/*", "decoder/*"})
    plan = sl.make_plan(
        params,
        sl.abstract_mesh(data=1),
        sl.progressive_layer_drop(0.5, 10.0, layers=["encoder/*", "decoder/*"]),
    )
    assert plan.step.layer_drop.keep(100) == dict(zip(names, (0.875, 0.75, 0.625, 0.5)))
    plan = sl.make_plan(params, sl.abstract_mesh(data=1), sl.random_ltd(3, layers=["encoder/*", "decoder/*"]))
    assert plan.step.token_drop.middle == ("encoder/1", "decoder/0")


def test_a_tied_embedding_is_no_part_of_the_order():
    """Leaves that are tied to an earlier one are found with that."""
    tied = torch.randn(50, 16)
    square = lambda: torch.randn(16, 16)  # noqa: E731

    def layers(params):
        return sl.make_plan(params, sl.abstract_mesh(data=1), DROP).step.layer_drop.layers

    assert layers([{"w": tied}, *[{"a": square()} for _ in range(11)], {"w": tied}]) == tuple(map(str, range(1, 12)))
    deep = [{"w": tied}, *[{"mlps": [{"w": square()} for _ in range(2)]} for _ in range(3)], {"w": tied}]
    assert layers(deep) == ("1", "2", "3")
    _, params = cut(decoder("gpt2", tie=True))
    assert params[0]["transformer"]["wte"]["weight"] is params[-1]["lm_head"]["weight"]
    assert layers(params) == ("1", "2", "3", "4")
    assert layers(sl.from_module(decoder("gpt2", tie=True))[1]) == tuple(f"transformer/h/{n}" for n in range(4))


def test_layers_without_a_parameter_of_their_own_are_refused():
    """Parameters tell which layer a block is."""
    first, second, shared = ({"w": torch.eye(3), "b": torch.ones(3)} for _ in range(3))
    half = {"w": torch.eye(3), "b": first["b"]}
    for tied in (
        [first] * 3,
        [first, first, second],
        [first, first, second, shared],
        [first, half | {"w": first["w"]}, second],
    ):
        for transform in (DROP, sl.random_ltd(2, ends=0), sl.progressive_layer_drop(layers="blocks/*")):
            with pytest.raises(
                IllegalComposition, match=r"do not have:(.|\n)*blocks/1: tied to blocks/0(.|\n)*Untie a par"
            ):
                sl.make_plan({"blocks": tied}, sl.abstract_mesh(data=2), transform)
    with pytest.raises(IllegalComposition, match="blocks/1: tied to embed/w"):
        tied = [{"w": first["w"]}, {"w": shared["w"]}, {"w": second["w"]}]
        sl.make_plan({"embed": {"w": shared["w"]}, "blocks": tied}, sl.abstract_mesh(data=2), DROP)
    plan = sl.make_plan({"blocks": [first, half]}, sl.abstract_mesh(data=1), DROP)
    assert plan.step.layer_drop.layers == ("blocks/0", "blocks/1")


def test_a_glob_of_no_layers_is_refused_beside_others():
    with pytest.raises(IllegalComposition, match=r"no element of a list matches b/\*"):
        layers_of("drop", info("a/0/w", "a/1/w"), ("a/*", "b/*"))


@pytest.mark.parametrize(("paths", "globs"), [(["w", "b"], ()), (["a/0", "a/1"], ()), (["a/0/w", "a/1/w"], ("b/*",))])
def test_models_without_layers_are_refused(paths, globs):
    with pytest.raises(IllegalComposition, match="drop leaves out layers"):
        layers_of("drop", info(*paths), globs)
