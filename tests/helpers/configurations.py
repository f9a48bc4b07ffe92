"""Configurations of other libraries, written anew from what is published of well-known ones, and what they become.

Each is (configuration, ranks, code of the chain).
"""

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}}
WARM = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
}

DEEPSPEED = {
    "stage 1 in fp16, with a dynamic scale": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": WARM,
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 15,
            },
            "wall_clock_breakdown": False,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000},
        },
        2,
        "sl.chain(sl.zero(1), sl.precision('fp16', loss_scale=sl.plan.LossScale(value=32768.0, window=500)))",
    ),
    "stage 2 in bf16, states on the CPU": (
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": ADAM,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            },
        },
        2,
        "sl.chain(sl.zero(2), sl.offload(), sl.precision(), sl.accumulate(2))",
    ),
    "stage 2 in fp32": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": ADAM,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 40, "warmup_max_lr": 1e-3, "warmup_num_steps": 4},
            },
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
        2,
        "sl.chain(sl.zero(2), sl.accumulate(2))",
    ),
    "stage 3, parameters and states on the CPU": (
        {
            "train_micro_batch_size_per_gpu": 8,
            "bf16": {"enabled": True},
            "optimizer": ADAM,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        2,
        "sl.chain(sl.zero(3), sl.offload(params='host'), sl.precision())",
    ),
    "stage 3 with NVMe": (
        {
            "train_batch_size": 16,
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "optimizer": ADAM,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "local_nvme",
                    "buffer_count": 4,
                    "pipeline_read": True,
                    "pipeline_write": True,
                    "fast_init": False,
                },
                "offload_param": {"device": "nvme", "nvme_path": "local_nvme", "buffer_count": 5, "max_in_cpu": 1e9},
            },
            "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1, "overlap_events": True},
        },
        2,
        "sl.chain(sl.zero(3), sl.offload('disk', params='disk', folder='local_nvme'), sl.precision())",
    ),
    "stage 3 without anything ahead": (
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0},
        },
        2,
        "sl.zero(3, prefetch=False)",
    ),
    "part of the states on the CPU": (
        {
            "train_batch_size": 16,
            "bf16": {"enabled": True},
            "optimizer": ADAM,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        },
        2,
        "sl.chain(sl.zero(3), sl.offload(fraction=0.5), sl.precision())",
    ),
    "ZeRO++": (
        {
            "train_batch_size": 16,
            "bf16": {"enabled": True},
            "optimizer": ADAM,
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 2,
                "zero_quantized_gradients": True,
            },
        },
        4,
        "sl.chain(sl.zero(3, axis='node'), sl.zero(3, axis='local'), sl.hierarchical(), "
        "sl.quantize('int8', gradients='int4', axis='node', feedback=False), "
        "sl.quantize('int8', gradients='int4', axis='local', feedback=False), sl.precision())",
    ),
    "MiCS": (
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "zero_optimization": {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": False},
        },
        4,
        "sl.zero(3, axis='local', replicate='node')",
    ),
    "1-bit Adam": (
        {
            "train_batch_size": 16,
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 1e-3, "freeze_step": 2, "cuda_aware": False, "comm_backend_name": "nccl"},
            },
        },
        2,
        "sl.zero()",
    ),
    "0/1 Adam": (
        {
            "train_batch_size": 16,
            "optimizer": {
                "type": "ZeroOneAdam",
                "params": {
                    "lr": 1e-3,
                    "weight_decay": 0.01,
                    "var_freeze_step": 1,
                    "var_update_scaler": 16,
                    "local_step_scaler": 1000,
                    "local_step_clipper": 16,
                },
            },
        },
        2,
        "sl.zero()",
    ),
    "1-bit LAMB": (
        {
            "train_batch_size": 16,
            "optimizer": {
                "type": "OneBitLamb",
                "params": {"lr": 1e-3, "freeze_step": 2, "max_coeff": 0.5, "min_coeff": 0.05, "factor_max": 4.0},
            },
        },
        2,
        "sl.zero()",
    ),
    "LAMB for large batches": (
        {
            "train_batch_size": 16,
            "gradient_clipping": 1.0,
            "optimizer": {
                "type": "Lamb",
                "params": {"lr": 2e-3, "weight_decay": 0.01, "max_coeff": 0.3, "min_coeff": 0.01},
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 40, "warmup_num_steps": 4, "cos_min_ratio": 0.1},
            },
        },
        2,
        "sl.zero()",
    ),
    "one cycle, with momentum": (
        {
            "train_batch_size": 16,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_first_step_size": 10,
                    "cycle_min_lr": 1e-4,
                    "cycle_max_lr": 1e-3,
                    "cycle_min_mom": 0.85,
                    "cycle_max_mom": 0.99,
                    "decay_lr_rate": 1e-3,
                    "decay_step_size": 10,
                },
            },
        },
        2,
        "sl.zero()",
    ),
    "a curriculum of lengths": (
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "zero_optimization": {"stage": 1},
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 64,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
            },
        },
        2,
        "sl.zero(1)",
    ),
    "random-LTD and a curriculum by rarity": (
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "data_efficiency": {
                "enabled": True,
                "seed": 1234,
                "data_sampling": {
                    "enabled": True,
                    "num_epochs": 1,
                    "num_workers": 0,
                    "curriculum_learning": {
                        "enabled": True,
                        "data_cluster_path": "clusters",
                        "curriculum_metrics": {
                            "vocabularyrarity": {
                                "index_to_sample_path": "rarity_index_to_sample",
                                "index_to_metric_path": "rarity_index_to_metric",
                                "difficulty_type": "percentile",
                                "clustering_type": "schedule_based",
                                "min_difficulty": 1,
                                "max_difficulty": 100,
                                "schedule_type": "fixed_root",
                                "schedule_config": {
                                    "total_curriculum_step": 100,
                                    "difficulty_step": 1,
                                    "root_degree": 2,
                                },
                            }
                        },
                    },
                },
                "data_routing": {
                    "enabled": True,
                    "random_ltd": {
                        "enabled": True,
                        "total_layer_num": 4,
                        "random_ltd_layer_num": 2,
                        "random_ltd_layer_id": [1, 2],
                        "model_mask_name": "attention_mask",
                        "model_type": "decoder",
                        "hidden_state_order": "seq_batch_dim",
                        "random_ltd_schedule": {
                            "min_value": 4,
                            "max_value": 8,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"require_steps": 10, "seq_per_step": 4},
                        },
                    },
                },
            },
        },
        2,
        None,  # a pace's code is of no use in a message
    ),
    "progressive layer drop": (
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "bf16": {"enabled": True},
            "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
        },
        2,
        "sl.chain(sl.zero(), sl.precision(), sl.progressive_layer_drop())",
    ),
    "sparse attention": (
        {
            "train_batch_size": 16,
            "optimizer": ADAM,
            "sparse_attention": {
                "mode": "fixed",
                "block": 16,
                "different_layout_per_head": True,
                "num_local_blocks": 4,
                "num_global_blocks": 1,
                "attention": "bidirectional",
                "horizontal_global_attention": False,
                "num_different_global_patterns": 4,
            },
        },
        2,
        "sl.zero()",
    ),
    "experts, and a sum in 16 bits": (
        {
            "train_batch_size": 16,
            "communication_data_type": "bf16",
            "bf16": {"enabled": True},
            "optimizer": ADAM,
            "zero_optimization": {"stage": 2},
            "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
        },
        4,
        "sl.chain(sl.zero(2, axis=('data', 'expert')), sl.experts(), sl.precision(reduce_dtype='bf16'))",
    ),
    "slices, stages and sequences": (
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "optimizer": ADAM,
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": 2},
            "pipeline": {"stages": 2, "partition": "uniform", "activation_checkpoint_interval": 1},
            "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
        },
        8,
        None,  # the rules are long
    ),
    "elastic, with Apex": (
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 2000,
                "micro_batch_sizes": [2, 4, 6],
                "min_gpus": 2,
                "max_gpus": 4,
                "min_time": 20,
                "version": 0.2,
            },
            "train_micro_batch_size_per_gpu": 8,
            "amp": {"enabled": True, "opt_level": "O1"},
            "optimizer": {
                "type": "SGD",
                "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
            },
        },
        2,
        "sl.chain(sl.zero(), sl.precision('fp16', keep='*', autocast=True))",
    ),
}

ACCELERATE = {
    "several devices": (
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "no",
            "num_processes": 2,
        },
        None,
        "sl.zero()",
    ),
    "FSDP": (
        {
            "compute_environment": "LOCAL_MACHINE",
            "debug": False,
            "distributed_type": "FSDP",
            "downcast_bf16": "no",
            "fsdp_config": {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False,
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_offload_params": False,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_sync_module_states": True,
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "fsdp_use_orig_params": True,
            },
            "machine_rank": 0,
            "main_training_function": "main",
            "mixed_precision": "bf16",
            "num_machines": 1,
            "num_processes": 2,
            "rdzv_backend": "static",
            "same_network": True,
            "tpu_env": [],
            "tpu_use_cluster": False,
            "tpu_use_sudo": False,
            "use_cpu": False,
        },
        None,
        "sl.chain(sl.zero(3), sl.precision())",
    ),
    "FSDP2 that keeps gathered parameters": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": False,
                "fsdp_activation_checkpointing": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
            "mixed_precision": "no",
            "num_processes": 2,
        },
        None,
        "sl.chain(sl.zero(3, keep='forward'), sl.remat())",
    ),
    "hybrid FSDP on two nodes": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_sharding_strategy": 4, "fsdp_offload_params": True},
            "mixed_precision": "bf16",
            "num_machines": 2,
            "num_processes": 4,
        },
        None,
        "sl.chain(sl.zero(3, axis='local', replicate='node'), sl.offload(params='host', gradients='host'), sl.precision())",
    ),
    "DeepSpeed": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "cpu",
                "zero3_init_flag": True,
                "zero3_save_16bit_model": True,
                "zero_stage": 3,
            },
            "mixed_precision": "bf16",
            "num_processes": 2,
        },
        None,
        "sl.chain(sl.zero(3), sl.offload(params='host'), sl.precision(), sl.accumulate(2))",
    ),
    "parallelism, compiled": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "dynamo_config": {"dynamo_backend": "INDUCTOR"},
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 2,
                "parallelism_config_cp_comm_strategy": "allgather",
            },
            "mixed_precision": "no",
            "num_processes": 8,
        },
        None,
        "sl.chain(sl.zero(3, axis='local', replicate='node'), sl.sequence('seq', kind='ring'))",
    ),
}

TORCHTITAN = {
    "a small model to try": (
        """
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "debugmodel"

[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0

[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
mixed_precision_param = "float32"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "none"
""",
        2,
        "sl.zero(3)",
    ),
    "8B": (
        """
[optimizer]
lr = 3e-4

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
steps = 1000

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1

[checkpoint]
enable = false
interval = 500
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
""",
        2,
        "sl.chain(sl.zero(3), sl.precision(), sl.remat('dots'))",
    ),
    "70B in 8 bits, sliced": (
        """
[model]
converters = ["quantize.linear.float8"]

[optimizer]
lr = 1.5e-4

[training]
local_batch_size = 8
steps = 1000

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
enable_async_tensor_parallel = false

[activation_checkpoint]
mode = "full"

[compile]
enable = true

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
""",
        8,
        None,  # the rules are long
    ),
    "405B in stages, with a long context": (
        """
[optimizer]
lr = 8e-5

[lr_scheduler]
warmup_steps = 600
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 4
steps = 3000
enable_cpu_offload = true

[parallelism]
data_parallel_shard_degree = -1
context_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1

[activation_checkpoint]
mode = "full"
""",
        8,
        "sl.chain(sl.zero(3, axis=('data', 'seq')), sl.sequence('seq', kind='ring'), sl.precision(), "
        "sl.offload(params='host', gradients='host'), sl.remat(), sl.pipeline('interleaved-1f1b', microbatches=4))",
    ),
}
