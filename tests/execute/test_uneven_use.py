"""Ranks whose batches use different units (experts, branches): they train like one device, and none waits for ever."""

from dataclasses import replace

import optree
import pytest
import torch
from helpers.measure import SCALARS, count_payload
from helpers.trees import assert_close
from hypothesis import given, note, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import LossError
from shardlib.plan.records import Trace

TOLERANCE = 1e-10
EXPERTS = 3
RATE = 0.1


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "first": {"w": weight(3, 4)},
        "experts": [{"w": weight(4, 4), "b": weight(4)} for _ in range(EXPERTS)],
        "last": {"w": weight(4)},
    }


@sl.block
def expert(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params, batch):
    """Row by row: a code's digits name the experts that the row goes through, in their order; 0 ends it."""
    total = 0.0
    for x, code in zip(batch["x"], batch["code"].tolist()):
        x = x @ params["first"]["w"]
        while code:
            code, number = divmod(code, EXPERTS + 1)
            x = expert(params["experts"][number - 1], x) if number else x
        total = total + (x @ params["last"]["w"]).square()
    return total / len(batch["x"])


def one_device(fn, params, batches, frozen=()):
    """Losses and parameters after a step of gradient descent with each batch."""
    params = optree.tree_map(torch.clone, params)
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    trained = [leaf.requires_grad_() for path, leaf in zip(paths, leaves) if path[0] not in frozen]
    losses = []
    for batch in batches:
        loss = fn(params, batch)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        with torch.no_grad():
            for leaf, grad in zip(trained, grads):
                if grad is not None:
                    leaf -= RATE * grad
        losses.append(loss.item())
    return losses, optree.tree_map(torch.Tensor.detach, params)


def train(mesh, fn, params, batches, transform):
    sharded = sl.shard(params, mesh, transform)
    state, step = sl.make_train_step(fn, sharded, sl.optim.sgd(RATE))
    axes = sharded.plan.batch_axes
    ranks, index = sharded.plan.batch_ranks, 0
    for axis in axes:
        index = index * mesh.shape[axis] + mesh.coords[axis]
    losses = []
    for batch in batches:
        rows = len(batch["x"]) // ranks
        mine = {name: part[index * rows : (index + 1) * rows] for name, part in batch.items()}
        state, metrics = step(state, mine)
        losses.append(metrics["loss"].item())
    return losses, sl.unshard(state.params)


def batch_of(codes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(len(codes), 3, generator=generator, dtype=torch.float64), "code": torch.tensor(codes)}


TRANSFORMS = {
    "stage 0": ({"data": 2}, sl.zero(0)),
    "stage 1": ({"data": 2}, sl.zero(1)),
    "stage 2": ({"data": 2}, sl.zero(2)),
    "stage 3": ({"data": 2}, sl.zero(3)),
    "stage 3, three ranks": ({"data": 3}, sl.zero(3)),
    "no prefetch": ({"data": 2}, sl.zero(3, prefetch=False)),
    "kept": ({"data": 2}, sl.zero(3, keep="forward")),
    "kept in part": ({"data": 2}, sl.chain(sl.zero(3, keep=400), sl.accumulate(2))),
    "hybrid": ({"data": 2, "copies": 2}, sl.zero(3, replicate="copies")),
    "second shards": (
        {"node": 2, "local": 2},
        sl.chain(sl.zero(3, "node"), sl.zero(3, "local"), sl.hierarchical("local")),
    ),
    "remat": ({"data": 2}, sl.chain(sl.zero(3), sl.remat())),
    "accumulate": ({"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2))),
    "accumulate, kept whole": ({"data": 2}, sl.chain(sl.zero(3), sl.accumulate(2, sync="last"))),
    "accumulate at stage 2": ({"data": 2}, sl.chain(sl.zero(2), sl.accumulate(2))),
    "accumulate at stage 1": ({"data": 2}, sl.chain(sl.zero(1), sl.accumulate(2))),
    "frozen": ({"data": 2}, sl.chain(sl.zero(3), sl.freeze(["first/*"]))),
}


@st.composite
def routes(draw, rows, steps=4):
    """The code of each row in each step; in some steps all rows have the same code."""
    codes = st.integers(0, (EXPERTS + 1) ** 2 - 1)
    alike = codes.map(lambda code: [code] * rows)
    return draw(st.lists(alike | st.lists(codes, min_size=rows, max_size=rows), min_size=steps, max_size=steps))


def check(name, codes, run):
    mesh, transform = TRANSFORMS[name]
    params, batches = parameters(), [batch_of(row, seed) for seed, row in enumerate(codes)]
    frozen = ("first",) if name == "frozen" else ()
    losses, final = one_device(loss_fn, params, batches, frozen)
    for got in run(train, loss_fn, params, batches, transform, mesh=mesh):
        assert got[0] == pytest.approx(losses, rel=TOLERANCE)
        assert_close(got[1], final, TOLERANCE)


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=max(6, settings().max_examples // 5))
@given(data=st.data())
def test_ranks_with_drawn_routes_train_like_one_device(name, data):
    rows = torch.Size(TRANSFORMS[name][0].values()).numel() * 2
    codes = data.draw(routes(rows))
    note(codes)
    check(name, codes, sl.simulate)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_real_processes_with_other_routes_train_like_one_device(pool, name):
    """Alike, then one strays, then all differ, then alike again; and different from the first step on."""
    rows = torch.Size(TRANSFORMS[name][0].values()).numel() * 2
    start = [1 + (EXPERTS + 1) * 2] * rows
    separate = [1 + number % EXPERTS for number in range(rows)]
    one = [*start[:-1], 3]
    check(name, [start, one, separate, start], pool.run)
    check(name, [separate, start, one], pool.run)


# --- other ways to run -----------------------------------------------------------------------------------------------


def blocks(params):
    """The same model cut into blocks, for a pipeline, and its parameters."""

    def first(p, carry, batch):
        return batch["x"] @ p["w"]

    def middle(digit):
        def run(p, x, batch):
            numbers = [code // (EXPERTS + 1) ** digit % (EXPERTS + 1) for code in batch["code"].tolist()]
            return torch.stack([expert(p[n - 1], row) if n else row for n, row in zip(numbers, x)])

        return run

    def last(p, x, batch):
        return (x @ p["w"]).square().mean()

    again = [{"w": p["w"] / 2, "b": p["b"] + 1} for p in params["experts"]]
    parts = [params["first"], params["experts"], again, params["last"]]
    return sl.sequential([first, middle(0), middle(1), last]), parts


@pytest.mark.pairwise
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_of_one_pipeline_stage(pool, stage, schedule, real):
    fn, parts = blocks(parameters())
    alike, other = [1 + (EXPERTS + 1) * 2] * 8, [3 + (EXPERTS + 1)] * 8
    steps = [alike, [*alike[:6], 2, 3], [5, 6, 7, 9, 10, 11, 13, 14], other, alike]
    batches = [batch_of(codes, seed) for seed, codes in enumerate(steps)]
    losses, final = one_device(fn, parts, batches)
    transform = sl.chain(sl.zero(stage), sl.pipeline(schedule, 2))
    run = pool.run if real else sl.simulate
    for got in run(train, fn, parts, batches, transform, mesh={"data": 2, "pipe": 2}):
        assert got[0] == pytest.approx(losses, rel=TOLERANCE)
        assert_close(got[1], final, TOLERANCE)


def with_all(params, batch):
    """The same loss of every expert: those that a row does not go through count nothing."""
    return loss_fn(params, batch) + 0.0 * sum(p["w"].sum() + p["b"].sum() for p in params["experts"])


FEW_BITS = {
    "onebit": (sl.onebit(), torch.float64, TOLERANCE),
    "int8": (sl.quantize(gradients="int8"), torch.float32, 1e-6),
    "weights": (sl.quantize(weights="int8"), torch.float32, 1e-6),
}


@pytest.mark.parametrize(
    ("name", "stage"), [*((name, stage) for name in ("onebit", "int8") for stage in (0, 2, 3)), ("weights", 3)]
)
def test_compressed_exchanges_and_their_residuals(name, stage):
    """A step that is taken again leaves out what it would have: the same numbers as where all ranks use all units."""
    codec, dtype, tolerance = FEW_BITS[name]
    alike = [1 + (EXPERTS + 1) * 2] * 4
    batches = [batch_of(codes, seed) for seed, codes in enumerate([alike, [1, 2, 3, 0], alike, [3, 3, 1, 1]])]
    params, batches = optree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, (parameters(), batches))
    transform = sl.chain(sl.zero(stage), codec)
    (losses, wanted), _ = sl.simulate(train, with_all, params, batches, transform, mesh={"data": 2})
    (got, final), _ = sl.simulate(train, loss_fn, params, batches, transform, mesh={"data": 2})
    assert got == pytest.approx(losses, rel=tolerance)
    assert_close(final, wanted, tolerance)


def generate(params, x, limit):
    """Goes on until it has gone far enough, through another expert each time: ranks stop at different times."""
    x, count = x @ params["first"]["w"], 0
    while count < limit:
        x, count = expert(params["experts"][count % EXPERTS], x), count + 1
    return (x @ params["last"]["w"]).sum()


def evaluate(mesh, stage, limits):
    sharded = sl.shard(parameters(), mesh, stage=stage)
    step, x = sl.make_eval_step(generate, sharded), torch.ones(2, 3, dtype=torch.float64)
    return [step(sharded, x + mesh.rank, limit[mesh.rank]).item() for limit in limits]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("limits", [[(1, 6), (2, 2), (7, 1)], [(2, 2), (2, 2), (5, 2), (2, 4), (3, 3)]])
def test_generation_that_ends_early_on_some_ranks(pool, stage, limits):
    x = torch.ones(2, 3, dtype=torch.float64)
    for run in (sl.simulate, pool.run):
        for rank, got in enumerate(run(evaluate, stage, limits, mesh={"data": 2})):
            wanted = [generate(parameters(), x + rank, limit[rank]).item() for limit in limits]
            assert got == pytest.approx(wanted, rel=1e-12)


class Double(torch.autograd.Function):
    """A user's own function: a handle reaches it as it is."""

    @staticmethod
    def forward(ctx, w):
        return 2 * w

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_users_own_function_of_an_expert_that_one_rank_uses(stage):
    def loss(params, batch):
        total = loss_fn(params, batch)
        if batch["code"][0] == 2:
            total = total + Double.apply(params["experts"][1]["w"]).square().mean()
        return total

    def whole(params, batch):
        return (
            loss(params, {k: v[:2] for k, v in batch.items()}) + loss(params, {k: v[2:] for k, v in batch.items()})
        ) / 2

    steps = [[1, 1, 1, 1], [1, 1, 2, 1], [2, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 2]]
    for some in (steps, steps[1:], steps[3:]):
        batches = [batch_of(codes, seed) for seed, codes in enumerate(some)]
        losses, final = one_device(whole, parameters(), batches)
        for got in sl.simulate(train, loss, parameters(), batches, sl.zero(stage), mesh={"data": 2}):
            assert got[0] == pytest.approx(losses, rel=TOLERANCE)
            assert_close(got[1], final, TOLERANCE)


def test_a_gradient_that_comes_on_one_rank_alone():
    """Both ranks use the same units, but one takes no gradient through an expert, so that its reductions come elsewhere."""

    def loss(params, batch):
        x = batch["x"] @ params["first"]["w"]
        for number, p in enumerate(params["experts"]):
            y = expert(p, x)
            x = y if number != 1 or batch["code"][0] else y.detach() + x
        return (x @ params["last"]["w"]).square().mean()

    def whole(params, batch):
        return (
            loss(params, {k: v[:2] for k, v in batch.items()}) + loss(params, {k: v[2:] for k, v in batch.items()})
        ) / 2

    for steps in ([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]]):
        batches = [batch_of(codes, seed) for seed, codes in enumerate(steps)]
        losses, final = one_device(whole, parameters(), batches)
        for got in sl.simulate(train, loss, parameters(), batches, sl.zero(3), mesh={"data": 2}):
            assert got[0] == pytest.approx(losses, rel=TOLERANCE)
            assert_close(got[1], final, TOLERANCE)


def test_torch_draws_the_same_when_a_step_is_taken_again():
    def noisy(params, batch):
        return loss_fn(params, batch) * (1 + torch.rand(()))

    def run(mesh, codes):
        torch.manual_seed(3)
        sharded = sl.shard(parameters(), mesh, stage=3)
        grad_fn = sl.value_and_grad(noisy)
        return [
            grad_fn(sharded, {k: v[mesh.rank : mesh.rank + 1] for k, v in batch_of(row).items()})[0].item()
            for row in codes
        ]

    def by_hand(codes):
        torch.manual_seed(3)
        return [loss_fn(parameters(), batch_of(row)).item() * (1 + torch.rand(()).item()) for row in codes]

    codes = [[1, 1], [2, 1], [1, 1]]
    assert sl.simulate(run, codes, mesh={"data": 2}) == [pytest.approx(by_hand(codes), rel=1e-6)] * 2


def test_zeros_that_a_users_code_refuses_stop_no_rank():
    """The results of a rank that has left the common order are discarded, and its errors too."""

    def strict(params, batch):
        if batch["code"][0] == 2:
            torch.linalg.inv(params["experts"][1]["w"])
        return loss_fn(params, batch)

    batches = [batch_of(codes, seed) for seed, codes in enumerate([[1, 1], [1, 2], [1, 1]])]
    losses, final = one_device(loss_fn, parameters(), batches)
    for got in sl.simulate(train, strict, parameters(), batches, sl.zero(3), mesh={"data": 2}):
        assert got[0] == pytest.approx(losses, rel=TOLERANCE)
        assert_close(got[1], final, TOLERANCE)


# --- what it costs ---------------------------------------------------------------------------------------------------


SUMS = 8 * SCALARS  # bytes beside the payload


def sent_in(mesh, codes):
    """Payload bytes of each step, and how often ranks agreed on the next unit."""
    sharded = sl.shard(parameters(), mesh, stage=3)
    state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(RATE))
    sent, recorded = count_payload(mesh, scalars=0), []
    for row in codes:
        mesh.group("data").agreed = 0
        state, _ = step(state, {k: v[mesh.rank : mesh.rank + 1] for k, v in batch_of(row).items()})
        recorded.append((sent()["data"] - SUMS, mesh.group("data").agreed))
    return recorded


def planned(*units):
    """The plan's payload where every rank gathers these units, in the forward and, but for the first, in the backward."""
    plan = sl.make_plan(parameters(), sl.abstract_mesh(data=2), stage=3)
    return replace(plan, traces=(Trace((tuple(units), tuple(reversed(units[1:]))), {}),)).payload()["data"]


def test_equal_ranks_send_nothing_more():
    one, both = planned("first", "experts/0", "last"), planned("first", "experts/0", "experts/1", "last")
    assert one < both
    for recorded in sl.simulate(sent_in, [[1, 1]] * 3, mesh={"data": 2}):
        assert [sent for sent, _ in recorded] == [one] * 3
        assert [agreed for _, agreed in recorded][1:] == [0, 0]  # the first step alone is agreed on
    for recorded in sl.simulate(sent_in, [[1, 2]] * 3, mesh={"data": 2}):
        assert [sent for sent, _ in recorded] == [both] * 3
        assert all(agreed for _, agreed in recorded)
    # A rank that leaves the trace: the step is taken twice, once as the trace says.
    for recorded in sl.simulate(sent_in, [[1, 1], [1, 2], [1, 2]], mesh={"data": 2}):
        assert [sent for sent, _ in recorded] == [one, one + SUMS + both, both]


def asked_in(mesh, fn, params, batch, transform):
    """How often ranks agreed on the next unit, in each of three steps with the same batch."""
    count_payload(mesh)
    state, step = sl.make_train_step(fn, sl.shard(params, mesh, transform), sl.optim.sgd(RATE))
    recorded = []
    for _ in range(3):
        state, _ = step(state, batch)
        recorded.append(sum(group.agreed for axis, group in mesh._groups.items() if mesh.shape[axis] > 1))
    return recorded


@pytest.mark.parametrize("name", [*TRANSFORMS, "gpipe", "zb-h1", "dualpipe-v"])
def test_equal_ranks_agree_in_the_first_run(name):
    """Accumulated gradients, recomputed blocks and split backwards do not count as leaving the trace."""
    fn, params = (loss_fn, parameters()) if name in TRANSFORMS else blocks(parameters())
    if name in TRANSFORMS:
        mesh, transform = TRANSFORMS[name]
    else:
        mesh, transform = {"data": 2, "pipe": 2}, sl.chain(sl.zero(3), sl.pipeline(name, 4))
    for first, *later in sl.simulate(asked_in, fn, params, batch_of([9, 9, 9, 9]), transform, mesh=mesh):
        assert first > 0 and later == [first] * 2


def test_ranks_that_are_equal_again_stop_asking():
    codes = [[1, 1], [1, 2], *[[1, 1]] * 20]
    for recorded in sl.simulate(sent_in, codes, mesh={"data": 2}):
        agreed = [count for _, count in recorded]
        assert agreed[1] and agreed[2] and not any(agreed[-8:])


def test_a_plan_names_units_that_the_traced_batch_does_not_use():
    def loss(params, batch):  # decided by a shape, which a trace can read
        return expert(params["experts"][len(batch) % 2], batch @ params["first"]["w"]).sum()

    text = str(
        sl.make_plan(
            parameters(), sl.abstract_mesh(data=2), stage=3, loss_fn=loss, batch=torch.zeros(2, 3, dtype=torch.float64)
        )
    )
    assert "Not used by the traced batch: experts/1, experts/2, last." in text
    whole = str(sl.make_plan(parameters(), sl.abstract_mesh(data=2), stage=3))
    assert "Not used" not in whole
    batch = batch_of([1, 2])
    values = str(sl.make_plan(parameters(), sl.abstract_mesh(data=2), stage=3, loss_fn=loss_fn, batch=batch))
    assert "Not used by the traced batch: " in values and "adds its gathers to every rank's payload" in values
    batch = optree.tree_map(lambda leaf: leaf.to("meta"), batch)  # of which nobody has values
    values = str(sl.make_plan(parameters(), sl.abstract_mesh(data=2), stage=3, loss_fn=loss_fn, batch=batch))
    assert "all ranks gather the units that any rank uses" in values


def test_units_that_ranks_do_not_share_are_logged_once(caplog):
    sl.simulate(sent_in, [[1, 2]] * 3, mesh={"data": 2})
    recorded = [record.getMessage() for record in caplog.records if "the ranks differ" in record.getMessage()]
    assert len(recorded) == 2 and all("experts/0, experts/1" in line for line in recorded)  # once for each of two ranks


# --- the same units in another order -----------------------------------------------------------------------------------


LAYERS = {"layers": [{"weight": torch.full((4, 4), float(i), dtype=torch.float64)} for i in range(3)]}


def in_order(params, batch):
    """Through the layers from the first to the last, or from the last to the first; all are of one size."""
    layers = params["layers"] if batch["code"][0] else params["layers"][::-1]
    return sum((p["weight"].square().sum() for p in layers), start=torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("name", ["stage 0", "stage 2", "stage 3", "accumulate", "accumulate at stage 1"])
@pytest.mark.parametrize("strays_in", [{0}, {2}, {1, 2, 3}])
def test_ranks_that_use_parameters_in_different_order(pool, name, strays_in):
    mesh, transform = TRANSFORMS[name]
    codes = [[1, 1, 0, 0] if step in strays_in else [1, 1, 1, 1] for step in range(4)]
    batches = [batch_of(code) for code in codes]
    losses, final = one_device(in_order, LAYERS, batches)
    for run in (sl.simulate, pool.run):
        for got in run(train, in_order, LAYERS, batches, transform, mesh=mesh):
            assert got[0] == pytest.approx(losses, rel=TOLERANCE)
            assert_close(got[1], final, TOLERANCE)


@pytest.mark.parametrize("strays_in", [{0}, {1}])
def test_ranks_that_evaluate_in_different_order(pool, strays_in):
    def total(params, reverse):
        layers = params["layers"][::-1] if reverse else params["layers"]
        weights = [p["weight"].clone() for p in layers]  # before they are summed: a sum has no order
        return sum((i + 1) * weight.sum() for i, weight in enumerate(weights))

    def run(mesh):
        params = sl.shard(LAYERS, mesh, stage=3)
        evaluate = sl.make_eval_step(total, params)
        return [evaluate(params, mesh.rank == 1 and number in strays_in).item() for number in range(3)]

    wanted = [[total(LAYERS, rank == 1 and number in strays_in).item() for number in range(3)] for rank in range(2)]
    assert sl.simulate(run, mesh={"data": 2}) == pool.run(run, mesh={"data": 2}) == wanted


# --- a module as users write it ----------------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    """Each row goes to the expert that a router likes best; experts that no row of a rank goes to are not called."""

    def __init__(self, width=6, experts=4):
        super().__init__()
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 9), torch.nn.GELU(), torch.nn.Linear(9, width))
            for _ in range(experts)
        )

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, one in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, one(x[rows]) * share[rows, None])
        return x + out


def experts_loss():
    torch.manual_seed(0)
    apply, params = sl.from_module(torch.nn.Sequential(Experts(), Experts(), torch.nn.Linear(6, 1)).double())
    return lambda params, batch: apply(params, batch["x"]).square().mean(), optree.tree_map(torch.Tensor.detach, params)


def train_experts(mesh, batches, stage):
    return train(mesh, *experts_loss(), batches, sl.chain(sl.zero(stage), sl.remat()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_unmodified_module_list_of_experts(pool, stage):
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 6, generator=generator, dtype=torch.float64)} for _ in range(5)]
    losses, final = one_device(*experts_loss(), batches)
    for run in (sl.simulate, pool.run):
        for got in run(train_experts, batches, stage, mesh={"data": 4}):
            assert got[0] == pytest.approx(losses, rel=TOLERANCE)
            assert_close(got[1], final, TOLERANCE)


def taking(params, batch):
    """`loss_fn`, which takes an entry out of its batch, and puts another one into it."""
    code = batch.pop("code")
    batch["x"] = batch["x"] / 2
    return loss_fn(params, {"x": batch["x"], "code": code})


@pytest.mark.parametrize("transform", [sl.zero(3), sl.chain(sl.zero(3), sl.remat())], ids=repr)
def test_a_step_that_is_computed_again_has_what_the_loss_took_out_of_its_batch(transform):
    batches = [batch_of([1, 1]), batch_of([1, 1], 1), batch_of([1, 2], 2), batch_of([2, 3], 3)]  # the third is, twice
    wanted = one_device(lambda params, batch: taking(params, dict(batch)), parameters(), batches)
    for losses, params in sl.simulate(train, taking, parameters(), batches, transform, mesh={"data": 2}):
        assert losses == pytest.approx(wanted[0], rel=TOLERANCE)
        assert_close(params, wanted[1], TOLERANCE)


def test_an_evaluation_that_is_computed_again_has_what_the_function_took_out_of_its_batch():
    def run(mesh):
        params = sl.shard(parameters(), mesh, stage=3)
        evaluate = sl.make_eval_step(lambda params, batch: sl.Mean(taking(params, batch), 1), params)
        batches = [batch_of([1, 1]), batch_of([1, 2], 1)]
        return [float(evaluate(params, {name: part[mesh.rank :][:1] for name, part in b.items()})) for b in batches]

    wanted = [float(taking(parameters(), batch_of([1, 1]))), float(taking(parameters(), batch_of([1, 2], 1)))]
    for found in sl.simulate(run, mesh={"data": 2}):
        assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_a_loss_that_writes_to_its_batch_is_refused_where_a_step_is_computed_again():
    def writing(params, batch):
        batch["x"] /= 2
        return loss_fn(params, batch)

    batches = [batch_of([1, 1]), batch_of([1, 2], 1)]
    with pytest.raises(LossError, match=r"writes to its batch in place \(x\).*write to a copy, x = x.clone\(\)"):
        sl.simulate(train, writing, parameters(), batches, sl.zero(3), mesh={"data": 2})
    sl.simulate(train, writing, parameters(), [batch_of([1, 1]), batch_of([1, 1], 1)], sl.zero(3), mesh={"data": 2})
