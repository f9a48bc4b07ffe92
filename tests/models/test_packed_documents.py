"""Packed documents: each gives what it gives alone, in attention and in a GPT, on any mesh."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives.sequence import Attention
from shardlib.models import gpt

CONFIG = gpt.GPTConfig(vocab=24, layers=2, width=8, heads=2, sequence=12, dtype=torch.float64)
DOCUMENTS = [[3, 4, 5, 6, 7], [8, 9], [1, 2, 3, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19], [20, 21, 22], [5]]


def inputs(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.booleans(), st.sampled_from([1, 2]))
def test_attention_of_each_document_alone(lengths, causal, groups):
    """Outputs and gradients, the documents of two rows being in another order."""
    total = sum(lengths)
    q, k, v, weight = inputs((2, 2, total, 3), (2, groups, total, 3), (2, groups, total, 3), (2, 2, total, 3))
    rows = [lengths, lengths[::-1]]
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    together = sl.nn.attention(q, k, v, causal=causal, segments=segments)
    alone = torch.zeros_like(together)
    for row, lengths_ in enumerate(rows):
        for stop, length in zip(itertools.accumulate(lengths_), lengths_, strict=True):
            here = [x[row : row + 1, :, stop - length : stop] for x in (q, k, v)]
            alone[row, :, stop - length : stop] = F.scaled_dot_product_attention(
                *here, is_causal=causal, enable_gqa=groups == 1
            )[0]
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for found, want in zip(
        torch.autograd.grad((together * weight).sum(), (q, k, v)),
        torch.autograd.grad((alone * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)


def test_padding_goes_with_segments():
    q, k, v = inputs(*[(1, 2, 6, 3)] * 3)
    segments, mask = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[True, True, True, True, False, False]])
    found = sl.nn.attention(q, k, v, causal=True, key_mask=mask, segments=segments)
    torch.testing.assert_close(
        found[:, :, 2:4], F.scaled_dot_product_attention(q[:, :, 2:4], k[:, :, 2:4], v[:, :, 2:4], is_causal=True)
    )


def loss_of_each_alone(params):
    """The mean over all targets, each document by itself."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document in DOCUMENTS:
        if len(document) > 1:
            tokens = torch.tensor([document])
            logits = gpt.logits(CONFIG, params, tokens[:, :-1])
            total = total + F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum")
            count += len(document) - 1
    return total / count


MESHES = {
    "one": ({"data": 1}, sl.zero(0)),
    "data": ({"data": 2}, sl.zero(3)),
    "sliced": ({"model": 2}, sl.tensor_slicing(gpt.slicing_rules(CONFIG))),
    "ulysses": ({"seq": 2}, sl.sequence("seq", "ulysses")),
    "ring": ({"seq": 2}, sl.sequence("seq", "ring")),
    "ring of three": ({"seq": 3}, sl.chain(sl.sequence("seq", "ring"), sl.zero(3, axis="seq"))),
    "recomputed": ({"data": 2}, sl.chain(sl.zero(3), sl.remat())),
    "stages": ({"pipe": 2}, sl.pipeline("1f1b", microbatches=2)),
}


@pytest.mark.parametrize("name", MESHES)
def test_a_gpt_trains_as_on_each_document_alone(name):
    shape, transform = MESHES[name]
    params = gpt.init(CONFIG, seed=1)
    leaves = [leaf.requires_grad_() for leaf in torch.utils._pytree.tree_leaves(params)]
    want = loss_of_each_alone(params)
    norm = torch.stack([grad.square().sum() for grad in torch.autograd.grad(want, leaves)]).sum().sqrt()
    want = want.item()

    def train(mesh):
        stages = "pipe" in mesh.shape
        whole = gpt.init(CONFIG, seed=1)
        sharded = sl.shard(gpt.to_blocks(whole) if stages else whole, mesh, transform)
        loss_fn = gpt.make_sequential(CONFIG) if stages else gpt.make_loss(CONFIG)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        dataset = sl.data.packed(DOCUMENTS, CONFIG.sequence)
        assert len(dataset) == 2 and dataset.filled == 1.0
        rows = sl.data.loader(dataset, state, 2, shuffle=False)
        _, metrics = step(state, next(iter(rows)))
        return float(metrics["loss"]), float(metrics["grad_norm"])

    for loss, grad_norm in sl.simulate(train, mesh=shape):
        assert loss == pytest.approx(want, rel=1e-11) and grad_norm == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_sees_what_one_rank_sees(causal):
    """Documents, padding at both ends and a row without any key, grouped queries; outputs and gradients."""
    ranks, length = 3, 12
    q, k, v, weight = inputs((3, 4, length, 3), (3, 2, length, 3), (3, 2, length, 3), (3, 4, length, 3))
    segments = torch.tensor([[7] * 2 + [-3] * 7 + [0] * 3, [1] * length, list(range(length))])
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, :1], mask[0, -2:], mask[1] = False, False, False
    for how in ({"segments": segments}, {"key_mask": mask}, {"segments": segments, "key_mask": mask}):

        def attend(mesh, how=how):
            ring = sl.collectives.sequence.Ring("seq")
            mine = [at for start, size in ring.chunks(mesh.rank, ranks, length) for at in range(start, start + size)]
            parts = [x.detach()[:, :, mine].requires_grad_() for x in (q, k, v)]
            out = ring.attention(*parts, Attention(causal, **how), None, mesh)
            return mine, out.detach(), torch.autograd.grad((out * weight[:, :, mine]).sum(), parts)

        # What sees no key is 0, as sl.nn.sparse_attention has it.
        seen = (
            torch.ones(length, length, dtype=torch.bool).tril()
            if causal
            else torch.ones(length, length, dtype=torch.bool)
        )
        seen = seen & how.get("key_mask", torch.ones_like(mask))[:, None, None, :]
        if "segments" in how:
            seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
        scores = q @ k.repeat_interleave(2, 1).mT / 3**0.5
        p = torch.softmax(scores.masked_fill(~seen, -1e300), -1) * seen
        want = p @ v.repeat_interleave(2, 1)
        grads = torch.autograd.grad((want * weight).sum(), (q, k, v))
        for mine, out, found in sl.simulate(attend, mesh={"seq": ranks}):
            torch.testing.assert_close(out, want[:, :, mine].detach(), rtol=1e-12, atol=1e-12)
            for mine_of, whole in zip(found, grads, strict=True):
                torch.testing.assert_close(mine_of, whole[:, :, mine], rtol=1e-11, atol=1e-12)


def test_layouts_and_other_shapes_are_refused():
    q, k, v = (x.detach() for x in inputs(*[(1, 2, 8, 4)] * 3))
    segments = torch.zeros(1, 8, dtype=torch.int64)
    layout = sl.sparse.sliding_window(length=8, block=16, window=1)
    with pytest.raises(ValueError, match="segments or a layout, and got both"):
        sl.nn.attention(q, k, v, layout=layout, segments=segments)
    for wrong in (segments[:, :4], segments.double(), segments[0]):
        with pytest.raises(ValueError, match=r"integers \(batch, sequence\) = \(1, 8\)"):
            sl.nn.attention(q, k, v, segments=wrong)

    def ring(mesh):
        part = [x[:, :, :4] for x in (q, k, v)]
        return sl.collectives.sequence.Ring("seq").attention(
            *part, Attention(key_mask=segments[:, :4].bool()), None, mesh
        )

    with pytest.raises(ValueError, match=r"key_mask is \(batch, sequence\) = \(1, 8\)"):
        sl.simulate(ring, mesh={"seq": 2})
