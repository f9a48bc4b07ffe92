"""The most common slips of a call: each is refused with the remedy, at once and on every kind of mesh."""

import pytest
import torch
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import HandleError, TreeError

PARAMS = {"w": torch.arange(15.0).reshape(5, 3) / 10}
X = torch.ones(4, 5)


def loss_fn(params, batch):
    return (batch @ params["w"]).square().mean()


def made(mesh=None):
    params = PARAMS if mesh is None else sl.shard(PARAMS, mesh, stage=1)
    return sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1))


TRAIN_STEPS = {
    "both results": (
        lambda state, step: step(step(state, X), X),
        r"a tuple with a state in it: .*state, metrics = train_",
    ),
    "swapped": (
        lambda state, step: step(X, state),
        r"its arguments in the wrong order: the state comes first, train_step\(state, batch\)",
    ),
    "parameters": (lambda state, step: step(state.params, X), r"parameters: give the state .*sl.replace_params"),
    "anything": (lambda state, step: step({"w": X}, X), "dict as the state: give the one that make_train_step"),
    "none": (lambda state, step: step(None, X), "NoneType as the state"),
}


@pytest.mark.parametrize("slip", TRAIN_STEPS)
def test_arguments_of_train_steps(slip):
    act, message = TRAIN_STEPS[slip]

    def run(mesh):
        with pytest.raises(TypeError, match=f"a train step was given {message}"):
            act(*made(mesh))

    run(None)
    sl.simulate(run, mesh={"data": 2})


def test_a_state_is_usable_after_a_slip():
    state, step = made()
    with pytest.raises(TypeError):
        step(X, state)
    state, metrics = step(state, X)
    assert metrics["loss"] == loss_fn(PARAMS, X)


MESHES = {
    "simulate": lambda: sl.simulate(lambda mesh: 1, mesh=2),
    "launch": lambda: sl.launch(print, mesh=2),
    "simulate's mesh": lambda: sl.simulate(lambda mesh: 1, mesh=sl.make_mesh()),
}


@pytest.mark.parametrize("slip", MESHES)
def test_meshes_without_names(slip):
    with pytest.raises(TypeError, match=r"mesh=.* names and sizes of its axes, such as mesh=dict\(data=2\)"):
        MESHES[slip]()
    with pytest.raises(TypeError, match=r"make_mesh\(2\): axes are given by name, make_mesh\(data=...\)"):
        sl.make_mesh(2)
    with pytest.raises(TypeError, match=r"axes are given by name, make_mesh\(data=2, model=4\)"):
        sl.make_mesh({"data": 2, "model": 4})


def test_parameters_after_the_batch():
    def run(mesh):
        state, step = made(mesh)
        result = step(made(mesh)[0], X)
        evaluate = sl.make_eval_step(lambda params, x: sl.Mean((x @ params["w"]).sum(), 1), state.params)
        grad_fn = sl.value_and_grad(loss_fn)
        for call, message in {
            lambda: evaluate(X, state.params): r"an eval step: Tensor .*\(params, ...\), in this order",
            lambda: evaluate(X, state): "an eval step: Tensor where parameters are due",
            lambda: evaluate.over([X], state): "an eval step: list where parameters are due",
            lambda: evaluate(result, X): "an eval step: a tuple of TrainState, dict",
            lambda: grad_fn(X, state.params): r"value_and_grad's function: Tensor .*\(params, batch\), in this order",
            lambda: grad_fn(X, state): "value_and_grad's function: Tensor where parameters are due",
            lambda: grad_fn(result, X): "value_and_grad's function: a tuple of TrainState, dict",
        }.items():
            with pytest.raises(TreeError, match=message):
                call()
        loss, grads = grad_fn(state, X)  # of a state, its parameters
        assert isinstance(grads, sl.Sharded) and loss == loss_fn(PARAMS, X)

    sl.simulate(run, mesh={"data": 2})


def test_arguments_of_an_update():
    tx = sl.optim.adamw(0.1)

    def run(mesh):
        params = sl.shard(PARAMS, mesh, stage=2)
        opt = tx.init(params)
        _, grads = sl.value_and_grad(loss_fn)(params, X)
        for arguments in (
            (opt, grads, params),
            (grads, params, opt),
            (params, grads, opt),
            (grads, opt, PARAMS),
            (PARAMS, opt, params),
            (grads, opt, sl.make_train_step(loss_fn, params, tx)[0]),
        ):
            with pytest.raises(TreeError, match=r"update was given \(.*\): it takes \(gradients, .*of a TrainState"):
                tx.update(*arguments)
        return sl.unshard(sl.optim.apply_updates(params, tx.update(grads, opt, params)[0]))

    grads = {"w": torch.autograd.functional.jacobian(lambda w: loss_fn({"w": w}, X), PARAMS["w"])}
    wanted = sl.optim.apply_updates(PARAMS, tx.update(grads, tx.init(PARAMS), PARAMS)[0])
    for params in sl.simulate(run, mesh={"data": 2}):
        torch.testing.assert_close(params, wanted)


def test_arguments_of_checkpoints(tmp_path):
    state, step = made()
    for call, message in {
        lambda: sl.checkpoint.save(state, tmp_path): r"the folder comes first, save\(folder, state\)",
        lambda: sl.checkpoint.restore(state, str(tmp_path)): r"the folder comes first, restore\(folder, state\)",
        lambda: sl.checkpoint.save(tmp_path, step(state, X)): r"a tuple with a state in it; .*state, metrics =",
    }.items():
        with pytest.raises(TypeError, match=message):
            call()


def test_a_module_that_simulated_ranks_share():
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def run(mesh, shared):
        own = shared or torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))

        def of_module(params, batch):
            return torch.func.functional_call(own, params, (batch,)).square().mean()

        state, step = sl.make_train_step(of_module, sl.shard(params, mesh, stage=3), sl.optim.sgd(0.1))
        for _ in range(2):
            state, _ = step(state, X)
        return sl.unshard(state.params)

    with pytest.raises(HandleError, match=r"on another rank.*inside the simulated function"):
        sl.simulate(run, module, mesh={"data": 2})
    assert_same(*sl.simulate(run, None, mesh={"data": 2}))


def test_a_parameter_that_is_used_after_its_call():
    kept = []

    def keeping(params, batch):
        kept.append(params["w"])
        return loss_fn(params, batch)

    def run(mesh):
        state, step = sl.make_train_step(keeping, sl.shard(PARAMS, mesh, stage=3), sl.optim.sgd(0.1))
        step(state, X)
        if mesh.rank == 1:  # alone: the others do not wait for it, nor it for them
            with pytest.raises(HandleError, match=r"after their call.*return as aux what you keep"):
                kept[0] + 1

    sl.simulate(run, mesh={"data": 2})


def test_inference_mode():
    with torch.inference_mode():
        params = {"w": PARAMS["w"].clone()}
        sharded = sl.shard(params, sl.make_mesh(), stage=1)
        for given in (params, sharded, PARAMS):
            with pytest.raises(TreeError, match=r"under torch.inference_mode\(\) cannot be trained; leave it"):
                sl.make_train_step(loss_fn, given, sl.optim.sgd(0.1))
    with pytest.raises(TreeError, match=r"cannot be trained; leave it .*param.clone\(\)"):
        sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
    evaluate = sl.make_eval_step(loss_fn, sharded)  # which needs no gradients
    assert evaluate(sharded, X) == loss_fn(PARAMS, X)
    state, step = sl.make_train_step(loss_fn, {"w": params["w"].clone()}, sl.optim.sgd(0.1))
    assert step(state, X)[1]["loss"] == loss_fn(PARAMS, X)
