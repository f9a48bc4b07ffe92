"""A user's own style of slicing: a gated linear layer, whose one weight gives two outputs."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers.stages import ADAMW, check_like_one_device, plan_of

import shardlib as sl
from shardlib.errors import IllegalComposition


@dataclass(frozen=True)
class Gated(sl.collectives.styles.Style):
    """``gate, value = x @ weight`` by a weight (2, in, out): a rank computes its share of both from the whole input."""

    name = "gated"

    def spec(self, shape, ways):
        return sl.P(None, None, self.axis)

    def misfit(self, shape, ways):
        return None if shape[0] == 2 and len(shape) == 3 else ("a gated layer's weight is (2, in, out)", "")

    def linear(self, weight, x, bias, compute, transposed):
        return weight.share(compute(weight.enter(x), weight.local, bias), weight.window.shape[-1])


RULES = {"*/gated": Gated(), "*/down": "row"}
TRANSFORM = sl.tensor_slicing(RULES)
MESHES = {"data": 2, "model": 2}, {"data": 1, "model": 2}


def layer(p, x):
    gate, value = x @ p["gated"]
    return x + F.linear(F.silu(gate) * value, p["down"])


def loss_fn(params, x):
    return layer(params[1], layer(params[0], x)).square().mean()


def model():
    generator = torch.Generator().manual_seed(0)
    shapes = {"gated": (2, 6, 8), "down": (6, 8)}
    params = [{n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()} for _ in "ab"]
    return loss_fn, params, [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(4)]


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    check_like_one_device(model, TRANSFORM, tmp_path, pool, meshes=MESHES)
    assert "style=gated on 2 leaves" in str(plan_of(model, TRANSFORM, ADAMW, 2, MESHES[0]))


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(IllegalComposition, match=r"0/down: .* is \(2, in, out\), by rule '\*': Gated\(\)"):
        sl.make_plan(model()[1], sl.abstract_mesh(model=2), sl.tensor_slicing({"*": Gated()}))
