"""1-bit Adam, 1-bit LAMB, 0/1 Adam and LAMB: every step equals a plain simulation, on every mesh."""

import pytest
from helpers.trajectories import (
    FREEZE,
    GROUPS,
    PEAK,
    RATE,
    STEPS,
    assert_same_trajectory,
    flat_model,
    grads,
    lr,
    trajectory,
)
from oracle import onebit_optimizers as oracle

import shardlib as sl
from shardlib.optim import Sent, ZeroOneSteps


def frozen_at(number):
    return lambda step, history: step == number


RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])
FORM = pytest.mark.parametrize("scales", ["leaf", 16])


@FORM
@RANKS
def test_onebit_adam_is_the_papers(ranks, scales):
    tx = sl.optim.onebit_adam(RATE, FREEZE, b2=0.99, weight_decay=0.1, scales=scales)
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, sl.zero(0)), mesh={"data": ranks})
    means = oracle.Means(ranks, flat_model(), GROUPS, scales)
    wanted = oracle.onebit_adam(
        flat_model(), grads, ranks, means, lr, frozen_at(FREEZE), b2=0.99, decay=0.1, steps=STEPS
    )
    assert_same_trajectory(got, wanted)


@pytest.mark.parametrize(("warmup", "expected"), [(20, [50]), (60, [75]), (80, [])])
def test_onebit_adam_freezes_when_the_variance_has_settled(warmup, expected):
    """The variance is not frozen before the rate has stopped rising; in the last case it has not settled by step 100."""
    b2, every = 0.96, 25
    rise = sl.optim.warmup_constant_schedule(0.0, PEAK, warmup)
    frozen = []

    def lr(step):
        return PEAK * min(step / warmup, 1)

    def freeze(step, history):
        before = history[step - 1 - every] if step > every else 0.0
        if step % every == 0 and before > 0 and history[-1] / before >= 0.96 and lr(step) <= lr(step - 1):
            frozen.append(step)
        return bool(frozen)

    tx = sl.optim.onebit_adam(rise, "auto", b2=b2)
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, sl.zero(0), steps=120), mesh={"data": 2})
    means = oracle.Means(2, flat_model(), GROUPS)
    assert_same_trajectory(got, oracle.onebit_adam(flat_model(), grads, 2, means, lr, freeze, b2=b2, steps=120))
    assert frozen == expected


@RANKS
def test_lamb_is_the_papers(ranks):
    tx = sl.optim.lamb(RATE, weight_decay=0.1)
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, sl.zero(0)), mesh={"data": ranks})
    assert_same_trajectory(got, oracle.lamb(flat_model(), grads, ranks, lr, decay=0.1, steps=STEPS))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lamb_on_shards(stage):
    tx = sl.optim.lamb(RATE, weight_decay=0.1)
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, sl.zero(stage), steps=30), mesh={"data": 4})
    wanted = oracle.lamb(flat_model(), grads, 4, lr, decay=0.1, steps=30)
    assert_same_trajectory(got, wanted, owners=4, owner_of=lambda rank: (0, rank))


@pytest.mark.pairwise
@pytest.mark.parametrize(("decay", "factors", "threshold"), [(0.0, (0.5, 4.0), 0.1), (0.1, (0.9, 1.02), 0.004)])
@FORM
@RANKS
def test_onebit_lamb_is_the_papers(ranks, scales, decay, factors, threshold):
    bounds = {"min_factor": factors[0], "max_factor": factors[1], "factor_threshold": threshold}
    tx = sl.optim.onebit_lamb(RATE, FREEZE, b2=0.99, weight_decay=decay, scales=scales, **bounds)
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, sl.zero(0), trees=("mu", "nu", "fresh")), mesh={"data": ranks})
    means = oracle.Means(ranks, flat_model(), GROUPS, scales)
    wanted = oracle.onebit_lamb(
        flat_model(), grads, ranks, means, lr, FREEZE, b2=0.99, decay=decay, steps=STEPS,
        factors=factors, threshold=threshold,
    )  # fmt: skip
    assert_same_trajectory(got, wanted)


INTERVALS = {"var_update_scaler": 4, "local_step_scaler": FREEZE // 2, "local_step_clipper": 8}


@FORM
@RANKS
def test_zero_one_adam_is_the_papers(ranks, scales):
    """While ranks go on their own their parameters and momentum differ, as the simulation's do."""
    tx = sl.optim.zero_one_adam(RATE, FREEZE, b2=0.99, weight_decay=0.1, scales=scales, **INTERVALS)
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, sl.zero(0)), mesh={"data": ranks})
    means = oracle.Means(ranks, flat_model(), GROUPS, scales)
    wanted = list(
        oracle.zero_one_adam(
            flat_model(), grads, ranks, means, lr, FREEZE, b2=0.99, decay=0.1, steps=STEPS,
            kappa=4, doubling=FREEZE // 2, longest=8,
        )
    )  # fmt: skip
    sent = {"full": Sent.FULL, "1 bit": Sent.ONE_BIT, "nothing": Sent.NOTHING}
    rule = ZeroOneSteps(FREEZE, **INTERVALS)
    assert [sent[recorded.pop("sent")] for recorded in wanted] == [rule.sent(step) for step in range(1, STEPS + 1)]
    assert_same_trajectory(got, wanted)


# --- in a node in full precision, between nodes in one bit -------------------------------------------------------

NODES = {"node": 2, "local": 2}
INSIDE = sl.zero(1, axis="local", replicate="node")


def node_grads(node, step, leaves):
    """The mean of the gradients of a node's two ranks."""
    return oracle.average([grads(2 * node + local, step, leaves) for local in range(2)])


def on_nodes(tx, **options):
    """Each rank's trajectory, and the simulation's way of exchanging: each local rank's chunk by itself."""
    got = sl.simulate(lambda mesh: trajectory(mesh, tx, INSIDE, **options), mesh=NODES)
    return got, oracle.Means(2, flat_model(), GROUPS, owners=2)


def assert_same_on_nodes(got, wanted):
    assert_same_trajectory(got, wanted, owners=2, owner_of=lambda rank: divmod(rank, 2))


def test_onebit_adam_between_nodes():
    got, means = on_nodes(sl.optim.onebit_adam(RATE, FREEZE, b2=0.99, weight_decay=0.1, axis="node"))
    wanted = oracle.onebit_adam(
        flat_model(), node_grads, 2, means, lr, frozen_at(FREEZE), b2=0.99, decay=0.1, steps=STEPS
    )
    assert_same_on_nodes(got, wanted)


def test_onebit_lamb_between_nodes():
    tx = sl.optim.onebit_lamb(RATE, FREEZE, b2=0.99, weight_decay=0.1, axis="node")
    got, means = on_nodes(tx, trees=("mu", "nu", "fresh"))
    wanted = oracle.onebit_lamb(flat_model(), node_grads, 2, means, lr, FREEZE, b2=0.99, decay=0.1, steps=STEPS)
    assert_same_on_nodes(got, wanted)


def test_zero_one_adam_between_nodes():
    got, means = on_nodes(sl.optim.zero_one_adam(RATE, FREEZE, b2=0.99, weight_decay=0.1, axis="node", **INTERVALS))
    wanted = oracle.zero_one_adam(
        flat_model(),
        node_grads,
        2,
        means,
        lr,
        FREEZE,
        b2=0.99,
        decay=0.1,
        steps=STEPS,
        kappa=4,
        doubling=FREEZE // 2,
        longest=8,
    )
    assert_same_on_nodes(got, wanted)


# --- in real processes ------------------------------------------------------------------------------------------


def test_in_real_processes(pool):
    """Two gloo processes, past the freeze."""

    def adam(mesh):
        return trajectory(mesh, sl.optim.onebit_adam(RATE, 5, b2=0.9), sl.zero(0), steps=15)

    def zero_one(mesh):
        return trajectory(mesh, sl.optim.zero_one_adam(RATE, 5, b2=0.9, local_step_scaler=3), sl.zero(0), steps=15)

    means = oracle.Means(2, flat_model(), GROUPS)
    wanted = oracle.onebit_adam(flat_model(), grads, 2, means, lr, frozen_at(5), b2=0.9, steps=15)
    assert_same_trajectory(pool.run(adam, mesh={"data": 2}), wanted)
    means = oracle.Means(2, flat_model(), GROUPS)
    wanted = oracle.zero_one_adam(flat_model(), grads, 2, means, lr, 5, b2=0.9, steps=15, doubling=3)
    assert_same_trajectory(pool.run(zero_one, mesh={"data": 2}), wanted)
