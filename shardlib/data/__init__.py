"""Batches to train on: the same on any mesh, resumed from one number, read ahead by workers."""

from shardlib.data.loader import Loader, loader
from shardlib.data.mixture import Mixture, mixture
from shardlib.data.streams import Streams, streams
from shardlib.data.token_file import TokenFile, TokenFileError, write_tokens
from shardlib.data.tokens import packed, tokens

__all__ = [
    # batches
    "Loader",
    "Streams",
    "loader",
    "streams",
    # datasets
    "Mixture",
    "mixture",
    "packed",
    "tokens",
    # token files
    "TokenFile",
    "TokenFileError",
    "write_tokens",
]
