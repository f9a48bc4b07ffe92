"""The keys of configurations, read out of the packages that they are for."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
from pathlib import Path

from pydantic import BaseModel


class Asked(dict):
    """A dictionary that notes by which keys it is asked for something."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self


def fields_of(model, under=""):
    """The keys of a pydantic model, with those of the models inside of it."""
    found = set()
    for name, field in model.model_fields.items():
        for key in {name, field.alias} - {None}:
            inner = [each for each in (field.annotation, *getattr(field.annotation, "__args__", ())) if _is_model(each)]
            found |= fields_of(inner[0], f"{under}{key}.") if inner else {f"{under}{key}"}
    return found


def _is_model(kind):
    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def arguments_of(function, under):
    """The arguments of a function, but for what is given by its caller."""
    left_out = {"self", "optimizer", "params", "model_params", "last_batch_iteration"}
    return {f"{under}{name}" for name in inspect.signature(function).parameters if name not in left_out}


def constants_of(module, under="", start=""):
    """The strings among a module's constants whose names begin so."""
    return {
        f"{under}{value}"
        for name, value in vars(module).items()
        if name.startswith(start) and isinstance(value, str) and not name.endswith(("DEFAULT", "FORMAT"))
    }


def of_deepspeed():
    """All keys of a ds_config.json, by what DeepSpeed asks a configuration for, and by the classes of its sections."""
    from deepspeed.runtime import config, lr_schedules
    from deepspeed.runtime.data_pipeline import constants as data
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    sections = {
        name: Asked()
        for name in ("activation_checkpointing", "aio", "flops_profiler", "autotuning", "checkpoint", "data_types")
    }
    sections["checkpoint"].update(writer=Asked(type="fast"), parallel_write=Asked())
    sections["autotuning"].update(model_info=Asked())
    sections["expert_parallel"] = Asked(enabled=False)
    sections["torch_autocast"] = Asked(enabled=True, dtype="bfloat16", lower_precision_safe_modules=[])
    sections["optimizer"] = Asked(type="Adam", params={})
    sections["scheduler"] = Asked(type="WarmupLR", params={})
    ltd = Asked(enabled=True)
    sections["data_efficiency"] = Asked(
        data_sampling=Asked(curriculum_learning=Asked(enabled=True, curriculum_metrics={}), dynamic_batching=Asked()),
        data_routing=Asked(random_ltd=ltd),
    )
    sections["timers"] = Asked(throughput={})
    top = Asked(sections | {"train_batch_size": 8})
    config.DeepSpeedConfig(top)

    def asked(section, under=""):
        for key in section.asked:
            inner = section.get(key)
            if isinstance(inner, Asked):
                yield from asked(inner, f"{under}{key}.")
            else:
                yield f"{under}{key}"

    models = {
        "zero_optimization": config.get_zero_config({}).__class__,
        "bf16": config.get_bfloat16_config({}).__class__,
        "bfloat16": config.get_bfloat16_config({}).__class__,
        "fp16": config.get_float16_config({}).__class__,
        "hybrid_engine": config.HybridEngineConfig,
        "weight_quantization": config.WeightQuantConfig,
        "compile": config.CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "timers.throughput": config.get_timers_config({}).__class__,
        "comms_logger": importlib.import_module("deepspeed.comm.config").CommsLoggerConfig,
    }
    models |= {name: type(each) for name, each in config.get_monitor_config({}) if _is_model(type(each))}
    found = set(asked(top)) | set(top.asked)
    for name, model in models.items():
        found |= fields_of(model, f"{name}.")
    found |= config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    found |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    found |= {f"pipeline.{key}" for key in config.get_pipeline_config({})}
    for name in lr_schedules.VALID_LR_SCHEDULES:
        found |= arguments_of(getattr(lr_schedules, name), "scheduler.params.")
    curriculum = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*."
    found |= {f"{curriculum}{key}" for key in _curriculum(data)}
    found |= {f"data_efficiency.data_routing.random_ltd.{key}" for key in _random_ltd(data)}
    found |= {
        f"data_efficiency.data_sampling.dynamic_batching.{key}" for key in constants_of(data, "", "DYNAMIC_BATCHING_")
    }
    found |= _optimizers()
    return found


# Values that a setting may have, and what a run keeps, among the constants of DeepSpeed's data efficiency.
_NO_KEYS = {
    *(
        "batch",
        "cluster",
        "custom",
        "fixed_discrete",
        "fixed_linear",
        "fixed_root",
        "percentile",
        "schedule_based",
        "value",
    ),
    *(
        "single_cluster",
        "consumed_samples",
        "curriculum_step",
        "current_difficulties",
        "current_difficulty",
        "np_rng_state",
    ),
    *("data_cluster_current_position", "data_cluster_paths"),
}


def _curriculum(data):
    """The settings of a metric; those of its schedule in their section."""
    values = constants_of(data, "", "CURRICULUM_LEARNING_") - _NO_KEYS - {"enabled", "curriculum_metrics"}
    schedule = {"total_curriculum_step", "difficulty_step", "root_degree", "difficulty", "max_step"}
    assert schedule < values
    return {f"schedule_config.{key}" if key in schedule else key for key in values if key != "data_cluster_path"}


def _random_ltd(data):
    """The settings of random-LTD; those of its schedules in their sections."""
    places = {
        "random_ltd_schedule": ("max_value", "min_value", "current_value", "schedule_type"),
        "random_ltd_schedule.schedule_config": ("seq_per_step", "require_steps"),
        "layer_token_lr_schedule": ("total_layer_tokens", "warmup_type", "warmup_layer_tokens"),
    }
    place = {key: section for section, keys in places.items() for key in keys}
    values = constants_of(data, "", "RANDOM_LTD_") - {"schedule_config"}  # a section
    return {f"{place[key]}.{key}" if key in place else key for key in values}


def _optimizers():
    """The arguments of the optimizers that DeepSpeed makes by name, from their source, which needs no compiler."""
    root = Path(importlib.util.find_spec("deepspeed").origin).parent
    classes = {
        "ops/adam/fused_adam.py": "FusedAdam",
        "ops/adam/cpu_adam.py": "DeepSpeedCPUAdam",
        "ops/adagrad/cpu_adagrad.py": "DeepSpeedCPUAdagrad",
        "ops/lamb/fused_lamb.py": "FusedLamb",
        "ops/lion/fused_lion.py": "FusedLion",
        "ops/lion/cpu_lion.py": "DeepSpeedCPULion",
    }
    found = set()
    for path, name in classes.items():
        tree = ast.parse((root / path).read_text())
        [made] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        [init] = [node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        found |= {
            f"optimizer.params.{each.arg}"
            for each in init.args.args
            if each.arg not in ("self", "params", "model_params")
        }
    engine = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine
    found |= {f"optimizer.params.{key}" for key in (*engine._MUON_HALF_KEYS, *engine._ADAM_HALF_KEYS)}
    return found


def of_dataclass(kind, under=""):
    """The fields of a dataclass."""
    return {f"{under}{field.name}" for field in dataclasses.fields(kind) if field.init}


def asked_by_accelerate_config():
    """The keys that ``accelerate config`` writes into sections of its file, from its source."""
    path = Path(importlib.util.find_spec("accelerate.commands.config.cluster").origin)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id.endswith("_config"):
            key = node.slice
            if isinstance(key, ast.Constant):
                found.add(key.value)
            elif isinstance(key, ast.BinOp) and isinstance(key.right, ast.Constant):
                found.add(f"{node.value.id.removesuffix('config')}{key.right.value}")
    return {
        name.replace("parallelism_", "parallelism_config_") if name.startswith("parallelism_") else name
        for name in found
    }


def options_of_accelerate_launch():
    """The options of ``accelerate launch``, which are the keys of sections with their prefixes."""
    from accelerate.commands.launch import launch_command_parser

    return {action.dest for action in launch_command_parser()._actions}
