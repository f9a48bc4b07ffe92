"""Experts in host memory: the tokens of those on the device, whatever the room, the guesses and the mesh."""

import dataclasses
import math

import pytest
import torch
from helpers.decoders import decoder
from helpers.experts_on_host import CONFIG, EXPERTS, experts_of, random_params
from helpers.profile import NIGHTLY
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optree import tree_map

import shardlib as sl
from shardlib.errors import IllegalComposition, TreeError
from shardlib.models import gpt, huggingface
from shardlib.models.decoding import experts_on_host, quantized
from shardlib.models.decoding.decoder import Decoder
from shardlib.models.decoding.experts_on_host import ExpertCache, LayerStore
from shardlib.models.decoding.gpt import GPT

PARAMS = random_params(dtype=torch.float64)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


def drawn(model, params, new=6, prompts=PROMPTS):
    return [text.tolist() for text in sl.generate(model, params, prompts, new, temperature=0.8, seed=6)]


WANTED = drawn(CONFIG, PARAMS)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3, EXPERTS, 100])
def test_the_same_tokens_with_any_room(slots, ahead):
    params, kept = experts_on_host(CONFIG, PARAMS, slots, ahead=ahead)
    assert drawn(CONFIG, params) == WANTED
    tally, one = kept.tally, sum(leaf[0].nbytes for leaf in experts_of(PARAMS)) // 2
    assert tally.bytes == (tally.misses + tally.ahead) * one
    assert kept.bytes == 2 * min(slots, EXPERTS) * one
    assert tally.used == tally.hits + tally.misses and tally.right <= tally.ahead
    assert (tally.ahead > 0) == ahead
    if slots >= EXPERTS:  # each comes once at most
        assert tally.misses + tally.ahead <= 2 * EXPERTS
    assert drawn(CONFIG, params) == WANTED and kept.tally.used == 2 * tally.used


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_models_of_transformers(kind):
    made = decoder(kind, torch.float64).eval()
    _, params = sl.from_module(made)
    held, kept = experts_on_host(made, params, 2)
    assert drawn(made, held) == drawn(made, params)
    assert kept.tally.right > 0


class Undecided(GPT):
    """A user's decoder that names its layers of experts, and not what they choose."""

    choices = Decoder.choices


def test_a_decoder_that_does_not_say_what_its_experts_are_chosen_by():
    """It generates, but nothing can be fetched ahead, which is told with a remedy."""
    decoder = Undecided(CONFIG)
    params, kept = experts_on_host(decoder, PARAMS, 2, ahead=False)
    assert drawn(decoder, params) == WANTED and kept.tally.ahead == 0
    params, _ = experts_on_host(decoder, PARAMS, 2)
    with pytest.raises(NotImplementedError, match=r"Undecided has layers of experts: define choices\(layer, x\)"):
        drawn(decoder, params)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_experts_take_fewer_bytes(bits):
    params = quantized(CONFIG, random_params(), bits)
    held, kept = experts_on_host(CONFIG, params, 2)
    _, plain = experts_on_host(CONFIG, random_params(), 2)
    assert drawn(CONFIG, held) == drawn(CONFIG, params)
    assert kept.bytes == plain.bytes * (bits + 1) // 32  # a scale for each 32 elements


def used(routings, slots):
    """What a layer with room for ``slots`` experts fetches for routings in turn, by a list in order of last use."""
    held, fetched = [], 0
    for experts in routings:
        here = [expert for expert in held if expert in experts]
        missing = [expert for expert in sorted(experts) if expert not in held]
        left = {*experts}
        for expert in [*here, *missing]:
            if expert not in held:
                fetched += 1
                if len(held) == slots:
                    held.remove(next(one for one in held if one not in left))
            else:
                held.remove(expert)
            held.append(expert)
            left.discard(expert)
    return fetched


@settings(max_examples=300 if NIGHTLY else 60)
@given(routings=st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=8), slots=st.integers(1, 6))
@example(routings=[{0}, {1}, {0}, {2}, {0}], slots=2)
def test_each_missing_expert_comes_once_and_the_least_recently_used_leaves(routings, slots):
    """Outputs are those of the experts, whose weights are their numbers."""
    leaf = torch.arange(6.0)[:, None, None]
    store = LayerStore(ExpertCache([leaf], slots, sl.make_mesh().transfers, torch.device("cpu")), 0, 6)
    for experts in routings:
        counts = torch.tensor([2 if expert in experts else 0 for expert in range(6)])
        rows = torch.ones(2 * len(experts) + 1, 1)
        found = store.outputs(lambda p, x, product: product(x, p["w"]), {"w": leaf}, rows, counts.cumsum(0))
        assert found.flatten().tolist() == [float(e) for e in sorted(experts) for _ in range(2)] + [0.0]
    assert store.tally.misses == used(routings, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 8])
def test_the_same_bits_as_with_all_experts_on_the_device(dtype, bits):
    """Of a few rows of each expert, and of many."""
    config = dataclasses.replace(CONFIG, sequence=200)
    params = random_params(config, dtype)
    params = quantized(config, params, bits) if bits else params
    held, _ = experts_on_host(config, params, 2)
    tokens = torch.arange(200).remainder(61)[None]
    with torch.no_grad():
        for count in (5, 200):
            wanted, found = (gpt.hidden(config, tree, tokens[:, :count]) for tree in (params, held))
            assert torch.equal(found, wanted)


MESHES = {
    "data": ({"data": 2}, [sl.zero(1)]),
    "in host memory": ({"data": 2}, [sl.zero(0), sl.offload(params="host")]),
    "experts": ({"data": 1, "expert": 4}, [sl.experts(), sl.zero(0), sl.offload(params="host")]),
    "data and experts": ({"data": 2, "expert": 2}, [sl.experts(), sl.zero(2)]),
    "attention in slices": (
        {"data": 1, "model": 2},
        [sl.zero(0), sl.tensor_slicing({k: v for k, v in gpt.slicing_rules(CONFIG).items() if "experts" not in k})],
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_the_same_tokens_on_every_mesh(name):
    mesh, plan = MESHES[name]

    def run(mesh):
        params, kept = experts_on_host(CONFIG, sl.shard(PARAMS, mesh, sl.chain(*plan)), 2)
        return drawn(CONFIG, params), kept.bytes

    room = 2 * sum(leaf[0].nbytes for leaf in experts_of(PARAMS))
    assert sl.simulate(run, mesh=mesh) == [(WANTED, room)] * math.prod(mesh.values())


def test_guesses_count_a_ranks_own_experts():
    store = LayerStore(ExpertCache([torch.zeros(2, 1)], 1, sl.make_mesh().transfers, torch.device("cpu")), 4, 2)
    assert store.counts(torch.tensor([[4, 5], [5, 3], [6, -1]])).tolist() == [1, 2]


def test_seats():
    """Guesses are of rows of the experts' leaves, where `sl.relayout` may have put others."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, seats=True))
    params = random_params(config, torch.float64)
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    for block in params["blocks"]:
        if "moe" in block:
            block["moe"]["router"]["seats"] = torch.arange(EXPERTS)
    moved = tree_map(lambda leaf: leaf, params)
    for block in moved["blocks"]:
        if "moe" in block:
            block["moe"]["router"]["seats"] = order
            experts = block["moe"]["experts"]
            block["moe"]["experts"] = {k: torch.empty_like(v).index_copy_(0, order, v) for k, v in experts.items()}
    (one, kept), (other, of_moved) = (experts_on_host(config, tree, 2) for tree in (params, moved))
    assert drawn(config, one) == drawn(config, other) == drawn(config, params)
    assert kept.tally.right == of_moved.tally.right > 0


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_seats_of_transformers(kind):
    """On the device, in host memory, on other ranks, and where each token gathers them."""
    made = huggingface.with_experts(decoder(kind, torch.float64).eval(), seats=True)
    _, params = sl.from_module(made)
    wanted, order = drawn(made, params), torch.tensor([2, 0, 3, 1])
    for layer in params["model"]["layers"]:
        layer["mlp"]["router"]["seats"] = order
        layer["mlp"]["experts"] = {
            name: torch.empty_like(leaf).index_copy_(0, order, leaf) for name, leaf in layer["mlp"]["experts"].items()
        }
    held, kept = experts_on_host(made, params, 2)
    assert drawn(made, params) == drawn(made, held) == wanted
    assert kept.tally.right > 0
    for mesh, plan in (({"data": 1, "expert": 2}, [sl.experts(), sl.zero(0)]), ({"data": 2}, [sl.zero(3)])):
        found = sl.simulate(lambda mesh, plan=plan: drawn(made, sl.shard(params, mesh, sl.chain(*plan))), mesh=mesh)
        assert found == [wanted] * 2


@pytest.mark.parametrize("made", [quantized, lambda config, params: experts_on_host(config, params, 2)[0]])
def test_second_copies_change_nothing(made):
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, seats=True, replicas=True))
    params = random_params(config)
    for block in params["blocks"]:
        if "moe" in block:
            block["moe"]["router"] |= {"seats": torch.arange(EXPERTS), "replicas": torch.tensor([1] + [-1] * 7)}

    def run(mesh):
        return drawn(config, made(config, sl.shard(params, mesh, sl.chain(sl.zero(0), sl.experts(spare=1)))))

    assert sl.simulate(run, mesh={"data": 1, "expert": 2}) == [drawn(config, made(config, params))] * 2


def test_parameters_that_are_gathered_or_sliced_are_refused():
    def sharded(mesh, *plan):
        experts_on_host(CONFIG, sl.shard(PARAMS, mesh, sl.chain(*plan)), 2)

    with pytest.raises(
        IllegalComposition, match=r"experts_on_host takes parameters whole .* \(ZeRO stage 3 over data\)"
    ):
        sl.simulate(sharded, sl.zero(3), mesh={"data": 2})
    with pytest.raises(IllegalComposition, match=r"slices of each expert.*blocks/1/moe/experts/down"):
        sl.simulate(sharded, sl.tensor_slicing(gpt.slicing_rules(CONFIG)), mesh={"data": 1, "model": 2})
    with pytest.raises(ValueError, match="slots=0"):
        experts_on_host(CONFIG, PARAMS, 0)
    with pytest.raises(TreeError, match="in host memory already"):
        experts_on_host(CONFIG, experts_on_host(CONFIG, PARAMS, 2)[0], 2)
    with pytest.raises(TreeError, match="quantized takes parameters before experts_on_host"):
        quantized(CONFIG, experts_on_host(CONFIG, PARAMS, 2)[0])
    with pytest.raises(TreeError, match=r"lies in host memory: bring it back with sl.to_device before it is used"):
        experts_on_host(CONFIG, sl.to_host(sl.shard(PARAMS, sl.make_mesh(), stage=0)), 2)
    dense = dataclasses.replace(CONFIG, moe=None)
    with pytest.raises(TreeError, match="GPT names no layers of experts of this model"):
        experts_on_host(dense, gpt.init(dense), 2)
