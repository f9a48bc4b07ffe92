"""Axes of the mesh, ZeRO's stages, offload, quantised messages, and recompute, of a ds_config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardlib.migration.calls import Call, Verbatim
from shardlib.migration.deepspeed.keys import KEYS, ZERO
from shardlib.migration.draft import Draft
from shardlib.migration.reader import Reader

_MEMORY = {"cpu": "host", "nvme": "disk"}


def read_axes(reader: Reader, draft: Draft) -> None:
    stage = reader.value(f"{ZERO}.stage", 0)
    local = reader.integer(f"{ZERO}.zero_hpz_partition_size", 1)
    group = reader.integer(f"{ZERO}.mics_shard_size", -1)
    if local and local > 1 and stage == 3:
        draft.nodes(local, "hierarchical")
    elif group and group > 0:
        draft.nodes(group, "replicate")
    else:
        for key in ("zero_hpz_partition_size", "mics_shard_size"):
            if reader.given(f"{ZERO}.{key}"):
                reader.skip(f"{ZERO}.{key}", "it is off: all ranks are one group")
    if (ways := reader.integer("sequence_parallel_size", 1)) and ways > 1:
        draft.sequence(ways, "ulysses")
    if (ways := reader.integer("data_parallel_size", least=1)) and draft.ranks is None:
        draft.ranks = ways * (draft.axes.get("seq") or 1)
    if reader.on("expert_parallel") and (ways := reader.integer("expert_parallel.autoep_size", 1)) > 1:
        draft.axes["expert"] = ways
        draft.transforms.append(Call("experts"))
        if reader.integer("expert_parallel.expert_tensor_parallel_size", 1) > 1:
            reader.refuse(
                "expert_parallel.expert_tensor_parallel_size",
                KEYS.refused["expert_parallel.expert_tensor_parallel_size"],
            )
    sizes = [
        reader.integer(f"tensor_parallel.{key}", 0) for key in ("autotp_size", "tensor_parallel.tp_size", "tp.tp_size")
    ]
    patterns = reader.read("tensor_parallel.partition_config")
    if patterns and not draft.rules:
        draft.rules = _rules(reader, patterns)
    if (ways := max(size or 0 for size in sizes)) > 1:
        draft.slice_layers(ways)
    _stages(reader, draft)


def _rules(reader: Reader, config: Any) -> dict[str, str] | None:
    """Rules of tensor slicing, from regular expressions that globs can say."""
    rules: dict[str, str] = {}
    key = "tensor_parallel.partition_config"
    for spec in config.get("layer_specs", ()) if isinstance(config, Mapping) else ():
        style = {"column": "column", "row": "row", "skip": "replicated"}.get(spec.get("partition_type", "column"))
        globs = [_glob(pattern) for pattern in spec.get("patterns", ())]
        if style is None or None in globs or spec.get("shape"):
            reader.refuse(
                key,
                f"{spec!r} is no glob with a style; give the rules: migrate(source, rules={{'*/up': 'column', ...}})",
            )
            return None
        rules |= {glob: style for glob in globs if glob}
    return rules or None


def _glob(pattern: str) -> str | None:
    """A regular expression of names as a glob of paths; None of one that is more than that."""
    glob = re.sub(r"\.weight\$?$", "", re.sub(r"\\\.", ".", pattern).replace(".*", "*").rstrip("$").lstrip("^"))
    glob = re.sub(r"(?<!\*)\.(?!\*)|(?<=\*)\.", "/", glob)
    return None if re.search(r"[\\()|+?{}^$]", glob) else glob


def _stages(reader: Reader, draft: Draft) -> None:
    if not reader.given("pipeline"):
        return
    section = reader.source["pipeline"]
    if not isinstance(section, Mapping):
        return
    if section.get("stages") == "auto":
        reader.skip("pipeline.stages", "stages are an axis of the mesh: pipe=4, and sl.pipeline() in the chain")
        return
    stages, partition = reader.integer("pipeline.stages", 1, least=1), reader.read("pipeline.partition", "best")
    if stages and stages > 1:
        draft.axes["pipe"] = stages
        cut: dict[str, Any] = {}
        if partition == "uniform":
            cut["partition"] = "count"
        elif str(partition).startswith("type:"):
            pattern = f"(?i){str(partition)[len('type:') :]}"
            cut["partition"] = Verbatim(f"re.compile({pattern!r})", re.compile(pattern))
        elif partition not in ("best", "parameters"):
            reader.refuse("pipeline.partition", f"{partition!r} is not known; write uniform, parameters or type:REGEX")
        draft.pipeline = cut
    if reader.integer("pipeline.activation_checkpoint_interval", 0):
        draft.transforms.append(Call("remat"))


def read_zero(reader: Reader, draft: Draft) -> None:
    whole = reader.value(ZERO)
    if isinstance(whole, bool):
        draft.stage = int(reader.flag(ZERO))
        return
    stage = reader.integer(f"{ZERO}.stage", 0)
    if stage not in range(4):
        reader.refuse(f"{ZERO}.stage", f"there is no stage {stage}; write 0 to 3")
        stage = 0
    draft.stage = stage
    for name in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        if reader.value(f"{ZERO}.{name}") == 0 and stage == 3:
            reader.integer(f"{ZERO}.{name}")
            draft.zero["prefetch"] = False
        elif reader.given(f"{ZERO}.{name}"):
            reader.skip(f"{ZERO}.{name}", "one unit is gathered ahead of its use, whatever its size")
    _offload(reader, draft)
    _quantize(reader, draft)


def _offload(reader: Reader, draft: Draft) -> None:
    devices: dict[str, str | None] = {}
    folders: dict[str, Any] = {}
    for role, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        key = f"{ZERO}.offload_{role}.device"
        device = reader.choice(key, ("none", "cpu", "nvme"), "none")
        if reader.given(f"{ZERO}.{old}") and reader.flag(f"{ZERO}.{old}"):
            device = "cpu"
        if device == "nvme":
            path = f"{ZERO}.offload_{role}.nvme_path"
            folders[role] = reader.read(path)
            if not (isinstance(folders[role], str) and folders[role]):
                reader.refuse(key, f"the files need a folder; write {path}")
                device = "none"
        elif device == "none" and reader.given(key):
            reader.skip(key, "it stays on the device")
        devices[role] = _MEMORY.get(device)
    states, params = devices["optimizer"], devices["param"]
    if params and draft.stage < 3:
        reader.refuse(
            f"{ZERO}.offload_param.device", "DeepSpeed offloads parameters at stage 3 alone; write stage 3, or none"
        )
        params = None
    if params == "disk" and states != "disk":
        reader.refuse(
            f"{ZERO}.offload_param.device",
            "parameters on disk need states there too, which are larger; write offload_optimizer.device nvme, or cpu here",
        )
        params = None
    if not states and not params:
        return
    options: dict[str, Any] = {}
    if params:
        options["params"] = params
    share = reader.number(f"{ZERO}.offload_optimizer.ratio", 1.0)
    if share is not None and share < 1 and states:
        options["fraction"] = float(share)
    used = [folders[role] for role, memory in (("optimizer", states), ("param", params)) if memory == "disk"]
    if used:
        options["folder"] = used[0] if len(set(used)) == 1 else used
    if reader.given(f"{ZERO}.offload_optimizer.super_offload") and reader.flag(
        f"{ZERO}.offload_optimizer.super_offload"
    ):
        if states == "host":
            options["speculate"] = True
        else:
            reader.refuse(f"{ZERO}.offload_optimizer.super_offload", "it needs states in the host's memory: device cpu")
    draft.transforms.append(Call("offload", (states or "device",), options))


def _quantize(reader: Reader, draft: Draft) -> None:
    weights = reader.given(f"{ZERO}.zero_quantized_weights") and reader.flag(f"{ZERO}.zero_quantized_weights")
    gradients = reader.given(f"{ZERO}.zero_quantized_gradients") and reader.flag(f"{ZERO}.zero_quantized_gradients")
    feedback = reader.given(f"{ZERO}.zeropp_loco_param")
    for key, used in (("zero_quantized_weights", weights), ("zero_quantized_gradients", gradients)):
        if used and draft.stage < 3:
            reader.refuse(f"{ZERO}.{key}", "DeepSpeed quantises at stage 3 alone; write stage 3, or leave it out")
    options: dict[str, Any] = {}
    if weights and draft.stage == 3:
        options["weights"] = "int8"
    if gradients and draft.stage == 3:
        options["gradients"] = "int4"
        if feedback:
            reader.marks.setdefault(f"{ZERO}.zeropp_loco_param", ("taken", KEYS.taken[f"{ZERO}.zeropp_loco_param"]))
        else:
            options["feedback"] = False
    if options:
        for axis in draft.over:
            where = {} if axis == "data" else {"axis": axis}
            draft.transforms.append(Call("quantize", (), {**options, **where}))


def read_rows(reader: Reader, draft: Draft) -> None:
    draft.total = reader.integer("train_batch_size", least=1)
    draft.micro = reader.integer("train_micro_batch_size_per_gpu", least=1)
    draft.accumulation = reader.integer("gradient_accumulation_steps", least=1)
    draft.settle_rows(reader, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    operation = "gradient_allreduce_op"
    if reader.value(operation, "mean") == "mean" and reader.given(operation):
        reader.skip(operation, "gradients are those of the mean over the global batch")


def read_activations(reader: Reader, draft: Draft) -> None:
    section = "activation_checkpointing"
    if not reader.given(section):
        return
    sharded = reader.given(f"{section}.partition_activations") and reader.flag(f"{section}.partition_activations")
    host = reader.given(f"{section}.cpu_checkpointing") and reader.flag(f"{section}.cpu_checkpointing")
    if sharded and "model" not in draft.axes:
        reader.refuse(
            f"{section}.partition_activations",
            "inputs of blocks are divided over the axis of slices, and there is none; write tensor_parallel.autotp_size, "
            "or leave it out",
        )
        sharded = False
    for name, used in (("partition_activations", sharded), ("cpu_checkpointing", host)):
        key = f"{section}.{name}"
        if reader.given(key) and not used and reader.marks[key][0] == "taken":
            reader.skip(key, "it is off; sl.remat() recomputes blocks, where the model calls checkpoint here")
    stores = [*(["sharded"] if sharded else []), *(["host"] if host else [])]
    if stores:
        draft.transforms.append(Call("remat", (), {"store": stores[0] if len(stores) == 1 else tuple(stores)}))
