"""Leaves come to the mesh's device one by one, from wherever they are.

The meta device stands for that of a mesh: what is on it is counted as on any other, and what is copied to it is seen.
"""

import pytest
import torch
from helpers.measure import Live
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib.errors import BatchError, TreeError

LAYERS, WIDTH = 6, 32
LEAF = 4 * WIDTH * WIDTH


def params():
    generator = torch.Generator().manual_seed(0)
    layers = [{"w": torch.randn(WIDTH, WIDTH, generator=generator), "b": torch.zeros(WIDTH)} for _ in range(LAYERS)]
    return {"layers": layers, "tied": layers[0]["w"], "strided": torch.randn(WIDTH, WIDTH, generator=generator).T}


def hollow(mesh):
    mesh.device = torch.device("meta")
    return mesh


class Copies(TorchDispatchMode):
    """The values that are copied to the meta device, one after the other."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            self.seen.append(args[1].to(args[0].dtype, copy=True).flatten())
        return func(*args, **(kwargs or {}))


SLICED = sl.tensor_slicing({"layers/*": "column"})
MESHES = [
    ({"data": 4}, sl.zero(0)),
    ({"data": 4}, sl.zero(2)),
    ({"data": 4}, sl.zero(3)),
    ({"data": 2, "model": 2}, sl.chain(SLICED, sl.zero(3))),
    ({"data": 2, "model": 2}, sl.chain(sl.tensor_slicing({"layers/*": "row"}), sl.zero(1), sl.precision("bf16"))),
]


@pytest.mark.parametrize("given", ["a tree", "a function"])
@pytest.mark.parametrize(("mesh", "transform"), MESHES, ids=lambda value: getattr(value, "name", str(value)))
def test_a_device_holds_the_shards_and_no_more(mesh, transform, given):
    """To the byte; and they are given what a mesh that is where the leaves are holds."""
    whole = params()
    source = whole if given == "a tree" else params

    def run(mesh):
        there = sl.shard(whole, mesh, transform)
        with Live("meta") as live, Copies() as copies:
            sharded = sl.shard(source, hollow(mesh), transform)
        assert all(buffer.is_meta for buffer in sharded.buffers.values())
        held = sum(buffer.nbytes for buffer in sharded.buffers.values())
        assert held == sum(buffer.nbytes for buffer in there.buffers.values())
        given = torch.cat(copies.seen).double().sort().values
        wanted = torch.cat([buffer.flatten().double() for buffer in there.buffers.values()])
        assert torch.equal(given[given != 0], wanted[wanted != 0].sort().values)
        return live.peak, held

    for peak, held in sl.simulate(run, mesh=mesh):
        assert held <= peak <= held + LEAF
        assert transform.name != "zero(3)" or peak < LEAF * (LAYERS + 1) / 4 + 2 * LEAF


def test_tied_leaves_stay_tied():
    w = torch.ones(4)

    def run(mesh):
        sharded = sl.shard({"a": w, "b": w, "c": w.clone()}, hollow(mesh))
        return sharded.plan.shape.owners, sum(buffer.numel() for buffer in sharded.buffers.values())

    assert sl.simulate(run, mesh={"data": 2}) == [((0, 0, 1), 8)] * 2


def test_leaves_on_the_meta_device_are_refused():
    far = {"near": torch.ones(2), "far": torch.ones(3, 2, device="meta")}
    text = r"1 parameters on the meta device have no values for cpu:\n.*far: shape \(3, 2\)\nPass sl.shard the func"
    for given in (far, lambda: {"near": torch.ones(2), "far": torch.ones(3, 2, device="meta")}):
        with pytest.raises(TreeError, match=text):
            sl.simulate(lambda mesh, given=given: sl.shard(given, mesh, stage=3), mesh={"data": 2})
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2)
    made = sl.from_module(module)[1]  # as the message says
    whole = sl.simulate(lambda mesh: sl.unshard(sl.shard(made, mesh, stage=3)), mesh={"data": 2})[0]
    assert whole["weight"].isfinite().all() and whole["weight"].device.type == "cpu"


def test_a_plain_tree_is_on_one_device():
    mixed = {"near": torch.ones(2), "far": torch.ones(2, device="meta")}

    def loss_fn(params, batch):
        return params["near"].sum()

    for use in (
        lambda: sl.make_train_step(loss_fn, mixed, sl.optim.sgd(0.1)),
        lambda: sl.value_and_grad(loss_fn)(mixed, None),
        lambda: sl.make_eval_step(loss_fn, mixed),
    ):
        with pytest.raises(
            TreeError,
            match=r"a plain pytree are on (cpu, meta|meta, cpu): move all of them to one device, or pass sl.shard",
        ):
            use()
    state, _ = sl.make_train_step(loss_fn, {"near": torch.ones(2, device="meta")}, sl.optim.adamw(0.1))
    assert state.params["near"].is_meta and state.params.mesh.device.type == "meta"


def test_batches_stay_where_they_are_and_buffers_come():
    def loss_fn(params, buffers, batch):
        return (params["w"] * batch).sum(), buffers

    def run(mesh):
        sharded = sl.shard({"w": torch.ones(4)}, hollow(mesh))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1), buffers={"mean": torch.zeros(3), "n": 2})
        assert state.buffers["mean"].is_meta and state.buffers["n"] == 2
        with pytest.raises(BatchError, match=r"x: on cpu, the mesh is on meta; move it with .to\('meta'\)"):
            step(state, {"x": torch.ones(4)})

    sl.simulate(run, mesh={"data": 2})


def test_a_checkpoint_comes_back_to_another_device(tmp_path):
    def loss_fn(params, batch):
        return (params["w"] * batch).square().mean()

    def start(mesh):
        sharded = sl.shard({"w": torch.arange(12.0).reshape(3, 4)}, mesh, stage=3)
        return sl.make_train_step(loss_fn, sharded, sl.optim.adamw(0.1))

    def save(mesh):
        state, step = start(mesh)
        state, _ = step(state, torch.ones(3, 4))
        sl.checkpoint.save(tmp_path, state)
        return {name: buffer.clone() for name, buffer in state.params.buffers.items()}

    def restore(mesh):
        state, _ = start(hollow(mesh))
        with Live("meta") as live, Copies() as copies:
            state = sl.checkpoint.restore(tmp_path, state)
        assert state.step == 1 and all(buffer.is_meta for buffer in state.params.buffers.values())
        return live.peak, torch.cat(copies.seen)

    saved = sl.simulate(save, mesh={"data": 2})
    for peak, given in sl.simulate(restore, mesh={"data": 4}):
        assert peak <= 3 * 4 * 4
        found = set(given.tolist())
        assert len(found.intersection(torch.cat([b for s in saved for b in s.values()]).tolist())) >= 3


def test_a_modules_buffers_go_where_its_parameters_are():
    """Buffers belong to the function, unlike the parameters of a sharded model."""

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.inner = torch.nn.Module()
            self.inner.register_buffer("shift", torch.arange(4.0))

        def forward(self, x):
            return self.linear(x) + self.inner.shift

    apply, whole = sl.from_module(Shifted())
    x = torch.ones(2, 4)
    wanted = apply(whole, x)

    def run(mesh):
        sharded = sl.shard(whole, hollow(mesh))
        return apply(sharded.tree, x.to("meta"))

    found = sl.simulate(run, mesh={"data": 1})[0]
    assert found.is_meta and found.shape == wanted.shape
    assert torch.equal(apply(whole, x), wanted)  # those of the CPU are still there


def test_transformers_models_run_where_their_parameters_are():
    """Llama's rotary frequencies are a buffer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"intermediate_size": 32, "num_key_value_heads": 2, "hidden_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    apply, whole = sl.from_module(transformers.LlamaForCausalLM(config).eval())
    positions = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "position_ids": torch.arange(8).expand(2, 8)}

    def run(mesh):
        given = {name: x.to("meta") for name, x in positions.items()}
        mask = torch.zeros(2, 1, 8, 8, device="meta")
        return apply(sl.shard(whole, hollow(mesh)).tree, **given, attention_mask=mask, use_cache=False).logits

    assert sl.simulate(run, mesh={"data": 1})[0].is_meta
