"""A user's own transform: only biases and norms are trained (BitFit, arXiv 2106.10199)."""

from dataclasses import dataclass

import optree
import pytest
import torch
from helpers.stages import ADAMW, in_halves, plan_of
from helpers.trees import assert_close, assert_same
from oracle import one_device

import shardlib as sl
from shardlib.errors import IllegalComposition


@dataclass(frozen=True)
class OnlyVectors(sl.plan.Transform):
    """Trains the leaves of one dimension, but those that ``keep`` matches."""

    keep: tuple[str, ...] = ()

    @property
    def name(self):
        return f"only_vectors(keep={self.keep})"

    def claims(self, sizes, leaves):
        for leaf in leaves:
            if len(leaf.shape) != 1 or leaf.matches(self.keep):
                yield sl.plan.Use(leaf.path, trainable=False)

    def check(self, resolved):
        if all(resolved.use(leaf.path).trainable is False for leaf in resolved.leaves):
            raise IllegalComposition(f"{self.name} leaves no parameter to train; keep fewer")


CONFIG = sl.models.gpt.GPTConfig(vocab=19, layers=2, width=12, heads=3, sequence=8, dtype=torch.float64)


def model():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(CONFIG.vocab, (4, CONFIG.sequence + 1), generator=generator) for _ in range(4)]
    batches = [{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in rows]
    return sl.models.gpt.make_loss(CONFIG), sl.models.gpt.init(CONFIG), batches


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    loss_fn, params, batches = model()
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    matrices = [path for path, leaf in zip(paths, leaves) if leaf.dim() != 1]
    expected, _, final = one_device.train(loss_fn, params, batches, frozen=matrices)
    for half, _, losses, trained in in_halves(model, OnlyVectors(), ADAMW, tmp_path, pool):
        assert losses == pytest.approx(expected[2 * half :][:2], rel=1e-10)
        assert_same(*(optree.tree_map(lambda p: p if p.dim() != 1 else None, tree) for tree in (trained, params)))
        if half == 1:
            assert_close(trained, final, 1e-10)


def test_the_plan_says_who_froze_what():
    assert "only_vectors(keep=()): trainable=False on 11 leaves" in str(plan_of(model, OnlyVectors(), ADAMW, 2))


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(IllegalComposition, match=r"only_vectors\(keep=\('\*',\)\) leaves no parameter to train"):
        plan_of(model, OnlyVectors(("*",)), ADAMW, 2)
    with pytest.raises(IllegalComposition, match=r"only_vectors.*freeze|freeze.*only_vectors"):
        plan_of(model, sl.chain(OnlyVectors(), sl.freeze("*/mlp/*")), ADAMW, 2)
