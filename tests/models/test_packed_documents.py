"""Packed documents: each gives what it gives alone, in attention and in a GPT, on any mesh."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import SpecError
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


def batch_of(rows=None):
    dataset = sl.data.packed(DOCUMENTS, CONFIG.sequence)
    assert len(dataset) == 2 and dataset.filled == 1.0
    return dataset.rows_at(np.arange(2) if rows is None else rows)


MESHES = {
    "one": ({"data": 1}, sl.zero(0)),
    "data": ({"data": 2}, sl.zero(3)),
    "sliced": ({"model": 2}, sl.tensor_slicing(gpt.slicing_rules(CONFIG))),
    "ulysses": ({"seq": 2}, sl.sequence("seq", "ulysses")),
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
        rows = sl.data.loader(sl.data.packed(DOCUMENTS, CONFIG.sequence), state, 2, shuffle=False)
        _, metrics = step(state, next(iter(rows)))
        return float(metrics["loss"]), float(metrics["grad_norm"])

    for loss, grad_norm in sl.simulate(train, mesh=shape):
        assert loss == pytest.approx(want, rel=1e-11) and grad_norm == pytest.approx(float(norm), rel=1e-9)


def test_rings_layouts_and_other_shapes_are_refused():
    q, k, v = (x.detach() for x in inputs(*[(1, 2, 8, 4)] * 3))
    segments = torch.zeros(1, 8, dtype=torch.int64)

    def ring(mesh):
        sharded = sl.shard(gpt.init(CONFIG), mesh, sl.sequence("seq", "ring"))
        state, step = sl.make_train_step(gpt.make_loss(CONFIG), sharded, sl.optim.sgd(0.1))
        step(state, batch_of())

    with pytest.raises(SpecError, match=r"key_mask, layout or segments.*use kind='ulysses'"):
        sl.simulate(ring, mesh={"seq": 2})
    layout = sl.sparse.sliding_window(length=8, block=16, window=1)
    with pytest.raises(ValueError, match="segments or a layout, and got both"):
        sl.nn.attention(q, k, v, layout=layout, segments=segments)
    for wrong in (segments[:, :4], segments.double(), segments[0]):
        with pytest.raises(ValueError, match=r"integers \(batch, sequence\) = \(1, 8\)"):
            sl.nn.attention(q, k, v, segments=wrong)
