"""Configurations of other libraries: what they become, planned, and trained beside the same written by hand."""

import copy
import json
import tomllib

import pytest
import torch
import yaml
from helpers.configurations import ACCELERATE, DEEPSPEED, TORCHTITAN
from helpers.models import share, tiny_gpt, token_batches
from transformers import TrainingArguments

import shardlib as sl
from shardlib.commands.__main__ import main
from shardlib.errors import MigrationError
from shardlib.migration import accelerate, deepspeed, torchtitan

EVERY = {
    **{f"DeepSpeed: {name}": case for name, case in DEEPSPEED.items()},
    **{f"accelerate: {name}": case for name, case in ACCELERATE.items()},
    **{f"torchtitan: {name}": case for name, case in TORCHTITAN.items()},
}

# The optimizers of some, by hand, with the options of the train step.
ADAMW = "sl.optim.adamw(1e-3, 0.9, 0.95, 1e-8, 0.01)"
SKIP = {"nonfinite": "skip"}
BY_HAND = {
    "DeepSpeed: stage 2 in bf16, states on the CPU": (
        f"sl.optim.chain(sl.optim.clip_by_global_norm(1.0), {ADAMW})",
        SKIP,
    ),
    "DeepSpeed: stage 1 in fp16, with a dynamic scale": (
        "sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(sl.optim.warmup_constant_schedule(0.0, 1e-3, 4), "
        "0.8, 0.999, 1e-8, 3e-7))",
        {},
    ),
    "DeepSpeed: stage 2 in fp32": (
        "sl.optim.adamw(sl.optim.warmup_linear_decay_schedule(0.0, 1e-3, 4, 40, warmup='log'), 0.9, 0.95, 1e-8, 0.01)",
        {},
    ),
    "DeepSpeed: stage 3, parameters and states on the CPU": (ADAMW, SKIP),
    "DeepSpeed: stage 3 with NVMe": (ADAMW, {}),
    "DeepSpeed: stage 3 without anything ahead": (ADAMW, {}),
    "DeepSpeed: part of the states on the CPU": (ADAMW, SKIP),
    "DeepSpeed: ZeRO++": (ADAMW, SKIP),
    "DeepSpeed: MiCS": (ADAMW, {}),
    "DeepSpeed: 1-bit Adam": ("sl.optim.onebit_adam(1e-3, 2)", {}),
    "DeepSpeed: 0/1 Adam": (
        "sl.optim.zero_one_adam(1e-3, 1, weight_decay=0.01, local_step_scaler=1000)",
        {},
    ),
    "DeepSpeed: 1-bit LAMB": (
        "sl.optim.onebit_lamb(1e-3, 2, eps=1e-8, min_coeff=0.05, max_coeff=0.5, max_factor=4.0)",
        {},
    ),
    "DeepSpeed: LAMB for large batches": (
        "sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.lamb(sl.optim.warmup_cosine_decay_schedule(0.0, 2e-3, "
        "4, 40, 2e-4, warmup='log'), eps=1e-8, weight_decay=0.01, min_coeff=0.01, max_coeff=0.3))",
        {},
    ),
    "DeepSpeed: one cycle, with momentum": (
        "(lambda cycle: sl.optim.inject_hyperparams(sl.optim.adamw)(cycle.lr, b1=cycle.momentum, b2=0.99, weight_decay=0.0))("
        "sl.optim.one_cycle(1e-4, 1e-3, 10, decay_rate=1e-3, decay_steps=10, min_momentum=0.85, max_momentum=0.99))",
        {},
    ),
    "DeepSpeed: progressive layer drop": (ADAMW, SKIP),
    "DeepSpeed: elastic, with Apex": (
        "sl.optim.chain(sl.optim.add_decayed_weights(1e-4), sl.optim.sgd(0.1, momentum=0.9, nesterov=True))",
        {},
    ),
    "torchtitan: a small model to try": (
        "sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(sl.optim.warmup_stable_decay_schedule(4e-4, 8e-4, "
        "1, 1, 8), 0.9, 0.95, 1e-8, 0.1))",
        {},
    ),
    "torchtitan: 8B": (
        "sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(sl.optim.warmup_stable_decay_schedule(3e-4 / 200, "
        "3e-4, 199, 1, 800), 0.9, 0.95, 1e-8, 0.1))",
        {},
    ),
}


def migrated(name):
    config, ranks, _ = EVERY[name]
    return sl.migrate(tomllib.loads(config) if isinstance(config, str) else config, ranks=ranks)


def test_there_are_enough():
    assert (len(DEEPSPEED), len(ACCELERATE), len(TORCHTITAN)) >= (20, 6, 4)


def test_chains():
    found = {name: repr(migrated(name).chain) for name, (_, _, code) in EVERY.items() if code}
    assert found == {name: code for name, (_, _, code) in EVERY.items() if code}
    assert repr(sl.data.linear_pace(4, 8, 10, 4)) in repr(
        migrated("DeepSpeed: random-LTD and a curriculum by rarity").chain
    )


@pytest.mark.parametrize("name", EVERY)
def test_code_makes_the_same(name):
    made = migrated(name)
    names = {}
    exec(made.code, names)
    assert repr(names["parallel"]) == repr(made.chain)
    assert names["axes"] == made.sizes()
    for step in range(30) if made.schedule else ():
        assert float(names["schedule"](step)) == float(made.schedule(step))


def model(name):
    """Parameters for which a plan can be made, and a loss for those that are trained."""
    if "slices" in name or "sliced" in name:
        layer = {each: torch.ones(8, 8) for each in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
        layer |= {"o_proj": torch.ones(8, 8), "down_proj": torch.ones(8, 8)}
        titan = {each: torch.ones(8, 8) for each in ("wq", "wk", "wv", "w1", "w3", "wo", "w2", "output")}
        return None, [layer if "DeepSpeed" in name else titan for _ in range(4)]
    if "experts" in name:
        return None, {"router": torch.ones(4, 8), "experts": {"up": torch.ones(4, 16, 8)}}
    if "stages" in name:
        return None, [{"weight": torch.ones(8, 8)} for _ in range(8)]
    return tiny_gpt(layers=4)


@pytest.mark.parametrize("name", EVERY)
def test_plans(name):
    made = migrated(name)
    plan = sl.make_plan(model(name)[1], sl.abstract_mesh(**made.sizes()), made.chain, optimizer=made.optimizer)
    assert plan.bytes("param") > 0


def losses(mesh, loss_fn, params, parallel, optimizer, options):
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), optimizer, **options)
    found = []
    for batch in token_batches(3, rows=16):
        state, metrics = step(state, share(batch, mesh.rank, mesh.size))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_trains_as_by_hand(name, tmp_path, monkeypatch):
    """Three steps, with the code that was made, and with the chain and optimizer written by hand: the same losses."""
    made, (loss_fn, params) = migrated(name), model(name)
    optimizer, options = BY_HAND[name]
    runs = []
    for run, (parallel, tx, given) in enumerate(
        [
            (made.chain, made.optimizer, made.options),
            (eval(EVERY[name][2], {"sl": sl}), eval(optimizer, {"sl": sl}), options),
        ]
    ):
        (tmp_path / str(run)).mkdir()
        monkeypatch.chdir(tmp_path / str(run))  # files on disk belong to one run
        runs.append(sl.simulate(losses, loss_fn, params, parallel, tx, given, mesh=made.sizes())[0])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][2]


def test_code_starts_a_run():
    made = migrated("DeepSpeed: stage 2 in bf16, states on the CPU")
    names, (loss_fn, params) = {}, tiny_gpt()
    exec(made.code, names)

    def run(mesh):
        state, step = names["start"](loss_fn, params, mesh)
        [batch] = token_batches(1, rows=made.rows.total)
        batch = share(batch, mesh.rank, mesh.size)
        assert batch["tokens"].shape[0] == made.rows.rank
        return step(state, batch)[1]["loss"].isfinite().item()

    assert sl.simulate(run, mesh=made.sizes()) == [True, True]


def test_a_curriculum_is_that_of_the_configuration():
    lengths = migrated("DeepSpeed: a curriculum of lengths").curriculum
    assert [lengths.tokens_at(step) for step in (0, 5, 10)] == [16 * 8, 16 * 32, 16 * 64]
    made = migrated("DeepSpeed: random-LTD and a curriculum by rarity")
    numbers = list(range(200))  # one for each sample
    by_hand = sl.data.curriculum(16, difficulty=numbers, up_to=sl.data.root_pace(1, 100, 100, 2), percentile=True)
    drawn = made.curriculum(numbers)
    assert (drawn.rows, drawn.length, drawn.limits) == (by_hand.rows, None, by_hand.limits)
    assert "sl.data.loader(seed=1234)" in entry(made, "data_efficiency.seed").note


def test_a_layout_of_attention_is_that_of_the_configuration():
    layout = migrated("DeepSpeed: sparse attention").values["attention_layout"]
    by_hand = sl.sparse.fixed(256, heads=4, patterns=4)
    assert torch.equal(layout(256, heads=4).columns, by_hand.columns)
    assert torch.equal(layout(256, heads=4).row_offsets, by_hand.row_offsets)


# Keys.


def entry(made, key):
    return next(each for each in made.entries if each.key == key)


def test_every_key_has_a_verdict():
    for name, (config, _, _) in EVERY.items():
        made = migrated(name)
        config = tomllib.loads(config) if isinstance(config, str) else config
        assert [each.key for each in made.entries] == list(leaves(config)), name
        assert all(each.note and each.verdict in ("taken", "not needed") for each in made.entries)


def leaves(config, under=""):
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{under}{name}.")
        else:
            yield f"{under}{name}"


def test_unknown_keys_are_refused_by_name_with_the_nearest():
    with pytest.raises(MigrationError, match=r"(?s)zero_optimisation = .*write zero_optimization.*steps_per_prnt = 3"):
        sl.migrate({"zero_optimisation": {"stage": 2}, "steps_per_prnt": 3})
    made = sl.migrate({"zero_optimization": {"stage": 2, "overlap_com": True}}, strict=False)
    assert "write zero_optimization.overlap_comm" in entry(made, "zero_optimization.overlap_com").note
    assert repr(made.chain) == "sl.zero(2)"
    with pytest.raises(MigrationError, match=r"fsdp_config\.fsdp_sharding_stratgy"):
        sl.migrate({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_stratgy": "FULL_SHARD"}})
    with pytest.raises(MigrationError, match=r"write training\.local_batch_size"):
        sl.migrate({"parallelism": {}, "training": {"local_batchsize": 8}})


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "the loss times the number of ranks"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "there is no stage 4"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
            "stage 3 alone",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device",
            "need a folder",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}},
            "zero_optimization.offload_param.device",
            "need states there too",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "zero_optimization.zenflow.topk_ratio",
            "delay",
        ),
        (
            {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
            "fp16.consecutive_hysteresis",
            "take hysteresis 1",
        ),
        (
            {"gradient_clipping": 1.0, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}},
            "gradient_clipping",
            "nobody knows their norm",
        ),
        ({"optimizer": {"type": "MuAdam"}}, "optimizer.type", "from_torch"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr", "TrainingArguments"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
            "train_batch_size",
            "depends on the number of ranks",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.type", "total_num_steps"),
        ({"weight_quantization": {"enabled": True}}, "weight_quantization.enabled", "sl.precision"),
        ({"compression_training": {"weight_quantization": {}}}, "compression_training", "distillation"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type", "is not known"),
        ({"parallelism": {}, "lr_scheduler": {"decay_type": "sqrt"}}, "lr_scheduler.decay_type", "linear or cosine"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled", "neither true nor false"),
        ({"gradient_clipping": "much"}, "gradient_clipping", "is no number"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_refused_with_reason_and_remedy(config, key, reason):
    with pytest.raises(MigrationError, match=reason):
        sl.migrate(config)
    found = entry(sl.migrate(config, strict=False), key)
    assert found.verdict == "refused" and reason in found.note


def test_what_is_switched_off_is_not_needed():
    off = {
        "fp16": {"enabled": False, "loss_scale_window": 7},
        "zero_optimization": {"zenflow": None},
        "amp": {"enabled": False},
    }
    made = sl.migrate({**off, "elasticity": {"enabled": False, "max_gpus": 9}, "gradient_clipping": 0.0})
    assert {each.verdict for each in made.entries} == {"not needed"}
    assert repr(made.chain) == "sl.zero()" and made.optimizer is None


def test_values_that_do_not_go_together_are_named():
    config = {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.5]}}}
    with pytest.raises(MigrationError, match=r"b2=1\.5"):
        sl.migrate(config)


def test_rows_follow_from_one_another():
    both = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    assert sl.migrate(both, ranks=2).rows == (4, 4, 16, 32)
    assert sl.migrate({**both, "gradient_accumulation_steps": 2}).sizes() == {"data": 4}
    assert sl.migrate({"train_batch_size": 32}, ranks=4).rows == (8, 1, 8, 32)
    with pytest.raises(MigrationError, match="do not make 32 rows"):
        sl.migrate({**both, "gradient_accumulation_steps": 3})
    sliced = {**both, "tensor_parallel": {"autotp_size": 2}}
    assert sl.migrate(sliced, ranks=4).rows == (4, 4, 16, 32)
    assert sl.migrate(sliced, ranks=4).sizes() == {"data": 2, "model": 2}


def test_regular_expressions_of_layers_become_rules():
    specs = [
        {"patterns": [".*\\.o_proj\\.weight$", ".*\\.down_proj\\.weight$"], "partition_type": "row"},
        {"patterns": [".*\\.[qkv]_proj\\.weight$"], "partition_type": "column"},
    ]
    made = sl.migrate({"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": specs}}}, ranks=2)
    layer = {name: {"weight": torch.ones(8, 8)} for name in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")}
    plan = sl.make_plan({"layers": [layer]}, sl.abstract_mesh(**made.sizes()), made.chain)
    found = {path.split("/")[2]: placement.compute.spec for path, placement in plan.placement_of.items()}
    assert found == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), sl.P("model")),
        **dict.fromkeys(("o_proj", "down_proj"), sl.P(None, "model")),
    }


# TrainingArguments.


def arguments(tmp_path, **given):
    return TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, **given)


def test_training_arguments(tmp_path):
    made = sl.migrate(
        arguments(
            tmp_path,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            warmup_steps=2,
            max_steps=10,
            lr_scheduler_type="cosine",
            bf16=True,
            activation_checkpointing=True,
        ),
        ranks=2,
    )
    assert (
        repr(made.chain) == "sl.chain(sl.zero(), sl.precision(keep='*', autocast=True), sl.remat(), sl.accumulate(2))"
    )
    assert made.rows == (4, 2, 8, 16) and made.options == {"rng": 42}
    for step in range(10):
        torchs = 1e-3 * _cosine(step, 2, 10)
        assert float(made.schedule(step)) == pytest.approx(torchs, rel=1e-9)
    state = made.optimizer.init({"norm": torch.ones(4), "weight": torch.ones(4, 4)})
    grads = {"norm": torch.zeros(4), "weight": torch.zeros(4, 4)}
    params = {"norm": torch.ones(4), "weight": torch.ones(4, 4)}
    for _ in range(3):
        updates, state = made.optimizer.update(grads, state, params)
    assert (updates["norm"] == 0).all() and (updates["weight"] != 0).all()  # transformers decays no norms


def _cosine(step, warmup, total):
    from transformers.optimization import _get_cosine_schedule_with_warmup_lr_lambda as factor

    return factor(step, num_warmup_steps=warmup, num_training_steps=total, num_cycles=0.5)


SCHEDULES = {
    "linear": {},
    "constant_with_warmup": {},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 2},
    "warmup_stable_decay": {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("steps", [20, 3], ids=["", "all of a warm-up"])
def test_schedules_are_those_of_transformers(kind, steps, tmp_path):
    from transformers import get_scheduler

    given = arguments(tmp_path, max_steps=steps, warmup_steps=4, learning_rate=1e-3, lr_scheduler_type=kind)
    given.lr_scheduler_kwargs = SCHEDULES[kind]
    if kind == "warmup_stable_decay" and steps < 4:
        with pytest.raises(MigrationError, match="4 of 3 steps leave none to decay"):
            sl.migrate(given)
        return
    ours = sl.migrate(given).schedule
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1e-3)
    scheduler = get_scheduler(kind, theirs, 4, steps, SCHEDULES[kind])
    for step in range(steps):
        assert float(ours(step)) == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-6), step
        theirs.step()
        scheduler.step()


def test_training_arguments_fill_in_what_deepspeeds_configuration_leaves_to_them(tmp_path):
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    }
    given = arguments(
        tmp_path, bf16=True, max_steps=100, warmup_steps=10, learning_rate=1e-3, per_device_train_batch_size=2
    )
    given.deepspeed = config
    made = sl.migrate(given, ranks=4)
    assert repr(made.chain) == "sl.chain(sl.zero(3), sl.precision())" and made.rows == (2, 1, 2, 8)
    assert float(made.schedule(10)) == 1e-3 and float(made.schedule(55)) == 5e-4
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    given.deepspeed = str(file)
    assert sl.migrate(given, ranks=4).code == made.code


def test_a_deepspeed_configuration_without_a_schedule_has_that_of_the_arguments(tmp_path):
    """As transformers' integration says: "HF scheduler + DS optimizer" go together, and "DS scheduler + HF optimizer"."""
    given = arguments(tmp_path, max_steps=100, warmup_steps=10, learning_rate=2e-3, lr_scheduler_type="cosine")
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    for config in ({"optimizer": optimizer}, {"zero_optimization": {"stage": 1}}):
        given.deepspeed = config
        made = sl.migrate(given)
        assert "schedule" in made.code.partition("optimizer =")[2].partition("def ")[0]
        assert "clip" not in made.code  # which accelerate leaves to DeepSpeed, by gradient_clipping alone
        assert [float(made.schedule(step)) for step in (0, 10, 55)] == pytest.approx([0, 2e-3, 1e-3])
    cosine = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}
    given.deepspeed = {"scheduler": cosine}
    assert float(sl.migrate(given).schedule(10)) == 2e-3
    with pytest.raises(MigrationError, match=r"write optimizer\.params\.lr"):
        sl.migrate({"scheduler": cosine})


def test_training_arguments_of_epochs_need_the_number_of_steps(tmp_path):
    given = arguments(tmp_path, learning_rate=1e-3)
    with pytest.raises(MigrationError, match=r"max_steps, or migrate\(source, steps"):
        sl.migrate(given)
    assert float(sl.migrate(given, steps=100).schedule(50)) == 5e-4


def test_training_arguments_with_fsdp(tmp_path):
    config = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "reshard_after_forward": False}
    given = arguments(tmp_path, bf16=True, max_steps=9)
    given.fsdp, given.fsdp_config = True, config
    assert repr(sl.migrate(given).chain) == "sl.chain(sl.zero(3, keep='forward'), sl.precision())"


# Files, and the command.


def test_files_and_the_command(tmp_path, capsys):
    config, _, _ = DEEPSPEED["stage 2 in bf16, states on the CPU"]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert sl.migrate(tmp_path / "ds.json", ranks=2).code == sl.migrate(config, ranks=2).code
    assert main(["migrate", str(tmp_path / "ds.json"), "--ranks", "2", "--out", str(tmp_path / "made.py")]) == 0
    shown = capsys.readouterr().out
    assert "zero_optimization.overlap_comm" in shown and "not needed" in shown
    assert (tmp_path / "made.py").read_text() in shown

    config, _, _ = ACCELERATE["DeepSpeed"]
    config = {**config, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(config))
    made = sl.migrate(tmp_path / "fsdp.yaml")
    assert repr(made.chain) == "sl.chain(sl.zero(2), sl.offload(), sl.precision(), sl.accumulate(2))"
    assert entry(made, "deepspeed_config.deepspeed_config_file: zero_optimization.stage").verdict == "taken"

    (tmp_path / "titan.toml").write_text(TORCHTITAN["8B"][0])
    assert main(["migrate", str(tmp_path / "titan.toml")]) == 0
    (tmp_path / "odd.json").write_text('{"zero_optimization": {"stage": 2, "new": 1}}')
    assert main(["migrate", str(tmp_path / "odd.json")]) == 1
    assert "1 keys are refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "{"), ("a.toml", "= 3"), ("a.yaml", "a: [1"), ("a.json", "[1]"), ("a.txt", "")]
)
def test_what_is_no_configuration_is_said(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(MigrationError, match=name):
        sl.migrate(tmp_path / name)
    with pytest.raises(SystemExit, match="shardlib migrate: "):
        main(["migrate", str(tmp_path / name)])


def test_a_file_that_is_missing_is_said(tmp_path):
    with pytest.raises(MigrationError, match="cannot be read"):
        sl.migrate(tmp_path / "none.json")
    with pytest.raises(MigrationError, match="give a path, a dictionary"):
        sl.migrate(3)


@pytest.mark.parametrize("origin", ["DeepSpeed", "accelerate", "torchtitan"])
def test_odd_values_are_refused_not_raised(origin):
    """Every known key with values of wrong kinds: a configuration is read, or refused, and nothing else is raised."""
    keys, base = {
        "DeepSpeed": (deepspeed.KEYS, DEEPSPEED["random-LTD and a curriculum by rarity"][0]),
        "accelerate": (accelerate.KEYS, ACCELERATE["FSDP"][0]),
        "torchtitan": (torchtitan.KEYS, tomllib.loads(TORCHTITAN["405B in stages, with a long context"][0])),
    }[origin]
    parts = [key.split(".") for key in keys.all()]
    every = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}
    refused = 0
    for key in sorted(every):
        for value in (None, True, "x", -1, float("nan"), [1], {"a": 1}):
            config = copy.deepcopy(base)
            *sections, name = key.replace("*", "name").split(".")
            inside = config
            for section in sections:
                inside[section] = inside[section] if isinstance(inside.get(section), dict) else {}
                inside = inside[section]
            inside[name] = value
            try:
                refused += bool(sl.migrate(config, ranks=8, strict=False).refused)
            except MigrationError:
                refused += 1
    assert refused > len(every)
