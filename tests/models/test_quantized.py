"""Quantised parameters of ranks that hold what they compute with: each quantises its own share."""

import pytest
from helpers.decoders import decoder
from helpers.experts_on_host import CONFIG, random_params
from optree import tree_leaves

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.kernels.thin_matmul import QuantizedMatrix
from shardlib.models import gpt, huggingface
from shardlib.models.decoding import quantized

PARAMS = random_params()
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
SLICED = sl.tensor_slicing(gpt.slicing_rules(CONFIG))
PLANS = {
    "data": ({"data": 2}, [sl.zero(2)]),
    "in host memory": ({"data": 2}, [sl.zero(1), sl.offload(params="host")]),
    "slices": ({"data": 2, "model": 2}, [sl.zero(1), SLICED]),
    "experts": ({"data": 1, "expert": 4}, [sl.experts(), sl.zero(0)]),
    "slices of experts": ({"expert": 2, "model": 2}, [sl.experts(), sl.zero(0, axis="expert"), SLICED]),
}


def drawn(model, params, prompts=PROMPTS):
    return [text.tolist() for text in sl.generate(model, params, prompts, 8, temperature=0)]


def held(params):
    return sum(leaf.nbytes for leaf in tree_leaves(params) if isinstance(leaf, QuantizedMatrix))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("bits", [8, 4])
def test_each_rank_quantises_what_it_holds(name, bits):
    """Blocks of 16 are the same whole and in slices."""
    mesh, plan = PLANS[name]
    whole = quantized(CONFIG, PARAMS, bits, block=16)

    def run(mesh):
        params = quantized(CONFIG, sl.shard(PARAMS, mesh, sl.chain(*plan)), bits, block=16)
        return drawn(CONFIG, params), held(params.tree)

    wanted, size = drawn(CONFIG, whole), held(whole)
    for found, own in sl.simulate(run, mesh=mesh):
        assert found == wanted
        assert own == size if set(mesh) == {"data"} else own < size


def test_slices_of_transformers_in_processes(pool):
    made = huggingface.sliceable(decoder("llama", intermediate_size=32, hidden_size=32, head_dim=8).eval())
    _, params = sl.from_module(made)
    wanted = drawn(made, quantized(made, params, block=16))
    assert pool.run(_sliced, made, params, mesh={"data": 1, "model": 2}) == [wanted] * 2


def _sliced(mesh, made, params):
    rules = huggingface.slicing_rules(made)
    return drawn(made, quantized(made, sl.shard(params, mesh, sl.tensor_slicing(rules)), block=16))


@pytest.mark.parametrize("ways", [2, 4])
def test_slices_with_padding(ways):
    """Of five tokens the last slice has fewer rows than the others, or none."""
    config = gpt.GPTConfig(vocab=5, layers=1, width=32, heads=4, sequence=24)
    params = gpt.init(config)

    def run(mesh):
        plan = sl.chain(sl.zero(0), sl.tensor_slicing(gpt.slicing_rules(config)))
        return drawn(config, quantized(config, sl.shard(params, mesh, plan), block=16), [[1, 2], [3]])

    wanted = drawn(config, quantized(config, params, block=16), [[1, 2], [3]])
    assert sl.simulate(run, mesh={"data": 1, "model": ways}) == [wanted] * ways


def test_parameters_that_are_gathered_are_refused():
    def run(mesh):
        quantized(CONFIG, sl.shard(PARAMS, mesh, stage=3))

    with pytest.raises(IllegalComposition, match=r"quantized takes parameters whole on each rank.*sl.zero\(0\)"):
        sl.simulate(run, mesh={"data": 2})
