"""What functions take as parameters: a plain tree, sharded ones or a train state everywhere, and the rest with a remedy."""

import pytest
import torch
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import gpt
from shardlib.models.decoding import experts_on_host, quantized
from shardlib.tree import leaves_of

EXPERTS = gpt.Experts((2,), sl.nn.MoEConfig(sl.nn.routers.top_k(1), "gelu_tanh"))
CONFIG = gpt.GPTConfig(vocab=32, layers=1, width=16, heads=2, sequence=8, moe=EXPERTS)
PARAMS = gpt.init(CONFIG)
BATCH = dict.fromkeys(("tokens", "targets"), torch.zeros(1, 4, dtype=torch.int64))


def generated(params):
    return sl.generate(CONFIG, params, [[1, 2]], 3, temperature=0)


CALLS = {
    "generate": generated,
    "quantized": lambda params: generated(quantized(CONFIG, params)),
    "experts_on_host": lambda params: generated(experts_on_host(CONFIG, params, 1)[0]),
    "make_eval_step": lambda params: sl.make_eval_step(
        lambda p, x: x * sum(leaf.sum() for leaf in leaves_of(p)), params
    )(params, torch.ones(1)),
}


@pytest.fixture(scope="module")
def forms():
    """The same parameters in each form, and what is none."""
    params = sl.shard(PARAMS, sl.make_mesh(), stage=0)
    state, _ = sl.make_train_step(gpt.make_loss(CONFIG), params, sl.optim.sgd(0.1))
    _, grads = sl.value_and_grad(gpt.make_loss(CONFIG))(params, BATCH)
    right = {"plain": PARAMS, "sharded": params, "state": state}
    return right, {
        "a tuple of TrainState, dict": (state, {}),
        "gradients": grads,
        "Linear is a module": torch.nn.Linear(2, 2),
    }


@pytest.mark.parametrize("call", CALLS)
def test_every_form_gives_the_same(call, forms):
    right, wrong = forms
    first, *others = [CALLS[call](params) for params in right.values()]
    for other in others:
        assert_same(other, first)
    for message, given in wrong.items():
        with pytest.raises(TreeError, match=f"{call}: .*{message}.*(take|give)"):
            CALLS[call](given)


def test_what_is_gathered(forms):
    right, wrong = forms
    module = torch.nn.Linear(2, 2)
    apply, params = sl.from_module(module)
    state, _ = sl.make_train_step(lambda p, x: apply(p, x).sum(), params, sl.optim.sgd(0.1))
    assert_same(dict(sl.models.state_dict(module, state)), dict(module.state_dict()))
    assert_same(sl.unshard(right["state"]), PARAMS)
    assert sl.unshard(wrong["gradients"]).keys() == PARAMS.keys()
    for given in (PARAMS, *(each for message, each in wrong.items() if message != "gradients")):
        with pytest.raises(TreeError, match="unshard: "):
            sl.unshard(given)
    dense = gpt.init(gpt.GPTConfig(vocab=32, layers=1, width=16, heads=2))
    assert "moe" in sl.models.upcycle(dense, EXPERTS, sl.Key(0))["blocks"][0]
    for given in (sl.shard(dense, sl.make_mesh(), stage=0), right["state"]):
        with pytest.raises(TreeError, match=r"upcycle takes whole parameters, .* give sl\.unshard\(params\)"):
            sl.models.upcycle(given, EXPERTS, sl.Key(0))
