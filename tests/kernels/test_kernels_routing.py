"""Routing: every implementation against a loop in Python, to the bit."""

import math
import sys

import pytest
import torch
from helpers import kernels
from hypothesis import example, given
from hypothesis import strategies as st

from shardlib.common import thresholds
from shardlib.kernels.routing import by_expert, top_k

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def scores_of(tokens, count, dtype, seed, ties):
    """With NaN, infinities and both zeros; with few different numbers if ``ties``."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, count, generator=generator)
    scores = (scores.round() if ties else scores).to(dtype)
    odd = torch.randint(0, 40, scores.shape, generator=generator)
    for number, value in enumerate((math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0)):
        scores[odd == number] = value
    return scores


def plain(experts, count):
    """Counts and positions of a list of assignments."""
    known = [e for e in experts if 0 <= e < count]
    counts = [known.count(e) for e in range(count)]
    order = sorted((e, a) for a, e in enumerate(experts) if 0 <= e < count)
    positions = [-1] * len(experts)
    for row, (_, a) in enumerate(order):
        positions[a] = row
    return counts, positions


def check(using, tokens, count, k, dtype, seed=0, ties=True):
    scores = scores_of(tokens, count, dtype, seed, ties)
    experts, counts, positions = top_k(scores, k, using=using)
    wanted = [
        sorted(range(count), key=lambda e: (0 if row[e] != row[e] else 1, -row[e] if row[e] == row[e] else 0, e))[:k]
        for row in scores.double().tolist()
    ]
    assert experts.tolist() == wanted
    assert experts.dtype == counts.dtype == positions.dtype == torch.int64
    flat = experts.flatten().tolist()
    assert (counts.tolist(), positions.flatten().tolist()) == plain(flat, count) and positions.shape == experts.shape
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, count + 2, (tokens, k), generator=generator)  # some of no expert
    counts, positions = by_expert(drawn, count, using=using)
    assert (counts.tolist(), positions.flatten().tolist()) == plain(drawn.flatten().tolist(), count)
    assert positions.shape == drawn.shape


@pytest.mark.parametrize("by", ["reference", *kernels.ON_CPU])
@given(
    tokens=st.integers(0, 40),
    count=st.integers(1, 40),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    ties=st.booleans(),
    seed=st.integers(0, 2**30),
)
@example(tokens=33, count=8, share=1.0, dtype=torch.float32, ties=True, seed=0)
def test_drawn(by, tokens, count, share, dtype, ties, seed):
    k = max(1, round(share * count))
    with kernels.served_by(by, dtype) as using:
        check(using, tokens, count, k, dtype, seed, ties)


def test_one_expert_takes_all():
    scores = torch.zeros(50, 4)
    scores[:, 2] = 1
    experts, counts, positions = top_k(scores, 1)
    assert counts.tolist() == [0, 0, 50, 0] and positions.flatten().tolist() == list(range(50))
    assert experts.eq(2).all()


def test_threads_change_nothing():
    scores = scores_of(3000, 16, torch.float32, 1, True)
    wanted = top_k(scores, 2, using="reference")
    for threads in (1, 2, 3, 70):
        with kernels.threads(threads), thresholds.small(1):
            assert all(torch.equal(a, b) for a, b in zip(top_k(scores, 2, using="cpu"), wanted))


def test_of_a_batch_and_compiled():
    torch._dynamo.reset()
    scores = torch.stack([scores_of(7, 5, torch.float32, seed, True) for seed in (1, 2)])
    wanted = [top_k(each, 2) for each in scores]
    for found in (torch.func.vmap(lambda s: top_k(s, 2))(scores),):
        for i in range(2):
            assert all(torch.equal(mine[i], one) for mine, one in zip(found, wanted[i]))
    compiled = torch.compile(lambda s: top_k(s, 2), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(scores[0].requires_grad_()), wanted[0]))


def test_opcheck():
    torch.library.opcheck(torch.ops.shardlib.routing_top_k.default, (torch.randn(5, 3), 2, None))
    torch.library.opcheck(torch.ops.shardlib.routing_by_expert.default, (torch.tensor([[1, 0], [3, -1]]), 3, None))


def test_wrong_arguments():
    for scores, k in ((torch.zeros(3), 1), (torch.zeros(2, 3), 4), (torch.zeros(2, 3), 0), (torch.zeros(2, 0), 1)):
        with pytest.raises(ValueError, match=r"scores must be \[tokens, experts\], and k in 1 to experts"):
            top_k(scores, k)
    with pytest.raises(ValueError, match="there must be an expert"):
        by_expert(torch.zeros(3, dtype=torch.int64), 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert sys.argv[1]
    for tokens, count, k in ((37, 8, 2), (0, 3, 1), (5, 130, 3), (300, 3, 3)):
        check("triton", tokens, count, k, torch.float32)
    check("triton", 9, 5, 2, torch.bfloat16, ties=False)
