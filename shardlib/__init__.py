"""shardlib: pure functions turn a parameter pytree into sharded state and a train step."""

from shardlib import (
    checkpoint,
    collectives,
    data,
    debug,
    errors,
    init,
    models,
    nn,
    optim,
    plan,
    report,
    schedules,
    sparse,
)
from shardlib.checkpoint.relayout import relayout
from shardlib.common.version import VERSION
from shardlib.evaluate import make_eval_step
from shardlib.generate import generate
from shardlib.make_plan import make_plan
from shardlib.mesh.launch import launch, simulate
from shardlib.mesh.mesh import Mesh, abstract_mesh, make_mesh
from shardlib.mesh.specs import P
from shardlib.models.from_module import from_module
from shardlib.nn import Mean, block, dropout, sequential
from shardlib.optim.moving import to_device, to_disk, to_host
from shardlib.optim.train_state import TrainState, replace_params
from shardlib.plan.transform import chain
from shardlib.report.profile import profile
from shardlib.rng import Key
from shardlib.search import search_plan
from shardlib.shard import shard
from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import unshard
from shardlib.train import make_train_step, unused_params, value_and_grad
from shardlib.transforms import (
    accumulate,
    column,
    experts,
    freeze,
    hierarchical,
    offload,
    onebit,
    pipeline,
    powersgd,
    precision,
    progressive_layer_drop,
    quantize,
    random_ltd,
    remat,
    reproducible,
    row,
    sequence,
    tensor_slicing,
    tile,
    zero,
)

__version__ = VERSION

__all__ = [
    # verbs
    "shard",
    "unshard",
    "make_train_step",
    "make_eval_step",
    "generate",
    "make_plan",
    "search_plan",
    "profile",
    "value_and_grad",
    "replace_params",
    "relayout",
    "to_host",
    "to_disk",
    "to_device",
    "unused_params",
    "from_module",
    # meshes and ranks
    "make_mesh",
    "abstract_mesh",
    "launch",
    "simulate",
    # values
    "Key",
    "Mean",
    "Mesh",
    "P",
    "Sharded",
    "TrainState",
    # in a loss
    "block",
    "dropout",
    "sequential",
    # transforms
    "chain",
    "accumulate",
    "column",
    "experts",
    "freeze",
    "hierarchical",
    "offload",
    "onebit",
    "pipeline",
    "powersgd",
    "precision",
    "progressive_layer_drop",
    "quantize",
    "random_ltd",
    "remat",
    "reproducible",
    "row",
    "sequence",
    "tensor_slicing",
    "tile",
    "zero",
    # rooms
    "checkpoint",
    "collectives",
    "data",
    "debug",
    "errors",
    "init",
    "models",
    "nn",
    "optim",
    "plan",
    "report",
    "schedules",
    "sparse",
]
