"""transformers' models with layers of experts: their training on meshes, unmodified and by `with_experts`."""

import copy

import pytest
import torch
from helpers.decoders import EXPERTS, VOCAB, decoder, label_batches
from helpers.training import assert_same_training, optimizer, simulate
from helpers.trees import assert_close
from optree import tree_leaves
from oracle import one_device

import shardlib as sl
from shardlib.errors import HandleError, TreeError
from shardlib.models import huggingface

TOKENS = torch.randint(VOCAB, (3, 8, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_models_own_logits_and_gradients(kind):
    """In float64, of which transformers' routers and norms take some steps in fp32: both do."""
    results = []
    for change in (lambda model: model, huggingface.with_experts):
        apply, params = sl.from_module(change(decoder(kind, torch.float64)))

        def loss_fn(params, tokens, apply=apply):
            logits = apply(params, input_ids=tokens).logits
            return logits.square().mean(), logits

        (_, logits), grads = sl.value_and_grad(loss_fn)(params, TOKENS[0])
        results.append([logits, *tree_leaves(grads)])
    for mine, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        assert theirs.abs().max() > 1e-7


@pytest.fixture(scope="module", params=EXPERTS)
def trained_alone(request):
    apply, params = sl.from_module(decoder(request.param))
    loss_fn = loss_of(apply)
    own = loss_of(sl.from_module(huggingface.with_experts(decoder(request.param)))[0])
    return (
        {"as it is": loss_fn, "with experts": own},
        params,
        one_device.train(loss_fn, params, list(TOKENS), max_norm=1.0),
    )


def loss_of(apply):
    return lambda params, tokens: apply(params, input_ids=tokens, labels=tokens).loss


PLANS = {
    "stage 0": ("with experts", sl.zero(0)),
    "stage 1": ("as it is", sl.zero(1)),
    "stage 2": ("with experts", sl.chain(sl.zero(2), sl.accumulate(2))),
    "stage 3": ("with experts", sl.zero(3)),
    "stage 3, as it is": ("as it is", sl.zero(3)),
}


@pytest.mark.parametrize("plan", PLANS)
def test_same_training(trained_alone, plan):
    by_form, params, wanted = trained_alone
    form, transform = PLANS[plan]
    got = simulate({"data": 2}, by_form[form], copy.deepcopy(params), list(TOKENS), transform, optimizer(max_norm=1.0))
    # In fp32: these models compute their routers and their own loss in it, whatever the dtype of the weights.
    assert_same_training(got, wanted, 1e-5)


def gradients(mesh, loss_fn, params):
    return sl.unshard(sl.value_and_grad(loss_fn)(sl.shard(params, mesh, stage=3), TOKENS[0][mesh.rank :: 2])[1])


def test_checkpoints_of_the_model():
    """`gradient_checkpointing_enable` recomputes layers; the numbers are those without it."""
    results = []
    for recomputed in (False, True):
        model = huggingface.with_experts(decoder("mixtral")).train()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        apply, params = sl.from_module(model)
        results.append(sl.simulate(gradients, loss_of(apply), params, mesh={"data": 2})[0])
    assert_close(results[1], results[0], 1e-6)


def test_stages_that_are_recomputed():
    module = huggingface.with_experts(decoder("qwen3_moe"))
    loss_fn, params = sl.from_module(module, blocks=huggingface.decoder_blocks(module))
    batches = label_batches(1, 4)

    def run(*transforms):
        plan = sl.chain(sl.zero(1), sl.pipeline("1f1b", microbatches=2), *transforms)
        return simulate({"data": 1, "pipe": 2}, loss_fn, params, batches, plan, optimizer(1.0))

    alone, found = run(), run(sl.remat())
    assert found[0] == alone[0]
    assert_close(found[2], alone[2], 1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_move_and_are_on_two_ranks(kind):
    """But for rounding: torch's own activations compute the last elements of a tensor otherwise than the rest. GPT-OSS has a
    router already, beside its experts."""
    model = huggingface.with_experts(decoder(kind), seats=True, replicas=True)
    rules, (apply, params) = huggingface.expert_rules(model), sl.from_module(model)
    layers = [f"model/layers/{layer}/mlp" for layer in range(len(model.model.layers))]
    number = model.config.num_local_experts

    def run(mesh, relayout):
        sharded = sl.shard(params, mesh, sl.chain(sl.experts(rules=rules, spare=1), sl.zero(3, axis="expert")))
        state, step = sl.make_train_step(loss_of(apply), sharded, sl.optim.sgd(0.1))
        losses = []
        for tokens in TOKENS[:2]:
            state = relayout(state)
            state, metrics = step(state, tokens.chunk(2)[mesh.rank])
            losses.append(metrics["loss"].item())
        return losses, sl.unshard(sl.relayout(state).params)

    def moved(state):
        state = sl.relayout(state, counts={layers[0]: list(range(number))})
        return sl.relayout(state, replicas={layers[-1]: [1, 0, *[-1] * (number - 2)]})

    for found, wanted in sl.simulate(
        lambda mesh: (run(mesh, moved), run(mesh, lambda state: state)), mesh={"expert": 2}
    ):
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
        assert_close(found[1], wanted[1], 1e-6)


def test_models_that_are_refused():
    with pytest.raises(TreeError, match="LlamaForCausalLM has no layers of experts"):
        huggingface.with_experts(decoder("llama"))
    with pytest.raises(TreeError, match="set output_router_logits to False"):
        huggingface.decoder_blocks(decoder("mixtral", output_router_logits=True))


def over_experts(kind):
    model = huggingface.with_experts(decoder(kind, torch.float64))
    return model, sl.experts(rules=huggingface.expert_rules(model))


def logits_squared(apply):
    return lambda params, tokens: apply(params, input_ids=tokens).logits.double().square().mean()


def shares_of(mesh, loss_fn, params, transform):
    """The loss and whole gradients, of this rank's share of a batch."""
    sharded = sl.shard(params, mesh, transform)
    ranks = [mesh.coords[axis] * mesh.shape["expert"] ** (axis == "data") for axis in mesh.shape if axis != "model"]
    number = mesh.size // mesh.shape.get("model", 1)
    loss, grads = sl.value_and_grad(loss_fn)(sharded, TOKENS[0].chunk(number)[sum(ranks)])
    return loss.item(), sl.unshard(grads)


DEALT = {
    "two ranks": ({"expert": 2}, (sl.zero(0, axis="expert"),)),
    "four ranks": ({"expert": 4}, (sl.zero(2, axis="expert"),)),
    "data too": ({"data": 2, "expert": 2}, (sl.zero(3),)),
    "split over both": ({"data": 2, "expert": 2}, (sl.zero(3, axis=("data", "expert")),)),
}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("plan", DEALT)
def test_experts_on_other_ranks(kind, plan):
    """Leaf by leaf as on one device. DeepSeek's router is computed in fp32."""
    model, experts = over_experts(kind)
    apply, params = sl.from_module(model)
    alone, wanted = sl.value_and_grad(logits_squared(apply))(params, TOKENS[0])
    mesh, transforms = DEALT[plan]
    for loss, grads in sl.simulate(shares_of, logits_squared(apply), params, sl.chain(experts, *transforms), mesh=mesh):
        assert loss == pytest.approx(alone.item(), rel=1e-10)
        assert_close(grads, wanted, 1e-6 if kind == "deepseek_v3" else 1e-10)


def test_experts_on_other_processes(pool):
    model, experts = over_experts("gpt_oss")
    apply, params = sl.from_module(model)
    alone, wanted = sl.value_and_grad(logits_squared(apply))(params, TOKENS[0])
    transform = sl.chain(experts, sl.zero(3, axis=("data", "expert")))
    results = pool.run(
        lambda mesh: shares_of(mesh, logits_squared(own_apply()), params, transform), mesh={"data": 2, "expert": 2}
    )
    for loss, grads in results:
        assert loss == pytest.approx(alone.item(), rel=1e-10)
        assert_close(grads, wanted, 1e-10)


def own_apply():
    return sl.from_module(over_experts("gpt_oss")[0])[0]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_slices_of_attention_and_experts_on_other_ranks(kind):
    model, experts = over_experts(kind)
    apply, params = sl.from_module(model)
    slicing = sl.tensor_slicing(huggingface.slicing_rules(model))
    alone, wanted = sl.value_and_grad(logits_squared(apply))(params, TOKENS[0])
    transform = sl.chain(experts, slicing, sl.zero(1, axis="expert"))
    for loss, grads in sl.simulate(shares_of, logits_squared(apply), params, transform, mesh={"expert": 2, "model": 2}):
        assert loss == pytest.approx(alone.item(), rel=1e-10)
        assert_close(grads, wanted, 1e-6)  # norms of slices are taken in fp32


@pytest.mark.parametrize("ranks", [1, 2], ids=["whole", "dealt out"])
def test_two_projections_in_one_leaf_are_not_cut_as_one(ranks):
    """A rank would have the gate's rows, and another one the other projection's."""
    apply, params = sl.from_module(huggingface.with_experts(decoder("mixtral")))
    rules = {"*experts/gate_up_proj": sl.column(experts=True), "*experts/down_proj": sl.row(experts=True)}
    chain = sl.chain(sl.tensor_slicing(rules), sl.experts(rules=list(rules)), sl.zero(3))

    def run(mesh):
        sharded = sl.shard(params, mesh, chain)
        sl.value_and_grad(loss_of(apply))(sharded, TOKENS[0])

    with pytest.raises(HandleError, match=r"gate_up_proj, which tensor_slicing cuts as one matrix. Deal"):
        sl.simulate(run, mesh={"model": 2, "data": 1, "expert": ranks})


def test_a_model_without_a_plan_for_experts():
    with pytest.raises(TreeError, match="LlamaForCausalLM has no base_model_ep_plan"):
        huggingface.expert_rules(decoder("llama"))


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2}, {"expert": 2}])
def test_deepseeks_bias_moves_by_counts(mesh):
    """The model's state dict is what it was; the choices follow the bias, and each step's bias the step's counts."""
    model = huggingface.with_experts(decoder("deepseek_v3"), counts=True)
    assert model.state_dict().keys() == decoder("deepseek_v3").state_dict().keys()
    apply, params, buffers = sl.from_module(model, buffers=True)
    layers = [f"model.layers.{layer}.mlp" for layer in (1, 2, 3)]

    def loss_fn(params, buffers, tokens):
        out, buffers = apply(params, buffers, input_ids=tokens, labels=tokens)
        return out.loss, buffers

    def run(mesh):
        experts = [sl.experts(rules=huggingface.expert_rules(model))] if "expert" in mesh.shape else []
        axis = "expert" if experts else "data"
        plan = sl.chain(sl.zero(3, axis=axis), sl.accumulate(2), *experts)
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, plan), sl.optim.sgd(0.0), buffers=buffers)
        for tokens in TOKENS:
            state, _ = step(state, tokens.chunk(mesh.size)[mesh.rank])
            state.buffers = huggingface.balanced(state.buffers, rate=0.05)
        return state.buffers

    wanted = dict(buffers)
    for tokens in TOKENS:
        after = apply(params, wanted, input_ids=tokens)[1]
        for layer in layers:
            counts, bias = after[f"{layer}.experts.counts"], f"{layer}.gate.e_score_correction_bias"
            assert counts.sum() == 8 * 8 * 2
            wanted[bias] = sl.nn.routers.balanced(wanted[bias], counts.long(), 0.05)
    assert all(wanted[f"{layer}.gate.e_score_correction_bias"].any() for layer in layers)
    for found in sl.simulate(run, mesh=mesh):
        assert_close(found, wanted, 0)


def test_buffers_without_counts():
    _, _, buffers = sl.from_module(huggingface.with_experts(decoder("deepseek_v3")), buffers=True)
    with pytest.raises(TreeError, match="these have none: call with_experts"):
        huggingface.balanced(buffers)
