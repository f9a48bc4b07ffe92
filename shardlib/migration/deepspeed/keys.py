"""The keys of a ds_config.json: those of DeepSpeed 0.19.8, and those of earlier versions that it refuses."""

from shardlib.migration.reader import Keys, each

ZERO = "zero_optimization"
SAMPLING = "data_efficiency.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
METRIC = f"{CURRICULUM}.curriculum_metrics.*"
LTD = "data_efficiency.data_routing.random_ltd"

_BUCKETS = "the plan sizes buckets by units, and sends them as soon as they are complete"
_FETCH = "a unit is gathered whole, one ahead of its use, and freed after it; sl.zero(keep=) keeps some of them"
_POOL = "buffers of a memory are sized by the plan"
_FILES = "the disk is read and written at the depth that it serves best"
_PROFILE = "sl.profile(...) and `shardlib profile` show a step's time, operations, exchanges and memory"
_LOGGED = "train_step returns metrics; sl.report.Log writes them to CSV, JSON lines, TensorBoard and wandb"
_PRINTED = "train_step returns metrics, and print(plan) shows what a step holds and sends"
_SAVED = "sl.checkpoint.Manager saves in a thread, verifies every byte, and restores on any mesh"
_SEARCH = "`shardlib plan --search` finds the quickest plan that fits, without running the model"
_DETECTED = "experts are found by their paths and routed by the model's own router"
_INFERENCE = "sl.generate runs on the training shards, on any mesh"
_STATE = "it is state of a run, not a setting"
_WORKERS = "sl.data.loader reads ahead with workers=, pins where the mesh is on CUDA, and ends after epochs="
_COMPILED = "the passes of make_train_step(compile=True) order exchanges themselves"

_MOMENTS = "sl.optim.{adamw, ...}(lr, b1, b2, eps, weight_decay)"
_SCHEDULED = "the schedule of the learning rate"
_PACE = "sl.data.curriculum(rows, length=pace)"

TAKEN = {
    **each("train_batch_size train_micro_batch_size_per_gpu", "rows of batches"),
    "gradient_accumulation_steps": "sl.accumulate(n), or the micro-batches of sl.pipeline",
    "gradient_clipping": "sl.optim.clip_by_global_norm(...)",
    "communication_data_type": "sl.precision(reduce_dtype=...)",
    "sequence_parallel_size": 'sl.sequence("seq", "ulysses")',
    "data_parallel_size": "the size of axis data",
    # ZeRO
    ZERO: "sl.zero(1), as this old form means",
    f"{ZERO}.stage": "sl.zero(stage)",
    **each("cpu_offload offload_optimizer.device", "sl.offload(...)", ZERO),
    **each("cpu_offload_param offload_param.device", "sl.offload(params=...)", ZERO),
    **each("offload_optimizer.nvme_path offload_param.nvme_path", "sl.offload(folder=...)", ZERO),
    f"{ZERO}.offload_optimizer.ratio": "sl.offload(fraction=...)",
    f"{ZERO}.offload_optimizer.super_offload": "sl.offload(speculate=True): the host updates a bucket beside backward",
    **each("prefetch_bucket_size stage3_prefetch_bucket_size", "sl.zero(prefetch=False), for 0", ZERO),
    f"{ZERO}.zero_hpz_partition_size": "sl.hierarchical(...): a second shard inside a node",
    f"{ZERO}.zero_quantized_weights": 'sl.quantize(weights="int8")',
    f"{ZERO}.zero_quantized_gradients": 'sl.quantize(gradients="int4")',
    f"{ZERO}.mics_shard_size": 'sl.zero(3, axis="local", replicate="node")',
    f"{ZERO}.zeropp_loco_param": "sl.quantize(feedback=True)",
    # precision
    **each("enabled fp16_master_weights_and_grads", 'sl.precision("fp16", ...)', "fp16"),
    **each(
        "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale", "sl.plan.LossScale(...)", "fp16"
    ),
    **{
        f"{section}.{name}": note
        for section in ("bf16", "bfloat16")
        for name, note in {
            "enabled": 'sl.precision("bf16")',
            "check_grad_overflow": 'make_train_step(nonfinite="skip")',
            "bf16_master_weights_and_grads": "sl.precision(master=False)",
            "bf16_optimizer_states": "sl.precision(master=False), whose states have the parameters' dtype",
        }.items()
    },
    **each("enabled dtype", 'sl.precision(dtype, keep="*", autocast=True)', "torch_autocast"),
    **each("enabled opt_level loss_scale", "sl.precision(...)", "amp"),
    "data_types.grad_accum_dtype": "sl.precision(reduce_dtype=...)",
    "data_types.keep_in_fp32_modules": "sl.precision(keep=[...])",
    # the optimizer and its rate
    "optimizer.type": "sl.optim",
    **each(
        "lr betas eps weight_decay adam_w_mode adamw_mode momentum nesterov alpha centered initial_accumulator_value",
        _MOMENTS,
        "optimizer.params",
    ),
    **each(
        "max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold", "sl.optim.lamb", "optimizer.params"
    ),
    "optimizer.params.freeze_step": "the step at which the variance is frozen",
    **each(
        "var_freeze_step var_update_scaler local_step_scaler local_step_clipper",
        "the steps of sl.optim.zero_one_adam",
        "optimizer.params",
    ),
    **each("muon_lr adam_lr ns_steps", "sl.optim.partition of sl.optim.muon and sl.optim.adamw", "optimizer.params"),
    "optimizer.params.max_grad_norm": "sl.optim.clip_by_global_norm(...)",
    "optimizer.params.bias_correction": "sl.optim",
    "scheduler.type": _SCHEDULED,
    **each(
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio "
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase cycle_min_lr "
        "cycle_max_lr cycle_first_step_size cycle_second_step_size decay_lr_rate decay_step_size cycle_momentum "
        "cycle_min_mom cycle_max_mom",
        _SCHEDULED,
        "scheduler.params",
    ),
    # steps that leave out something, and what they read
    **each("enabled theta gamma", "sl.progressive_layer_drop(...)", "progressive_layer_drop"),
    **each("enabled curriculum_type min_difficulty max_difficulty schedule_type", _PACE, "curriculum_learning"),
    **each(
        "total_curriculum_step difficulty_step root_degree difficulty max_step",
        _PACE,
        "curriculum_learning.schedule_config",
    ),
    **each("enabled data_routing.enabled data_sampling.enabled", "what it switches on", "data_efficiency"),
    "data_efficiency.seed": "sl.data.loader(seed=...)",
    **each("enabled curriculum_metrics", "sl.data.curriculum(...)", CURRICULUM),
    **each(
        "index_to_metric_path difficulty_type clustering_type min_difficulty max_difficulty schedule_type",
        "sl.data.curriculum(...)",
        METRIC,
    ),
    **each(
        "total_curriculum_step difficulty_step root_degree difficulty max_step",
        "a pace of sl.data.curriculum",
        f"{METRIC}.schedule_config",
    ),
    **each(
        "enabled total_layer_num random_ltd_layer_num random_ltd_layer_id random_ltd_schedule.min_value "
        "random_ltd_schedule.max_value random_ltd_schedule.schedule_type "
        "random_ltd_schedule.schedule_config.require_steps random_ltd_schedule.schedule_config.seq_per_step",
        "sl.random_ltd(...)",
        LTD,
    ),
    **each(
        "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
        "horizontal_global_attention num_different_global_patterns num_random_blocks num_sliding_window_blocks "
        "local_window_blocks global_block_indices global_block_end_indices",
        "attention_layout(length), of sl.sparse, for sl.nn.attention",
        "sparse_attention",
    ),
    # meshes and stages
    **each(
        "enabled min_gpus max_gpus",
        "`shardlib run --ranks MIN:MAX script.py`, on any number of ranks in between",
        "elasticity",
    ),
    "tensor_parallel.autotp_size": "sl.tensor_slicing(rules)",
    **each("tensor_parallel.tp_size tp.tp_size", "sl.tensor_slicing(rules)", "tensor_parallel"),
    "tensor_parallel.partition_config": "rules of sl.tensor_slicing",
    "expert_parallel.enabled": "sl.experts(...)",
    "expert_parallel.autoep_size": "the size of axis expert",
    **each("stages partition", "sl.pipeline(...)", "pipeline"),
    "pipeline.activation_checkpoint_interval": "sl.remat()",
    # memory and speed
    **each("partition_activations cpu_checkpointing", "sl.remat(store=...)", "activation_checkpointing"),
    "compile.deepcompile": "make_train_step(compile=True)",
}

UNNEEDED = {
    "managed_gradient_accumulation": "a train step takes all of its micro-batches in one call",
    **each(
        "prescale_gradients gradient_predivide_factor", "means are taken in the dtype that sums are in, fp32 by default"
    ),
    "disable_allgather": _BUCKETS,
    **each("steps_per_print dump_state wall_clock_breakdown memory_breakdown log_level", _PRINTED),
    "disable_python_gc": "a step makes no circles of objects: gc.disable() is yours to call",
    "dataloader_drop_last": "sl.data.loader(drop_last=True)",
    "vocabulary_size": "DeepSpeed only warns by it; slices of a vocabulary are padded here",
    "sparse_gradients": "gradients of embeddings are dense here, with the same values",
    "graph_harvesting": "make_train_step(compile=True) makes a graph of the whole step",
    "use_data_before_expert_parallelism": "the order of the mesh's axes says so: sl.make_mesh(data=.., expert=..)",
    "seq_parallel_communication_data_type": "sums over an axis of sequences are in fp32, or a wider dtype",
    "zero_allow_untested_optimizer": "an optimizer declares what it reads, and any elementwise one runs on shards",
    "zero_force_ds_cpu_optimizer": "where states lie in the host's memory they are updated there",
    "allgather_size": _BUCKETS,
    # ZeRO
    **each(
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
        "allgather_bucket_size overlap_comm round_robin_gradients parameter_alignment sub_group_size",
        _BUCKETS,
        ZERO,
    ),
    **each(
        "param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
        "stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance "
        "stage3_max_reuse_distance module_granularity_threshold stage3_module_granularity_threshold "
        "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential "
        "stage3_allgather_sequential leaf_module.classes leaf_module.names leaf_module.name_suffixes "
        "memory_efficient_linear override_module_apply mics_hierarchical_params_gather",
        _FETCH,
        ZERO,
    ),
    **each(
        "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        "sl.checkpoint.export_safetensors writes whole weights at any stage",
        ZERO,
    ),
    **each("elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint", _SAVED, ZERO),
    f"{ZERO}.compute_grad_norm": "the norm is a metric of every step: one number in a message that is sent anyway",
    f"{ZERO}.ignore_unused_parameters": "parameters that a loss does not use have gradient 0; sl.unused_params finds them",
    **each(
        "log_trace_cache_warnings enable_sanity_checks", "ranks compare the order of what they send in every step", ZERO
    ),
    f"{ZERO}.save_muon_momentum_buffer_in_memory": "sl.offload says where states are, of all optimizers alike",
    **each(
        "cpu_offload_use_pin_memory offload_optimizer.pin_memory offload_param.pin_memory",
        "host memory is pinned where the device is CUDA",
        ZERO,
    ),
    **each(
        "offload_optimizer.buffer_count offload_optimizer.pipeline_read offload_optimizer.pipeline_write "
        "offload_optimizer.fast_init offload_optimizer.cpuadam_cores_perc offload_param.buffer_count "
        "offload_param.buffer_size offload_param.max_in_cpu",
        _POOL,
        ZERO,
    ),
    **each(
        "err_beta reset_T",
        "the residual is kept exactly, and added whole to the next gradient",
        f"{ZERO}.zeropp_loco_param",
    ),
    # precision
    "fp16.auto_cast": "floating tensors of the batch are cast by sl.precision",
    **each("immediate_grad_update", "gradients are summed as soon as they come", "bf16"),
    **each("immediate_grad_update", "gradients are summed as soon as they come", "bfloat16"),
    "data_types.param_dtype": "parameters have the dtype that sl.precision gives them",
    "data_types.buffer_dtype": "buffers keep their dtype",
    **each(
        "keep_batchnorm_fp32 master_weights cast_model_type patch_torch_functions verbosity",
        "sl.precision keeps masters, and takes keep= and leaves=",
        "amp",
    ),
    # optimizers
    "optimizer.legacy_fusion": "one kernel updates each group of shards",
    **each(
        "torch_adam fused foreach set_grad_none fp32_optimizer_states ns_method capturable differentiable",
        "one kernel updates each group of shards, with states in the masters' dtype",
        "optimizer.params",
    ),
    **each(
        "cuda_aware comm_backend_name pipeline_enabled", "messages go through the mesh's own groups", "optimizer.params"
    ),
    # data
    **each("num_epochs num_workers pin_memory", _WORKERS, SAMPLING),
    **each("data_cluster_path", "sl.data.curriculum draws by the index itself, without clusters in files", CURRICULUM),
    **each("index_to_sample_path", "sl.data.curriculum sorts samples by their difficulty itself", METRIC),
    **each(
        "model_mask_name model_type hidden_state_order attention_mask",
        "blocks name their residual stream, and masks among their inputs are cut along",
        LTD,
    ),
    **each(
        "global_batch_size micro_batch_size sample_idx consumed_layer_tokens current_steps current_value "
        "random_ltd_schedule.current_value",
        _STATE,
        LTD,
    ),
    # files, prints, searches
    **each("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds", _FILES, "aio"),
    **each("enabled prof_all prof_ops verbose debug", _PROFILE, "comms_logger"),
    **each(
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        _PROFILE,
        "flops_profiler",
    ),
    **each("enabled synchronized", _PROFILE, "timers.throughput"),
    **each("enabled output_path job_name", _LOGGED, "tensorboard"),
    **each("enabled group team project", _LOGGED, "wandb"),
    **each("enabled output_path job_name", _LOGGED, "csv_monitor"),
    **each(
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
        "sl.report.Log takes a writer of your own, with a method for a step's metrics",
        "comet",
    ),
    **each(
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type "
        "tuner_early_stopping tuner_num_trials arg_mappings model_info_path mp_size max_train_batch_size "
        "min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
        "num_tuning_micro_batch_sizes model_info.profile model_info.num_params model_info.hidden_size "
        "model_info.num_layers",
        _SEARCH,
        "autotuning",
    ),
    **each(
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
        _INFERENCE,
        "hybrid_engine",
    ),
    **each(
        "tag_validation load_universal use_node_local_storage checkpoint_serialization parallel_write.pipeline_stage",
        _SAVED,
        "checkpoint",
    ),
    **each(
        "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
        _SAVED,
        "checkpoint.writer",
    ),
    **each("datastates_ckpt nebula", _SAVED),
    **each(
        "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path",
        _SAVED,
        "nebula",
    ),
    **each(
        "autoep_non_moe free_activation free_activation_threshold offload_activation_pin_memory double_buffer "
        "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_int_input_tensors keep_all_input_tensors passes",
        _COMPILED,
        "compile",
    ),
    **each(
        "number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile",
        "sl.remat() recomputes every block, from the inputs that it keeps",
        "activation_checkpointing",
    ),
    **each(
        "seed_layers pipe_partitioned grad_partitioned",
        "messages of stages are views, and draws depend on a key alone",
        "pipeline",
    ),
    **each(
        "max_train_batch_size micro_batch_sizes min_time version ignore_non_elastic_batch_info prefer_larger_batch "
        "model_parallel_size num_gpus_per_node",
        "any number of ranks trains with the same global batch; sl.data.loader gives each its share",
        "elasticity",
    ),
    **each(
        "dtype tp_overlap_comm injection_policy_tuple keep_module_on_host replace_with_kernel_inject kernel_inject "
        "preset_model vocab_parallel_lm_head vocab_parallel_ce_backend tensor_parallel.tp_grain_size "
        "tensor_parallel.mpu tensor_parallel.tp_group tp.tp_grain_size tp.mpu tp.tp_group",
        "rules name the layers that are sliced: migrate(source, rules=sl.models.huggingface.slicing_rules(model))",
        "tensor_parallel",
    ),
    **each(
        "validate_folding_routing async_split_plan preset_model moe_layer_pattern expert_pattern router_pattern "
        "use_grouped_mm disable_triton_grouped_mm route_norm route_scale score_apply combine_impl row_weighting_impl "
        "gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank num_expert_groups "
        "num_limited_groups score_func top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 "
        "num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern "
        "expert_activation",
        _DETECTED,
        "expert_parallel",
    ),
}

REFUSED = {
    "gradient_allreduce_op": "gradients are those of the mean over the global batch; for a sum return the loss times the "
    "number of ranks",
    "fp16.consecutive_hysteresis": "tolerances come back when the scale grows; leave it out, or take hysteresis 1, for "
    "which both are the same",
    f"{ZERO}.legacy_stage1": "DeepSpeed has none any more; leave it out, stage 1 is the same",
    f"{ZERO}.zero_quantized_nontrainable_weights": "frozen parameters are stored in their dtype; leave it out, and take "
    'zero_quantized_weights for gathers in 8 bits, or sl.precision("bf16")',
    **each(
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds "
        "pt_reserved_cores_perc steps_per_epoch",
        "no transform updates a few columns earlier than others; take it out, and offload_optimizer.super_offload or "
        "sl.offload(delay=True) to update on the host beside the next step",
        f"{ZERO}.zenflow",
    ),
    f"{ZERO}.zenflow": "take it out, and sl.offload(delay=True) to update on the host beside the next step",
    "torch_autocast.lower_precision_safe_modules": "autocast has torch's own list of operations; leave it out, or name "
    "parameters by sl.precision(leaves={glob: dtype})",
    **each(
        "amsgrad",
        "sl.optim.adamw keeps no maximum of the variance; leave it out, or "
        "take sl.optim.from_torch(torch.optim.AdamW, lr=..., amsgrad=True)",
        "optimizer.params",
    ),
    "optimizer.params.eps_inside_sqrt": "eps is added to the root; leave it out",
    "optimizer.params.dampening": "momentum is not dampened; leave it out, or take sl.optim.from_torch(torch.optim.SGD, ...)",
    "optimizer.params.maximize": "steps go down; return the negative of the loss",
    "optimizer.params.lr_decay": "the rate follows a schedule; leave it out, and add a scheduler",
    **each(
        "cycle_first_stair_count cycle_second_stair_count",
        "sl.optim.one_cycle is continuous; leave it out, or 0",
        "scheduler.params",
    ),
    "scheduler.params.decay_mom_rate": "momentum stays after the cycle; leave it out, or 0",
    "scheduler.params.last_batch_iteration": "a schedule counts a state's updates; leave it out, and restore the state",
    **each(
        "offload_activation offload_opt_states offload_parameters",
        'transforms say where values are: sl.remat(store="host"), offload_optimizer and offload_param',
        "compile",
    ),
    "tensor_parallel.mpu": "a mesh has the groups; leave it out",
    "expert_parallel.expert_tensor_parallel_size": "rules slice experts: 1 here, and migrate(rules={..: "
    "sl.column(experts=True), ..: sl.row(experts=True)})",
    **each(
        "enabled lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens metrics_path verbose",
        "rows of a batch follow a pace, and documents of any length are packed: sl.data.packed(tokens, sequence=...), "
        "sl.optim.sqrt_scaling for the rate",
        f"{SAMPLING}.dynamic_batching",
    ),
    **each(
        "enabled total_layer_tokens warmup_type warmup_layer_tokens",
        "sl.optim.token_schedule(schedule, sl.data.layer_tokens(...)) makes a rate follow tokens; write it after the code",
        f"{LTD}.layer_token_lr_schedule",
    ),
    **each(
        "enabled quantized_initialization post_init_quant num_bits q_type q_groups",
        "weights are quantised for gathers and for inference, not as they are stored in training; take it out, and "
        'zero_quantized_weights or sl.precision("fp8")',
        "weight_quantization",
    ),
    **each(
        "compression_training quantize_training eigenvalue",
        "training of quantised weights, pruning and "
        'distillation by schedule are no transforms; take it out, and sl.precision("fp8") or sl.models.student',
    ),
}

KEYS = Keys(TAKEN, UNNEEDED, REFUSED)
