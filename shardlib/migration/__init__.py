"""Configurations of DeepSpeed, accelerate, torchtitan and transformers as chains of transforms: one file an origin."""

from shardlib.migration.reader import Entry
from shardlib.migration.value import Migration, Rows
from shardlib.migration.verb import migrate

__all__ = ["Entry", "Migration", "Rows", "migrate"]
