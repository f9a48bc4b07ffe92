"""A curriculum over length, layers that are left out and tokens that are left out, all at once: against a loop that does the
same by hand, where sequences are shorter than what layers keep and where they are longer."""

import functools
import itertools

import pytest
import torch
from helpers.drops import GPT, RATE, SEED, SLICES, gpt_loss, in_list, layer_tokens, looped, visits_at
from helpers.trees import assert_close

import shardlib as sl
from shardlib.models import gpt
from shardlib.plan.drops import LayerDrop

LENGTHS = sl.data.discrete_pace([2, 4, 8], until=[0, 2])  # of one, two and three steps
KEPT = sl.data.discrete_pace([3, 5, 6], until=[1, 3])  # so at step 0 and 2 more than there are
ROWS, STEPS = 8, 6
DROP = LayerDrop(0.5, 5.0, tuple("abcd"))
LESS = sl.chain(sl.random_ltd(KEPT), sl.progressive_layer_drop(0.5, 5.0))
PLANS = {
    "truncate": sl.data.curriculum(ROWS, length=LENGTHS),
    "reshape": sl.data.curriculum(ROWS, length=LENGTHS, surplus="reshape"),
    "rows": sl.data.curriculum(sl.data.map_paces(lambda length: 64 // length, LENGTHS), length=LENGTHS),
}
CASES = {
    "stage 0": ({"data": 2}, (sl.zero(0),)),
    "stage 1": ({"data": 2}, (sl.zero(1), sl.accumulate(2))),
    "stage 2, recomputed": ({"data": 4}, (sl.zero(2), sl.remat())),
    "stage 3": ({"data": 4}, (sl.zero(3),)),
    "stage 3, recomputed": ({"data": 2}, (sl.zero(3), sl.remat(), sl.accumulate(2))),
    "slices": ({"data": 2, "model": 2}, (sl.zero(3), SLICES, sl.remat("dots"))),
    "stages": ({"data": 2, "pipe": 2}, (sl.zero(3), sl.pipeline("1f1b", 2), sl.remat())),
    "split backward": ({"pipe": 2}, (sl.pipeline("zb-h1", 4),)),
}
# Each case with one of the curricula on every commit, and with the others nightly.
PRODUCT = [
    pytest.param(case, plan, marks=[] if (number + other) % len(PLANS) == 0 else [pytest.mark.nightly])
    for number, case in enumerate(CASES)
    for other, plan in enumerate(PLANS)
]


def text():
    drawn = torch.randint(GPT.vocab, (40, GPT.sequence + 1), generator=torch.Generator().manual_seed(6))
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


@functools.cache
def expected(name):
    """Losses and gradient norms of each step, the last parameters, and the tokens that layers saw in each step."""
    batches = list(itertools.islice(sl.data.loader(text(), sl.make_mesh(), PLANS[name]), STEPS))
    shapes = [batch["tokens"].shape for batch in batches]
    visits = [visits_at(step, KEPT, DROP, *shape) for step, shape in enumerate(shapes)]
    seen = [layer_tokens(each, *shape) for each, shape in zip(visits, shapes)]
    numbers, params = looped(lambda p, _, step: gpt_loss(p, batches[step], visits[step]), gpt.init(GPT), None, 0, STEPS)
    return numbers, params, seen


def begun(mesh, transforms, staged):
    """The state and the train step before the first step."""
    loss_fn, params = gpt.make_loss(GPT), gpt.init(GPT)
    if staged:
        loss_fn, params = gpt.make_sequential(GPT), gpt.to_blocks(params)
    sharded = sl.shard(params, mesh, sl.chain(LESS, *transforms))
    return sl.make_train_step(loss_fn, sharded, sl.optim.sgd(RATE), rng=SEED)


def train(mesh, name, transforms, steps=STEPS, folder=None, save=False):
    """Losses and norms, tokens that layers saw, and parameters; from the checkpoint of a folder, or up to it."""
    state, train_step = begun(mesh, transforms, "pipe" in mesh.shape)
    batches = sl.data.loader(text(), state, PLANS[name])
    if folder and not save:
        state = sl.checkpoint.restore(folder, state)
        batches.load_state_dict(sl.checkpoint.read_notes(folder))
    numbers, seen = [], []
    for batch in itertools.islice(batches, steps):
        state, metrics = train_step(state, batch)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        seen.append(metrics["layer_tokens"])
    if save:
        sl.checkpoint.save(folder, state, notes=batches.state_dict())
    params = sl.unshard(state.params)
    return torch.tensor(numbers, dtype=torch.float64), in_list(params) if "pipe" in mesh.shape else params, seen


def check(results, name, first=0):
    numbers, params, seen = expected(name)
    for found, after, counted in results:
        assert_close((found, after), (numbers[first:], params), 1e-10)
        assert counted == seen[first:]


def test_the_steps_here_leave_out_what_they_should():
    """What the tests below rest on: layers, tokens where there are more than layers keep, and none where there are not."""
    steps = [visits_at(step, KEPT, DROP, ROWS, LENGTHS(step)) for step in range(STEPS)]
    drops = [[index is not None for *_, index in step] for step in steps]
    assert [any(step) for step in drops] == [False, True, False, True, True, True]
    assert any(runs and cut for step, cuts in zip(steps, drops) for (runs, *_), cut in zip(step, cuts))
    assert any(not runs for step in steps for runs, *_ in step)


@pytest.mark.parametrize(("case", "name"), PRODUCT)
def test_equal_to_a_loop_on_every_mesh(case, name):
    mesh, transforms = CASES[case]
    expected(name)  # before the ranks run
    check(sl.simulate(train, name, transforms, mesh=mesh), name)


def test_equal_to_a_loop_in_processes(pool):
    mesh, transforms = CASES["stage 3, recomputed"]
    check(pool.run(train, "reshape", transforms, mesh=mesh), "reshape")


@pytest.mark.parametrize("name", PLANS)
def test_a_run_goes_on_on_another_number_of_ranks(name, tmp_path):
    """With draws of tokens and layers, and samples, of the run that was not stopped."""
    expected(name)
    sl.simulate(train, name, CASES["stage 3, recomputed"][1], 2, tmp_path, True, mesh={"data": 2})
    check(sl.simulate(train, name, CASES["stage 1"][1], STEPS - 2, tmp_path, mesh={"data": 4}), name, first=2)


@pytest.mark.parametrize("name", PLANS)
def test_layer_tokens_before_any_step(name):
    drop = sl.make_plan(gpt.init(GPT), sl.make_mesh(), sl.random_ltd(KEPT)).step.token_drop
    plan = PLANS[name]
    pieces = 8 // LENGTHS(0) if name == "reshape" else 1
    batches = itertools.islice(sl.data.loader(text(), sl.make_mesh(), plan), STEPS)
    shapes = [batch["tokens"].shape for batch in batches]
    assert shapes[0] == (plan.rows(0) * pieces, 2)
    counts = [layer_tokens(visits_at(step, KEPT, None, *shape), *shape) for step, shape in enumerate(shapes)]
    pace = sl.data.layer_tokens(drop, plan)
    assert [pace(step) for step in range(STEPS)] == counts and pace.total(STEPS) == sum(counts)
