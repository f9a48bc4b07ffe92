"""A user's own style of slicing: a gated linear layer, whose one weight gives two outputs."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers.measure import count_payload
from helpers.trees import assert_close
from oracle import one_device

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
TRANSFORM = sl.chain(sl.tensor_slicing(RULES), sl.zero(3))
TX = sl.optim.adamw(1e-3, eps=1e-5, weight_decay=0.01)


def layer(p, x):
    gate, value = x @ p["gated"]
    return x + F.linear(F.silu(gate) * value, p["down"])


def loss_fn(params, x):
    return layer(params[1], layer(params[0], x)).square().mean()


def model():
    generator = torch.Generator().manual_seed(0)
    shapes = {"gated": (2, 6, 8), "down": (6, 8)}
    params = [{n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()} for _ in "ab"]
    return params, [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(4)]


def train(mesh):
    """Losses, what the last step sent, and parameters."""
    params, batches = model()
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, TRANSFORM), TX)
    sent, losses = count_payload(mesh), []
    for batch in batches:
        sent()
        state, metrics = step(state, batch.chunk(mesh.shape["data"])[mesh.coords["data"]])
        losses.append(metrics["loss"].item())
    return losses, sent(), sl.unshard(state.params)


@pytest.mark.parametrize(("run", "data"), [(sl.simulate, 2), (sl.launch, 1)])
def test_it_trains_like_one_device_and_sends_what_the_plan_says(run, data):
    (params, batches), sizes = model(), {"data": data, "model": 2}
    about = {"loss_fn": loss_fn, "optimizer": TX, "batch": batches[0].chunk(data)[0]}
    plan = sl.make_plan(params, sl.abstract_mesh(**sizes), TRANSFORM, **about)
    assert "style=gated on 2 leaves" in str(plan)
    expected, _, final = one_device.train(loss_fn, params, batches)
    for losses, sent, found in run(train, mesh=sizes):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert_close(found, final, 1e-10)
        assert sent == {axis: plan.payload()[axis] for axis in sent} and sent["model"] > 0


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(IllegalComposition, match=r"0/down: .* is \(2, in, out\), by rule '\*': Gated\(\)"):
        sl.make_plan(model()[0], sl.abstract_mesh(model=2), sl.tensor_slicing({"*": Gated()}))
