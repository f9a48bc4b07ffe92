"""`repr` of gradient transformations and schedules is the code that makes them."""

import inspect

import torch
from helpers.optimizer_cases import CASES, model

import shardlib as sl

NAMES = vars(sl.optim) | {"sl": sl, "torch": torch}
opt = sl.optim

OTHERS = [
    opt.onebit_adam(1e-3, 10),
    opt.onebit_lamb(1e-3, 10),
    opt.zero_one_adam(1e-3, 10),
    opt.skip_unused(opt.adamw(0.1)),
    opt.clip_by_global_norm(1.0, float("inf")),
    opt.inject_hyperparams(opt.adamw, "b1")(0.1, b1=0.8),
]
SCHEDULES = [
    opt.constant_schedule(0.1),
    opt.linear_schedule(0.1, 0.0, 10),
    opt.polynomial_schedule(0.1, 0.0, 2.0, 10, transition_begin=3),
    opt.exponential_decay(0.1, 10, 0.5, staircase=True),
    opt.cosine_decay_schedule(0.1, 10),
    opt.join_schedules([opt.constant_schedule(1.0), opt.piecewise_constant_schedule(1.0, {10: 0.5})], [10]),
    opt.piecewise_interpolate_schedule("cosine", 1.0, {10: 0.5}),
    opt.cosine_onecycle_schedule(20, 1.0),
    opt.linear_onecycle_schedule(20, 1.0),
    opt.lr_range_test_schedule(1e-4),
    opt.one_cycle(0.1, 1.0, 10, max_momentum=0.95).lr,
    opt.one_cycle(0.1, 1.0, 10, max_momentum=0.95).momentum,
    opt.warmup_constant_schedule(0.0, 1.0, 5),
    opt.warmup_cosine_decay_schedule(0.0, 1.0, 5, 20),
    opt.warmup_exponential_decay_schedule(0.0, 1.0, 5, 20, 0.5),
    opt.warmup_linear_decay_schedule(0.0, 1.0, 5, 20, warmup="log"),
    opt.warmup_stable_decay_schedule(0.0, 1.0, 5, 10, 20),
    opt.batch_schedule(0.1, opt.linear_schedule(8, 16, 10), 8),
    opt.token_schedule(opt.cosine_decay_schedule(0.1, 1000), sl.data.linear_pace(8, 16, 10, 8)),
]


def test_a_chain_reads_as_it_was_written():
    tx = opt.chain(opt.clip_by_global_norm(1.0), opt.adamw(0.0003))
    assert repr(tx) == "chain(clip_by_global_norm(1.0), adamw(0.0003))"
    tx = opt.inject_hyperparams(opt.adamw)(opt.cosine_decay_schedule(0.1, 60), weight_decay=0.2)
    assert repr(tx) == "inject_hyperparams(adamw)(cosine_decay_schedule(0.1, 60), weight_decay=0.2)"


def test_code_makes_what_it_is_of():
    """It prints as before, and a first update has the same bits. Every public factory is among the cases."""
    _, params = model()
    leaves = params["first"] | {"zero": params["second"]["zero"]}
    matrices = {name: leaf for name, leaf in leaves.items() if leaf.dim() > 1}
    written = []
    for name, case in CASES.items():
        tx = case.make()
        written.append(code := repr(tx))
        if "<lambda>" not in code:
            again = eval(code, NAMES)
            given = matrices if case.matrices else leaves
            updates = [each.update(given, each.init(given), given)[0] for each in (tx, again)]
            assert repr(again) == code and all(map(torch.equal, *(each.values() for each in updates))), name
    assert sum("<lambda>" in code for code in written) == 3  # which choose by a function of the case's own
    for tx in OTHERS:
        written.append(code := repr(tx))
        assert repr(eval(code, NAMES)) == code
    written += map(repr, SCHEDULES)
    made = {
        name
        for name in opt.__all__
        if inspect.isfunction(each := getattr(opt, name))
        and inspect.signature(each).return_annotation in ("GradientTransformation", "Schedule")
    }
    assert len(made) > 40 and not [name for name in made if not any(f"{name}(" in code for code in written)]


def test_schedules_are_code_with_the_same_values():
    steps = torch.arange(30)
    for schedule in SCHEDULES:
        again = eval(repr(schedule), NAMES)
        assert repr(again) == repr(schedule) and torch.equal(again(steps), schedule(steps))


def test_what_nobody_can_write_again_names_its_functions():
    def update(updates, state, params):
        return updates, state

    tx = opt.GradientTransformation(lambda params: (), update)
    name = f"{__name__}.test_what_nobody_can_write_again_names_its_functions.<locals>"
    assert repr(tx) == f"GradientTransformation({name}.<lambda>, {name}.update)"
    assert repr(opt.adamw(abs)) == "adamw(abs)"
