"""Routers against the numbers of transformers and DeepSpeed, and against gates written down with masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.nn import routers
from shardlib.nn.moe.routing import is_kept, tokens_of

# Inputs and weights of the fixtures: x[t, h] = (4t + h)/8, W[e, h] = sin(4e + h).
X = torch.arange(8.0).view(2, 4) / 8
LOGITS = X @ torch.arange(16.0).view(4, 4).sin().T
LOGITS_OF_8 = X @ torch.arange(32.0).view(8, 4).sin().T
WAVES = (1.3 * torch.arange(24.0)).sin().view(6, 4)
DEEPSEEK = routers.top_k(2, score="sigmoid", renormalise="chosen", scale=2.5, groups=4, kept_groups=2)
BIAS = torch.zeros(8).index_fill(0, torch.tensor([4]), 0.5)


def by_choice(routing):
    """Token by token: expert -> weight, of the assignments that were kept."""
    kept = is_kept(routing.kept, routing.experts)
    return [{int(e): float(w) for e, w, k in zip(*rows) if k} for rows in zip(routing.experts, routing.weights, kept)]


TRANSFORMERS = {
    "mixtral": (
        routers.top_k(2, renormalise="chosen"),
        LOGITS,
        None,
        [{3: 0.539568, 0: 0.460432}, {0: 0.506274, 3: 0.493726}],
    ),
    "qwen2": (routers.top_k(2), LOGITS, None, [{3: 0.352839, 0: 0.301090}, {0: 0.439809, 3: 0.428908}]),
    "gpt-oss": (
        routers.top_k(2, renormalise="chosen"),
        LOGITS + torch.tensor([0, 0.1, 0.2, 0.3]),
        None,
        [{3: 0.612683, 0: 0.387317}, {3: 0.568296, 0: 0.431704}],
    ),
    "deepseek-v3": (DEEPSEEK, LOGITS_OF_8, None, [{3: 1.288243, 0: 1.211757}, {0: 1.253310, 3: 1.246690}]),
    "deepseek-v3, biased": (DEEPSEEK, LOGITS_OF_8, BIAS, [{4: 1.058997, 0: 1.441003}, {3: 1.923944, 4: 0.576056}]),
}


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_routers_of_transformers(model):
    router, logits, balance, expected = TRANSFORMERS[model]
    found = by_choice(router(logits, balance=balance))
    assert [set(row) for row in found] == [set(row) for row in expected]
    for row, other in zip(found, expected):
        assert row == pytest.approx(other, abs=1e-6)


def test_deepspeeds_top_1_of_waves():
    routing = routers.switch()(WAVES)
    assert routing.experts[:, 0].tolist() == [1, 2, 3, 3, 0, 1]
    assert float(routing.aux["load"]) == pytest.approx(1.001431, abs=1e-6)
    assert torch.equal(routing.weights[:, 0], WAVES.softmax(1).max(1).values)


def test_deepspeeds_top_2_of_waves():
    router = routers.gshard(routers.Capacity(0.5, 1, "choice"), second="best", renormalise="kept")
    found = by_choice(router(WAVES))
    expected = [
        {1: 0.61018, 2: 0.38982},
        {2: 1.0},
        {3: 1.0},
        {0: 0.37806, 3: 0.62194},
        {0: 1.0},
        {1: 1.0},
    ]
    assert [set(row) for row in found] == [set(row) for row in expected]
    for row, other in zip(found, expected):
        assert row == pytest.approx(other, abs=1e-5)


def one_hot(column, experts):
    return torch.nn.functional.one_hot(column, experts)


def gate_1(logits, capacity):
    """DeepSpeed's top-1 gate with masks, first come first served: weights [T, E] and the loss."""
    gates = logits.softmax(1)
    mask = one_hot(gates.argmax(1), gates.shape[1])
    load = gates.shape[1] * (gates.mean(0) * mask.double().mean(0)).sum()
    return gates * mask * (mask.cumsum(0) <= capacity), load


def gate_2(logits, capacity):
    """DeepSpeed's top-2 gate with masks, without sampling."""
    gates = logits.softmax(1)
    number = gates.shape[1]
    first = one_hot(gates.argmax(1), number)
    second = one_hot(logits.masked_fill(first.bool(), -math.inf).argmax(1), number)
    load = number * (gates.mean(0) * first.double().mean(0)).sum()
    places = first.cumsum(0) * first + (second.cumsum(0) + first.sum(0)) * second
    weights = gates * ((first + second) * (places <= capacity))
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-30), load


def gate_k(logits, capacity, k, by_score):
    """DeepSpeed's top-k gate with masks."""
    gates = logits.softmax(1)
    number = gates.shape[1]
    mask = torch.zeros_like(gates).scatter_(1, gates.topk(k).indices, 1)
    load = (gates.mean(0) * mask.mean(0)).mean() * number**2 / k
    if by_score:
        best = (gates * mask).topk(min(capacity, len(gates)), dim=0).indices
        mask = mask * torch.zeros_like(mask).scatter_(0, best, 1)
    else:
        mask = mask * (mask.cumsum(0) <= capacity)
    weights = gates * mask
    return weights / weights.sum(1, keepdim=True).clamp(min=1e-30), load


@given(
    gate=st.sampled_from(["1", "2", "position", "probability"]),
    tokens=st.integers(1, 12),
    experts=st.integers(2, 6),
    choices=st.integers(1, 6),
    factor=st.sampled_from([0.3, 0.5, 1.0, 1.25, 10.0]),
    minimum=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_gates_with_masks(gate, tokens, experts, choices, factor, minimum, seed):
    k = {"1": 1, "2": 2}.get(gate, min(choices, experts))
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    capacity = max(math.ceil(round(tokens * k / experts * factor, 9)), minimum)
    kept = routers.Capacity(factor, minimum, "choice" if gate == "2" else "position" if gate == "1" else gate)
    if gate == "1":
        router, (weights, load) = routers.switch(kept), gate_1(logits, capacity)
    elif gate == "2":
        router, (weights, load) = routers.gshard(kept, second="best", renormalise="kept"), gate_2(logits, capacity)
    else:
        router = routers.top_k(k, renormalise="kept", capacity=kept)
        weights, load = gate_k(logits, capacity, k, gate == "probability")
    routing = router(logits)
    found = torch.zeros_like(weights).scatter_(1, routing.experts, routing.weights)
    torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(routing.aux["load"], load, rtol=1e-10, atol=0)
    kept_ones = (weights > 0).sum()
    torch.testing.assert_close(float(routing.aux["dropped"]), 1 - int(kept_ones) / (tokens * k), rtol=1e-6, atol=1e-6)
    assert routing.counts.sum() == tokens * k
    assert (routing.kept < tokens * k).sum() == kept_ones
    assert len(routing.kept) == min(tokens * k, experts * capacity)


def test_conventions_of_the_load_loss_at_balance_and_away_from_it():
    experts = torch.tensor([[0, 1], [0, 2], [0, 1]])
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.8, 0.1, 0.1]])
    mean = [0.6, 0.2, 0.2]
    expected = {"first": 3 * mean[0], "sum": 3 * (mean[0] + mean[1] * 2 / 3 + mean[2] / 3)}
    expected["mean"] = expected["sum"] / 2
    for convention, value in expected.items():
        assert float(routers.load_loss(probabilities, experts, convention)) == pytest.approx(value)
        mask = torch.tensor([True, True, False])
        masked = routers.load_loss(probabilities, experts, convention, mask)
        assert torch.equal(masked, routers.load_loss(probabilities[:2], experts[:2], convention))
    with pytest.raises(ValueError, match="convention 'k'"):
        routers.load_loss(probabilities, experts, "k")


def test_equal_scores_go_to_the_first_expert_and_the_first_tokens():
    capacity = routers.Capacity(1.0, 1, "probability")
    routing = routers.top_k(2, capacity=capacity)(torch.zeros(4, 4))
    assert routing.experts.tolist() == [[0, 1]] * 4
    assert is_kept(routing.kept, routing.experts).tolist() == [[True, True]] * 2 + [[False, False]] * 2


def test_random_tokens_are_drawn_by_their_index_in_the_global_batch():
    """A rank with half of the batch keeps, of its tokens, those that the whole batch's numbers put first."""
    router = routers.switch(routers.Capacity(0.5, 1, "random"))
    logits, key = torch.tensor([[1.0, 0.0]]).repeat(16, 1), sl.Key(3)
    order = tokens_of(logits, key).bits("capacity", 2)[:, 0]
    routing = router(logits, key)
    whole = is_kept(routing.kept, routing.experts)[:, 0]
    assert set(whole.nonzero()[:, 0].tolist()) == set(order.argsort()[:4].tolist()) != {0, 1, 2, 3}
    for slot in range(2):
        routing = router(logits[:8], key.at_slot(slot))
        half = is_kept(routing.kept, routing.experts)[:, 0]
        assert set(half.nonzero()[:, 0].tolist()) == set(order[8 * slot :][:8].argsort()[:2].tolist())


def test_random_choices_need_a_key_and_are_those_of_the_key():
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for router in (routers.switch(sampled=True), routers.gshard(), routers.gshard(second="sampled")):
        plain, drawn = router(logits), router(logits, sl.Key(1))
        again, other = router(logits, sl.Key(1)), router(logits, sl.Key(2))
        assert torch.equal(drawn.experts, again.experts) and torch.equal(drawn.kept, again.kept)
        for different in (plain, other):
            assert not (torch.equal(drawn.experts, different.experts) and torch.equal(drawn.kept, different.kept))


def test_a_second_expert_is_kept_as_often_as_its_share_says():
    logits = torch.tensor([[math.log(0.8), math.log(0.2)]]).repeat(4000, 1)
    routing = routers.gshard()(logits, sl.Key(0))
    assert int(routing.counts[0]) == 4000
    assert int(routing.counts[1]) / 4000 == pytest.approx(0.4, abs=0.03)


def test_gumbel_noise_draws_experts_by_their_probability():
    logits = torch.tensor([[math.log(0.6), math.log(0.3), math.log(0.1)]]).repeat(4000, 1)
    routing = routers.switch(sampled=True)(logits, sl.Key(0))
    assert (routing.counts / 4000).tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    shares = torch.tensor([0.6, 0.3, 0.1])[routing.experts[:, 0]]
    torch.testing.assert_close(routing.weights[:, 0], shares)  # noise is in the choice alone


def test_expert_choice_takes_each_experts_best_tokens():
    logits = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    routing = routers.expert_choice(1.0)(logits)
    scores = logits.softmax(1)
    assert routing.counts.tolist() == [4, 4, 4]
    for expert, column in enumerate(scores.T):
        best = column.topk(4).indices
        assert set(routing.weights[:, expert].nonzero()[:, 0].tolist()) == set(best.tolist())
        assert routing.kept[4 * expert : 4 * expert + 4].tolist() == sorted((best * 3 + expert).tolist())
    assert float(routing.aux["dropped"]) == pytest.approx(float((routing.weights == 0).all(1).float().mean()))


@pytest.mark.parametrize(
    "router", [routers.top_k(2), routers.switch(routers.Capacity(1.0)), routers.expert_choice(1.0)]
)
@pytest.mark.parametrize("rows", [0, 6])
def test_of_no_tokens_none_are_dropped(router, rows):
    """Neither where there are none nor where all are padding."""
    assert float(router(torch.zeros(rows, 3), mask=torch.zeros(rows, dtype=torch.bool)).aux["dropped"]) == 0


def test_a_bias_moves_loads_towards_balance():
    """DeepSeek-V3's rule, without gradients: what starts at one expert spreads over all."""
    logits = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0.0, 0.0, 0.0])
    router, bias = routers.top_k(1, score="sigmoid"), torch.zeros(4)
    before = router(logits).counts
    for _ in range(100):
        bias = routers.balanced(bias, router(logits, balance=bias).counts, 0.01)
    after = router(logits, balance=bias).counts
    assert before.max() > 150 and after.max() < 75


def test_batches_without_tokens():
    for router in (
        routers.top_k(2),
        routers.gshard(),
        routers.expert_choice(1.0),
        routers.switch(routers.Capacity(1.0)),
    ):
        logits = torch.zeros(0, 4, requires_grad=True)
        routing = router(logits, sl.Key(0))
        assert routing.counts.tolist() == [0] * 4
        assert all(torch.isfinite(value) for value in routing.aux.values())
        (routing.aux["load"] + routing.aux["z"] + routing.weights.sum()).backward()


def test_all_choices_of_a_token_dropped_leave_a_finite_gradient():
    logits = torch.tensor([[3.0, 2.0, -200.0]] * 3, requires_grad=True)
    routing = routers.top_k(2, renormalise="kept", capacity=routers.Capacity(0.1, 1))(logits)
    assert routing.weights[1:].tolist() == [[0.0, 0.0]] * 2
    routing.weights.pow(2).sum().backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: routers.top_k(0), "at least one expert"),
        (lambda: routers.top_k(2, score="tanh"), "score='tanh'"),
        (lambda: routers.top_k(2, renormalise="all"), "renormalise='all'"),
        (lambda: routers.top_k(2, load="k"), "load='k'"),
        (lambda: routers.gshard(second="third"), "second='third'"),
        (lambda: routers.Capacity(0.0), "factor must be positive"),
        (lambda: routers.Capacity(1.0, priority="last"), "as priority"),
        (lambda: routers.expert_choice(-1.0), "must be positive"),
        (lambda: routers.top_k(5)(torch.zeros(2, 4)), "choose 5 of 4"),
        (lambda: routers.top_k(1)(torch.zeros(2, 3, 4)), r"shape \(2, 3, 4\)"),
        (lambda: routers.top_k(3, groups=2)(torch.zeros(2, 4)), "4 experts in 2 groups"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
