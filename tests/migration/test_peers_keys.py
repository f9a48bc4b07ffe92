"""No key of the other libraries is missing: keys are read out of the installed packages."""

import dataclasses
import importlib.metadata

import pytest
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from helpers import peers_keys
from transformers import TrainingArguments

from shardlib.migration import accelerate, deepspeed, torchtitan, training_arguments

ALL = {
    "DeepSpeed": deepspeed.KEYS,
    "accelerate": accelerate.KEYS,
    "torchtitan": torchtitan.KEYS,
    "TrainingArguments": training_arguments.KEYS,
}


@pytest.mark.parametrize("origin", ALL)
def test_a_key_has_one_verdict_and_a_note(origin):
    taken, unneeded, refused = (set(notes) for notes in ALL[origin])
    assert not (taken & unneeded) | (taken & refused) | (unneeded & refused)
    for key, note in {**ALL[origin].taken, **ALL[origin].unneeded, **ALL[origin].refused}.items():
        assert note.strip() and not note.endswith("."), key
    for key, note in ALL[origin].refused.items():
        assert len(note) > 15 and any(sign in note for sign in (";", ",", ":")), f"{key} has no remedy: {note}"


def test_none_of_accelerates_is_missing():
    assert importlib.metadata.version("accelerate") == "1.15.0"
    keys = accelerate.KEYS.all()
    top = peers_keys.of_dataclass(ClusterConfig) | peers_keys.of_dataclass(SageMakerConfig)
    sections = {
        "fsdp_config",
        "deepspeed_config",
        "parallelism_config",
        "megatron_lm_config",
        "dynamo_config",
        "fp8_config",
    }
    assert top - keys == sections
    fsdp = peers_keys.of_dataclass(FullyShardedDataParallelPlugin)
    assert {f"fsdp_config.{name}" for name in fsdp} <= keys
    assert {f"deepspeed_config.{name}" for name in peers_keys.of_dataclass(DeepSpeedPlugin)} <= keys
    assert {f"parallelism_config.{name}" for name in peers_keys.of_dataclass(ParallelismConfig)} <= keys
    asked = peers_keys.asked_by_accelerate_config()
    assert len(asked) > 40
    known = {key.rpartition(".")[2] for key in keys}
    assert asked - known == set()
    launched = peers_keys.options_of_accelerate_launch()
    assert {
        name for name in launched if name.startswith(("fsdp_", "parallelism_config_", "megatron_lm_"))
    } - known == set()


def test_none_of_training_arguments_is_missing():
    assert importlib.metadata.version("transformers") == "5.23.0"
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields == training_arguments.KEYS.all()


def test_none_of_deepspeeds_is_missing():
    assert importlib.metadata.version("deepspeed") == "0.19.8"
    keys = peers_keys.of_deepspeed()
    assert len(keys) > 400
    parts = [key.split(".") for key in deepspeed.KEYS.all()]
    sections = {".".join(part[:length]) for part in parts for length in range(1, len(part))}
    assert keys - deepspeed.KEYS.all() - sections == set()


def test_what_deepspeed_had_once_is_taken():
    """Of the keys that DeepSpeed 0.19.8 refuses, of features that it had once, these are taken here."""
    from deepspeed.runtime import config

    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | {
        f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS
    }
    taken = {key for key in removed if any(each == key or each.startswith(f"{key}.") for each in deepspeed.KEYS.taken)}
    assert taken == {
        "amp",
        "curriculum_learning",
        "elasticity",
        "progressive_layer_drop",
        "sparse_attention",
        "zero_optimization.mics_shard_size",
        "zero_optimization.zeropp_loco_param",
    }
    for name in ("onebitadam", "zerooneadam", "onebitlamb"):
        assert name not in config.DEEPSPEED_OPTIMIZERS
        assert name in deepspeed.OPTIMIZERS


def test_torchtitans_sections_are_whole():
    """As many keys as the dataclasses of its version 0.2.2 have: it is no dependency of the tests."""
    counted = {}
    for key in torchtitan.KEYS.all():
        section = key.partition(".")[0]
        counted[section] = counted.get(section, 0) + 1
    assert counted == {
        "job": 6,
        "profiling": 7,
        "metrics": 6,
        "model": 6,
        "optimizer": 8,
        "lr_scheduler": 5,
        "training": 17,
        "parallelism": 21,
        "checkpoint": 18,
        "activation_checkpoint": 9,
        "compile": 3,
        "quantize": 11,
        "comm": 6,
        "memory_estimation": 2,
        "fault_tolerance": 7,
        "experimental": 2,
        "validation": 11,
        "debug": 4,
    }
