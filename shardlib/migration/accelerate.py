"""A file of ``accelerate config``: FSDP, DeepSpeed, or plain data parallelism."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import MigrationError
from shardlib.migration import deepspeed
from shardlib.migration.calls import Call
from shardlib.migration.draft import Draft
from shardlib.migration.reader import Keys, Reader, each

ORIGIN = "accelerate"

_LAUNCH = "torchrun starts ranks, and `shardlib run` starts them again: docs/launching.md"
_UNITS = "units come from the pytree: each element of a list, or what sl.block marks"
_LOADED = "every rank passes the same values, or a function that makes them leaf by leaf; no rank holds the whole model"
_SAVED = "sl.checkpoint.Manager saves in a thread, and restores on any mesh"
_TPU = "there is no transport for TPUs; take another device, and leave it out"

FSDP = Keys(
    {
        **each("sharding_strategy reshard_after_forward", "sl.zero(...)"),
        **each("offload_params cpu_offload", 'sl.offload(params="host", gradients="host")'),
        **each("activation_checkpointing", "sl.remat()"),
        **each("activation_checkpointing_offload", 'sl.remat(store="host")'),
        "mixed_precision_policy": "sl.precision(...)",
    },
    {
        **each("version fsdp_version", "both versions of FSDP are sl.zero(3)"),
        **each(
            "auto_wrap_policy transformer_layer_cls_to_wrap transformer_cls_names_to_wrap min_num_params use_orig_params",
            _UNITS,
        ),
        **each(
            "backward_prefetch forward_prefetch limit_all_gathers",
            "one unit is gathered ahead of its use, forward and backward",
        ),
        **each("sync_module_states cpu_ram_efficient_loading param_init_fn", _LOADED),
        **each("state_dict_type state_dict_config optim_state_dict_config", _SAVED),
    },
    {
        "ignored_modules": "every parameter has one layout; sl.freeze(globs) for those that are not trained, or leave it out",
        **each("xla xla_fsdp_v2 xla_fsdp_grad_ckpt xla_fsdp_settings", _TPU),
    },
)

_DEEPSPEED = {  # key of the section -> key of a ds_config
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}

DEEPSPEED = Keys(
    {
        **{key: deepspeed.KEYS.taken[inner] for key, inner in _DEEPSPEED.items()},
        **each("deepspeed_config_file hf_ds_config", "its keys, which are in this table too"),
    },
    {
        **each(
            "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher",
            _LAUNCH,
        ),
        "zero3_init_flag": _LOADED,
        "zero3_save_16bit_model": "sl.checkpoint.export_safetensors writes whole weights at any stage",
        **each(
            "deepspeed_moe_layer_cls_names transformer_moe_cls_names",
            "a layer of experts is a unit; sl.models.huggingface.with_experts sends tokens to them",
        ),
        "is_train_batch_min": "the rows of a batch are those that a train step is given",
    },
    {
        **each(
            "enable_msamp msamp_opt_level", 'sl.precision("fp8") has products in 8 bits, without MS-AMP; leave it out'
        ),
    },
)

_PARALLEL = Keys(
    {
        **each("dp_replicate_size dp_shard_size", "sl.zero(...)"),
        "tp_size": "sl.tensor_slicing(rules)",
        **each("cp_size", 'sl.sequence("seq", "ring")'),
        **each("sp_size", 'sl.sequence("seq", "ulysses")'),
    },
    {
        **each("cp_backend cp_comm_strategy cp_handler", "keys and values travel around the ring of ranks"),
        **each(
            "sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation sp_handler",
            "any length that divides is cut",
        ),
        "tp_handler": "rules name the layers that are sliced: migrate(source, rules=...)",
    },
    {},
)

_DYNAMO = Keys(
    {"backend": "make_train_step(compile=True)"},
    each(
        "mode use_fullgraph use_dynamic use_regional_compilation",
        "make_train_step(compile=True) makes one graph of a step",
    ),
    {},
)

_FP8 = Keys(
    {},
    each(
        "backend fp8_format amax_compute_algorithm amax_compute_algo amax_history_length amax_history_len interval margin "
        "override_linear_precision use_autocast_during_eval optimization_level opt_level enable_fsdp_float8_all_gather "
        "pad_inner_dim",
        'sl.precision("fp8") scales each factor by its largest magnitude at each product: e4m3, gradients in e5m2',
    ),
    {},
)

_MEGATRON = (
    "attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss context_parallel_size "
    "decoder_last_pipeline_num_layers eod_mask_loss expert_model_parallel_size expert_tensor_parallel_size "
    "gradient_clipping hidden_dropout no_load_optim no_save_optim num_micro_batches optimizer_cpu_offload "
    "overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations recompute_granularity recompute_method "
    "recompute_num_layers sequence_parallelism tp_degree use_custom_fsdp use_distributed_optimizer "
    "use_precision_aware_optimizer use_rotary_position_embeddings"
)


def _spelled(prefix: str, keys: Keys, section: str) -> Keys:
    """Keys of a section that a file writes with a prefix; a Python dictionary without it."""
    both = Keys(
        *(
            {name: note for key, note in notes.items() for name in (key, f"{prefix}{key.removeprefix(prefix)}")}
            for notes in keys
        )
    )
    return both.under(section)


KEYS = Keys(
    {
        "distributed_type": "what is sharded: FSDP, DEEPSPEED, MULTI_GPU, …",
        "num_processes": "the number of ranks",
        "num_machines": "nodes, where sharding is inside of them",
        "mixed_precision": "sl.precision(...)",
        "fp16": 'sl.precision("fp16")',
        "dynamo_backend": "make_train_step(compile=True)",
    },
    {
        **each(
            "compute_environment debug machine_rank gpu_ids main_process_ip main_process_port rdzv_backend same_network "
            "main_training_function enable_cpu_affinity mpirun_config",
            _LAUNCH,
        ),
        **each("mpirun_hostfile mpirun_ccl", _LAUNCH, "mpirun_config"),
        "use_cpu": "sl.make_mesh(device='cpu')",
        "downcast_bf16": "it is for TPUs, and sl.precision says the dtype of parameters",
    },
    {
        **each("tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands", _TPU),
        **each(
            " ".join(f"megatron_lm_{name}" for name in _MEGATRON.split()),
            "Megatron-LM's models are not taken over; take sl.models.gpt, with sl.tensor_slicing and sl.pipeline",
            "megatron_lm_config",
        ),
        **each(
            "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version "
            "py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
            "jobs of SageMaker are not made here; start torchrun there, and leave it out",
        ),
    },
).joined(
    _spelled("fsdp_", FSDP, "fsdp_config"),
    DEEPSPEED.under("deepspeed_config"),
    _spelled("parallelism_config_", _PARALLEL, "parallelism_config"),
    _spelled("dynamo_", _DYNAMO, "dynamo_config"),
    _spelled("fp8_", _FP8, "fp8_config"),
)


def is_one(source: Mapping[str, Any]) -> bool:
    """Whether this is a file of accelerate's."""
    return any(key in source for key in ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"))


def convert(source: Mapping[str, Any], ranks: int | None, rules: Mapping[str, Any] | None, folder: Path) -> Any:
    """The migration. ``folder`` is that of the file, in which a DeepSpeed configuration may be."""
    reader = Reader(source, KEYS)
    started = reader.integer("num_processes")
    ranks = started if ranks is None and started and started > 0 else ranks
    kinds = (
        "NO",
        "MULTI_CPU",
        "MULTI_GPU",
        "FSDP",
        "DEEPSPEED",
        "MULTI_NPU",
        "MULTI_MLU",
        "MULTI_XPU",
        "MULTI_HPU",
        "TP",
    )
    kind = reader.choice("distributed_type", kinds, "NO")
    precision = reader.choice("mixed_precision", ("no", "fp16", "bf16", "fp8"), "no")
    if reader.given("fp16") and reader.flag("fp16"):
        precision = "fp16"
    nodes = reader.integer("num_machines", 1) or 1
    readers = [reader]
    if kind == "DEEPSPEED":
        draft, inner = _deepspeed(reader, ranks, rules, folder, precision)
        readers += inner
    else:
        draft = Draft(ORIGIN, ranks, rules)
        _parallel(reader, draft)
        fsdp = kind == "FSDP" or reader.given("fsdp_config")
        if fsdp:
            section = {key: key.removeprefix("fsdp_") for key in reader.names("fsdp_config")}
            read_fsdp(reader, draft, {name: f"fsdp_config.{key}" for key, name in section.items()}, nodes)
        if precision != "no":
            draft.transforms.append(mixed(precision, sharded=draft.stage == 3))
        draft.settle_rows(reader, "", "", "")
    draft.origin = ORIGIN
    _compiled(reader, draft)
    return draft.finish(readers)


def mixed(precision: str, sharded: bool) -> Call:
    """accelerate's mixed precision: autocast over fp32 parameters, or parameters that are gathered in 16 bits.

    Its scale of losses is torch's GradScaler: 2¹⁶ at first, doubled after 2000 finite steps, halved after one that is not.
    """
    scale = Call("plan.LossScale", (), {"window": 2000, "hysteresis": 1})
    options: dict[str, Any] = {"loss_scale": scale} if precision == "fp16" else {}
    if sharded or precision == "fp8":
        return Call("precision", (precision,), options)
    return Call("precision", (precision,), {"keep": "*", "autocast": True, **options})


def read_fsdp(reader: Reader, draft: Draft, keys: Mapping[str, str], nodes: int) -> None:
    """Sharding as FSDP's settings say. ``keys``: name of a setting -> its key."""

    def given(name: str) -> bool:
        return name in keys and reader.given(keys[name])

    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    strategy, after = "FULL_SHARD", None
    for name in ("sharding_strategy", "reshard_after_forward"):
        if given(name):
            value = reader.value(keys[name])
            if isinstance(value, bool) or str(value).lower() in ("true", "false"):
                after = reader.flag(keys[name])
            elif str(value).isdigit() and 1 <= int(value) <= len(strategies):
                reader.read(keys[name])
                strategy = strategies[int(value) - 1]
            else:
                strategy = reader.choice(keys[name], strategies, "FULL_SHARD")
    keeps = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") or after is False
    if strategy == "NO_SHARD":
        draft.stage = 0
    else:
        draft.stage = 3
        if keeps:
            draft.zero["keep"] = "forward"
    if strategy.startswith("HYBRID") and draft.node is None:
        if draft.ranks is None:
            reader.refuse(
                next(keys[name] for name in ("sharding_strategy", "reshard_after_forward") if name in keys),
                "a node's ranks are all ranks over the nodes; give num_processes, or migrate(ranks=)",
            )
        elif nodes > 1:
            draft.nodes(draft.ranks // nodes, "replicate")
    if any(given(name) and reader.flag(keys[name]) for name in ("offload_params", "cpu_offload")):
        draft.transforms.append(Call("offload", (), {"params": "host", "gradients": "host"}))
    host = given("activation_checkpointing_offload") and reader.flag(keys["activation_checkpointing_offload"])
    if given("activation_checkpointing") and reader.flag(keys["activation_checkpointing"]):
        draft.transforms.append(Call("remat", (), {"store": "host"} if host else {}))


def _parallel(reader: Reader, draft: Draft) -> None:
    def size(name: str) -> int:
        for key in (f"parallelism_config.parallelism_config_{name}", f"parallelism_config.{name}"):
            if reader.given(key):
                return reader.integer(key, 1) or 1
        return 1

    replicas, shards = size("dp_replicate_size"), size("dp_shard_size")
    if shards > 1:
        draft.stage = 3
        if replicas > 1:
            draft.nodes(shards, "replicate")
    if (ways := size("tp_size")) > 1:
        draft.slice_layers(ways)
    for name, kind in (("cp_size", "ring"), ("sp_size", "ulysses")):
        if (ways := size(name)) > 1:
            draft.sequence(ways, kind)


def _compiled(reader: Reader, draft: Draft) -> None:
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if reader.given(key):
            backend = str(reader.read(key)).upper()
            if backend in ("NO", "NONE"):
                reader.skip(key, "it is off")
            else:
                draft.options["compile"] = "inductor" if backend == "INDUCTOR" else True


def _deepspeed(
    reader: Reader, ranks: int | None, rules: Mapping[str, Any] | None, folder: Path, precision: str
) -> tuple[Draft, list[Reader]]:
    file = "deepspeed_config.deepspeed_config_file"
    found: dict[str, Any] = {}
    named = reader.read(file)
    if isinstance(named, str) and named:
        path = folder / named
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise MigrationError(
                f"{path}, which {file} names, cannot be read: {error}; mend it, or leave it out"
            ) from error
    written = {}
    for name, inner in _DEEPSPEED.items():
        key = f"deepspeed_config.{name}"
        value = reader.read(key)
        if value is not None and str(value).lower() not in ("none", "auto"):
            written[inner] = value
        elif reader.given(key) and reader.marks[key][0] == "taken":
            reader.skip(key, "it is off")
    if precision != "no":
        written[f"{'bf16' if precision == 'fp8' else precision}.enabled"] = True
    if named:
        draft, inside = deepspeed.read(found, ranks, rules, written, f"{file}: ")
        return draft, [inside]
    draft, inside = deepspeed.read(_nested(written), ranks, rules)
    for entry in inside.entries():
        if entry.verdict == "refused":
            outer = next((name for name, inner in _DEEPSPEED.items() if inner == entry.key), None)
            reader.refuse(f"deepspeed_config.{outer}" if outer else "mixed_precision", entry.note)
        elif entry.verdict == "not needed" and entry.key in _DEEPSPEED.values():
            outer = next(name for name, inner in _DEEPSPEED.items() if inner == entry.key)
            reader.skip(f"deepspeed_config.{outer}", entry.note)
    if precision == "fp8":
        draft.transforms = [
            Call("precision", ("fp8",)) if call.function == "precision" else call for call in draft.transforms
        ]
    return draft, []


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A dictionary of dictionaries, of keys with dots."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        inside = found
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return found
