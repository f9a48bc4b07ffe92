"""The search for plans: its result against brute force, its reasons against the plans that they are about."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from helpers.profile import NIGHTLY

import shardlib as sl
from shardlib.common import thresholds
from shardlib.errors import ShardlibError
from shardlib.models import gpt
from shardlib.plan import Link, Machine
from shardlib.plan.limits import Limits
from shardlib.search import Space
from shardlib.search.model import Model
from shardlib.search.space import choices, meshes
from shardlib.search.value import Search
from shardlib.search.verb import Searching

CONFIG = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=2, sequence=16)
RULES = gpt.slicing_rules(CONFIG, blocks=True)
LOSS, OPTIMIZER = gpt.make_sequential(CONFIG), sl.optim.adamw(1e-3)
SPACE = Space(stages=(0, 3), precisions=("bf16",), schedules=("1f1b",), offloads=(None,))
MACHINE = Machine(
    "1GiB",
    {"bf16": 1e9},
    Link(3e7, 1e-5),
    Link(1e7, 1e-4),
    ranks_per_host=2,
    streaming=1e9,
    launches=1e5,
    host_memory="1GiB",
    ways={"down": 1e7, "up": 1e7, "update": 1e8},
)


def batch(rows):
    return {
        name: torch.empty(rows, CONFIG.sequence, dtype=torch.int64, device="meta") for name in ("tokens", "targets")
    }


def params():
    return gpt.to_blocks(gpt.init(CONFIG, device="meta"))


def searched(machine=MACHINE, space=SPACE, rows=4, ranks=4, **options):
    job = {"optimizer": OPTIMIZER, "ranks": ranks, "rules": RULES} | options
    return sl.search_plan(LOSS, params(), machine, batch(rows), space=space, **job)


def planned(choice):
    """The plan that a user makes of a choice."""
    return sl.make_plan(
        params(),
        sl.abstract_mesh(**choice.mesh),
        choice.transform(RULES),
        loss_fn=LOSS,
        batch=batch(choice.rows * choice.microbatches),
        optimizer=OPTIMIZER,
    )


@functools.cache
def everything():
    """Choice -> its plan, for all choices of the space that make one."""
    plans = {}
    for choice in choices(SPACE, meshes(SPACE, 4, 4, True, 0), 4, frozenset({"host"})):
        try:
            plans[choice] = planned(choice)
        except ShardlibError:
            continue
    return plans


def peak(plan, choice):
    """The peak of a rank's device with its batch."""
    size = sum(leaf.nbytes for leaf in batch(choice.rows * choice.microbatches).values())
    return Limits.given("1TiB", None, None, 4, size).peak(plan)


@pytest.mark.parametrize("memory", ["1GiB", "400kB", "250kB"])
def test_nothing_that_fits_is_quicker(memory):
    machine = replace(MACHINE, memory=memory)
    found = searched(machine, within=0.0)
    fitting = {c: plan for c, plan in everything().items() if peak(plan, c) <= machine.memory}
    best = min(sl.report.predict_on(plan, machine).total for plan in fitting.values())
    winner = found.winner
    assert winner.bytes == peak(planned(winner.choice), winner.choice) <= machine.memory
    assert winner.seconds == sl.report.predict_on(planned(winner.choice), machine).total
    assert winner.seconds <= best * (1 + 1e-9)


def test_reasons_are_true():
    machine = replace(MACHINE, memory="250kB")
    found = searched(machine)
    assert len(found.rejected) > 10
    plans = everything()
    kinds = set()
    for choice, kind, reason in found.rejected:
        kinds.add(kind)
        if kind == "does not compose":
            assert choice not in plans
            continue
        assert peak(plans[choice], choice) > machine.memory, (choice, reason)
    assert {"activations exceed device memory", "parameters and states exceed device memory"} <= kinds


def test_a_host_may_hold_too_little():
    space = replace(SPACE, offloads=("host",), recompute=(None,), largest={"pipe": 1, "model": 1})
    found = searched(replace(MACHINE, host_memory="400kB"), space)
    assert {kind for _, kind, _ in found.rejected} == {"states exceed host memory"}
    assert {choice.stage for choice, *_ in found.rejected} == {0} and found.winner.choice.offload == "host"


def test_every_line_of_code_makes_its_plan():
    found = searched(replace(MACHINE, memory="600kB"))
    assert len(found.front) > 1
    for each in found.front:
        rows = batch(each.choice.rows * each.choice.microbatches)
        names = {"sl": sl, "params": params(), "loss_fn": LOSS, "batch": rows, "optimizer": OPTIMIZER}
        assert eval(each.code, names) == each.plan


def test_the_front_is_one_and_all_choices_are_counted(tmp_path):
    found = searched(replace(MACHINE, memory="600kB"))
    for quicker, smaller in itertools.pairwise(found.front):
        assert quicker.seconds <= smaller.seconds and quicker.bytes > smaller.bytes
    everything_there = list(choices(SPACE, meshes(SPACE, 4, 4, True, 0), 4, frozenset({"host"})))
    assert found.considered == len(everything_there) == len(set(everything_there))
    assert found.winner.code in str(found) and "known to be slower" in str(found)
    found.draw(tmp_path / "new" / "front.png")
    assert (tmp_path / "new" / "front.png").stat().st_size > 1000


def bounded(space, tried, rows):
    """Of every choice: what is known of its seconds and bytes before it is planned is no more than the plan's."""
    model = Model(LOSS, params(), batch(rows), OPTIMIZER, RULES)
    searching = Searching(model, MACHINE, 4, tried, 0.0)
    plain = searching._plain()
    for choice in tried:
        try:
            plan = everything().get(choice) or model.exact(choice)
        except ShardlibError:
            continue
        exact, holds = sl.report.predict_on(plan, MACHINE).total * (1 + 1e-9), peak(plan, choice)
        assert searching._times.soonest(choice, plain) <= exact
        seconds, held = searching._bound(choice)
        assert seconds <= exact and held <= holds
        yield choice, seconds / exact
        # Blocks alone gather nothing and pack nothing, so what is put together from them lacks some operators.
        seconds, held = searching._clocked(choice)
        assert 0.85 * exact < seconds <= 1.01 * exact and held <= holds


def test_bounds_are_bounds():
    near = [share for _, share in bounded(SPACE, list(everything()), 4)]
    assert len(near) == len(everything())


def test_bounds_of_other_choices():
    """Of some of those with offload, other stages and weight gradients apart, at random; by night of many."""
    space = Space(precisions=("bf16",))
    found = list(choices(space, meshes(space, 4, 4, True, 0), 8, frozenset({"host"})))
    some = random.Random(0).sample(found, 300 if NIGHTLY else 12)
    assert any(choice.split for choice in some) and {choice.offload for choice in some} == set(space.offloads)
    shares = [share for _, share in bounded(space, some, 8)]
    assert len(shares) > len(some) / 2 and sum(shares) > 0.5 * len(shares)


@pytest.mark.parametrize("layers", [4, 7, 12])
def test_memory_of_deep_functions_is_bounded(layers):
    """Of some choices with many blocks in a stage, whose gradients pile up behind slow links: what is known of their bytes
    before they are planned is no more than the plan's, and not much less where neither updates nor gradients leave."""
    config = replace(CONFIG, layers=layers)
    tree, loss = gpt.to_blocks(gpt.init(config, device="meta")), gpt.make_sequential(config)
    model = Model(loss, tree, batch(8), OPTIMIZER, gpt.slicing_rules(config, blocks=True))
    space = Space(precisions=("bf16",), largest={"model": 2})
    found = list(choices(space, meshes(space, 4, layers + 2, True, 0), 8, frozenset({"host"})))
    searching, shares = Searching(model, replace(MACHINE, memory="1TiB"), 4, found, 0.0), []
    for choice in random.Random(layers).sample(found, 150 if NIGHTLY else 10):
        held, holds = searching._bound(choice)[1], peak(model.exact(choice), choice)
        assert held <= holds, choice
        shares += [held / holds] * (choice.offload is None)
    assert sum(shares) > 0.8 * len(shares) > 0


@pytest.mark.parametrize(("latency", "nearly"), [(1e-5, 0.9), (2e-2, 0.7)])
def test_a_long_pipeline_is_bounded_nearly(latency, nearly):
    """Of many micro-batches through four stages: what is known before the clock runs is nearly what the clock says. Where
    messages take longer than a walk, a stage waits for its micro-batches in flight to come back."""
    machine = replace(MACHINE, inside=Link(3e7, latency), between=Link(1e7, latency))
    space = Space(precisions=("bf16",), stages=(0, 1), offloads=(None,), largest={"data": 1, "model": 1})
    found = list(choices(space, meshes(space, 4, 4, True, 0), 64, frozenset()))
    model = Model(LOSS, params(), batch(64), OPTIMIZER, RULES)
    searching = Searching(model, machine, 4, found, 0.0)
    for choice in found:
        if choice.microbatches >= 16:
            assert nearly < searching._bound(choice)[0] / searching._clocked(choice)[0] <= 1


def test_many_micro_batches_are_timed_by_a_few():
    space = replace(SPACE, recompute=(None,), offloads=(None,), stages=(0,))
    model, few = Model(LOSS, params(), batch(256), OPTIMIZER, RULES), False
    for choice in choices(space, meshes(space, 4, 4, True, 0), 256, frozenset()):
        if choice.microbatches >= 64 and choice.size("model") < 4:
            whole = sl.report.predict_on(model.assembled(choice), MACHINE).total
            with thresholds.small(64):
                seconds, _ = Searching(model, MACHINE, 4, [choice], 0.0)._clocked(choice)
            assert seconds == pytest.approx(whole, rel=1e-3)
            few |= seconds != whole
    assert few  # another sum, of as much


def test_a_loss_that_nothing_cuts():
    """A loss that is no sequential gets no pipeline; without rules nothing is sliced."""
    loss_fn, tree = gpt.make_loss(CONFIG), gpt.init(CONFIG, device="meta")
    found = sl.search_plan(
        loss_fn, lambda: gpt.init(CONFIG), MACHINE, batch(8), optimizer=OPTIMIZER, ranks=2, space=SPACE
    )
    assert found.winner.choice.mesh == {"data": 2}
    names = {"sl": sl, "params": tree, "loss_fn": loss_fn, "batch": batch(4), "optimizer": OPTIMIZER}
    assert eval(found.winner.code, names) == found.winner.plan


def test_a_batch_of_arrays_has_the_rows_of_its_tensors():
    drawn = torch.zeros(8, CONFIG.sequence, dtype=torch.int64)
    loss_fn, job = gpt.make_loss(CONFIG), {"optimizer": OPTIMIZER, "ranks": 2, "space": SPACE}
    tensors, arrays = (
        sl.search_plan(loss_fn, lambda: gpt.init(CONFIG), MACHINE, {"tokens": x, "targets": x}, **job)
        for x in (drawn, drawn.numpy())
    )
    assert arrays == tensors


def test_experts_are_dealt_out():
    moe = gpt.Experts((0, 4), sl.nn.MoEConfig(sl.nn.routers.switch(), "gelu_tanh"))
    config = replace(CONFIG, moe=moe)
    space = replace(SPACE, recompute=(None,), offloads=(None,), largest={"pipe": 1})
    loss_fn, tree = gpt.make_loss(config), gpt.init(config, device="meta")
    slow = replace(MACHINE, memory="1GiB", inside=Link(1e5, 1e-5), ranks_per_host=4, flops={"bf16": 1e12})
    found = sl.search_plan(loss_fn, tree, slow, batch(8), optimizer=OPTIMIZER, ranks=4, space=space)
    assert found.winner.choice.size("expert") > 1


def test_sequences_are_cut():
    space = replace(SPACE, sequences=("ring",), recompute=(None,), offloads=(None,), largest={"model": 1, "pipe": 1})
    found = searched(space=space, rows=1)
    assert found.winner.choice.mesh == {"data": 1, "seq": 4} and "sl.sequence('seq', kind='ring')" in found.winner.code


def test_messages_are_compressed_where_the_space_says_so():
    space = replace(SPACE, codecs=(None, "int8"), recompute=(None,), stages=(0,), largest={"model": 1, "pipe": 1})
    slow = replace(MACHINE, between=Link(1e6, 1e-5), ranks_per_host=1)
    winner = searched(slow, space).winner
    assert winner.choice.codec == "int8" and "sl.quantize(gradients='int8')" in winner.code
    assert winner.seconds < searched(slow, replace(space, codecs=(None,))).winner.seconds


def test_a_printed_reason_is_one_line():
    """Slices that do not fit name every layer, in the value alone."""
    found = searched(space=replace(SPACE, largest={"pipe": 1, "data": 1}, recompute=(None,)))
    long = [each for each in found.rejected if each.kind == "does not compose"]
    assert long and all("\n" in each.reason for each in long)
    (line,) = [line for line in str(found).splitlines() if "does not compose" in line]
    assert len(line) < 300


def test_nothing_fits():
    found = searched(replace(MACHINE, memory="1kB", host_memory=None))
    assert not found.front
    with pytest.raises(ValueError, match=r"no choice fits:\n(.*\n)*.*parameters and states exceed device memory by"):
        found.winner  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 2.5, "within": -1}, "ranks=2.5, within=-1"),
        ({"within": float("nan")}, "within=nan"),
        ({"rows": 0}, "the batch has 0 rows"),
        (
            {"rows": 16, "ranks": 5, "rules": None},
            "16 rows do not divide over 5 ranks: give a batch of 15 rows(.|\n)*4 blocks make no 5 stages: "
            "use another(.|\n)*without rules= no layer is sliced",
        ),
        (
            {"machine": replace(MACHINE, host_memory=None), "space": replace(SPACE, offloads=("host",))},
            r"no mesh of 4 ranks goes with Space\(offloads=\('host',\) \(the machine has no host and no disk\)",
        ),
        ({"space": replace(SPACE, largest={"data": 1}), "rules": None, "ranks": 8}, "leaves no mesh of 8 ranks"),
        ({"space": Space(precisions=("fp16",))}, "no rate for fp16, only for bf16"),
        ({"optimizer": 3}, "search_plan"),
        ({"machine": "machine.json"}, r"search_plan takes a sl.plan.Machine, not str 'machine.json': .*Machine.read"),
    ],
)
def test_what_cannot_be_searched_for(wrong, words):
    with pytest.raises((ValueError, TypeError), match=words):
        searched(**wrong)


def test_a_loss_that_takes_buffers_is_refused():
    with pytest.raises(TypeError, match=r"takes buffers, \(params, means, batch\), .*: close over them"):
        sl.search_plan(lambda params, means, batch: 0, params(), MACHINE, batch(4), optimizer=OPTIMIZER, ranks=4)


def test_a_space_of_unknown_values():
    with pytest.raises(ValueError, match="'gpu': use"):
        Space(offloads=("gpu",))
    with pytest.raises(ValueError, match="'zb-v': use"):  # of two stages for each rank
        Space(schedules=("zb-v",))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stages": (), "offloads": ()}, r"Space\(stages=\(\), offloads=\(\)\): give one value"),
        ({"largest": {"depth": 2, "data": 0, "pipe": 2}}, r"Space\(largest={'depth': 2, 'data': 0}\): use the names"),
    ],
)
def test_a_space_of_nothing(wrong, words):
    with pytest.raises(ValueError, match=words):
        Space(**wrong)


def test_a_search_that_rejects_nothing_prints_no_reasons():
    assert str(Search((), (), slower=2, planned=1, within=0.0)) == (
        "3 choices: 0 rejected, 2 known to be slower, 1 planned"
    )
