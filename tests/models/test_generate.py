"""`sl.generate` against models that see the whole context anew for every token, alone, among others and on meshes."""

import dataclasses
import re

import pytest
import torch
from helpers.decoders import MAKE, decoder
from helpers.models import shaken
from helpers.profile import NIGHTLY
from helpers.texts import uncached
from hypothesis import given, settings
from hypothesis import strategies as st
from optree import tree_leaves, tree_map

import shardlib as sl
from shardlib.errors import IllegalComposition, NonFiniteError, RankMismatch, TreeError
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.models import gpt, huggingface
from shardlib.models.decoding import Sampling

CONFIG = gpt.GPTConfig(vocab=64, layers=2, width=24, heads=4, sequence=17, dtype=torch.float64)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [35, 8, 9, 7, 9, 3, 2, 38, 46, 26, 43], list(range(20))]
SHARP = Sampling(temperature=0.8, seed=6)


def random_params(config):
    return shaken(gpt.init(config))


PARAMS = random_params(CONFIG)


def scores(window):
    return gpt.logits(CONFIG, PARAMS, window[None])[0, -1]


def wanted(prompts, max_new, sampling=SHARP, stop=()):
    return [uncached(scores, p, max_new, i, CONFIG.sequence, sampling, stop) for i, p in enumerate(prompts)]


def lists(texts):
    return [text.tolist() for text in texts]


def drawn(prompts, max_new=12, params=PARAMS, **options):
    return lists(sl.generate(CONFIG, params, prompts, max_new, **{"temperature": 0.8, "seed": 6} | options))


@pytest.mark.parametrize("max_new", [0, 1, 25])
def test_the_cache_changes_no_token(max_new):
    """Prompts of uneven lengths, within the window and beyond it."""
    found = drawn(PROMPTS, max_new)
    assert found == wanted(PROMPTS, max_new)
    assert max_new < 25 or len({token for text in found for token in text}) > 10


def test_dropout_is_of_training_alone():
    config = dataclasses.replace(CONFIG, dropout=0.5)
    assert lists(sl.generate(config, PARAMS, PROMPTS, 3, seed=6, temperature=0.8)) == drawn(PROMPTS, 3)


def test_a_text_ends_at_its_stop_token():
    whole = drawn(PROMPTS)
    stop = {whole[0][4], whole[2][1]}
    found = drawn(PROMPTS, stop=stop)
    assert found == wanted(PROMPTS, 12, stop=stop)
    for text, before in zip(found, whole):
        ends = [i for i, token in enumerate(before) if token in stop]
        assert text == before[: ends[0] + 1 if ends else None]


def test_prompts_may_be_tensors_and_none():
    assert drawn([torch.tensor(prompt, dtype=torch.int32) for prompt in PROMPTS]) == drawn(PROMPTS)
    assert drawn(torch.tensor([[1, 2], [3, 4]])) == drawn([[1, 2], [3, 4]])
    assert drawn([]) == []


def test_other_seeds_and_prompts_of_the_same_tokens_draw_differently():
    assert drawn(PROMPTS, seed=7) != drawn(PROMPTS)
    one, other = drawn([[1, 2, 3]] * 2)
    assert one != other


@settings(max_examples=300 if NIGHTLY else 40)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=9),
    top_k=st.none() | st.integers(1, 10),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_odds_are_those_of_transformers(logits, top_k, top_p, temperature):
    transformers = pytest.importorskip("transformers")
    # No two tokens are equally likely: which of equals is kept is a choice, of each library.
    given = torch.tensor([logits], dtype=torch.float64) + torch.arange(len(logits), dtype=torch.float64) * 1e-3
    left = transformers.TemperatureLogitsWarper(temperature)(None, given)
    left = transformers.TopKLogitsWarper(top_k)(None, left) if top_k is not None else left
    left = transformers.TopPLogitsWarper(top_p)(None, left) if top_p < 1 else left
    found = Sampling(temperature, top_k, top_p).probabilities(given)
    torch.testing.assert_close(found / found.sum(), left.softmax(-1), rtol=1e-12, atol=1e-12)


def test_draws_have_the_odds():
    """Of 4,000 prompts; the frequencies lie within four standard deviations."""
    odds = torch.tensor([0.1, 0.0, 0.6, 0.3])
    chosen = torch.tensor(Sampling(seed=1).choose(odds.log().expand(4000, -1), range(4000), 3))
    found = torch.bincount(chosen, minlength=4) / 4000
    assert ((found - odds).abs() <= 4 * (odds * (1 - odds) / 4000).sqrt()).all()


def test_temperature_zero_takes_the_most_likely_token():
    assert drawn(PROMPTS, temperature=0) == wanted(PROMPTS, 12, Sampling(temperature=0))


PLANS = {
    "stage 0": [sl.zero(0)],
    "stage 3": [sl.zero(3)],
    "sliced": [sl.zero(1), sl.tensor_slicing(gpt.slicing_rules(CONFIG))],
    "sliced at stage 3": [sl.zero(3), sl.tensor_slicing(gpt.slicing_rules(CONFIG))],
    "on the host": [sl.zero(3), sl.offload("host", "host", "host")],
}


@pytest.mark.parametrize(("plan", "data"), [*((plan, 2) for plan in PLANS), ("stage 0", 7), ("stage 3", 7)])
def test_the_same_tokens_on_every_mesh(plan, data):
    """With more ranks than prompts too, and ranks whose texts end before others'."""
    stop = {drawn(PROMPTS)[4][2]}

    def run(mesh):
        return drawn(PROMPTS, params=sl.shard(PARAMS, mesh, sl.chain(*PLANS[plan])), stop=stop)

    mesh = {"data": data, "model": 2} if "sliced" in plan else {"data": data}
    assert sl.simulate(run, mesh=mesh) == [drawn(PROMPTS, stop=stop)] * (2 * data if "sliced" in plan else data)


def _in_processes(mesh):
    return drawn(PROMPTS, params=sl.shard(PARAMS, mesh, sl.chain(*PLANS["sliced at stage 3"])))


def test_the_same_tokens_in_processes(pool):
    assert pool.run(_in_processes, mesh={"data": 2, "model": 2}) == [drawn(PROMPTS)] * 4


def test_generates_from_a_training_state():
    batch = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "targets": torch.zeros(2, 4, dtype=torch.int64)}
    state, step = sl.make_train_step(
        gpt.make_loss(CONFIG), sl.shard(PARAMS, sl.make_mesh(), stage=3), sl.optim.sgd(0.1)
    )
    state, _ = step(state, batch)
    assert drawn(PROMPTS, params=state) == drawn(PROMPTS, params=sl.unshard(state.params)) != drawn(PROMPTS)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_an_error(temperature):
    """Of one rank's prompt, on every rank; masked tokens with a logit of -inf are none."""
    broken = tree_map(torch.clone, PARAMS)
    broken["embed"]["tokens"][9] = torch.nan  # which the second prompt has alone

    def run(mesh):
        with pytest.raises(NonFiniteError, match="after prompt 1 are"):
            drawn(PROMPTS[:2], 1, params=sl.shard(broken, mesh, sl.zero(0)), temperature=temperature)
        return True

    assert sl.simulate(run, mesh={"data": 2}) == [True, True]
    assert Sampling(temperature).choose(torch.tensor([[-torch.inf, 0.0], [torch.nan, 0.0]]), range(2), 0) == [1, None]


def test_stop_tokens_may_come_from_an_iterator():
    stop = drawn(PROMPTS)[0][4], drawn(PROMPTS)[2][1]
    assert drawn(PROMPTS, stop=iter(stop)) == drawn(PROMPTS, stop=stop)


KINDS = ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
WITH_EXPERTS = ["mixtral", "qwen3_moe"]


@pytest.mark.parametrize("temperature", [1e-305, 5e-324])
def test_the_smallest_temperatures_take_the_most_likely_token(temperature):
    assert Sampling(temperature).choose(torch.tensor([[1.0, 3e4, -2.0], [-7.0, -9.0, -8.0]]), range(2), 0) == [1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_transformers(kind):
    """Their own generate, and their own scores for drawn tokens."""
    made = decoder(kind, torch.float64).eval()
    _, params = sl.from_module(made)
    prompts = [[1, 5, 9], [7], [4, 4, 2, 30]]
    found = sl.generate(made, params, prompts, 4, temperature=0)
    for prompt, new in zip(prompts, found):
        given = torch.tensor([prompt])
        how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        theirs = made.generate(given, attention_mask=torch.ones_like(given), **how)
        assert theirs[0, len(prompt) :].tolist() == new.tolist()
    sampled = lists(sl.generate(made, params, prompts, 5, temperature=0.8, seed=6))
    assert sampled == [
        uncached(lambda window: made(window[None]).logits[0, -1], prompt, 5, i, 8, SHARP)
        for i, prompt in enumerate(prompts)
    ]


HALF = {"layer_types": ["full_attention", "sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"sliding_window": 3}),
        ("mistral", HALF),
        ("mixtral", {"sliding_window": 3} | HALF),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3} | HALF),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3} | HALF),
    ],
)
def test_windows_are_those_that_the_model_computes(kind, changes):
    """Some kinds ignore a window, or which layers are to have it."""
    made = decoder(kind, torch.float64, **changes).eval()
    text = [1, 5, 9, 4, 4, 2]
    (found,) = sl.generate(made, sl.from_module(made)[1], [text], 2, temperature=0)
    for _ in range(2):
        with torch.no_grad():
            text.append(int(made(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert found.tolist() == text[6:]


@pytest.mark.parametrize("kind", WITH_EXPERTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_other_ranks(kind, ranks):
    """Each rank holds its share of the experts, and some have no prompt."""
    made = decoder(kind, torch.float64).eval()
    _, params = sl.from_module(made)
    prompts = [[1, 5, 9], [7], [4, 4, 2, 30]]

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.experts(), sl.zero(0)))
        held = sharded.tree["model"]["layers"][0]["mlp"]["experts"]["down_proj"]
        return len(held), lists(sl.generate(made, sharded, prompts, 4, seed=1, stop=[11]))

    whole = lists(sl.generate(made, params, prompts, 4, seed=1, stop=[11]))
    assert sl.simulate(run, mesh={"data": 1, "expert": ranks}) == [(4 // ranks, whole)] * ranks


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(WITH_EXPERTS)))
def test_slices_of_transformers(kind):
    made = huggingface.sliceable(decoder(kind, torch.float64).eval())
    _, params = sl.from_module(made)
    rules = huggingface.slicing_rules(made)

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.tensor_slicing(rules), sl.zero(3)))
        return lists(sl.generate(made, sharded, [[1, 5, 9], [7], [4, 4, 2, 30]], 4, seed=1))

    whole = lists(sl.generate(made, params, [[1, 5, 9], [7], [4, 4, 2, 30]], 4, seed=1))
    assert sl.simulate(run, mesh={"data": 2, "model": 2}) == [whole] * 4


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 4},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_of_transformers(rope):
    made = decoder(
        "llama", torch.float64, max_position_embeddings=16, rope_parameters=ROPES[rope] | {"rope_theta": 100.0}
    )
    _, params = sl.from_module(made)
    found = sl.generate(made, params, [[1, 5, 9]], 9, temperature=0.8, seed=6)[0].tolist()
    assert found == uncached(lambda window: made(window[None]).logits[0, -1], [1, 5, 9], 9, 0, 16, SHARP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompts": [[1], []]},
            "prompt 1 is torch.float32 of shape (0,), and not a list of integers, tokens, at least one",
        ),
        ({"prompts": [[1.5]]}, "prompt 0 is torch.float32"),
        ({"prompts": torch.tensor([1, 2])}, "prompt 0 is torch.int64 of shape ()"),
        ({"prompts": ["abc"]}, "prompt 0 is 'abc'"),
        ({"prompts": [[[1], [2, 3]]]}, "prompt 0 is"),
        ({"prompts": [[True]]}, "torch.bool"),
        ({"prompts": [[1], [99]]}, "prompt 1 has the token 99, and the model 64 tokens"),
        ({"prompts": [[-1]]}, "prompt 0 has the token -1"),
        ({"stop": [64]}, "stop has the token 64"),
        ({"max_new": -1}, "max_new=-1"),
        ({"max_new": 2.5}, "max_new=2.5"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0}, "top_p=0"),
    ],
)
def test_wrong_arguments(changes, message):
    """On every rank, before any runs."""
    with pytest.raises(ValueError, match=re.escape(message)):
        sl.generate(CONFIG, PARAMS, **{"prompts": PROMPTS, "max_new": 2} | changes)


def test_models_that_are_not_supported():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(TreeError, match=r"takes a GPTConfig.*got Linear"):
        sl.generate(torch.nn.Linear(2, 2), {}, PROMPTS, 1)
    with pytest.raises(TreeError, match="hidden_act='gelu', and 'silu' is computed"):
        sl.generate(MAKE["llama"](hidden_act="gelu"), {}, PROMPTS, 1)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    with pytest.raises(TreeError, match=r"rotary embeddings .*'dynamic'"):
        sl.generate(MAKE["llama"](head_dim=4, rope_parameters=dynamic), {}, PROMPTS, 1)
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    with pytest.raises(TreeError, match="got GPTNeoXForCausalLM"):
        sl.generate(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)), {}, PROMPTS, 1)


def test_stages_and_ranks_that_differ():
    def staged(mesh):
        params = sl.shard(gpt.to_blocks(PARAMS), mesh, sl.pipeline(microbatches=2))
        sl.generate(CONFIG, params, PROMPTS, 2)

    def uneven(mesh):
        sl.generate(CONFIG, sl.shard(PARAMS, mesh, stage=0), PROMPTS[: 2 + mesh.rank], 2)

    with pytest.raises(IllegalComposition, match=r"gather the parameters by sl.unshard"):
        sl.simulate(staged, mesh={"data": 1, "pipe": 2})
    with pytest.raises(RankMismatch, match="calls of generate differ"):
        sl.simulate(uneven, mesh={"data": 2})


ROUTER = sl.nn.routers.top_k(2, renormalise="chosen")
GPTS = {
    "gpt": None,
    "gpt with gated experts": gpt.Experts((0, 4), sl.nn.MoEConfig(ROUTER), hidden=32, shared=16),
    "gpt with biased experts": gpt.Experts((4,), sl.nn.MoEConfig(ROUTER, "gelu_tanh"), hidden=48, residual=32),
}
WIDE = {"intermediate_size": 32, "moe_intermediate_size": 32}


def model_of(kind):
    """A model in fp32 whose weights all have inputs that are multiples of 16, and its parameters."""
    if kind in GPTS:
        config = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=4, sequence=17, moe=GPTS[kind])
        return config, random_params(config)
    made = decoder(kind, torch.float32, **WIDE).eval()
    return made, sl.from_module(made)[1]


@pytest.mark.parametrize("kind", [*GPTS, "llama", "qwen3", *WITH_EXPERTS])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights(kind, bits):
    """The texts of the weights that the values stand for, which lie in as few bytes."""
    made, params = model_of(kind)
    found = sl.models.decoding.quantized(made, params, bits=bits)
    dense = tree_map(lambda leaf: leaf.dense() if isinstance(leaf, QuantizedMatrix) else leaf, found)
    texts = [lists(sl.generate(made, tree, [[1, 5, 9], [7]], 6, seed=1)) for tree in (found, dense)]
    assert texts[0] == texts[1]
    changed = [leaf for leaf in tree_leaves(found) if isinstance(leaf, QuantizedMatrix)]
    assert len(changed) >= 2 * 4 + 1
    assert sum(leaf.nbytes for leaf in changed) < sum(leaf.dense().nbytes for leaf in changed) * (bits + 2.1) / 32
    experts = [leaf for leaf in changed if len(leaf.shape) == 3]
    assert bool(experts) == ("experts" in kind or kind in WITH_EXPERTS)
    left = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.dim() == 3]
    assert not left


def test_experts_of_the_users_own_function_stay_as_they_are():
    """It may use its leaves as it likes."""

    def expert(params, rows, product):
        return product(rows * params["up"].mean(), params["up"])

    config = gpt.GPTConfig(
        vocab=64, layers=1, width=32, heads=4, sequence=17, moe=gpt.Experts((2,), sl.nn.MoEConfig(ROUTER, expert))
    )
    params = random_params(dataclasses.replace(config, moe=None))
    block = params["blocks"][0]
    block["moe"] = {"router": {"weight": torch.randn(2, 32)}, "experts": {"up": torch.randn(2, 32, 32)}}
    del block["mlp"]
    found = sl.models.decoding.quantized(config, params)
    assert found["blocks"][0]["moe"]["experts"]["up"] is block["moe"]["experts"]["up"]
    assert len(sl.generate(config, found, [[1, 2]], 2)[0]) == 2


@pytest.mark.parametrize(("bits", "most"), [(8, 1.001), (4, 1.03)])
def test_the_perplexity_of_quantised_experts_is_close(bits, most):
    """Of a model that was trained on a text, on the text."""
    config = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=4, sequence=17, moe=GPTS["gpt with gated experts"])
    text = torch.arange(17 * 64).square().add(torch.arange(17 * 64) // 5).remainder(61).view(64, 17)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    state, step = sl.make_train_step(gpt.make_loss(config), gpt.init(config), sl.optim.adamw(1e-2))
    for _ in range(40):
        state, _ = step(state, batch)
    params = sl.unshard(state.params)
    small = sl.models.decoding.quantized(config, params, bits)

    def perplexity(params):
        with torch.no_grad():
            scores = gpt.logits(config, params, batch["tokens"])
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten()).exp().item()

    before, after = perplexity(params), perplexity(small)
    assert before < 40 and before != after and after / before < most


def test_models_without_weights_to_quantise():
    made = decoder("gpt2", torch.float32)
    with pytest.raises(TreeError, match=r"GPT2LMHeadModel has no weights to quantise: GPT2.products names none"):
        sl.models.decoding.quantized(made, sl.from_module(made)[1])
