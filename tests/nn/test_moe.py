"""The layer of experts against a loop over tokens in float64: outputs and every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.trees import assert_same
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.common._compat import pytree
from shardlib.nn import routers
from shardlib.nn.moe.routing import is_kept

WIDTH, HIDDEN = 3, 5
ACTIVATIONS = {"swiglu": None, "gelu": F.gelu, "relu": F.relu}


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expert_params(kind, *experts, seed=0):
    names = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    names |= {"gate": (HIDDEN, WIDTH)} if kind == "swiglu" else {"up_bias": (HIDDEN,), "down_bias": (WIDTH,)}
    return {name: normal(*experts, *shape, seed=seed + n) for n, (name, shape) in enumerate(names.items())}


def make_params(kind, experts, shared=None, residual=False, balance=False):
    router = {"weight": normal(experts, WIDTH, seed=10), "bias": normal(experts, seed=11)}
    if balance:
        router["balance"] = normal(experts, seed=12)
    params = {"router": router, "experts": expert_params(kind, experts)}
    if shared is not None:
        params["shared"] = expert_params(kind, seed=20)
        if shared == "scaled":
            params["shared"]["scale"] = normal(1, WIDTH, seed=25)
    if residual:
        mix = {"weight": normal(2, WIDTH, seed=35), "bias": normal(2, seed=36)}
        params["residual"] = {**expert_params(kind, seed=30), "mix": mix}
    return params


def one_expert(kind, params, x):
    """The output of one expert for one token."""
    if kind == "swiglu":
        return params["down"] @ (F.silu(params["gate"] @ x) * (params["up"] @ x))
    return params["down"] @ ACTIVATIONS[kind](params["up"] @ x + params["up_bias"]) + params["down_bias"]


def per_token(params, x, kind, routing, weights):
    """The layer, token by token, for the choices of ``routing`` and ``weights`` ``[T][E]``, a list of rows."""
    kept, rows = is_kept(routing.kept, routing.experts), []
    for t, token in enumerate(x.reshape(-1, WIDTH)):
        y = torch.zeros(WIDTH, dtype=x.dtype)
        for j, expert in enumerate(routing.experts[t].tolist()):
            if kept[t, j]:
                mine = {name: value[expert] for name, value in params["experts"].items()}
                y = y + weights[t][expert] * one_expert(kind, mine, token)
        if "residual" in params:
            shares = (params["residual"]["mix"]["weight"] @ token + params["residual"]["mix"]["bias"]).softmax(0)
            y = shares[0] * y + shares[1] * one_expert(kind, params["residual"], token)
        if "shared" in params:
            other = one_expert(kind, params["shared"], token)
            y = y + (other * (params["shared"]["scale"][0] @ token).sigmoid() if "scale" in params["shared"] else other)
        rows.append(y)
    return torch.stack(rows).view(x.shape)


def weights_of(params, x, routing, score, renormalise):
    """The weights of each token's experts, as its scores say."""
    kept, found = is_kept(routing.kept, routing.experts), []
    for t, token in enumerate(x.reshape(-1, WIDTH)):
        logits = params["router"]["weight"] @ token + params["router"]["bias"]
        scores = logits.softmax(0) if score == "softmax" else 1 / (1 + (-logits).exp())
        of = {e: k for e, k in zip(routing.experts[t].tolist(), kept[t].tolist()) if k or renormalise == "chosen"}
        total = sum(scores[e] for e in of) if renormalise and of else 1
        found.append({e: scores[e] / total for e, k in of.items() if k})
    return found


def leaves_for_gradients(params, x):
    leaves, shape = pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    return pytree.tree_unflatten(leaves, shape), x.clone().requires_grad_(), leaves


def gradients(function, params, x):
    """A function's output, and the gradients of all leaves and of x of a weighted sum of it."""
    params, x, leaves = leaves_for_gradients(params, x)
    y = function(params, x)
    grads = torch.autograd.grad((y * normal(*y.shape, seed=99)).sum(), [*leaves, x], allow_unused=True)
    return y.detach(), [torch.zeros_like(v) if g is None else g for g, v in zip(grads, [*leaves, x])]


@given(
    kind=st.sampled_from(["swiglu", "gelu", "relu"]),
    tokens=st.sampled_from([(1,), (7,), (2, 4), (2, 2, 2)]),
    experts=st.integers(1, 6),
    choices=st.integers(1, 4),
    how=st.sampled_from(["top_k", "gshard", "expert_choice"]),
    score=st.sampled_from(["softmax", "sigmoid"]),
    renormalise=st.sampled_from([None, "chosen", "kept"]),
    factor=st.sampled_from([None, 0.4, 1.0]),
    priority=st.sampled_from(["position", "choice", "probability", "random"]),
    shared=st.sampled_from([None, "plain", "scaled"]),
    residual=st.booleans(),
    balance=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_loop_over_tokens(
    kind, tokens, experts, choices, how, score, renormalise, factor, priority, shared, residual, balance, seed
):
    capacity = None if factor is None else routers.Capacity(factor, 1, priority)
    if how == "top_k" or experts == 1:
        k = min(choices, experts)
        router = routers.top_k(k, score=score, renormalise=renormalise, capacity=capacity)
    elif how == "gshard":
        router, score = routers.gshard(capacity, renormalise=renormalise), "softmax"
    else:
        router, score, renormalise = routers.expert_choice(1.0), "softmax", None
    config = sl.nn.MoEConfig(router, kind)
    params, x = make_params(kind, experts, shared, residual, balance), normal(*tokens, WIDTH, seed=40 + seed)
    routings = []

    def layer(params, x):
        y, routing = sl.nn.moe(params, x, config, sl.Key(seed))
        routings.append(routing)
        return y

    y, grads = gradients(layer, params, x)

    def loop(params, x):
        return per_token(params, x, kind, routings[0], weights_of(params, x, routings[0], score, renormalise))

    expected, others = gradients(loop, params, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    for grad, other in zip(grads, others):
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-10)


def test_experts_without_tokens_have_gradients_of_zero():
    params, x = make_params("swiglu", 4), normal(6, WIDTH, seed=1)
    params["router"]["bias"] += torch.tensor([0.0, 100.0, 0.0, 0.0])  # all tokens to one expert
    params, x, _ = leaves_for_gradients(params, x)
    y, routing = sl.nn.moe(params, x, sl.nn.MoEConfig(routers.top_k(1)))
    y.sum().backward()
    assert routing.counts.tolist() == [0, 6, 0, 0]
    for leaf in params["experts"].values():
        assert (leaf.grad[[0, 2, 3]] == 0).all() and (leaf.grad[1] != 0).any()


def test_a_batch_without_tokens():
    params, x, leaves = leaves_for_gradients(make_params("swiglu", 4, "scaled", True), torch.zeros(0, WIDTH).double())
    y, routing = sl.nn.moe(params, x, sl.nn.MoEConfig(routers.top_k(2)), sl.Key(0))
    assert y.shape == (0, WIDTH) and routing.experts.shape == (0, 2)
    y.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_a_routing_is_replayed():
    params, x = make_params("swiglu", 4), normal(6, WIDTH, seed=1)
    config = sl.nn.MoEConfig(routers.gshard(routers.Capacity(0.5, 1, "random")), jitter=0.5)
    y, routing = sl.nn.moe(params, x, config, sl.Key(0))
    again, same = sl.nn.moe(params, x, config, sl.Key(1), routing=routing)
    assert torch.equal(y, again) and same is routing
    other, _ = sl.nn.moe(params, x, config, sl.Key(1))
    assert not torch.equal(y, other)


def test_gradients_pass_through_the_weights_of_a_routing_that_is_given():
    params, x = make_params("swiglu", 4), normal(6, WIDTH, seed=1)
    config = sl.nn.MoEConfig(routers.top_k(2))

    def replayed(params, x):
        logits = F.linear(x, params["router"]["weight"], params["router"]["bias"])
        return sl.nn.moe(params, x, config, routing=config.router(logits))[0]

    for grads, others in zip(gradients(replayed, params, x), gradients(lambda *v: sl.nn.moe(*v, config)[0], params, x)):
        assert_same(grads, others)


def test_jitter_is_of_the_routers_input_alone():
    """Experts get tokens as they are; numbers are those of the tokens in the global batch."""
    params, x = make_params("relu", 4), normal(8, WIDTH, seed=1)
    config = sl.nn.MoEConfig(routers.top_k(4, renormalise=None), "relu", jitter=0.9)
    y, routing = sl.nn.moe(params, x, config, sl.Key(0))
    weights = [dict(zip(e, w)) for e, w in zip(routing.experts.tolist(), routing.weights)]
    torch.testing.assert_close(y, per_token(params, x, "relu", routing, weights), rtol=1e-10, atol=1e-10)
    assert not torch.equal(routing.weights, sl.nn.moe(params, x, config)[1].weights)
    halves = [sl.nn.moe(params, half, config, sl.Key(0, slot))[0] for slot, half in enumerate(x.split(4))]
    torch.testing.assert_close(torch.cat(halves), y, rtol=1e-10, atol=1e-10)


def test_an_expert_function_of_ones_own():
    """Two matrices and a bias per expert, with an activation that the library does not have."""
    params = {"router": {"weight": normal(4, WIDTH, seed=1)}}
    params["experts"] = {"a": normal(4, HIDDEN, WIDTH, seed=2), "b": normal(4, HIDDEN, seed=3)}
    params["experts"]["c"] = normal(4, WIDTH, HIDDEN, seed=4)

    def expert(params, rows, product):
        return product(product(rows, params["a"], params["b"]).tanh(), params["c"])

    x = normal(5, WIDTH, seed=5)
    y, routing = sl.nn.moe(params, x, sl.nn.MoEConfig(routers.switch(), expert))
    for t in range(5):
        a, b, c = (leaf[routing.experts[t, 0]] for leaf in params["experts"].values())
        expected = routing.weights[t, 0] * (c @ (a @ x[t] + b).tanh())
        torch.testing.assert_close(y[t], expected, rtol=1e-10, atol=1e-10)


def test_bf16_routes_in_fp32():
    params = pytree.tree_map(torch.Tensor.bfloat16, make_params("swiglu", 4))
    x = normal(64, WIDTH, seed=1).bfloat16()
    y, routing = sl.nn.moe(params, x, sl.nn.MoEConfig(routers.top_k(2)))
    assert y.dtype is torch.bfloat16 and routing.weights.dtype is torch.float32
    logits = F.linear(x.float(), params["router"]["weight"].float(), params["router"]["bias"].float())
    assert torch.equal(routing.weights, routers.top_k(2)(logits).weights)
    wide, _ = sl.nn.moe(pytree.tree_map(torch.Tensor.double, params), x.double(), sl.nn.MoEConfig(routers.top_k(2)))
    # Each product, activation and output is rounded to bf16, by 2^-9, of sums whose terms are larger than they are.
    torch.testing.assert_close(y.double(), wide, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(5, 4).double()}, r"x is \(5, 4\) and the router's weight \(4, 3\)"),
        ({"routing": routers.top_k(1)(torch.zeros(3, 4))}, "of 3 tokens among 4 experts, and the layer has 5 among 4"),
        ({"rng": 3}, "rng is 3"),
    ],
)
def test_refusals(change, message):
    given = {"params": make_params("swiglu", 4), "x": torch.zeros(5, WIDTH).double(), "rng": None, "routing": None}
    with pytest.raises((ValueError, TypeError), match=message):
        sl.nn.moe(config=sl.nn.MoEConfig(routers.top_k(1)), **given | change)
    for setting in ({"expert": "tanh"}, {"jitter": 1.0}, {"jitter": math.nan}):
        with pytest.raises(ValueError, match="MoEConfig"):
            sl.nn.MoEConfig(routers.top_k(1), **setting)


def test_choices_made_elsewhere():
    """−1 is no expert."""
    params, x = {"w": torch.randn(3, 5, 4)}, torch.randn(6, 4)
    experts = torch.tensor([[2, 0], [-1, 0], [1, 2], [-1, -1], [2, 1], [0, 1]])
    weights = torch.rand(6, 2, requires_grad=True)
    routing = routers.Routing.of(experts, weights, 3)
    y = sl.nn.run_experts(params, x, routing, lambda params, rows, product: product(rows, params["w"]))
    wanted = torch.stack(
        [
            sum(
                (w * params["w"][e] @ token for e, w in zip(chosen, shares) if e >= 0),
                torch.zeros(5),
            )
            for token, chosen, shares in zip(x, experts, weights)
        ]
    )
    torch.testing.assert_close(y, wanted)
    assert routing.counts.tolist() == [3, 3, 3] and routing.kept.tolist() == [1, 3, 10, 4, 9, 11, 0, 5, 8, 12, 12, 12]
    (grad,) = torch.autograd.grad(y.sum(), weights)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.sum(), weights)[0])


@pytest.mark.parametrize(
    ("experts", "weights", "error", "words"),
    [
        (torch.tensor([[0], [3]]), torch.ones(2, 1), RuntimeError, "a choice is not among −1 … 2, of 3 experts"),
        (torch.tensor([[0], [-2]]), torch.ones(2, 1), RuntimeError, "a choice is not among −1 … 2, of 3 experts"),
        (torch.tensor([0, 1]), torch.ones(2), ValueError, r"choices are \(2,\) of torch.int64"),
        (torch.tensor([[0], [1]]), torch.ones(2), ValueError, r"weights \(2,\); both must be \[tokens, choices\]"),
        (torch.tensor([[0.0], [1.0]]), torch.ones(2, 1), ValueError, "of torch.float32"),
    ],
)
def test_choices_that_are_none(experts, weights, error, words):
    with pytest.raises(error, match=words):
        routers.Routing.of(experts, weights, 3)


@pytest.mark.parametrize("number", [2, 4])
def test_leaves_of_another_number_of_experts(number):
    routing = routers.Routing.of(torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1), number)
    with pytest.raises(ValueError, match=f"the routing is among {number} experts, and the leaves hold 3 of them along"):
        sl.nn.run_experts(
            {"w": torch.ones(3, 5, 4)}, torch.ones(6, 4), routing, lambda p, x, product: product(x, p["w"])
        )


def test_masks_that_do_not_fit():
    params, x = {"router": {"weight": torch.ones(3, 4)}, "experts": {"up": torch.ones(3, 5, 4)}}, torch.ones(2, 3, 4)
    config, mask = (
        sl.nn.MoEConfig(routers.top_k(1), expert=lambda p, x, product: x),
        torch.zeros(2, 3, dtype=torch.bool),
    )
    _, routing = sl.nn.moe(params, x, config, mask=mask)
    with pytest.raises(ValueError, match="give mask= or routing=, not both"):
        sl.nn.moe(params, x, config, mask=mask, routing=routing)
    for wrong in (mask.float(), mask.long(), mask[:1]):
        with pytest.raises(ValueError, match=r"it must be \(2, 3\) of torch.bool"):
            sl.nn.moe(params, x, config, mask=wrong)
