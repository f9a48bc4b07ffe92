"""What the steps of a ds_config read and leave out: curricula, dropped layers and tokens, and layouts of attention."""

from __future__ import annotations

from typing import Any

from shardlib.migration.calls import Call, Lambda, Variable
from shardlib.migration.deepspeed.keys import CURRICULUM, LTD
from shardlib.migration.draft import Draft
from shardlib.migration.reader import Reader


def read_drops(reader: Reader, draft: Draft) -> None:
    if reader.on("progressive_layer_drop"):
        theta, gamma = (
            reader.number(f"progressive_layer_drop.{name}", usual) for name, usual in (("theta", 1.0), ("gamma", 0.001))
        )
        draft.transforms.append(Call("progressive_layer_drop", (float(theta), float(gamma))))
    if not (reader.given(LTD) and reader.on("data_efficiency") and reader.on("data_efficiency.data_routing")):
        return
    if not reader.on(LTD):
        return
    schedule = f"{LTD}.random_ltd_schedule"
    reader.choice(f"{schedule}.schedule_type", ("fixed_linear",), "fixed_linear")
    numbers = [
        reader.integer(f"{schedule}.{name}")
        for name in ("min_value", "max_value", "schedule_config.require_steps", "schedule_config.seq_per_step")
    ]
    layers, dropped = reader.integer(f"{LTD}.total_layer_num"), reader.integer(f"{LTD}.random_ltd_layer_num")
    which = reader.read(f"{LTD}.random_ltd_layer_id")
    if which is not None and not (isinstance(which, list) and all(type(each) is int for each in which)):
        reader.refuse(f"{LTD}.random_ltd_layer_id", f"{which!r} is no list of numbers of layers; write [1, 2, 3]")
        which = None
    if None in numbers:
        reader.refuse(
            f"{LTD}.enabled", f"the schedule is not whole; write min_value, max_value and schedule_config of {schedule}"
        )
        return
    ends = 1
    if layers is not None and (which or dropped is not None):
        ends = min(which) if which else (layers - dropped) // 2
        middle = layers - 2 * ends
        if (which and sorted(which) != list(range(ends, min(layers, 10**6) - ends))) or (
            dropped is not None and dropped != middle
        ):
            reader.refuse(
                f"{LTD}.random_ltd_layer_id" if which else f"{LTD}.random_ltd_layer_num",
                f"tokens are left out of the middle layers, all but as many at either end; write layers {ends} to "
                f"{layers - ends - 1}",
            )
    draft.transforms.append(
        Call("random_ltd", (Call("data.linear_pace", tuple(numbers)),), {"ends": ends} if ends != 1 else {})
    )


def _pace(reader: Reader, section: str) -> Call | None:
    kinds = ("fixed_linear", "fixed_root", "fixed_discrete")
    kind = reader.choice(f"{section}.schedule_type", kinds)
    config = f"{section}.schedule_config"
    if kind is None:
        if reader.value(f"{section}.schedule_type") == "custom":
            reader.refuse(
                f"{section}.schedule_type",
                "a function of the step is sl.data.custom_pace(function, steps); write it there",
            )
        return None
    if kind == "fixed_discrete":
        values, until = reader.read(f"{config}.difficulty"), reader.read(f"{config}.max_step")
        for bound in ("min_difficulty", "max_difficulty"):
            if reader.given(f"{section}.{bound}"):
                reader.read(f"{section}.{bound}")
        found = [values, until] if values and until else None
    else:
        numbers = [reader.integer(f"{section}.{name}") for name in ("min_difficulty", "max_difficulty")]
        numbers.append(reader.integer(f"{config}.total_curriculum_step"))
        degree = reader.number(f"{config}.root_degree", 2) if kind == "fixed_root" else None
        multiple = reader.integer(f"{config}.difficulty_step", 1)
        found = [*numbers, *([] if degree is None else [degree]), multiple] if None not in numbers else None
    if found is None:
        reader.refuse(f"{section}.schedule_type", f"{kind} needs more numbers; write all of {config}")
        return None
    names = {"fixed_linear": "linear_pace", "fixed_root": "root_pace", "fixed_discrete": "discrete_pace"}
    return Call(f"data.{names[kind]}", tuple(found))


def read_curriculum(reader: Reader, draft: Draft) -> None:
    length = difficulty = None
    percentile = False
    if reader.on("curriculum_learning"):
        reader.choice("curriculum_learning.curriculum_type", ("seqlen",), "seqlen")
        length = _pace(reader, "curriculum_learning")
    sampled = reader.given(CURRICULUM) and reader.on("data_efficiency") and reader.on("data_efficiency.data_sampling")
    for name in reader.names(f"{CURRICULUM}.curriculum_metrics") if sampled and reader.on(CURRICULUM) else ():
        at = f"{CURRICULUM}.curriculum_metrics.{name}"
        kind = reader.choice(f"{at}.difficulty_type", ("value", "percentile"), "value")
        if reader.given(f"{at}.clustering_type"):
            reader.skip(f"{at}.clustering_type", "samples are sorted by their difficulty, without clusters")
        pace = _pace(reader, at)
        if name.startswith("seqlen") and kind == "value" and not reader.given(f"{at}.index_to_metric_path"):
            length = pace
        elif difficulty is not None:
            reader.refuse(
                f"{at}.schedule_type",
                "samples are drawn by one difficulty; join the numbers of several into one for each sample",
            )
        else:
            difficulty, percentile = pace, kind == "percentile"
            if reader.given(f"{at}.index_to_metric_path"):
                reader.took(
                    f"{at}.index_to_metric_path",
                    "the argument of curriculum(difficulty): a number for each sample, or an index that `shardlib analyze` "
                    "makes",
                )
    if reader.given("data_efficiency.seed"):
        reader.took("data_efficiency.seed", f"sl.data.loader(seed={reader.value('data_efficiency.seed')!r})")
    if length is None and difficulty is None:
        return
    rows: Any = draft.total if draft.total is not None else Variable("rows")
    parameters = ["rows"] if draft.total is None else []
    options: dict[str, Any] = {} if length is None else {"length": length}
    if difficulty is not None:
        parameters.append("difficulty")
        options |= {"difficulty": Variable("difficulty"), "up_to": difficulty}
        if percentile:
            options["percentile"] = True
    made = Call("data.curriculum", (rows,), options)
    draft.program["curriculum"] = Lambda(", ".join(parameters), made) if parameters else made


def read_sparse(reader: Reader, draft: Draft) -> None:
    section = "sparse_attention"
    if not reader.given(section):
        return
    modes = {
        "dense": ("dense", {}),
        "fixed": (
            "fixed",
            {
                "num_local_blocks": "local",
                "num_global_blocks": "global_blocks",
                "num_different_global_patterns": "patterns",
                "horizontal_global_attention": "horizontal",
            },
        ),
        "variable": (
            "variable",
            {
                "num_random_blocks": "random",
                "local_window_blocks": "windows",
                "global_block_indices": "global_blocks",
                "global_block_end_indices": "global_ends",
                "horizontal_global_attention": "horizontal",
            },
        ),
        "bigbird": (
            "bigbird",
            {
                "num_random_blocks": "random",
                "num_sliding_window_blocks": "window",
                "num_global_blocks": "global_blocks",
            },
        ),
        "bslongformer": (
            "longformer",
            {
                "num_sliding_window_blocks": "window",
                "global_block_indices": "global_blocks",
                "global_block_end_indices": "global_ends",
            },
        ),
        "local_sliding_window": ("sliding_window", {"num_sliding_window_blocks": "window"}),
    }
    mode = reader.choice(f"{section}.mode", tuple(modes), "fixed")
    function, names = modes[mode]
    options: dict[str, Any] = {"block": reader.integer(f"{section}.block", 16)}
    way = "unidirectional" if mode == "local_sliding_window" else "bidirectional"
    way = reader.choice(f"{section}.attention", ("bidirectional", "unidirectional"), way)
    options["causal"] = way == "unidirectional"
    for theirs, ours in names.items():
        value = reader.read(f"{section}.{theirs}")
        if value is not None and value is not False:
            options[ours] = value
    each = reader.given(f"{section}.different_layout_per_head") and reader.flag(f"{section}.different_layout_per_head")
    parameters = "length"
    if function in ("fixed", "variable", "bigbird") and (each or options.get("patterns", 1) != 1):
        options["heads"] = Variable("heads")
        parameters = "length, heads=1"
    draft.program["attention_layout"] = Lambda(parameters, Call(f"sparse.{function}", (Variable("length"),), options))
