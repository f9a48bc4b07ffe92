"""Parts of sharded trees, which no function takes for plain ones; whole ones on another plan; and trees put together."""

import optree
import pytest
import torch
from helpers.trees import assert_close, assert_same

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import gpt

PARAMS = {"body": {"w": torch.arange(35.0).view(7, 5) / 35, "b": torch.ones(7)}, "head": {"w": torch.ones(2, 7)}}
TX = sl.optim.adam(0.1)
X = torch.ones(4, 5)


def loss(part, x):
    return torch.tanh(x @ part["w"].T).mean()


CALLS = {
    "value_and_grad's function": lambda part, mesh: sl.value_and_grad(loss)(part, X),
    "make_eval_step": lambda part, mesh: sl.make_eval_step(loss, part),
    "an eval step": lambda part, mesh: sl.make_eval_step(loss, PARAMS["body"])(part, X),
    "a function of parameters": lambda part, mesh: sl.make_train_step(loss, part, TX),
    "generate": lambda part, mesh: sl.generate(gpt.GPTConfig(vocab=8, layers=1, width=8, heads=2), part, [[1]], 1),
    "init": lambda part, mesh: TX.init(part),
    "update": lambda part, mesh: TX.update(part, (), None),
    "apply": lambda part, mesh: TX.apply(part, part, ()),
    "apply_updates": lambda part, mesh: sl.optim.apply_updates(part, part),
    "unshard": lambda part, mesh: sl.unshard(part),
    "shard": lambda part, mesh: sl.shard(part, mesh, stage=1),
    "make_plan": lambda part, mesh: sl.make_plan(part, mesh, stage=1),
    "state_dict": lambda part, mesh: sl.models.state_dict(torch.nn.Linear(5, 7), part),
    "global_norm": lambda part, mesh: sl.optim.global_norm(part),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("call", CALLS)
def test_no_function_takes_a_part_for_a_plain_tree(call, stage):
    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=stage)
        detached = optree.tree_map(torch.Tensor.detach, params["body"])
        for part in (params["body"], detached):
            with pytest.raises(TreeError, match=f"^{call} was given a part of a sharded tree.*(\n.*)*sl.unshard"):
                CALLS[call](part, mesh)

    sl.simulate(run, mesh={"data": 2})


def test_parts_of_whole_trees_are_plain():
    sl.value_and_grad(loss)(sl.shard(PARAMS, sl.make_mesh(), stage=3)["body"], X)
    sl.simulate(
        lambda mesh: sl.value_and_grad(loss)(sl.unshard(sl.shard(PARAMS, mesh, stage=0))["body"], X), mesh={"data": 2}
    )


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("before", [0, 3])
def test_sharded_anew(before, after):
    tied = PARAMS | {"tied": PARAMS["head"]["w"], "count": torch.arange(3)}

    def run(mesh):
        first = sl.shard(tied, mesh, sl.zero(before))
        second = sl.shard(first, mesh, sl.zero(after))
        direct = sl.shard(tied, mesh, sl.zero(after))
        assert second.plan == direct.plan == sl.make_plan(first, mesh, sl.zero(after))
        assert_same(second.buffers, direct.buffers)
        whole = sl.unshard(second)
        assert whole["tied"] is whole["head"]["w"]
        return whole, sl.unshard(first)

    for found in sl.simulate(run, mesh={"data": 2}):
        for whole in found:
            assert_same(whole, tied)


def test_slices_are_sharded_anew():
    def run(mesh):
        slicing = sl.tensor_slicing({"body": sl.column(), "head": sl.row()}, axis="model")
        wide = optree.tree_map(lambda leaf: leaf[:6] if leaf.shape[0] == 7 else leaf[:, :6], PARAMS)
        sliced = sl.shard(wide, mesh, sl.chain(sl.zero(3), slicing))
        again = sl.shard(sliced, mesh, sl.zero(2, replicate="model"))
        return wide, sl.unshard(again)

    for wide, whole in sl.simulate(run, mesh={"data": 2, "model": 2}):
        assert_same(whole, wide)


def test_what_is_not_parameters_is_not_sharded():
    def run(mesh):
        state, _ = sl.make_train_step(lambda p, x: loss(p["body"], x), sl.shard(PARAMS, mesh, stage=1), TX)
        _, grads = sl.value_and_grad(lambda p, x: loss(p["body"], x))(state.params, X)
        for given in (state, grads):
            with pytest.raises(TreeError, match=r"shard: .* is not parameters; .* state\.params"):
                sl.shard(given, mesh)

    sl.simulate(run, mesh={"data": 2})


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_an_average_in_the_tree(stage, precision):
    """A teacher beside its student in one tree, moved between steps by parts of the state."""

    def loss_fn(params, x):
        y, target = (torch.tanh(x @ params[name]["w"].T) + params[name]["b"] for name in ("student", "teacher"))
        return (y - target - 0.1).square().mean()

    params = {"student": PARAMS["body"], "teacher": optree.tree_map(lambda leaf: leaf / 2, PARAMS["body"])}
    parallel = [sl.freeze("teacher/*"), *([sl.precision(precision)] if precision else [])]

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), *parallel))
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.5))
        for _ in range(3):
            state, _ = step(state, X)
            parts = state.params["teacher"], state.params["student"]
            teacher = optree.tree_map(lambda t, s: t.lerp(s, 0.25), *parts)
            state = sl.replace_params(state, {"student": state.params["student"], "teacher": teacher})
        return sl.unshard(state)

    (one,) = sl.simulate(run, mesh={"data": 1})
    for found in sl.simulate(run, mesh={"data": 2}):
        assert_close(found, one, 1e-2 if precision else 1e-6)
    if precision is None:
        student, teacher = params["student"], params["teacher"]
        for _ in range(3):
            leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), student)
            loss_fn({"student": leaves, "teacher": teacher}, X).backward()
            student = optree.tree_map(lambda leaf: (leaf - 0.5 * leaf.grad).detach(), leaves)
            teacher = optree.tree_map(lambda t, s: t.lerp(s, 0.25), teacher, student)
        assert_close(one, {"student": student, "teacher": teacher}, 1e-5)


# --- gradients that a caller changes ------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_changed_gradients_keep_the_dtype_that_holds_them(name, master):
    """fp16 has no 1e-9, and bf16 no third digit; gradients are in fp32."""

    def run(mesh):
        params = sl.shard({"w": torch.ones(6)}, mesh, sl.chain(sl.zero(2), sl.precision(name, master=master)))
        _, grads = sl.value_and_grad(lambda p, x: p["w"].float().sum() * 2.0**-30)(params, X)
        changed = optree.tree_map(lambda leaf: leaf * 1.001, grads)
        return sl.unshard(changed)["w"], sl.optim.global_norm(changed) / sl.optim.global_norm(grads)

    for found, ratio in sl.simulate(run, mesh={"data": 2}):
        assert torch.equal(found, torch.full((6,), 2.0**-30) * 1.001) and abs(ratio - 1.001) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grads: optree.tree_map(torch.Tensor.mean, grads), r"body/b: shape \(\), planned \(7,\)"),
        (lambda grads: optree.tree_map(lambda leaf: None, grads), "head/w: missing"),
        (
            lambda grads: optree.tree_map_with_path(lambda path, leaf: leaf * (path[-1] != "tied"), grads),
            "head/w and tied",
        ),
    ],
)
def test_gradients_of_other_leaves_or_shapes_are_refused(change, message):
    params = sl.shard(PARAMS | {"tied": PARAMS["head"]["w"]}, sl.make_mesh(), stage=2)
    _, grads = sl.value_and_grad(lambda p, x: loss(p["body"], x) + p["head"]["w"].sum())(params, X)
    assert sl.optim.global_norm(optree.tree_map(torch.neg, grads)) == sl.optim.global_norm(grads)
    with pytest.raises(TreeError, match=message):
        sl.optim.global_norm(change(grads))
