"""The precision of a ds_config: bf16, fp16, autocast, and Apex."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.migration.calls import Call
from shardlib.migration.deepspeed.keys import KEYS
from shardlib.migration.draft import Draft
from shardlib.migration.reader import Reader

Precision = tuple[str, dict[str, Any]] | None


def read_precision(reader: Reader, draft: Draft) -> None:
    reduce = {"fp32": None, "fp16": "fp16", "bf16": "bf16"}
    dtype = reader.choice("communication_data_type", tuple(reduce))
    kept = reader.choice("data_types.grad_accum_dtype", tuple(reduce))
    options: dict[str, Any] = {}
    if dtype in ("fp16", "bf16") or kept in ("fp16", "bf16"):
        options["reduce_dtype"] = dtype or kept
    if dtype and kept and dtype != kept:
        reader.refuse(
            "data_types.grad_accum_dtype",
            f"gradients are summed over ranks and micro-batches in one dtype; write {dtype}, as communication_data_type",
        )
    patterns = reader.source.get("data_types", {})
    patterns = patterns.get("keep_in_fp32_modules") if isinstance(patterns, Mapping) else None
    if isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns):
        reader.read("data_types.keep_in_fp32_modules")
        options["keep"] = [f"*{pattern.replace('.', '/')}*" for pattern in patterns]
    elif patterns == "auto":
        reader.skip(
            "data_types.keep_in_fp32_modules", "name them by sl.precision(keep=[...]), or leave them in 16 bits"
        )
    elif patterns is not None:
        reader.refuse("data_types.keep_in_fp32_modules", f"{patterns!r} is no list of names; write one")
    chosen = _bf16(reader, draft) or _fp16(reader) or _autocast(reader) or _amp(reader)
    if chosen is None:
        if options.pop("reduce_dtype", None):
            for key in ("communication_data_type", "data_types.grad_accum_dtype"):
                if reader.given(key):
                    reader.refuse(
                        key, "gradients of fp32 parameters are summed in fp32; switch on bf16 or fp16, or write fp32"
                    )
        return
    compute, extra = chosen
    draft.transforms.append(Call("precision", (compute,), {**options, **extra}))


def _bf16(reader: Reader, draft: Draft) -> Precision:
    section = "bf16" if reader.given("bf16") else "bfloat16"
    if not reader.on(section):
        return None
    options: dict[str, Any] = {}
    if reader.flag(f"{section}.check_grad_overflow", True):
        draft.options["nonfinite"] = "skip"
    masters = reader.given(f"{section}.bf16_master_weights_and_grads") and reader.flag(
        f"{section}.bf16_master_weights_and_grads"
    )
    states = f"{section}.bf16_optimizer_states"
    if masters:
        options["master"] = False
        if not (reader.given(states) and reader.flag(states)):
            reader.refuse(
                f"{section}.bf16_master_weights_and_grads",
                f"without masters the states are in bf16 too; write {states}: true, or leave both out",
            )
    elif reader.given(states) and reader.flag(states):
        reader.refuse(states, f"it goes with {section}.bf16_master_weights_and_grads, or sl.optim.adamw8bit")
    return "bf16", options


def _fp16(reader: Reader) -> Precision:
    if not reader.on("fp16"):
        return None
    options: dict[str, Any] = {}
    static = reader.number("fp16.loss_scale", 0)
    hysteresis = reader.integer("fp16.hysteresis", 2)
    if static:
        options["loss_scale"] = float(static)
        for key in ("initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis"):
            if reader.given(f"fp16.{key}"):
                reader.skip(f"fp16.{key}", "the scale is static")
    else:
        found = {
            "value": 2.0 ** min(reader.integer("fp16.initial_scale_power", 16), 1000),
            "window": reader.integer("fp16.loss_scale_window", 1000),
            "hysteresis": hysteresis,
            "minimum": float(reader.number("fp16.min_loss_scale", 1)),
        }
        usual = {"value": 2.0**16, "window": 1000, "hysteresis": 2, "minimum": 1.0}
        scale = {name: value for name, value in found.items() if value != usual[name]}
        if scale:
            options["loss_scale"] = Call("plan.LossScale", (), scale)
    again = "fp16.consecutive_hysteresis"
    if reader.given(again) and reader.flag(again):
        if static or hysteresis == 1:
            reader.skip(again, "with one tolerance it changes nothing")
        else:
            reader.refuse(again, KEYS.refused[again])
    elif reader.given(again):
        reader.skip(again, "it is off")
    if reader.given("fp16.fp16_master_weights_and_grads") and reader.flag("fp16.fp16_master_weights_and_grads"):
        options["master"] = False
    return "fp16", options


def _autocast(reader: Reader) -> Precision:
    if not reader.on("torch_autocast"):
        return None
    dtype = str(reader.read("torch_autocast.dtype", "bfloat16")).removeprefix("torch.").lower()
    compute = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}.get(dtype)
    if compute is None:
        reader.refuse("torch_autocast.dtype", f"autocast casts to 16 bits, not to {dtype}; write bfloat16 or float16")
        return None
    return compute, {"keep": "*", "autocast": True}


def _amp(reader: Reader) -> Precision:
    """Apex, which DeepSpeed had until 0.19."""
    if not reader.on("amp"):
        return None
    level = reader.choice("amp.opt_level", ("O0", "O1", "O2", "O3"), "O1")
    scale = reader.value("amp.loss_scale", "dynamic")
    options: dict[str, Any] = {}
    if scale != "dynamic" and level != "O0":
        options["loss_scale"] = float(reader.number("amp.loss_scale"))
    elif reader.given("amp.loss_scale"):
        reader.read("amp.loss_scale")
    if level == "O0":
        return None
    if level == "O1":
        return "fp16", {"keep": "*", "autocast": True, **options}
    return "fp16", {**({"master": False} if level == "O3" else {}), **options}
