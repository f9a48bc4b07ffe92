"""The GPT with experts against layers written down expert by expert, and its training on meshes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import training
from helpers.models import shaken
from helpers.training import assert_same_training, optimizer, simulate
from helpers.trees import assert_close
from optree import tree_leaves, tree_map

import shardlib as sl
from shardlib.models import gpt
from shardlib.nn import routers

ROUTER = routers.top_k(2, renormalise="chosen", load="sum")
EXPERTS = gpt.Experts(
    (0, 4, 0, 6), sl.nn.MoEConfig(ROUTER, "gelu_tanh"), hidden=10, shared=6, residual=14, load=0.1, z=0.02
)
CONFIG = gpt.GPTConfig(vocab=29, layers=4, width=12, heads=2, sequence=8, dtype=torch.float64, moe=EXPERTS)


def drawn(config=CONFIG):
    return shaken(gpt.init(config), 0.2)  # so that routers tell tokens apart


def batch_of(rows, seed=2):
    tokens = torch.randint(29, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}


def mlp(p, x):
    return F.linear(F.gelu(F.linear(x, p["up"], p["up_bias"]), approximate="tanh"), p["down"], p["down_bias"])


def by_hand(params, batch, present=None):
    """The loss, with every expert computed for every token; ``present`` (B, S) leaves out padding."""
    b, s = batch["tokens"].shape
    present = torch.ones(b, s, dtype=torch.bool) if present is None else present
    x = params["embed"]["tokens"][batch["tokens"]] + params["embed"]["positions"][:s]
    losses, shares = 0.0, []
    seen = torch.ones(s, s, dtype=torch.bool).tril() & (present[:, None, :, None] == present[:, None, None, :])
    for p in params["blocks"]:
        h = F.layer_norm(x, (12,), p["ln1"]["weight"], p["ln1"]["bias"])
        q, k, v = F.linear(h, p["attn"]["qkv"]["weight"], p["attn"]["qkv"]["bias"]).view(b, s, 2, 3, 6).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.mT / 6**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + F.linear(scores.transpose(1, 2).flatten(2), p["attn"]["out"]["weight"], p["attn"]["out"]["bias"])
        h = F.layer_norm(x, (12,), p["ln2"]["weight"], p["ln2"]["bias"])
        if "mlp" in p:
            x = x + mlp(
                {n + e: p["mlp"][n][w] for n in ("up", "down") for e, w in (("", "weight"), ("_bias", "bias"))}, h
            )
            continue
        moe, number = p["moe"], len(p["moe"]["router"]["weight"])
        logits = F.linear(h, moe["router"]["weight"])
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(logits).scatter(-1, probabilities.topk(2).indices, 1.0) * present[..., None]
        weights = probabilities * chosen
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        y = sum(
            weights[..., e, None] * mlp({name: leaf[e] for name, leaf in moe["experts"].items()}, h)
            for e in range(number)
        )
        mix = F.linear(h, moe["residual"]["mix"]["weight"], moe["residual"]["mix"]["bias"]).softmax(-1)
        x = x + mix[..., :1] * y + mix[..., 1:] * mlp(moe["residual"], h) + mlp(moe["shared"], h)
        tokens = present.sum()
        frequency, mean = chosen.sum((0, 1)) / tokens, (probabilities * present[..., None]).sum((0, 1)) / tokens
        losses = losses + 0.1 * number * (frequency.detach() * mean).sum()
        losses = losses + 0.02 * (logits.logsumexp(-1).square() * present).sum() / tokens
        shares.append(frequency / 2)
    x = F.layer_norm(x, (12,), params["head"]["norm"]["weight"], params["head"]["norm"]["bias"])
    scores = F.linear(x, params["head"]["weight"]).flatten(0, 1)
    return F.cross_entropy(scores, batch["targets"].flatten(), ignore_index=-100) + losses, shares


def test_the_model_written_down():
    params, batch = drawn(), batch_of(6)
    trained = tree_map(lambda leaf: leaf.clone().requires_grad_(), params)
    expected, shares = by_hand(trained, batch)
    grads = torch.autograd.grad(expected, tree_leaves(trained))
    (loss, aux), found = sl.value_and_grad(gpt.make_loss(CONFIG))(params, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for mine, theirs in zip(tree_leaves(found), grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        assert theirs.abs().max() > 1e-6
    assert list(aux["experts"]) == ["1", "3"]
    for layer, expected in zip(aux["experts"].values(), shares, strict=True):
        torch.testing.assert_close(torch.stack(layer["shares"]), expected)
        assert layer["dropped"] == 0 and 0 < layer["entropy"] < 1.8


def test_padding_goes_to_no_expert_and_is_in_no_loss():
    params, batch = drawn(), batch_of(4)
    batch["targets"][1, 5:], batch["targets"][3, 2:] = -100, -100
    present = batch["targets"] != -100
    segments = torch.where(present, 0, -1)
    batch |= {"segments": segments, "positions": torch.arange(8).expand(4, 8)}
    expected, shares = by_hand(params, batch, present)
    loss, aux = sl.value_and_grad(gpt.make_loss(CONFIG))(params, batch)[0]
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(torch.stack(aux["experts"]["3"]["shares"]), shares[1])


MESHES = {
    **{f"stage {stage}": ({"data": 2}, (sl.zero(stage),)) for stage in range(4)},
    "recomputed": ({"data": 2}, (sl.zero(3), sl.remat())),
    "sliced": ({"data": 2, "model": 2}, (sl.zero(3), sl.tensor_slicing(gpt.slicing_rules(CONFIG)))),
    "dealt out": ({"expert": 2}, (sl.experts(), sl.zero(3, axis="expert"))),
    "dealt out and sliced": (
        {"expert": 2, "model": 2},
        (sl.experts(), sl.zero(1, axis="expert"), sl.tensor_slicing(gpt.slicing_rules(CONFIG))),
    ),
    "1f1b": ({"data": 1, "pipe": 2}, (sl.zero(2), sl.pipeline("1f1b", microbatches=2))),
    "zb-h1, recomputed": ({"data": 1, "pipe": 4}, (sl.zero(1), sl.pipeline("zb-h1", microbatches=2), sl.remat())),
}


@pytest.fixture(scope="module")
def alone():
    """Losses are of the tokens that a rank has at once: two halves, one after the other."""
    return trained({"data": 1}, sl.zero(0), sl.accumulate(2))


def trained(mesh, *transforms):
    staged, params = "pipe" in mesh, drawn()
    loss_fn = gpt.make_sequential(CONFIG) if staged else gpt.make_loss(CONFIG)
    given = gpt.to_blocks(params) if staged else params
    batches = [batch_of(8, seed) for seed in (3, 4)]
    losses, norms, final = simulate(mesh, loss_fn, given, batches, sl.chain(*transforms), optimizer(1.0))
    return losses, norms, gpt.from_blocks(final) if staged else final


@pytest.mark.parametrize("mesh", MESHES)
def test_training_on_meshes(alone, mesh):
    found = trained(MESHES[mesh][0], *MESHES[mesh][1])
    assert_same_training(found, alone)


def test_real_processes(pool):
    """Four, of which two share each expert; one device takes their tokens one after the other."""
    chain = sl.chain(sl.experts(), sl.zero(3, axis=("data", "expert")), sl.remat())
    batches = [batch_of(8, seed) for seed in (3, 4)]

    def run(mesh):
        return training.train(mesh, gpt.make_loss(CONFIG), drawn(), batches, chain, optimizer(1.0))

    alone = trained({"data": 1}, sl.zero(0), sl.accumulate(4))
    for found in pool.run(run, mesh={"data": 2, "expert": 2}):
        assert_same_training(found, alone)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_sequence_parts(kind):
    """But for the load loss, which is of a rank's tokens, a sequence that is cut trains as a whole one."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(EXPERTS, load=0.0))

    def run(mesh, *transforms):
        return simulate(mesh, gpt.make_loss(config), drawn(), [batch_of(4)], sl.chain(*transforms), optimizer(1.0))

    alone, found = run({"data": 1}, sl.zero(0)), run({"seq": 2}, sl.sequence("seq", kind), sl.zero(3, axis="seq"))
    assert_same_training(found, alone)


def test_shares_are_of_all_ranks_and_micro_batches():
    def run(mesh):
        state, step = sl.make_train_step(
            gpt.make_loss(CONFIG), sl.shard(drawn(), mesh, sl.chain(sl.zero(1), sl.accumulate(2))), sl.optim.sgd(0.1)
        )
        rows = slice(4 * mesh.rank, 4 * mesh.rank + 4)
        return step(state, {name: tensor[rows] for name, tensor in batch_of(8).items()})[1]["aux"]["experts"]["1"]

    whole = sl.value_and_grad(gpt.make_loss(CONFIG))(drawn(), batch_of(8))[0][1]["experts"]["1"]
    for layer in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(torch.stack(layer["shares"]), torch.stack(whole["shares"]), rtol=1e-12, atol=0)
        assert float(layer["entropy"]) == pytest.approx(float(whole["entropy"]), rel=1e-10)


def test_a_layer_is_drawn_shard_by_shard():
    """Each rank draws what is its own, the same numbers as one device."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(EXPERTS, balance=True))
    found = sl.simulate(lambda mesh: sl.unshard(sl.shard(lambda: gpt.init(config), mesh, stage=3)), mesh={"data": 3})
    for params in found:
        assert_close(params, gpt.init(config), 0)
    assert sum(leaf.numel() for leaf in tree_leaves(gpt.init(config))) == gpt.parameters_count(config)
    first, other = (gpt.init(config)["blocks"][layer]["moe"]["experts"]["up"] for layer in (1, 3))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])
    assert float(first.std()) == pytest.approx(0.02, rel=0.15)
    down = gpt.init(config)["blocks"][1]["moe"]["experts"]["down"]
    assert float(down.std()) == pytest.approx(0.02 / 8**0.5, rel=0.15)


def test_sampling():
    prompts, params = batch_of(2)["tokens"][:, :3].tolist(), drawn()
    for prompt, new in zip(prompts, sl.generate(CONFIG, params, prompts, 4, temperature=0)):
        for token in new.tolist():
            assert token == gpt.logits(CONFIG, params, torch.tensor([prompt]))[0, -1].argmax()
            prompt.append(token)


def test_no_token_is_dropped_in_generating():
    """An expert with room for one token; alone, every token has it."""
    router = sl.nn.routers.top_k(1, capacity=sl.nn.routers.Capacity(1e-9, minimum=1))
    experts = dataclasses.replace(CONFIG.moe, config=dataclasses.replace(CONFIG.moe.config, router=router))
    config, params = dataclasses.replace(CONFIG, moe=experts), drawn()
    whole = dataclasses.replace(
        config, moe=dataclasses.replace(experts, config=sl.nn.MoEConfig(sl.nn.routers.top_k(1), experts.config.expert))
    )
    prompts = batch_of(3)["tokens"][:, :5].tolist()
    assert not torch.equal(
        gpt.logits(config, params, torch.tensor(prompts)), gpt.logits(whole, params, torch.tensor(prompts))
    )
    found, wanted = (sl.generate(c, params, prompts, 6, seed=2) for c in (config, whole))
    assert all(map(torch.equal, found, wanted))


def test_a_choice_by_experts_cannot_generate():
    config = dataclasses.replace(CONFIG.moe.config, router=sl.nn.routers.expert_choice(1.0))
    with pytest.raises(ValueError, match="chooses among all tokens of a text"):
        sl.generate(dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, config=config)), drawn(), [[1]], 1)


@pytest.mark.parametrize(
    ("per_layer", "message"),
    [
        ((), "numbers in turn"),
        ((0,), "numbers in turn"),
        ((-1, 2), "numbers in turn"),
        ((0, 2, 2), "does not divide layers=4; give each a number"),
    ],
)
def test_patterns_that_do_not_fit(per_layer, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, moe=gpt.Experts(per_layer, EXPERTS.config))


def test_an_expert_of_ones_own_has_no_initial_parameters():
    own = gpt.Experts((2,), sl.nn.MoEConfig(ROUTER, by_hand))
    with pytest.raises(ValueError, match="the expert function 'by_hand' are unknown"):
        gpt.init(dataclasses.replace(CONFIG, moe=own))


def test_what_is_sliced():
    """All but the routers, the norms and "mix" is cut."""
    rules = sl.tensor_slicing(gpt.slicing_rules(CONFIG))
    placed = sl.make_plan(gpt.init(CONFIG), sl.abstract_mesh(data=1, model=2), rules).placement_of
    uncut = {path for path, placement in placed.items() if not placement.compute.spec.axes}
    assert {path.removeprefix("blocks/1/moe/") for path in uncut if path.startswith("blocks/1/moe")} == {
        "router/weight", "experts/down_bias", "shared/down_bias", "residual/down_bias", "residual/mix/bias",
        "residual/mix/weight",
    }  # fmt: skip


BALANCED = dataclasses.replace(EXPERTS, balance=True, load=0.0)
PLACES = {
    "stage 0": ({"data": 1}, (sl.zero(0),)),
    "stage 3": ({"data": 2}, (sl.zero(3),)),
    "stage 3 of three": ({"data": 3}, (sl.zero(3),)),
    "dealt out": ({"expert": 2}, (sl.experts(), sl.zero(3, axis="expert"))),
    "stages": ({"data": 1, "pipe": 2}, (sl.zero(3), sl.pipeline("1f1b", microbatches=2))),
}


@pytest.mark.parametrize("place", PLACES)
def test_balance_without_a_loss(place):
    """The biases after two steps are those that one device gets from the counts of the whole batch."""
    config = dataclasses.replace(CONFIG, moe=BALANCED)
    mesh, transforms = PLACES[place]
    staged = "pipe" in mesh

    def run(mesh):
        params, loss_fn = drawn(config), (gpt.make_sequential if staged else gpt.make_loss)(config)
        plan = sl.chain(sl.freeze("*router/balance"), *transforms)
        sharded = sl.shard(gpt.to_blocks(params) if staged else params, mesh, plan)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.0))
        number = mesh.shape.get("data", 1) * mesh.shape.get("expert", 1)
        rank = mesh.coords.get("data", 0) + mesh.coords.get("expert", 0)
        for seed in (3, 4):
            batch = {name: tensor.chunk(number)[rank] for name, tensor in batch_of(12, seed).items()}
            state, metrics = step(state, batch)
            state = sl.replace_params(state, gpt.balanced(state.params, metrics["aux"]["experts"], rate=0.3))
        whole = sl.unshard(state.params)
        return (gpt.from_blocks(whole) if staged else whole)["blocks"]

    params = drawn(config)
    for seed in (3, 4):
        shares = sl.value_and_grad(gpt.make_loss(config))(params, batch_of(12, seed))[0][1]["experts"]
        for layer in (1, 3):
            counts = torch.stack(shares[str(layer)]["shares"]) * 12 * 8 * 2
            router = params["blocks"][layer]["moe"]["router"]
            router["balance"] = routers.balanced(router["balance"], counts.round().long(), 0.3)
    for blocks in sl.simulate(run, mesh=mesh):
        assert_close(blocks, params["blocks"], 1e-12)
    assert params["blocks"][1]["moe"]["router"]["balance"].unique().numel() > 1
