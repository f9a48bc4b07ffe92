"""Random layer-wise token dropping: against loops that leave out the same tokens, equal on every mesh, alone and with layers
that are left out."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from helpers import drops
from helpers.decoders import cut, decoder, in_float64, label_batches
from helpers.drops import (
    BERT,
    GPT,
    RATE,
    SEED,
    SLICES,
    STEPS,
    in_list,
    layer_tokens,
    looped,
    tokens,
    trained,
    visits_at,
)
from helpers.trees import assert_close

import shardlib as sl
from shardlib.errors import BatchError, IllegalComposition, LossError
from shardlib.execute.token_subset import Subset, drawn_tokens
from shardlib.models import bert, gpt
from shardlib.plan.drops import LayerDrop, TokenDrop

PACE = sl.data.linear_pace(3, 8, steps=4)
LTD, DROP = sl.random_ltd(PACE), sl.progressive_layer_drop(0.5, 5.0)
PLANS = {"tokens": LTD, "tokens and layers": sl.chain(LTD, DROP)}


def visits(step, layers_too):
    return visits_at(step, PACE, LayerDrop(0.5, 5.0, tuple("abcd")) if layers_too else None)


# The schedule and the draw.


def test_the_schedule_is_deepspeeds():
    drop = TokenDrop(sl.data.linear_pace(16, 64, steps=6, multiple=8), 1, tuple(map(str, range(12))))
    assert [drop.kept(step) for step in range(8)] == [16, 24, 32, 40, 48, 56, 64, 64]
    assert sum(drop.layer_tokens(step, 4, 64) for step in range(8)) == 17856
    assert sl.data.layer_tokens(drop, sl.data.curriculum(4, sequence=64)).total(8) == 17856
    assert drop.middle == tuple(map(str, range(1, 11)))


def test_a_rate_by_consumed_layer_tokens():
    """Not there in DeepSpeed (NotImplementedError)."""
    drop = TokenDrop(PACE, 1, tuple("abcd"))
    per_step, whole = sl.data.layer_tokens(drop, sl.data.curriculum(8, sequence=8)), 8 * 8 * 4
    cosine = sl.optim.cosine_decay_schedule(1.0, 20 * whole)
    rate = sl.optim.token_schedule(cosine, per_step.total)
    for step in (0, 1, 5, 17, 30):
        consumed = sum(drop.layer_tokens(before, 8, 8) for before in range(step))
        t = min(consumed / (20 * whole), 1.0)
        assert float(rate(step)) == pytest.approx(0.5 * (1 + math.cos(math.pi * t)))
    with pytest.raises(BatchError, match="kept"):
        sl.data.layer_tokens(TokenDrop(lambda step: 4, 1, tuple("abc")), sl.data.curriculum(8, sequence=8))
    with pytest.raises(BatchError, match="give sequence="):
        sl.data.layer_tokens(drop, sl.data.curriculum(8))
    assert (
        sl.data.layer_tokens(TokenDrop(4, 1, tuple("abcd")), sl.data.curriculum(8, sequence=8)).total(3) == 3 * 8 * 24
    )


@pytest.mark.parametrize(("length", "count"), [(1, 1), (7, 3), (64, 63), (5, 0)])
def test_tokens_are_drawn_without_replacement_in_order(length, count):
    index = drawn_tokens(sl.Key(1), 50, length, count, torch.device("cpu"))
    assert index.shape == (50, count) and bool((index.diff(dim=1) > 0).all())
    assert not index.numel() or (int(index.min()) >= 0 and int(index.max()) < length)


def test_every_token_and_every_pair_is_as_likely():
    rows, length, count = 20_000, 6, 3
    index = drawn_tokens(sl.Key(2), rows, length, count, torch.device("cpu"))
    there = torch.zeros(rows, length).scatter_(1, index, 1.0)
    pairs = (there.T @ there) / rows
    for i in range(length):
        for j in range(length):
            p = count / length * (1 if i == j else (count - 1) / (length - 1))
            assert abs(float(pairs[i, j]) - p) < 4.5 * math.sqrt(p * (1 - p) / rows)


def test_a_sequence_draws_by_its_place_in_the_global_batch():
    whole = drawn_tokens(sl.Key(3), 12, 9, 4, torch.device("cpu"))
    for parts in (2, 3, 6):
        of_slots = [drawn_tokens(sl.Key(3).at_slot(n), 12 // parts, 9, 4, torch.device("cpu")) for n in range(parts)]
        assert torch.equal(torch.cat(of_slots), whole)


def test_experts_weigh_the_tokens_that_a_rank_has_at_once():
    """A router's losses are no means over rows, whatever is left out: ranks' rows are one device's micro-batches."""
    experts = gpt.Experts((0, 4), sl.nn.MoEConfig(sl.nn.routers.top_k(2), "gelu_tanh"), load=0.1, z=1e-2)
    config = dataclasses.replace(GPT, moe=experts)

    def run(ranks, *others):
        chain = sl.chain(LTD, DROP, *others)
        return sl.simulate(trained, chain, gpt.make_loss(config), gpt.init(config), tokens(), mesh={"data": ranks})[0]

    numbers, params, _, seen_tokens = run(1, sl.accumulate(4))
    for found in (run(4, sl.zero(3)), run(2, sl.zero(1), sl.accumulate(2))):
        assert_close((found[0], found[1]), (numbers, params), 1e-10)
        assert found[3] == seen_tokens
    assert (run(1)[0] - numbers).abs().max() > 1e-5  # another loss


# Equal to a loop, on every mesh.

CASES = {
    "one device": ({"data": 1}, ()),
    "stage 1": ({"data": 2}, (sl.zero(1), sl.accumulate(2))),
    "stage 2": ({"data": 4}, (sl.zero(2), sl.remat())),
    "stage 3": ({"data": 2}, (sl.zero(3), sl.accumulate(4))),
    "slices": ({"data": 2, "model": 2}, (sl.zero(3), SLICES, sl.remat("dots"))),
}
STAGES = {
    "1f1b": ({"data": 2, "pipe": 2}, (sl.zero(3), sl.pipeline("1f1b", 2), sl.remat())),
    "split backward": ({"pipe": 2}, (sl.pipeline("zb-h1", 4),)),
}


@pytest.fixture(scope="module", params=PLANS)
def reference(request):
    layers_too = request.param == "tokens and layers"

    def loss(params, batch, step):
        return drops.gpt_loss(params, batch, visits(step, layers_too))

    return (
        PLANS[request.param],
        looped(loss, gpt.init(GPT), tokens()),
        [layer_tokens(visits(step, layers_too)) for step in range(STEPS)],
    )


@pytest.mark.parametrize("case", [*CASES, *STAGES])
def test_equal_to_a_loop_on_every_mesh(reference, case):
    drop, expected, counts = reference
    staged = case in STAGES
    mesh, transforms = (CASES | STAGES)[case]
    params, loss_fn = gpt.init(GPT), gpt.make_sequential(GPT) if staged else gpt.make_loss(GPT)
    params = gpt.to_blocks(params) if staged else params
    run = partial(trained, transform=sl.chain(drop, *transforms), loss_fn=loss_fn, params=params, batch=tokens())
    for numbers, after, _, consumed in sl.simulate(run, mesh=mesh):
        assert_close((numbers, in_list(after) if staged else after), expected, 1e-10)
        assert consumed == counts


def test_equal_to_a_loop_in_processes(pool):
    def loss(params, batch, step):
        return drops.gpt_loss(params, batch, visits(step, True))

    expected = looped(loss, gpt.init(GPT), tokens())
    transform = sl.chain(LTD, DROP, sl.zero(3))
    ran = pool.run(trained, transform, gpt.make_loss(GPT), gpt.init(GPT), tokens(), mesh={"data": 2})
    for numbers, after, *_ in ran:
        assert_close((numbers, after), expected, 1e-10)


def gradients(loss_fn, params, batch, step, transform=LTD):
    sharded = sl.shard(params, sl.make_mesh(), transform)
    loss, grads = sl.value_and_grad(loss_fn)(sharded, batch, step=step, rng=sl.Key(SEED).fold_in(step))
    return loss, sl.unshard(grads)


def by_autograd(loss_of, params):
    leaves, shape = torch.utils._pytree.tree_flatten(params)
    distinct = {id(leaf): leaf.clone().requires_grad_() for leaf in leaves}
    loss = loss_of(torch.utils._pytree.tree_unflatten([distinct[id(leaf)] for leaf in leaves], shape))
    grads = dict(zip(distinct, torch.autograd.grad(loss, list(distinct.values()), materialize_grads=True)))
    return loss.detach(), torch.utils._pytree.tree_unflatten([grads[id(leaf)] for leaf in leaves], shape)


def test_masks_of_a_bert():
    generator = torch.Generator().manual_seed(2)
    batch = tokens() | {"mask": torch.rand(8, 8, generator=generator) < 0.7}
    batch["mask"][:, 0] = True
    params = bert.init(BERT)
    for step in range(3):
        masked = visits(step, False)
        for _, _, index in masked:  # with nothing to see attention is undefined
            if index is not None:
                batch["mask"].scatter_(1, index[:, :1], True)
        expected = by_autograd(lambda p, v=masked: drops.bert_loss(p, batch, v), params)
        assert_close(gradients(bert.make_loss(BERT), params, batch, step), expected, 1e-10)


def test_segments_of_packed_documents():
    batch = tokens() | {
        "segments": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]).expand(8, -1).contiguous(),
        "positions": torch.arange(8).expand(8, -1).contiguous(),
    }
    params = gpt.init(GPT)
    for step in range(3):
        there = visits(step, False)
        expected = by_autograd(lambda p, v=there: drops.gpt_loss(p, batch, v), params)
        assert_close(gradients(gpt.make_loss(GPT), params, batch, step), expected, 1e-10)


@pytest.mark.parametrize("optional", [(), ("attention_mask",)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders_of_transformers(kind, optional):
    module = in_float64(decoder(kind)).train()
    loss_fn, params = cut(module)
    batch = label_batches(1, 8, optional)[0]

    def by_hand(params, step):
        carry = None
        for number, (block, p) in enumerate(zip(loss_fn.blocks, params, strict=True)):
            visit = visits(step, False)[number - 1] if 1 <= number <= 4 else (True, 1.0, None)

            def layer(x, keep, mask, positions, block=block, p=p):
                ids = torch.zeros_like(positions)
                return block(p, x, {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions})

            if visit[2] is None:
                carry = block(p, carry, batch)
            else:
                mask = batch.get("attention_mask", torch.ones(8, 8, dtype=torch.int64))
                carry = drops.through(carry, visit, layer, mask, torch.arange(8).expand(8, -1))
        return carry.total / carry.weight

    for step in (0, 2):
        expected = by_autograd(partial(by_hand, step=step), params)
        transform = sl.chain(LTD, sl.remat()) if optional else LTD
        assert_close(gradients(loss_fn, params, batch, step, transform), expected, 1e-10)


def test_rotary_positions_are_those_of_the_tokens():
    """Against the whole model, whose mask hides the tokens that one layer does not see: a layer of two."""
    module = in_float64(decoder("llama", num_hidden_layers=3)).train()
    loss_fn, params = cut(module)
    batch = label_batches(1, 8)[0]
    loss, _ = gradients(loss_fn, params, batch, 0)
    index = drawn_tokens(sl.Key(SEED).fold_in(0).fold_in("random_ltd").fold_in(1), 8, 8, 3, torch.device("cpu"))
    seen = torch.zeros(8, 8, dtype=torch.int64).scatter_(1, index, 1)
    blocks = loss_fn.blocks
    x = blocks[1](params[1], blocks[0](params[0], None, batch), batch)
    after = blocks[2](
        params[2], x, batch | {"attention_mask": seen}
    )  # at its own positions; rows that see nothing aside
    x = torch.where(seen[..., None] == 1, after, x)
    mean = blocks[4](params[4], blocks[3](params[3], x, batch), batch)
    assert_close(loss, (mean.total / mean.weight).detach(), 1e-10)


def test_packed_documents_of_transformers_are_refused():
    loss_fn, params = cut(decoder("llama").train())
    batch = label_batches(1, 8, ("position_ids",))[0]
    with pytest.raises(BatchError, match="random_ltd leaves out tokens, and transformers finds packed documents"):
        gradients(loss_fn, params, batch, 0)


def test_masks_of_two_sides():
    """(B, 1, tokens, tokens) and (1, heads, tokens, tokens), as arguments of a user's block."""
    index = torch.tensor([[0, 2], [1, 3]])
    both = torch.arange(32.0).view(2, 1, 4, 4), torch.arange(48.0).view(1, 3, 4, 4)
    one, other = Subset(index, 4).of(both, lambda leaf: False)
    for row, line in enumerate(index):
        assert torch.equal(one[row, 0], both[0][row, 0][line][:, line])
        assert torch.equal(other[row], both[1][0][:, line][:, :, line])


def test_evaluation_sees_all_tokens():
    sharded = sl.shard(gpt.init(GPT), sl.make_mesh(), LTD)
    evaluate = sl.make_eval_step(gpt.make_loss(GPT), sharded)
    assert_close(evaluate(sharded, tokens()), gpt.make_loss(GPT)(gpt.init(GPT), tokens()), 1e-12)


# What is sent and computed.


def test_a_plan_of_one_step_has_its_tokens():
    mesh, transform = {"data": 2, "model": 2}, sl.chain(LTD, sl.zero(1), SLICES)
    params, loss_fn, batch = gpt.init(GPT), gpt.make_loss(GPT), tokens()
    ran = sl.simulate(lambda mesh: trained(mesh, transform, loss_fn, params, batch), mesh=mesh)
    rows = {name: value[:4] for name, value in batch.items()}
    flops = []
    steps = (0, 2, 4)
    for step in steps:
        plan = sl.make_plan(
            params, sl.abstract_mesh(**mesh), transform, loss_fn=loss_fn, batch=rows, optimizer=sl.optim.sgd(RATE),
            step=step, rng=SEED,
        )  # fmt: skip
        assert plan.payload() == ran[0][2][step]
        flops.append(sum(plan.traces[0].flops))
    assert flops == sorted(flops) and len(set(flops)) == len(steps)
    whole = sl.make_plan(params, sl.abstract_mesh(**mesh), transform, loss_fn=loss_fn, batch=rows)
    assert sum(whole.traces[0].flops) == flops[-1]


# What is refused.


def test_sequences_that_are_cut_are_refused():
    with pytest.raises(IllegalComposition, match=r"random_ltd\(.*draws tokens of whole sequences"):
        sl.make_plan(
            gpt.init(GPT), sl.abstract_mesh(seq=2), sl.chain(LTD, sl.sequence("seq", "ring"), sl.zero(1, axis="seq"))
        )


@pytest.mark.parametrize("later", [0, -3, 2.7, math.nan, "many", None, True])
def test_a_schedule_that_gives_no_number_of_tokens_later_is_refused(later):
    transform = sl.random_ltd(lambda step: 4 if step < 2 else later)
    state, step = sl.make_train_step(
        gpt.make_loss(GPT), sl.shard(gpt.init(GPT), sl.make_mesh(), transform), sl.optim.sgd(RATE), donate=False
    )
    for _ in range(2):
        state, _ = step(state, tokens())
    with pytest.raises(IllegalComposition, match=rf"it gives {later!r} at step 2; use a number of tokens, at least 1"):
        step(state, tokens())


def test_no_middle_layers_are_refused():
    with pytest.raises(IllegalComposition, match="the first and the last 2 of 4 layers"):
        sl.make_plan(gpt.init(GPT), sl.make_mesh(), sl.random_ltd(PACE, ends=2))


def of_layers(layer):
    layer = sl.block(layer)

    def loss_fn(params, batch):
        x = batch
        for p in params["layers"]:
            x = layer(p, x)
            x = x[0] if isinstance(x, tuple) else x
        return x.square().mean()

    return loss_fn, {"layers": [{"w": torch.eye(3)} for _ in range(3)]}


@pytest.mark.parametrize(
    ("layer", "batch", "message"),
    [
        (lambda p, x: x @ p["w"], torch.ones(2, 3), "a stream (B, tokens, width), and this one is [2, 3]"),
        (lambda p, x: ((x @ p["w"]), x), torch.ones(2, 5, 3), "return what it takes for each token"),
        (
            lambda p, x: x if x.shape[1] == 5 else x.mean(1, keepdim=True) @ p["w"],
            torch.ones(2, 5, 3),
            "takes (B, tokens, 3) and returns nothing",
        ),
    ],
)
def test_layers_without_a_stream_of_tokens_are_refused(layer, batch, message):
    loss_fn, params = of_layers(layer)
    with pytest.raises(LossError) as refused:
        gradients(loss_fn, params, batch, 0)
    assert message in str(refused.value)


def beside_the_stream(layer, extra):
    """A loss of three layers ``layer(p, x, extra=extra)`` on 5 tokens, of which the one in the middle sees 3 at step 0."""
    layer = sl.block(layer)

    def loss_fn(params, batch):
        x = batch
        for p in params["layers"]:
            x = layer(p, x, extra=extra)
        return x.square().mean()

    generator = torch.Generator().manual_seed(5)
    return loss_fn, {"layers": [{"w": torch.eye(3).double()} for _ in range(3)]}, torch.rand(
        2, 5, 3, generator=generator, dtype=torch.float64
    )  # fmt: skip


@pytest.mark.parametrize("size", [4, 5])
def test_vectors_of_rows_are_whole_however_long_they_are(size):
    """As long as the sequence too: the layer sums what it is given."""
    extra = torch.arange(2.0 * size, dtype=torch.float64).view(2, size) + 1

    def layer(p, x, extra):
        return x + x.sin() @ p["w"] * extra.sum(1)[:, None, None]

    loss_fn, params, batch = beside_the_stream(layer, extra)
    index = drawn_tokens(sl.Key(SEED).fold_in(0).fold_in("random_ltd").fold_in(1), 2, 5, 3, torch.device("cpu"))

    def by_hand(params):
        x = batch
        for p, seen in zip(params["layers"], (None, index, None), strict=True):
            x = drops.through(x, (True, 1.0, seen), lambda x, keep, p=p: layer(p, x, extra))
        return x.square().mean()

    assert_close(gradients(loss_fn, params, batch, 0), by_autograd(by_hand, params), 1e-10)


def test_values_of_tokens_in_a_matrix_are_refused_with_the_form_that_is_cut():
    weights = torch.rand(2, 5, dtype=torch.float64)
    loss_fn, params, batch = beside_the_stream(lambda p, x, extra: x + x.sin() @ p["w"] * extra[..., None], weights)
    with pytest.raises(
        LossError, match=r"on the 3 tokens that random_ltd keeps, beside \(\[2, 5\]\).*\(B, tokens, 1\)"
    ):
        gradients(loss_fn, params, batch, 0)
    loss_fn, *_ = beside_the_stream(lambda p, x, extra: x + x.sin() @ p["w"] * extra, weights[..., None])
    gradients(loss_fn, params, batch, 0)


def test_an_error_of_a_layer_stays_what_it_is():
    def layer(p, x, extra):
        if x.shape[1] == 3:
            raise IndexError("the layer's own")
        return x + x @ p["w"]

    loss_fn, params, batch = beside_the_stream(layer, torch.ones(2, 5))
    with pytest.raises(IndexError, match="the layer's own"):
        gradients(loss_fn, params, batch, 0)


@pytest.mark.parametrize(("shape", "told"), [((2, 5, 3), 1), ((2, 5, 7), 1), ((2, 1, 5, 3), 0), ((2, 4, 3), 0)])
def test_a_second_sequence_beside_the_stream_is_told_of(shape, told, caplog):
    """That may be values of the tokens, or an encoder's that is as long."""
    loss_fn, params, batch = beside_the_stream(
        lambda p, x, extra: x + x.sin() @ p["w"] * extra.sum(), torch.ones(shape, dtype=torch.float64)
    )
    sharded = sl.shard(params, sl.make_mesh(), LTD)
    grad_fn = sl.value_and_grad(loss_fn)
    for step in (0, 1):
        grad_fn(sharded, batch, step=step, rng=sl.Key(SEED).fold_in(step))
    messages = [text for text in caplog.messages if "random_ltd cuts what" in text and str(list(shape)) in text]
    assert len(messages) == told


def test_short_sequences_are_not_changed():
    loss_fn, params = of_layers(lambda p, x: x + x.sin() @ p["w"])
    batch = torch.ones(2, 3, 3)
    assert_close(gradients(loss_fn, params, batch, 0)[1], by_autograd(lambda p: loss_fn(p, batch), params)[1], 1e-6)


# In graphs.

GRAPHS = {
    "0": ({"data": 1}, sl.zero(0)),
    "3, recomputed, in 2 micro-batches": ({"data": 2}, sl.zero(3), sl.remat(), sl.accumulate(2)),
    "2, dots kept, in bf16": ({"data": 2}, sl.zero(2), sl.remat("dots"), sl.precision("bf16")),
    "3, in slices": ({"data": 2, "model": 2}, sl.zero(3), SLICES),
    "pipeline": ({"data": 2, "pipe": 2}, sl.zero(1), sl.pipeline("zb-h1", microbatches=2), sl.remat()),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_equal(name):
    """To the bit, with other tokens in each step, and with more of them while the schedule rises."""
    mesh, *transforms = GRAPHS[name]
    config = dataclasses.replace(GPT, dropout=0.1)
    loss_fn, params = gpt.make_loss(config), gpt.init(config)
    if name == "pipeline":
        loss_fn, params = gpt.make_sequential(config), gpt.to_blocks(params)

    def run(mesh, compile):
        sharded = sl.shard(params, mesh, sl.chain(LTD, *transforms))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(RATE), rng=SEED, compile=compile)
        found = []
        for _ in range(6):
            state, metrics = step(state, drops.share(mesh, tokens()))
            found.append((metrics["loss"].item(), metrics["grad_norm"].item(), metrics["layer_tokens"]))
        if compile:
            assert step.graph.graphs
        return found, sl.unshard(state.params)

    compiled, eager = (sl.simulate(run, how, mesh=mesh) for how in (True, False))
    assert compiled[0][0] == eager[0][0] and len({seen for *_, seen in eager[0][0]}) > 2
    assert_close(compiled[0][1], eager[0][1], 0)


def test_a_schedule_may_rise_more_often_than_there_are_graphs():
    config = dataclasses.replace(GPT, sequence=16)
    drawn = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}
    params = sl.shard(gpt.init(config), sl.make_mesh(), sl.random_ltd(lambda step: 1 + step))
    state, step = sl.make_train_step(gpt.make_loss(config), params, sl.optim.adamw(RATE), compile=True)
    for _ in range(11):
        state, _ = step(state, batch)
    assert len(step.graph.graphs) == 1


def test_layers_that_are_left_out_have_no_graph():
    with pytest.raises(
        IllegalComposition, match=r"(?s)compile=True does not go together with.*progressive_layer_drop: "
    ):
        sl.make_train_step(
            gpt.make_loss(GPT), sl.shard(gpt.init(GPT), sl.make_mesh(), DROP), sl.optim.adamw(RATE), compile=True
        )
