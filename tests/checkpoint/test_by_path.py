"""What a state has of one parameter, read and written whole, from any layout."""

import optree
import pytest
import torch
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition, RankMismatch, TreeError

PATHS = ("blocks/0/w", "blocks/1/w", "b", "w")
CLIPPED = lambda: sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(1e-2))  # noqa: E731


def model():
    torch.manual_seed(0)
    shared = torch.randn(7, 5).double()
    blocks = [{"w": torch.randn(3, 7).double()}, {"w": torch.randn(3, 3).double()}]
    return {"w": shared, "tied": shared, "b": torch.randn(7).double(), "blocks": blocks}


def loss_fn(params, x):
    y = torch.tanh(x @ params["w"].T + params["b"]) + x @ params["tied"].T
    return (y @ params["blocks"][0]["w"].T @ params["blocks"][1]["w"].T).square().mean()


BATCH = torch.ones(4, 5).double()


def written(mesh, transform, make):
    """What is read after two steps, and the parameters after a step from a state that was written to."""
    state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, transform), make())
    for _ in range(2):
        state, _ = step(state, BATCH)
    found = {path: sl.checkpoint.read_leaf(state, path) for path in PATHS}
    for whole in found.values():
        whole.pop("master", None)
    moments = {name: torch.linspace(0, 1, 21).view(3, 7) for name in found["w"] if name != "param"}
    state = sl.checkpoint.write_leaf(state, "tied", {"param": torch.ones(7, 5)})
    state = sl.checkpoint.write_leaf(state, "blocks/0/w", moments)
    kept = sl.checkpoint.read_leaf(state, "w")["param"], sl.checkpoint.read_leaf(state, "blocks/0/w")
    kept[1].pop("master", None)
    state, _ = step(state, BATCH)
    return found, kept, sl.unshard(state)


LAYOUTS = {
    **{f"stage {stage}": sl.zero(stage) for stage in range(4)},
    "host": sl.chain(sl.zero(3), sl.offload("host")),
    "part on host": sl.chain(sl.zero(2), sl.offload("host", fraction=0.5)),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, "disk"])
def test_every_layout_is_read_and_written_alike(layout, tmp_path):
    transform = LAYOUTS.get(layout) or sl.chain(sl.zero(2), sl.offload("disk", folder=str(tmp_path)))
    one = written(sl.make_mesh(), sl.zero(0), CLIPPED)
    assert [*one[0]["w"]] == ["param", "mu", "nu"]
    assert one[0]["w"]["mu"].abs().max() > 0
    for found in sl.simulate(written, transform, CLIPPED, mesh={"data": 2}):
        assert_close(found, one, 1e-10)


@pytest.mark.parametrize(
    ("mesh", "transform"),
    [
        ({"data": 2, "model": 2}, sl.chain(sl.zero(1), sl.tensor_slicing({"blocks/0/w": sl.row()}, axis="model"))),
        ({"data": 2, "other": 2}, sl.zero(3, axis="other", replicate="data")),
    ],
)
def test_of_slices_and_copies(mesh, transform):
    params = model() | {"blocks": [{"w": torch.randn(3, 8).double()}]}

    def run(mesh):
        state, _ = sl.make_train_step(lambda p, x: loss_fn(p, x), sl.shard(params, mesh, transform), CLIPPED())
        before = sl.checkpoint.read_leaf(state, "blocks/0/w")
        state = sl.checkpoint.write_leaf(state, "blocks/0/w", {"param": before["param"] * 2, "nu": before["param"]})
        return before, sl.checkpoint.read_leaf(state, "blocks/0/w"), sl.unshard(state)

    weight = params["blocks"][0]["w"]
    for before, after, whole in sl.simulate(run, mesh=mesh):
        assert_same(before["param"], weight)
        assert_same(after, {"param": weight * 2, "mu": torch.zeros_like(weight), "nu": weight})
        assert_same(whole, params | {"blocks": [{"w": weight * 2}]})


def test_of_stages():
    """Ranks of other stages read and write it too."""
    loss = sl.sequential([lambda p, carry, x: x @ p["w"], lambda p, carry, x: (carry @ p["w"]).square().mean()])
    params = [{"w": torch.ones(4, 4)}, {"w": torch.eye(4)}]

    def run(mesh):
        transform = sl.chain(sl.zero(1), sl.pipeline(schedule="1f1b", microbatches=1))
        state, _ = sl.make_train_step(loss, sl.shard(params, mesh, transform), sl.optim.sgd(0.1, momentum=0.9))
        name = next(name for name in sl.checkpoint.read_leaf(state, "1/w") if name != "param")
        state = sl.checkpoint.write_leaf(state, "1/w", {name: torch.ones(4, 4)})
        return sl.checkpoint.read_leaf(state, "1/w")[name], sl.checkpoint.read_leaf(state, "0/w")[name]

    for found in sl.simulate(run, mesh={"data": 2, "pipe": 2}):
        assert_same(found, (torch.ones(4, 4), torch.zeros(4, 4)))


def test_masters_and_parameters_are_one():
    def run(mesh):
        params = optree.tree_map(torch.Tensor.float, model())
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), sl.precision("bf16")))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.0))
        for name in ("param", "master"):
            value = torch.full((7,), 1.0001 if name == "master" else 3.0001)
            state = sl.checkpoint.write_leaf(state, "b", {name: value})
            state, _ = step(state, BATCH)  # writes the master's rounding
            found = sl.checkpoint.read_leaf(state, "b")
            assert_same(found, {"param": value.bfloat16(), "master": value})

    sl.simulate(run, mesh={"data": 2})


def test_gradients_and_states_that_are_kept():
    def run(mesh):
        sharded = sl.shard(model(), mesh, stage=2)
        _, grads = sl.value_and_grad(loss_fn)(sharded, BATCH)
        assert_same(sl.checkpoint.read_leaf(grads, "w"), {"grad": sl.unshard(grads)["w"]})
        changed = sl.checkpoint.write_leaf(grads, "b", {"grad": torch.ones(7)})
        assert_same(sl.unshard(changed), sl.unshard(grads) | {"b": torch.ones(7).double()})
        state, _ = sl.make_train_step(loss_fn, sharded, CLIPPED())
        other = sl.checkpoint.write_leaf(state, "b", {"param": torch.zeros(7)}, donate=False)
        assert_same((sl.unshard(other)["b"], sl.unshard(state)["b"]), (torch.zeros(7).double(), model()["b"]))

    sl.simulate(run, mesh={"data": 2})


def test_what_does_not_fit_is_refused(tmp_path):
    def run(mesh):
        state, _ = sl.make_train_step(loss_fn, sl.shard(model(), mesh, stage=1), CLIPPED())
        with pytest.raises(TreeError, match="no parameter 'c' in the state"):
            sl.checkpoint.read_leaf(state, "c")
        with pytest.raises(TreeError, match=r"mo: not there; there are param, .*(\n.*)*nu: shape \(2,\).*\(7,\)"):
            sl.checkpoint.write_leaf(state, "b", {"mo": torch.ones(7), "nu": torch.ones(2)})
        with pytest.raises(RankMismatch, match="values"):
            sl.checkpoint.write_leaf(state, "b", {"nu": torch.full((7,), float(mesh.rank))})
        on_disk = sl.shard(model(), mesh, sl.chain(sl.zero(1), sl.offload("disk", folder=str(tmp_path))))
        state, _ = sl.make_train_step(loss_fn, on_disk, CLIPPED())
        with pytest.raises(IllegalComposition, match="leave donate=True"):
            sl.checkpoint.write_leaf(state, "b", {"nu": torch.ones(7)}, donate=False)

    sl.simulate(run, mesh={"data": 2})
