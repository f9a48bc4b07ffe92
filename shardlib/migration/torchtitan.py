"""A TOML file of torchtitan's, as its versions until 0.2 read them (0.3 has Python in its place)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.migration import optimizers
from shardlib.migration.calls import Call
from shardlib.migration.draft import Draft, rate
from shardlib.migration.optimizers import warm_stay_decay
from shardlib.migration.reader import Keys, Reader, each

ORIGIN = "torchtitan"

# The layers of its Llama models, besides those with transformers' names.
RULES = {f"*/{name}": "column" for name in ("wq", "wk", "wv", "w1", "w3")} | {
    f"*/{name}": "row" for name in ("wo", "w2")
}

_DATA = "sl.data.loader reads ahead with workers=, and pins where the mesh is on CUDA"
_FILES = "sl.checkpoint.Manager(folder, keep=, every=) saves in a thread, verifies, and restores on any mesh"
_LOGGED = "train_step returns metrics; sl.report.Log writes them to CSV, JSON lines, TensorBoard and wandb"
_PROFILE = "sl.profile(...) and `shardlib profile` show a step's time, operations, exchanges and memory"
_NAMED = "it names the run, which the script does"
_RAN = "torchrun and `shardlib run` start ranks; sl.make_mesh(timeout=) is how long one waits for another"
_MODEL = "the model is a loss function and a pytree: sl.models, or sl.from_module(module)"
_CUT = "sl.pipeline(partition=) cuts blocks by their parameters, their number, or given costs"
_SCALED = 'sl.precision("fp8") scales each factor by its largest magnitude, and gathers in 16 bits'

KEYS = Keys(
    {
        "optimizer.name": "sl.optim",
        **each("lr beta1 beta2 eps weight_decay", "sl.optim.adamw(...)", "optimizer"),
        **each(
            "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
            "the schedule of the learning rate",
            "lr_scheduler",
        ),
        **each("local_batch_size global_batch_size", "rows of batches", "training"),
        "training.max_norm": "sl.optim.clip_by_global_norm(...)",
        "training.steps": "the last step of the schedule",
        "training.enable_cpu_offload": 'sl.offload(params="host", gradients="host")',
        **each("dtype mixed_precision_param mixed_precision_reduce", "sl.precision(...)", "training"),
        **each("data_parallel_replicate_degree data_parallel_shard_degree", "sl.zero(...)", "parallelism"),
        "parallelism.fsdp_reshard_after_forward": 'sl.zero(3), with keep="forward" for never',
        "parallelism.tensor_parallel_degree": "sl.tensor_slicing(rules)",
        **each(
            "pipeline_parallel_degree pipeline_parallel_schedule pipeline_parallel_schedule_csv "
            "pipeline_parallel_microbatch_size",
            "sl.pipeline(...)",
            "parallelism",
        ),
        "parallelism.context_parallel_degree": 'sl.sequence("seq", "ring")',
        "parallelism.expert_parallel_degree": "sl.experts()",
        **each("mode selective_ac_option", "sl.remat(...)", "activation_checkpoint"),
        **each("enable", "make_train_step(compile=True)", "compile"),
        "compile.backend": "make_train_step(compile='inductor')",
        "model.converters": 'sl.precision("fp8")',
        "quantize.linear.float8.filter_fqns": 'sl.precision("fp8", leaves={glob: "bf16"})',
        "debug.seed": "the key of make_train_step(rng=)",
        "debug.deterministic": "sl.reproducible(...) makes bits independent of ranks too",
    },
    {
        **each("config_file dump_folder description print_config save_config_file custom_config_module", _NAMED, "job"),
        **each(
            "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot "
            "save_memory_snapshot_folder",
            _PROFILE,
            "profiling",
        ),
        **each(
            "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
            _LOGGED,
            "metrics",
        ),
        **each("name flavor hf_assets_path tokenizer_path print_after_conversion", _MODEL, "model"),
        "optimizer.implementation": "one kernel updates each group of shards",
        "optimizer.early_step_in_backward": "sl.zero(2) splits gradients as they come",
        **each("dataset dataset_path seq_len", "batches are what the script gives to train_step", "training"),
        **each("num_workers persistent_workers pin_memory prefetch_factor", _DATA, "training.dataloader"),
        **each("gc_freq gc_debug", "a step makes no circles of objects", "training"),
        **each(
            "disable_loss_parallel", "rules say it: 'vocab' for a head whose logits are never gathered", "parallelism"
        ),
        "parallelism.enable_async_tensor_parallel": "exchanges of slices begin as soon as their factors are there",
        **each(
            "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
            "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage",
            _CUT,
            "parallelism",
        ),
        "parallelism.pipeline_parallel_expert_parallel_overlap": "exchanges of tokens begin as soon as rows are there",
        **each(
            "context_parallel_load_balancer context_parallel_rotate_method",
            "each rank has one chunk from either end of the sequence, and keys travel around the ring",
            "parallelism",
        ),
        "parallelism.expert_parallel_comm_backend": "rows that there are travel, by one all-to-all",
        **each(
            "enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only "
            "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode "
            "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only",
            _FILES,
            "checkpoint",
        ),
        **each(
            "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop visualize_memory_budget_pareto preserve_rng_state "
            "determinism_check debug",
            "sl.remat recomputes blocks, whose draws depend on a key alone",
            "activation_checkpoint",
        ),
        "compile.components": "make_train_step(compile=True) makes one graph of loss, backward and exchanges",
        **each(
            "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name emulate",
            _SCALED,
            "quantize.linear.float8",
        ),
        **each(
            "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
            _RAN,
            "comm",
        ),
        **each(
            "enable disable_fake_mode", "sl.make_plan says what ranks hold, before any rank runs", "memory_estimation"
        ),
        **each(
            "enable dataset dataset_path local_batch_size seq_len freq steps dataloader.num_workers "
            "dataloader.persistent_workers dataloader.pin_memory dataloader.prefetch_factor",
            "sl.make_eval_step(fn, params) evaluates on sharded parameters",
            "validation",
        ),
        "debug.deterministic_warn_only": "operations are torch's, and torch.use_deterministic_algorithms is yours to call",
        **each("custom_import custom_args_module", "the script imports what it needs", "experimental"),
    },
    {
        "parallelism.expert_tensor_parallel_degree": "rules slice experts: 1 here, and migrate(rules={..: "
        "sl.column(experts=True), ..: sl.row(experts=True)})",
        "activation_checkpoint.memory_budget": 'sl.make_plan(device_memory="24GiB") chooses how many blocks sl.remat("auto") '
        "recomputes; leave it out",
        **each(
            "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
            "there is no MX format; take float8",
            "quantize.linear.mx",
        ),
        **each(
            "float8.fqns mx.recipe_name mx.fqns",
            "products of experts are in 16 bits; leave it out",
            "quantize.grouped_mm",
        ),
        **each(
            "enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method",
            "`shardlib run --ranks 2:4` goes on with the ranks that are left, from the last checkpoint; leave it out",
            "fault_tolerance",
        ),
        "debug.moe_force_load_balance": "routers balance by their own loss or bias; leave it out",
    },
)


def is_one(source: Mapping[str, Any]) -> bool:
    """Whether this is a file of torchtitan's."""
    return any(key in source for key in ("parallelism", "activation_checkpoint", "lr_scheduler", "job"))


def convert(source: Mapping[str, Any], ranks: int | None, rules: Mapping[str, Any] | None) -> Any:
    """The migration."""
    reader = Reader(source, KEYS)
    draft = Draft(ORIGIN, ranks, rules or RULES)
    _axes(reader, draft)
    _rows(reader, draft)
    _precision(reader, draft)
    _optimizer(reader, draft)
    if reader.given("training.enable_cpu_offload") and reader.flag("training.enable_cpu_offload"):
        draft.transforms.append(Call("offload", (), {"params": "host", "gradients": "host"}))
    _recompute(reader, draft)
    if reader.given("compile.enable") and reader.flag("compile.enable"):
        inductor = reader.read("compile.backend", "inductor") == "inductor"
        draft.options["compile"] = "inductor" if inductor else True
    if (seed := reader.integer("debug.seed")) is not None:
        draft.options["rng"] = seed
    _deterministic(reader, draft)
    return draft.finish([reader])


def _deterministic(reader: Reader, draft: Draft) -> None:
    if reader.given("debug.deterministic"):
        if reader.flag("debug.deterministic"):
            reader.skip(
                "debug.deterministic",
                "call torch.use_deterministic_algorithms(True); sums of ranks are in a fixed order",
            )
        else:
            reader.skip("debug.deterministic", "it is off")


def _axes(reader: Reader, draft: Draft) -> None:
    def degree(name: str, usual: int = 1) -> int:
        return reader.integer(f"parallelism.{name}_degree", usual)

    replicas, shards = degree("data_parallel_replicate"), degree("data_parallel_shard", -1)
    pipe = degree("pipeline_parallel")
    if shards != 1:
        draft.stage = 3
        if replicas > 1:
            draft.axes = {"node": replicas, "local": None if shards == -1 else shards}
            draft.node = "replicate"
        elif shards > 1:
            draft.axes = {"data": shards}
    reshard = reader.choice("parallelism.fsdp_reshard_after_forward", ("default", "always", "never"), "default")
    if draft.stage == 3 and reshard == "never" and pipe == 1:
        draft.zero["keep"] = "forward"
    if (ways := degree("expert_parallel")) > 1:
        # Its ranks are those of the data axis, which experts here divide with it.
        if isinstance(size := draft.axes.get("data"), int):
            draft.axes["data"] = size // ways
        draft.axes["expert"] = ways
        draft.transforms.append(Call("experts"))
    if (ways := degree("tensor_parallel")) > 1:
        draft.slice_layers(ways)
    if (ways := degree("context_parallel")) > 1:
        draft.sequence(ways, "ring")
    if pipe > 1:
        draft.axes["pipe"] = pipe
        csv = reader.read("parallelism.pipeline_parallel_schedule_csv", "")
        schedule = csv or reader.read("parallelism.pipeline_parallel_schedule", "1F1B")
        draft.pipeline = {"schedule": schedule}


def _rows(reader: Reader, draft: Draft) -> None:
    local, total = reader.integer("training.local_batch_size", 8), reader.integer("training.global_batch_size", -1)
    if reader.given("training.global_batch_size") and total < 0:
        reader.skip("training.global_batch_size", "it is the rows of all ranks")
    draft.micro, draft.total = local, total if total > 0 else None
    draft.settle_rows(reader, "training.global_batch_size", "training.local_batch_size", "a smaller global_batch_size")
    if draft.pipeline is not None:
        rows = reader.integer("parallelism.pipeline_parallel_microbatch_size", 1)
        if local % rows:
            reader.refuse(
                "parallelism.pipeline_parallel_microbatch_size", f"{local} rows are not cut by {rows}; take a divisor"
            )
        else:
            draft.micro, draft.accumulation = rows, (draft.accumulation or 1) * (local // rows)


def _precision(reader: Reader, draft: Draft) -> None:
    compute = reader.choice("training.mixed_precision_param", ("bfloat16", "float32"), "bfloat16")
    stored = reader.choice("training.dtype", ("bfloat16", "float32"), "float32")
    reader.choice("training.mixed_precision_reduce", ("float32",), "float32")
    options: dict[str, Any] = {}
    name = "bf16"
    converters = [each.rpartition(".")[2] for each in reader.texts("model.converters")]
    for converter in converters:
        if converter == "float8":
            name = "fp8"
        else:
            reader.refuse("model.converters", f"{converter!r} is no precision here; leave it out, or take float8")
    if name == "fp8":
        filters = reader.texts("quantize.linear.float8.filter_fqns")
        if names := [each for each in filters if each != "auto_filter_small_kn"]:
            options["leaves"] = {f"*{each.replace('.', '/')}*": "bf16" for each in names}
        if len(names) < len(filters):
            reader.refuse("quantize.linear.float8.filter_fqns", "small layers are not found by themselves; name them")
    elif compute == "float32" and stored == "float32":
        return
    if stored == "bfloat16":
        options["master"] = False
    if draft.stage < 3 and name == "bf16" and stored == "float32":
        options |= {"keep": "*", "autocast": True}  # what DDP does there
    draft.transforms.append(Call("precision", (name,), options))


def _optimizer(reader: Reader, draft: Draft) -> None:
    peak, steps = float(reader.number("optimizer.lr", 8e-4)), reader.integer("training.steps", 10000)
    total = reader.integer("lr_scheduler.total_steps") or steps
    warmup = min(reader.integer("lr_scheduler.warmup_steps", 200), total)
    share = reader.number("lr_scheduler.decay_ratio")
    decay = total - warmup if share is None else min(round(total * share), total - warmup)
    shape = reader.choice("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"), "linear")
    if shape == "sqrt":
        reader.refuse(
            "lr_scheduler.decay_type",
            "no schedule falls as 1 − √progress; write linear or cosine, or a function of the step as lr",
        )
    last = peak * float(reader.number("lr_scheduler.min_lr_factor", 0.0))
    stay = total + 1 - warmup - decay
    # Its first step has 1/warmup of the peak, where schedules here begin at their first value.
    first, rising = (peak / warmup, warmup - 1) if warmup else (peak, 0)
    draft.schedule = warm_stay_decay(first, peak, rising, stay if warmup else stay - 1, decay, last, shape)
    norm = reader.number("training.max_norm", 1.0)
    draft.clip = float(norm) or None
    kind = reader.choice("optimizer.name", ("AdamW", "Adam"), "AdamW")
    betas = (reader.number("optimizer.beta1", 0.9), reader.number("optimizer.beta2", 0.95))
    eps, weight = reader.number("optimizer.eps", 1e-8), reader.number("optimizer.weight_decay", 0.1)
    draft.optimizer = optimizers.adam(rate(draft, peak), betas, eps, weight, decoupled=kind == "AdamW")


def _recompute(reader: Reader, draft: Draft) -> None:
    modes = ("selective", "full", "memory_budget", "none")
    mode = reader.choice("activation_checkpoint.mode", modes, "none")
    option = "activation_checkpoint.selective_ac_option"
    if mode == "full":
        draft.transforms.append(Call("remat"))
    elif mode == "selective" and str(reader.read(option, "2")) == "op":
        draft.transforms.append(Call("remat", ("dots",)))
    elif mode == "selective":
        draft.transforms.append(Call("remat"))
        reader.took(
            option if reader.given(option) else "activation_checkpoint.mode",
            "sl.remat() recomputes every block; sl.remat(blocks=n) the first n of them",
        )
    elif mode == "memory_budget":
        reader.refuse("activation_checkpoint.mode", KEYS.refused["activation_checkpoint.memory_budget"])
