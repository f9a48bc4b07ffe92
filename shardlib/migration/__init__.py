"""Configurations of DeepSpeed, accelerate, torchtitan and transformers as chains of transforms: one file an origin."""

from shardlib.migration.reader import KeyEntry
from shardlib.migration.value import BatchRows, Migration
from shardlib.migration.verb import migrate

__all__ = ["KeyEntry", "Migration", "BatchRows", "migrate"]
