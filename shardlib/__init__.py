"""shardlib: pure functions turn a parameter pytree into sharded state and a train step."""

from shardlib import checkpoint, init, optim, report, schedules, sparse
from shardlib.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy,
    permute,
    reduce_scatter,
    split,
    vocab_cross_entropy,
)
from shardlib.errors import IllegalComposition, ShardlibError
from shardlib.evaluate import make_eval_step
from shardlib.kernels.sparse_attention import sparse_attention
from shardlib.make_plan import make_plan
from shardlib.measure import measure_blocks
from shardlib.mesh.launch import launch, simulate
from shardlib.mesh.mesh import Mesh, abstract_mesh, make_mesh
from shardlib.mesh.specs import Leaf, P
from shardlib.models.from_module import from_module
from shardlib.models.state_dict import state_dict
from shardlib.nn.attention import attention
from shardlib.nn.blocks import block, sequential
from shardlib.nn.functional import Mean, embedding, linear_cross_entropy
from shardlib.nn.sequence import gather_sequence, shard_sequence, sum_sequence
from shardlib.optim import GradientTransformation, apply_updates
from shardlib.optim.train_state import TrainState, replace_params
from shardlib.plan.claims import chain
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.plan import Plan
from shardlib.plan.predict import predict_step
from shardlib.rng import Key, dropout
from shardlib.sharded.shard import shard
from shardlib.sharded.tree import Sharded
from shardlib.sharded.unshard import unshard
from shardlib.train import make_train_step, unused_params, value_and_grad
from shardlib.transforms import (
    accumulate,
    column,
    freeze,
    hierarchical,
    onebit,
    pipeline,
    powersgd,
    precision,
    quantize,
    remat,
    row,
    sequence,
    tensor_slicing,
    zero,
)

__version__ = "0.1.0"

__all__ = [
    "abstract_mesh",
    "accumulate",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply_updates",
    "attention",
    "block",
    "broadcast",
    "chain",
    "checkpoint",
    "column",
    "copy",
    "dropout",
    "embedding",
    "freeze",
    "hierarchical",
    "from_module",
    "state_dict",
    "gather_sequence",
    "GradientTransformation",
    "IllegalComposition",
    "init",
    "Key",
    "launch",
    "Leaf",
    "linear_cross_entropy",
    "LossScale",
    "make_eval_step",
    "make_mesh",
    "make_plan",
    "make_train_step",
    "Mean",
    "measure_blocks",
    "Mesh",
    "onebit",
    "optim",
    "P",
    "permute",
    "pipeline",
    "Plan",
    "powersgd",
    "precision",
    "quantize",
    "predict_step",
    "reduce_scatter",
    "remat",
    "replace_params",
    "report",
    "row",
    "schedules",
    "sequence",
    "sequential",
    "shard",
    "shard_sequence",
    "Sharded",
    "ShardlibError",
    "simulate",
    "sparse",
    "sparse_attention",
    "split",
    "sum_sequence",
    "tensor_slicing",
    "TrainState",
    "unshard",
    "unused_params",
    "value_and_grad",
    "vocab_cross_entropy",
    "zero",
]
