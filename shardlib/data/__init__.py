"""Batches to train on: the same on any mesh, resumed from one number, read ahead by workers."""

from shardlib.data.analyze import analyze
from shardlib.data.curriculum import Curriculum, curriculum, layer_tokens
from shardlib.data.examples import Examples, examples
from shardlib.data.files import Index, IndexFile, IndexFileError, TokenFile, TokenFileError, write_tokens
from shardlib.data.loader import Loader, loader
from shardlib.data.mixture import Mixture, mixture
from shardlib.data.pace import Pace, constant_pace, custom_pace, discrete_pace, linear_pace, map_paces, root_pace
from shardlib.data.streams import Streams, streams
from shardlib.data.tokens import packed, tokens

__all__ = [
    # batches
    "Loader",
    "Streams",
    "loader",
    "streams",
    # what each step reads
    "Curriculum",
    "Index",
    "Pace",
    "constant_pace",
    "curriculum",
    "custom_pace",
    "discrete_pace",
    "layer_tokens",
    "linear_pace",
    "map_paces",
    "root_pace",
    # datasets
    "Examples",
    "Mixture",
    "examples",
    "mixture",
    "packed",
    "tokens",
    # index files
    "IndexFile",
    "IndexFileError",
    "analyze",
    # token files
    "TokenFile",
    "TokenFileError",
    "write_tokens",
]
