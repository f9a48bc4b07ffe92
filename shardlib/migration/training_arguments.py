"""transformers' TrainingArguments, with the DeepSpeed configuration or the FSDP settings that they name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from shardlib.errors import MigrationError
from shardlib.migration import deepspeed, optimizers
from shardlib.migration.accelerate import FSDP, mixed, read_fsdp
from shardlib.migration.calls import Call, Verbatim
from shardlib.migration.draft import Draft, rate
from shardlib.migration.optimizers import warm_stay_decay
from shardlib.migration.reader import Keys, Reader, each

ORIGIN = "TrainingArguments"

_LOGGED = "train_step returns metrics; sl.report.Log writes them to CSV, JSON lines, TensorBoard and wandb"
_SAVED = "sl.checkpoint.Manager(folder, keep=, every=) saves in a thread and restores on any mesh, at the exact batch"
_HUB = "sl.checkpoint.export_safetensors writes what from_pretrained reads, and huggingface_hub uploads a folder"
_EVALUATED = "sl.make_eval_step(fn, params) evaluates on sharded parameters, when the script says so"
_LOADED = "sl.data.loader shuffles, reads ahead and resumes; collate and map are its arguments"
_DDP = "gradients travel in the plan's buckets, and unused parameters have gradient 0"
_LOOPED = "the loop is the script's"

KEYS = Keys(
    {
        "per_device_train_batch_size": "rows of a micro-batch",
        "gradient_accumulation_steps": "sl.accumulate(n)",
        **each("learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay optim optim_args", "sl.optim"),
        **each("lr_scheduler_type lr_scheduler_kwargs warmup_steps max_steps", "the schedule of the learning rate"),
        "max_grad_norm": "sl.optim.clip_by_global_norm(...)",
        **each("bf16 fp16", "sl.precision(...)"),
        **each("activation_checkpointing gradient_checkpointing", "sl.remat()"),
        **each("torch_compile torch_compile_backend", "make_train_step(compile=...)"),
        "seed": "make_train_step(rng=seed)",
        "deepspeed": "the keys of that configuration, which are in this table too",
        **each("fsdp fsdp_config", "sl.zero(3), and what the settings say"),
    },
    {
        "output_dir": _SAVED,
        "num_train_epochs": "sl.data.loader(epochs=); a schedule counts steps: migrate(source, steps=...)",
        "average_tokens_across_devices": "a loss that is an sl.Mean weighs tokens over all ranks and micro-batches",
        **each(
            "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
            "sl.remat() recomputes blocks, never by re-entering autograd",
        ),
        "tf32": "torch.set_float32_matmul_precision is yours to call",
        "torch_compile_mode": "make_train_step(compile=) has one mode",
        **each(
            "use_liger_kernel liger_kernel_config",
            "the library's kernels serve its models and sl.nn; a transformers model keeps its own",
        ),
        "use_cache": "a training step keeps no cache of keys",
        "torch_empty_cache_steps": "buffers are allocated once",
        **each("bf16_full_eval fp16_full_eval", "evaluation has the plan's precision"),
        **each(
            "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
            "include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project "
            "trackio_space_id trackio_bucket_id trackio_static_space_id",
            _LOGGED,
        ),
        **each(
            "eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
            "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics",
            _EVALUATED,
        ),
        **each(
            "save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint "
            "load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip "
            "restore_callback_states_from_checkpoint resume_from_checkpoint",
            _SAVED,
        ),
        **each("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", _HUB),
        "full_determinism": "torch.use_deterministic_algorithms is yours to call; sl.reproducible(n) is the same on any mesh",
        "data_seed": "sl.data.loader(seed=)",
        "use_cpu": "sl.make_mesh(device='cpu')",
        **each(
            "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
            "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
            "label_names",
            _LOADED,
        ),
        "length_column_name": "sl.data.packed makes full rows of documents of any length",
        **each("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend", _DDP),
        "ddp_timeout": "sl.make_mesh(timeout=)",
        **each("debug skip_memory_metrics", "sl.profile(...) shows a step's time and memory"),
        **each("do_train do_eval do_predict local_rank", _LOOPED),
        "accelerator_config": "sl.data.loader gives each rank its share",
    },
    {
        "optim_target_modules": "no optimizer projects gradients; leave it out, or sl.optim.partition with sl.optim.muon",
        "label_smoothing_factor": "the loss is the script's: F.cross_entropy(..., label_smoothing=0.1)",
        "neftune_noise_alpha": "noise on embeddings is a line of the loss function; leave it out",
        "auto_find_batch_size": "sl.make_plan(device_memory='24GiB') says what fits, before a run; leave it out",
        "parallelism_config": "migrate the accelerate file that has it, or leave it out and add transforms to the chain",
        "train_sampling_strategy": "sl.data.packed makes full rows of documents of any length; write 'random'",
    },
)

_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "paged_adamw_32bit",
    "paged_adamw",
)
_ADAMW8 = ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit")
_LION = ("lion_32bit", "paged_lion_32bit", "lion", "paged_lion")


def convert(
    source: Any,
    ranks: int | None,
    rules: Mapping[str, Any] | None,
    steps: int | None = None,
    decayed: Collection[str] | None = None,
) -> Any:
    """The migration.

    Args:
        steps: of the run, where the arguments count epochs.
        decayed: paths of the parameters that decay, where the model is known.
    """
    known = {field.name: getattr(source, field.name, None) for field in dataclasses.fields(source)}
    values = {name: value.value if isinstance(value, Enum) else value for name, value in known.items()}
    usual = {field.name: field.default for field in dataclasses.fields(source)}
    inner = values.pop("deepspeed", None)
    fsdp_config = values.pop("fsdp_config", None)
    reader = Reader(values, KEYS, usual=usual)
    if reader.integer("max_steps", -1) > 0:
        steps = reader.integer("max_steps")
    else:
        reader.skip("max_steps", "it is off")
    if inner:
        return _of_deepspeed(source, reader, inner, ranks, rules, steps)
    draft = Draft(ORIGIN, ranks, rules)
    readers = [reader]
    if reader.read("fsdp"):
        section = _loaded(fsdp_config or {})
        settings = Reader(section, _fsdp_keys(), prefix="fsdp_config.")
        read_fsdp(settings, draft, {key.removeprefix("fsdp_"): key for key in section}, 1)
        readers.append(settings)
    draft.micro = reader.integer("per_device_train_batch_size", 8)
    draft.accumulation = reader.integer("gradient_accumulation_steps", 1)
    draft.settle_rows(reader, "", "", "")
    _precision(reader, draft)
    _schedule(reader, draft, steps)
    _optimizer(reader, draft, decayed)
    _rest(reader, draft)
    return draft.finish(readers)


def _fsdp_keys() -> Keys:
    """FSDP's settings, with and without their prefix."""
    return Keys(*({name: note for key, note in notes.items() for name in (key, f"fsdp_{key}")} for notes in FSDP))


def _loaded(given: Any) -> Mapping[str, Any]:
    """A configuration that is a dictionary, or a path of a JSON file."""
    if isinstance(given, Mapping):
        return given
    try:
        return json.loads(Path(given).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise MigrationError(f"{given!r} cannot be read: {error}; give a dictionary, or a path of JSON") from error


def _of_deepspeed(
    source: Any, reader: Reader, inner: Any, ranks: int | None, rules: Mapping[str, Any] | None, steps: int | None
) -> Any:
    """What "auto" stands for, as transformers fills it in."""
    at, lr = reader, reader.number("learning_rate")
    rows, cut = at.integer("per_device_train_batch_size", 8), at.integer("gradient_accumulation_steps", 1)
    filled: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": cut,
        "train_batch_size": None if ranks is None else rows * cut * ranks,
        "gradient_clipping": at.number("max_grad_norm", 1.0),
        "optimizer.params.lr": lr,
        "optimizer.params.betas": [at.number("adam_beta1", 0.9), at.number("adam_beta2", 0.999)],
        "optimizer.params.eps": at.number("adam_epsilon", 1e-8),
        "optimizer.params.weight_decay": at.number("weight_decay", 0.0),
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": lr,
        "fp16.enabled": at.flag("fp16"),
        "bf16.enabled": at.flag("bf16"),
    }
    warm = at.number("warmup_steps", 0) or 0
    if steps is not None:
        filled["scheduler.params.total_num_steps"] = steps
    if steps is not None or warm >= 1:
        filled["scheduler.params.warmup_num_steps"] = max(1, int(warm) if warm >= 1 else math.ceil((steps or 0) * warm))
    config = _loaded(inner)
    asked = Draft(ORIGIN)
    if "scheduler" not in config:
        _schedule(reader, asked, steps)
    draft, inside = deepspeed.read(config, ranks, rules, filled, "deepspeed: ", asked.schedule)
    draft.origin = ORIGIN
    clip = draft.clip
    if not inside.given("optimizer"):
        _optimizer(reader, draft)
    draft.clip = clip
    if not inside.given("gradient_clipping"):
        reader.skip("max_grad_norm", "DeepSpeed clips by gradient_clipping, which its configuration lacks")
    for name in ("lr_scheduler_type", "lr_scheduler_kwargs", "optim", "optim_args"):
        if name not in reader.marks:
            reader.skip(name, "the DeepSpeed configuration has its own")
    _rest(reader, draft)
    return draft.finish([reader, inside])


def _precision(reader: Reader, draft: Draft) -> None:
    chosen = [name for name in ("bf16", "fp16") if reader.flag(name)]
    for name in ("bf16", "fp16"):
        if name not in chosen:
            reader.skip(name, "it is off")
    if chosen:
        draft.transforms.append(mixed(chosen[0], sharded=draft.stage == 3))


def _rest(reader: Reader, draft: Draft) -> None:
    names = ("activation_checkpointing", "gradient_checkpointing")
    for name in names:
        if reader.value(name) is None or not reader.flag(name):
            reader.skip(name, "it is off")
        elif not any(call.function == "remat" for call in draft.transforms):
            draft.transforms.append(Call("remat"))
    backend = reader.read("torch_compile_backend")
    if reader.flag("torch_compile"):
        draft.options["compile"] = "inductor" if backend in (None, "inductor") else True
    else:
        reader.skip("torch_compile", "it is off")
        reader.skip("torch_compile_backend", "torch_compile is off")
    draft.options["rng"] = reader.integer("seed", 42)


def _schedule(reader: Reader, draft: Draft, steps: int | None) -> None:
    peak = float(reader.number("learning_rate", 5e-5))
    kind = str(reader.read("lr_scheduler_type", "linear"))
    given = reader.read("lr_scheduler_kwargs") or {}
    warm = reader.number("warmup_steps", 0) or 0
    if not given:
        reader.skip("lr_scheduler_kwargs", "there are none")
    if not warm:
        reader.skip("warmup_steps", "there is no warm-up")
    if kind == "constant":
        return
    if (steps is None and kind != "constant_with_warmup") or (steps is None and 0 < warm < 1):
        reader.refuse(
            "lr_scheduler_type",
            f"the steps of {kind!r} follow from epochs and the dataset; give them: max_steps, or migrate(source, steps=...), "
            "--steps N",
        )
        return
    warmup = int(warm) if warm >= 1 or steps is None else math.ceil(steps * warm)
    total = steps or warmup
    if kind == "constant_with_warmup":
        draft.schedule = Call("optim.warmup_constant_schedule", (0.0, peak, warmup))
    elif total <= warmup and kind == "warmup_stable_decay":
        reader.refuse("warmup_steps", f"{warmup} of {total} steps leave none to decay; take fewer")
    elif kind in ("linear", "cosine", "polynomial", "cosine_with_min_lr", "cosine_with_restarts"):
        draft.schedule = _decaying(reader, kind, given, peak, warmup, total)
    elif kind == "warmup_stable_decay":
        draft.schedule = _stable(reader, given, peak, warmup, total)
    else:
        reader.refuse(
            "lr_scheduler_type",
            f"{kind!r} is no schedule of steps here; write linear, cosine or warmup_stable_decay, or give lr a function of "
            "the step",
        )


def _decaying(reader: Reader, kind: str, given: Mapping[str, Any], peak: float, warmup: int, total: int) -> Call | None:
    known = {
        "polynomial": {"lr_end", "power"},
        "cosine": {"num_cycles"},
        "cosine_with_restarts": {"num_cycles"},
        "cosine_with_min_lr": {"min_lr", "min_lr_rate", "num_cycles"},
    }.get(kind, set())
    cycles = given.get("num_cycles", 1 if kind == "cosine_with_restarts" else 0.5)
    if set(given) - known or (kind != "cosine_with_restarts" and cycles != 0.5):
        reader.refuse(
            "lr_scheduler_kwargs",
            f"{given!r} of {kind!r} has no equal here; leave it out, or give lr a function of the step",
        )
        return None
    left = total - warmup
    if left <= 0:  # no step decays
        return Call("optim.warmup_constant_schedule", (0.0, peak, warmup))
    if kind == "linear":
        return warm_stay_decay(0.0, peak, warmup, 0, left, 0.0)
    if kind == "polynomial":
        last, power = float(given.get("lr_end", 1e-7)), float(given.get("power", 1.0))
        return warm_stay_decay(0.0, peak, warmup, 0, left, last, power=power)
    if kind == "cosine_with_restarts" and cycles > 1:
        if left % cycles:
            reader.refuse(
                "lr_scheduler_kwargs", f"{left} steps are not {cycles} cycles of equal length; take a divisor"
            )
            return None
        fall = Call("optim.cosine_decay_schedule", (peak, left // int(cycles)))
        rise = Call("optim.linear_schedule", (0.0, peak, max(warmup, 1)))
        starts = [warmup + left // int(cycles) * number for number in range(int(cycles))]
        falls = [fall] * int(cycles)
        return Call("optim.join_schedules", ([rise, *falls], starts) if warmup else (falls, starts[1:]))
    last = float(given.get("min_lr", peak * given.get("min_lr_rate", 0.0)))
    return warm_stay_decay(0.0, peak, warmup, 0, left, last, "cosine")


def _stable(reader: Reader, given: Mapping[str, Any], peak: float, warmup: int, total: int) -> Call | None:
    known = {"num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"}
    decay = given.get("num_decay_steps")
    shape = given.get("decay_type", "cosine")
    wrong = set(given) - known or given.get("warmup_type", "linear") != "linear" or shape not in ("linear", "cosine")
    if decay is None or wrong or given.get("num_cycles", 0.5) != 0.5:
        reader.refuse(
            "lr_scheduler_kwargs",
            f"{given!r} has no equal here; write num_decay_steps, and decay_type linear or cosine",
        )
        return None
    stay = given.get("num_stable_steps", total - warmup - decay)
    last = peak * float(given.get("min_lr_ratio", 0.0))
    return warm_stay_decay(last, peak, warmup, stay, decay, last, shape)  # warm-up begins there too


def _optimizer(reader: Reader, draft: Draft, decayed: Collection[str] | None = None) -> None:
    norm = reader.number("max_grad_norm", 1.0)
    draft.clip = float(norm) if norm else None
    if not norm:
        reader.skip("max_grad_norm", "0 clips nothing")
    lr = rate(draft, float(reader.number("learning_rate", 5e-5)))
    betas = (reader.number("adam_beta1", 0.9), reader.number("adam_beta2", 0.999))
    eps, decay = reader.number("adam_epsilon", 1e-8), float(reader.number("weight_decay", 0.0))
    kind, given = str(reader.read("optim", "adamw_torch")), reader.read("optim_args")
    options = (
        dict(part.strip().split("=") for part in given.split(",")) if isinstance(given, str) else dict(given or {})
    )
    if not options:
        reader.skip("optim_args", "there are none")
    makers: dict[str, Any] = {
        **dict.fromkeys(_ADAMW, lambda decay: optimizers.adam(lr, betas, eps, decay)),
        **dict.fromkeys(_ADAMW8, lambda decay: optimizers.adam(lr, betas, eps, decay, kind="adamw8bit")),
        **dict.fromkeys(
            _LION, lambda decay: Call("optim.lion", (lr,), {"b1": betas[0], "b2": betas[1], "weight_decay": decay})
        ),
        "sgd": lambda decay: optimizers.sgd(
            lr,
            float(options.pop("momentum", 0.0)),
            str(options.pop("nesterov", False)).lower() in ("true", "1", "yes"),
            decay,
        ),
        "adagrad": lambda decay: optimizers.adagrad(lr, float(options.pop("eps", 1e-10)), decay),
        "rmsprop": lambda decay: optimizers.rmsprop(
            lr,
            float(options.pop("alpha", 0.99)),
            float(options.pop("eps", 1e-8)),
            float(options.pop("momentum", 0.0)),
            str(options.pop("centered", False)).lower() in ("true", "1", "yes"),
            decay,
        ),
        "adafactor": lambda decay: Call(
            "optim.adafactor", (lr,), {"min_dim_size_to_factor": 1, "multiply_by_parameter_scale": False}
        ),
    }
    if kind not in makers:
        reader.refuse("optim", f"{kind!r} is not known here; write one of {', '.join(makers)}")
        return
    if kind == "adafactor" and decay:
        reader.refuse(
            "weight_decay", "sl.optim.adafactor(weight_decay_rate=) is not multiplied by lr; write 0, or give it there"
        )
        decay = 0.0
    shared = dict(options)
    made = makers[kind](decay)
    if options:
        reader.refuse("optim_args", f"{options!r} of {kind!r} has no equal here; leave it out")
    if decay and kind not in ("adafactor",):
        # transformers decays neither biases nor norms, by their names and classes. Norms have one dimension.
        options.update(shared)
        plain = makers[kind](0.0)
        text = 'lambda path, shape: "plain" if len(shape) < 2 or "bias" in path else "decayed"'
        label = Verbatim(text, _label if decayed is None else _by_path(decayed))
        made = Call("optim.partition", ({"decayed": made, "plain": plain}, label))
    draft.optimizer = made


def _label(path: str, shape: tuple[int, ...]) -> str:
    return "plain" if len(shape) < 2 or "bias" in path else "decayed"


def _by_path(decayed: Collection[str]) -> Callable[[str, tuple[int, ...]], str]:
    return lambda path, shape: "decayed" if path in decayed else "plain"
