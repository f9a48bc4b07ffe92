"""A ds_config.json of DeepSpeed as transforms, an optimizer and a schedule.

Keys that DeepSpeed 0.19.8 refuses, of features that it had once, are taken where a transform does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.migration.deepspeed.data import read_curriculum, read_drops, read_sparse
from shardlib.migration.deepspeed.keys import KEYS
from shardlib.migration.deepspeed.optimizer import OPTIMIZERS, read_optimizer, read_schedule
from shardlib.migration.deepspeed.precision import read_precision
from shardlib.migration.deepspeed.sharding import read_activations, read_axes, read_rows, read_zero
from shardlib.migration.draft import Draft
from shardlib.migration.reader import Reader

__all__ = ["KEYS", "OPTIMIZERS", "ORIGIN", "read"]

ORIGIN = "DeepSpeed"


def read(
    source: Mapping[str, Any],
    ranks: int | None = None,
    rules: Mapping[str, Any] | None = None,
    filled: Mapping[str, Any] | None = None,
    prefix: str = "",
    schedule: Any = None,
) -> tuple[Draft, Reader]:
    """The draft of a configuration, and its reader.

    Args:
        filled: key -> value in the place of "auto".
        prefix: of keys in entries.
        schedule: of the rate, where the configuration has none.
    """
    draft = Draft(ORIGIN, ranks, rules)
    reader = Reader(source, KEYS, filled or {}, prefix)
    read_axes(reader, draft)
    read_zero(reader, draft)
    read_precision(reader, draft)
    read_schedule(reader, draft)
    if not reader.given("scheduler"):
        draft.schedule = schedule
    read_optimizer(reader, draft)
    read_rows(reader, draft)
    read_activations(reader, draft)
    read_drops(reader, draft)
    read_curriculum(reader, draft)
    read_sparse(reader, draft)
    if reader.on("elasticity"):
        least, most = reader.integer("elasticity.min_gpus", 1), reader.integer("elasticity.max_gpus", 10000)
        draft.notes.append(f"shardlib run --ranks {least}:{most} script.py  # goes on with the ranks that are there")
    if reader.given("compile") and reader.flag("compile.deepcompile"):
        draft.options["compile"] = True
    return draft, reader
