"""Transforms, one file each: values that claim how a step is sharded, reduced and scheduled."""

from shardlib.transforms.accumulate import accumulate
from shardlib.transforms.experts import experts
from shardlib.transforms.freeze import freeze
from shardlib.transforms.hierarchical import hierarchical
from shardlib.transforms.offload import offload
from shardlib.transforms.onebit import onebit
from shardlib.transforms.pipeline import pipeline
from shardlib.transforms.powersgd import powersgd
from shardlib.transforms.precision import precision
from shardlib.transforms.progressive_layer_drop import progressive_layer_drop
from shardlib.transforms.quantize import quantize
from shardlib.transforms.random_ltd import random_ltd
from shardlib.transforms.remat import remat
from shardlib.transforms.reproducible import reproducible
from shardlib.transforms.sequence import sequence
from shardlib.transforms.tensor_slicing import column, row, tensor_slicing
from shardlib.transforms.tile import tile
from shardlib.transforms.zero import zero

__all__ = [
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
]
