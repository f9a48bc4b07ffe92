"""A user's script. Type checkers read it; `test_types.py` holds what they say of it, and of the lines that are wrong."""

# ruff: noqa: F821  # reveal_type is the checkers' own
import numpy as np
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.nn.functional import LossResult

raw = {"up": torch.randn(256, 64) / 8, "down": torch.randn(8, 256) / 16}
batches = [{"x": torch.randn(32, 64), "y": torch.randn(32, 8)} for _ in range(10)]


def loss_fn(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(F.linear(F.linear(batch["x"], params["up"]).relu(), params["down"]), batch["y"])


def counted(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], rng: sl.Key) -> LossResult:
    x = sl.dropout(batch["x"], 0.1, rng.fold_in(1))
    tokens = sl.Mean(F.linear(x, params["up"]).sum(), x.numel())
    return tokens + 0.1 * sl.Mean(x.square().sum(), 2), 3


def with_aux(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return loss_fn(params, batch), 3


def of_mesh(mesh: sl.Mesh, factor: int) -> float:
    return factor * float(mesh.coords["data"])


@sl.block
def layer(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ params["w"]


# The eight lines of the README.
mesh = sl.make_mesh()
params = sl.shard(raw, mesh, stage=3)
tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(3e-4))
state, train_step = sl.make_train_step(loss_fn, params, tx)
for batch in batches:
    state, metrics = train_step(state, batch)
    reveal_type(metrics["loss"])  # Tensor
    reveal_type(metrics["finite"])  # bool

reveal_type(mesh)  # Mesh
reveal_type(params)  # Sharded[dict[str, Tensor]]
reveal_type(params.tree)  # dict[str, Tensor]
reveal_type(tx)  # GradientTransformation
reveal_type(state)  # TrainState[dict[str, Tensor]]
reveal_type(state.step)  # int
reveal_type(state.rng)  # Key
reveal_type(train_step)  # TrainStep[dict[str, Tensor]]

# A function that makes parameters, plain parameters, other layouts; and back.
reveal_type(sl.shard(lambda: raw, mesh, sl.zero(3)))  # Sharded[dict[str, Tensor]]
reveal_type(sl.shard(params, mesh, sl.zero(0)))  # Sharded[dict[str, Tensor]]
reveal_type(sl.make_train_step(counted, raw, tx)[0])  # TrainState[dict[str, Tensor]]
reveal_type(sl.unshard(params))  # dict[str, Tensor]
reveal_type(sl.unshard(state))  # dict[str, Tensor]
reveal_type(sl.to_device(sl.to_host(state)))  # TrainState[dict[str, Tensor]]
reveal_type(sl.replace_params(state, raw))  # TrainState[dict[str, Tensor]]
reveal_type(sl.relayout(state))  # TrainState[dict[str, Tensor]]

# Gradients and optimizers by themselves.
loss, grads = sl.value_and_grad(loss_fn)(params, batches[0])
reveal_type(loss)  # Tensor
reveal_type(grads)  # Sharded[dict[str, Tensor]]
reveal_type(sl.value_and_grad(with_aux)(raw, batches[0]))  # tuple[tuple[Tensor, int], dict[str, Tensor]]
reveal_type(tx.update(grads, state.opt.inner, params)[0])  # Sharded[dict[str, Tensor]]

# Plans.
chain = sl.chain(sl.zero(2), sl.precision("bf16"), sl.accumulate(2))
plan = sl.make_plan(raw, sl.abstract_mesh(data=8), chain, optimizer=tx, loss_fn=loss_fn, batch=batches[0])
reveal_type(chain)  # Chain
reveal_type(plan)  # Plan
reveal_type(plan.bytes("param"))  # int
reveal_type(plan.peak_bytes)  # int | None
reveal_type(plan.payload())  # dict[str, int]
reveal_type(mesh.shape)  # dict[str, int]
reveal_type(mesh.device)  # device
reveal_type(sl.P("data", None))  # P

# Modules, blocks, evaluation.
module = torch.nn.Linear(64, 8)
apply, module_params = sl.from_module(module)
reveal_type(apply)  # Apply
reveal_type(module_params)  # ModuleParams
reveal_type(sl.from_module(module, buffers=True)[2])  # Mapping[str, Tensor | None]
reveal_type(sl.from_module(module, frozen=True)[2])  # list[str]
reveal_type(sl.from_module(module, blocks=[module])[0])  # Sequential
reveal_type(layer(raw, loss))  # Tensor
evaluate = sl.make_eval_step(lambda params, batch: sl.Mean(loss_fn(params, batch), 1), params)
reveal_type(evaluate(state, batches[0]))  # Tensor
reveal_type(evaluate.over(params, batches))  # Tensor
reveal_type(sl.unused_params(loss_fn, raw, {"x": np.ones(2)}))  # tuple[str, ...]
reveal_type(sl.generate(sl.models.gpt.GPTConfig(), state, [[1, 2]], 3))  # list[Tensor]

# Checkpoints.
with sl.checkpoint.Manager("run", keep=3, every=5) as manager:
    reveal_type(manager.latest())  # Path | None
    reveal_type(manager.restore(state))  # TrainState[dict[str, Tensor]]
    reveal_type(sl.checkpoint.with_rollback(train_step, manager))  # TrainStep[dict[str, Tensor]]
    manager.step(state)

# Ranks.
reveal_type(sl.launch(of_mesh, 2, mesh={"data": 2}))  # list[float]
reveal_type(sl.simulate(of_mesh, 2, mesh={"data": 2}))  # list[float]
reveal_type(sl.simulate(lambda mesh: mesh.rank, mesh={"data": 2}))  # list[int]

# What is wrong.
sl.shard(raw, mesh, stage="3")  # wrong
sl.shard(mesh, raw)  # wrong
sl.shard(raw, mesh, "zero3")  # wrong
sl.make_train_step(loss_fn, params, torch.optim.SGD([loss], 0.1))  # wrong
sl.make_train_step(params, loss_fn, tx)  # wrong
sl.make_train_step(lambda params, batch: "loss", params, tx)  # wrong
sl.make_train_step(loss_fn, params, tx, nonfinite="ignore")  # wrong
sl.make_plan(raw, {"data": 8}, sl.zero(3))  # wrong
sl.chain(sl.zero(3), tx)  # wrong
sl.optim.chain(sl.optim.adamw(1e-3), sl.zero(3))  # wrong
sl.abstract_mesh(data="8")  # wrong
sl.launch(of_mesh, "2", mesh={"data": 2})  # wrong
sl.simulate(of_mesh, 2, mesh=2)  # wrong
sl.checkpoint.Manager("run", every="5")  # wrong
sl.from_module(loss_fn)  # wrong
sl.Key("0")  # wrong
train_step(params, batches[0])  # wrong
metrics["lr"]  # wrong
plan.bytes(3)  # wrong
sl.zeros(3)  # wrong
