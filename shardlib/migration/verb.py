"""`migrate`: a configuration of DeepSpeed, accelerate, torchtitan or transformers as a chain, an optimizer and Python."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.common.optional import require
from shardlib.errors import MigrationError, ShardlibError, listing
from shardlib.migration import accelerate, deepspeed, torchtitan, training_arguments
from shardlib.migration.value import Migration


def migrate(
    source: Any,
    *,
    ranks: int | None = None,
    steps: int | None = None,
    rules: Mapping[str, Any] | None = None,
    strict: bool = True,
) -> Migration:
    """A configuration of another library as what it is here: a chain of transforms, an optimizer, a schedule, and Python.

    ==================  =================================================================================================
    source              is
    ==================  =================================================================================================
    dictionary, .json   a ds_config of DeepSpeed, of version 0.19.8 or of an earlier one
    .yaml, .yml         a file of ``accelerate config``, with FSDP or DeepSpeed or neither
    .toml               a file of torchtitan's, until version 0.2
    TrainingArguments   those of transformers, with what ``deepspeed=`` and ``fsdp_config=`` name
    ==================  =================================================================================================

    Each key of the source is in the table of the result's ``entries``: taken (for what), not needed (why), or refused
    (why, and what to do).

    Args:
        source: a path, a dictionary, or ``transformers.TrainingArguments``. A dictionary with a key of accelerate's or
            torchtitan's files (``distributed_type``, ``parallelism``) is one of theirs.
        ranks: the number of ranks that will train, where numbers of the batch depend on it.
        steps: of the run, for a schedule of TrainingArguments that count epochs.
        rules: for tensor slicing, of the model: `shardlib.models.huggingface.slicing_rules`, say. By default those of
            decoders with transformers' names (``q_proj``, ``up_proj``, …).
        strict: whether a key that is refused is an error. If not, it is in the table alone.

    Raises:
        MigrationError: with ``strict``, keys that are refused, or not known: all of them. In any case, a file that is none
            of these, or values that do not go together.

    >>> config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
    ...           "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    ...           "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}}
    >>> migrated = sl.migrate(config, ranks=8)
    >>> migrated.chain
    sl.chain(sl.zero(2), sl.precision(), sl.accumulate(2))
    >>> migrated.rows.rank, migrated.sizes()
    (8, {'data': 8})
    """
    migration = _migration(source, ranks, steps, rules)
    try:
        _ = migration.values
        if migration.ranks is not None:
            migration.sizes()
    except ShardlibError as error:
        raise MigrationError(f"{migration.origin}'s values do not go together here: {error}") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise MigrationError(f"{migration.origin}'s values are out of range here: {error}") from error
    if strict and migration.refused:
        refused = [f"{entry.key} = {entry.value!r}: {entry.note}" for entry in migration.refused]
        raise MigrationError(
            f"{len(refused)} of {len(migration.entries)} keys of {migration.origin} are refused:\n{listing(refused)}\nChange "
            "them, or take what is left by strict=False."
        )
    return migration


def _migration(source: Any, ranks: int | None, steps: int | None, rules: Mapping[str, Any] | None) -> Migration:
    if isinstance(source, Mapping):
        return _of_mapping(source, ranks, rules, Path())
    if hasattr(source, "per_device_train_batch_size") and hasattr(source, "learning_rate"):
        return training_arguments.convert(source, ranks, rules, steps)
    if not isinstance(source, (str, Path)):
        raise MigrationError(
            f"migrate({type(source).__name__}): give a path, a dictionary, or transformers' TrainingArguments"
        )
    path = Path(source)
    return _of_mapping(parsed(path), ranks, rules, path.parent)


def parsed(path: Path) -> Mapping[str, Any]:
    """The contents of a file of JSON, YAML or TOML, by its suffix.

    Raises:
        MigrationError: there is no such file, or it is none of these.
    """
    try:
        if path.suffix == ".toml":
            found = tomllib.loads(path.read_text())
        elif path.suffix in (".yaml", ".yml"):
            yaml = require("yaml", "a file of YAML", "pyyaml", "hf")
            found = yaml.safe_load(path.read_text())
        elif path.suffix == ".json":
            found = json.loads(path.read_text())
        else:
            raise MigrationError(f"{path} is no .json, .yaml or .toml; give one of these")
    except OSError as error:
        raise MigrationError(f"{path} cannot be read: {error}; give a file") from error
    except ValueError as error:  # of json and tomllib
        raise MigrationError(f"{path} is damaged: {error}; mend the file") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise MigrationError(f"{path} is damaged: {error}; mend the file") from error
    if not isinstance(found, Mapping):
        raise MigrationError(f"{path} holds {type(found).__name__}, not keys and values; give a configuration")
    return found


def _of_mapping(
    source: Mapping[str, Any], ranks: int | None, rules: Mapping[str, Any] | None, folder: Path
) -> Migration:
    if accelerate.is_one(source):
        return accelerate.convert(source, ranks, rules, folder)
    if torchtitan.is_one(source):
        return torchtitan.convert(source, ranks, rules)
    draft, reader = deepspeed.read(source, ranks, rules)
    return draft.finish([reader])
