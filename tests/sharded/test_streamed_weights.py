"""`sl.stream_weights`: whole tensors by name, and nothing gathered of what is not wanted."""

import pytest
import torch

import shardlib as sl
from shardlib.errors import TreeError

PARAMS = {
    "layers": [{"weight": torch.arange(12.0).view(3, 4) + layer, "bias": torch.ones(3) * layer} for layer in range(2)]
}


@pytest.mark.parametrize("stage", [3, 0])
def test_all_tensors_come_whole_and_by_name(stage):
    def run(mesh):
        return dict(sl.stream_weights(sl.shard(PARAMS, mesh, stage=stage)))

    for found in sl.simulate(run, mesh={"data": 2}):
        assert list(found) == [f"layers.{layer}.{name}" for layer in range(2) for name in ("bias", "weight")]
        assert all(
            torch.equal(found[f"layers.{n}.weight"], layer["weight"]) for n, layer in enumerate(PARAMS["layers"])
        )


def test_of_what_is_not_wanted_nothing_is_sent():
    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=3)
        mesh.traffic.reset()
        names = [name for name, _ in sl.stream_weights(params, only="layers/1/*")]
        one = dict(mesh.traffic.payload)
        mesh.traffic.reset()
        sl.unshard(params)
        return names, one, dict(mesh.traffic.payload)

    names, one, both = sl.simulate(run, mesh={"data": 2})[0]
    assert names == ["layers.1.bias", "layers.1.weight"] and 2 * one["data"] == both["data"] > 0
    with pytest.raises(TreeError, match=r"only='h/\*' matches none of 4 leaves, such as 'layers/0/bias'"):
        sl.stream_weights(sl.shard(PARAMS, sl.make_mesh()), only="h/*")


def test_stages_give_their_weights_to_all():
    blocks = sl.sequential([lambda p, x, batch: batch @ p["w"], lambda p, x, batch: (x @ p["w"]).sum()])
    params = [{"w": torch.eye(2)}, {"w": torch.ones(2, 2)}]

    def run(mesh):
        parallel = sl.chain(sl.pipeline("1f1b", microbatches=2), sl.zero(2))
        state, _ = sl.make_train_step(blocks, sl.shard(params, mesh, parallel), sl.optim.sgd(0.1))
        return dict(sl.stream_weights(state, only=["1/*"]))

    for found in sl.simulate(run, mesh={"data": 1, "pipe": 2}):
        assert list(found) == ["1.w"] and torch.equal(found["1.w"], torch.ones(2, 2))
