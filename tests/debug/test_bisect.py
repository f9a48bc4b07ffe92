"""`bisect` names the operation by which two plans differ."""

import threading
from dataclasses import dataclass

import numpy
import pytest
import torch

import shardlib as sl
from shardlib.errors import BatchError, IllegalComposition, LossError, NonFiniteError
from shardlib.execute import layer_dropping
from shardlib.plan.drops import LayerDrop

from .cases import CASES, data, found, matrices, perceptron, rules, transformer


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_found_without_a_defect(case):
    assert not found(case), found(case)


def test_residuals_of_two_steps_are_no_finding():
    assert not found("one bit")


@dataclass(frozen=True)
class Half:
    """A user's own codec, which returns half of every sum."""

    wide, whole = True, False

    def bind(self, rows):
        return HalfBound(rows)

    def exchange(self, mesh, axis, items, residuals):
        return Sums(mesh, axis, items)


class HalfBound:
    keeps = ()

    def __init__(self, rows):
        self.rows, self.payload = rows, 2 * rows.elements * rows.dtype.itemsize * (rows.ways - 1) // rows.ways

    def pad(self, x):
        return x

    def start(self, device):
        return []


class Sums:
    def __init__(self, mesh, axis, items):
        self.items = items
        self.works = [sl.collectives.primitives.all_reduce(mesh, axis, item.buffer) for item in items]

    def wait(self, out=None):
        for work in self.works:
            work.wait()
        return [item.buffer / 2 for item in self.items]


@dataclass(frozen=True)
class Halved(sl.plan.Transform):
    name = "halved()"

    def claims(self, sizes, leaves):
        yield sl.plan.Reduce("data", codec=Half())


def test_a_users_own_codec():
    loss_fn, params, batch = matrices()
    result = sl.debug.bisect(loss_fn, params, None, ({"data": 2}, sl.chain(sl.zero(0), Halved())), batch)
    assert result.finding.phase == "reduction" and "in Half()" in result.finding.operation
    assert result.finding.note == "it is 0.5 times the sum of what the ranks send"
    assert "float64 too" in result.verdict and "plan_b, step 0, reduction" in str(result)


@pytest.mark.parametrize("codec", [sl.onebit(feedback=False), sl.quantize(gradients="int4", feedback=False)], ids=repr)
def test_what_a_codec_loses_is_no_finding(codec):
    (loss_fn, params, batch), plan, optimizer, _ = data(sl.chain(sl.zero(0), codec))
    assert not sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=optimizer)


class Mirrored(torch.autograd.Function):
    """A user's own kernel, which is wrong for few rows: as in tiles that are not filled."""

    @staticmethod
    def forward(ctx, x):
        ctx.few = len(x) < 5
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if ctx.few else grad


def test_a_users_own_operation_that_is_wrong_for_few_rows_is_the_losses_own():
    """It is as wrong on one device, for as few rows: no plan is to blame."""
    _, params, batch = matrices()
    result = sl.debug.bisect(mirrored, params, None, ({"data": 4}, sl.zero(1)), batch)
    assert result.finding.operation.startswith("the loss function: its mean over 4 micro-batches")


def mirrored(params, batch):
    x, y = batch
    return perceptron(params, (Mirrored.apply(x @ params["layers"][0]["weight"].T @ params["layers"][0]["weight"]), y))


def test_a_users_own_optimizer_that_forgets_the_other_ranks():
    loss_fn, params, batch = matrices()

    def update(updates, state, params, *, shards):
        norm = sum(leaf.square().sum() for leaf in torch.utils._pytree.tree_leaves(updates)).sqrt()
        return torch.utils._pytree.tree_map(lambda leaf: -leaf / norm, updates), state

    own = sl.optim.GradientTransformation(lambda params, shards: (), update, sl.optim.Locality.ELEMENTWISE)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), own)
    plans = [({"data": 2}, sl.zero(stage)) for stage in (0, 1)]
    finding = sl.debug.bisect(loss_fn, params, *plans, batch, optimizer=tx).finding
    assert finding.phase == "update" and finding.plan == "plan_b"
    assert finding.operation == "test_a_users_own_optimizer_that_forgets_the_other_ranks, from the same gradients"


def test_rounding_is_no_finding_and_a_plan_of_make_plan_is_taken():
    loss_fn, params, batch = transformer(dtype=torch.bfloat16)
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), sl.zero(2))
    result = sl.debug.bisect(loss_fn, params, None, plan, batch)
    assert not result and str(result).startswith("nothing differs")


def test_wrong_arguments():
    loss_fn, params, batch = matrices()
    plan = {"data": 2}, sl.zero(1)
    with pytest.raises(TypeError, match=r"plan_b is a Zero; give a plan of sl.make_plan, or a pair"):
        sl.debug.bisect(loss_fn, params, None, sl.zero(1), batch)
    with pytest.raises(ValueError, match="both None"):
        sl.debug.bisect(loss_fn, params, None, None, batch)
    with pytest.raises(ValueError, match="steps=0"):
        sl.debug.bisect(loss_fn, params, None, plan, batch, steps=0)
    with pytest.raises(TypeError, match="gradient transformations"):
        sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=0.1)
    with pytest.raises(BatchError, match=r"3 micro-batches of 3 ranks × 1:\n.*16 rows"):
        sl.debug.bisect(loss_fn, params, None, ({"data": 3}, sl.zero(1)), batch)
    with pytest.raises(IllegalComposition, match="for 512 ranks, and 64 at most"):
        sl.debug.bisect(loss_fn, params, None, ({"data": 512}, sl.zero(1)), batch)
    with pytest.raises(IllegalComposition, match="no transform uses axis 'model'"):
        sl.debug.bisect(loss_fn, params, None, ({"data": 2, "model": 2}, sl.zero(1)), batch)


def squares(params, batch):
    return (batch @ params["w"]).square().mean()


def test_arrays_are_tensors():
    result = sl.debug.bisect(
        squares, {"w": torch.ones(4, 4)}, None, ({"data": 2}, sl.zero(1)), numpy.ones((4, 4), dtype=numpy.float32)
    )
    assert not result, result


@pytest.mark.parametrize("steps", [0, "2", 1.5, None])
def test_steps_that_are_no_number_of_steps_are_refused(steps):
    with pytest.raises(ValueError, match="replay at least 1"):
        sl.debug.bisect(
            squares, {"w": torch.ones(4, 4)}, None, ({"data": 2}, sl.zero(1)), torch.ones(4, 4), steps=steps
        )


@pytest.mark.parametrize("what", ["parameters", "batch", "second step"])
def test_what_is_not_finite_on_one_device_is_refused(what):
    """Ranks skip such a step, so that there is no update to compare."""
    params, batch = {"w": torch.ones(4, 4)}, torch.ones(4, 4)
    if what != "second step":
        (params["w"] if what == "parameters" else batch)[0, 1] = torch.inf
    step = 1 if what == "second step" else 0
    with pytest.raises(NonFiniteError, match=f"step {step}: the .* is not finite on one device .* fewer steps"):
        sl.debug.bisect(
            squares, params, None, ({"data": 2}, sl.zero(1)), batch, optimizer=sl.optim.sgd(1e200), steps=step + 1
        )


def test_what_a_plan_does_otherwise_by_itself_is_told():
    """It trains like one device that does so too, so nothing differs; but not like the other plan."""
    loss_fn, params, batch = transformer(layers=3)
    frozen = {"data": 2}, sl.chain(sl.zero(2), sl.freeze("blocks/*/attn/*"), sl.progressive_layer_drop())
    result = sl.debug.bisect(loss_fn, params, ({"data": 2}, sl.zero(0)), frozen, batch)
    assert not result and len(result.notes) == 2
    assert result.notes[0].startswith("that plan_b does not train blocks/0/attn/out/bias, ")
    assert result.notes[0].endswith(" and 9 more, and plan_a does")
    assert result.notes[1].startswith("that plan_b leaves out parts of layers, in the end 66.7% of 3 layers")
    assert not sl.debug.bisect(loss_fn, params, frozen, frozen, batch).notes
    assert not sl.debug.bisect(loss_fn, params, frozen, None, batch).notes


def test_a_loss_that_draws_from_torch_is_as_good_a_mean_as_any():
    """A batch draws other numbers than its micro-batches."""
    _, params, batch = matrices()

    def dropped(params, batch):
        x, y = batch
        return perceptron(params, (torch.nn.functional.dropout(x), y))

    result = sl.debug.bisect(dropped, params, None, ({"data": 2}, sl.chain(sl.zero(1), sl.accumulate(2))), batch)
    assert not result, result


def test_a_batch_without_rows_is_refused():
    with pytest.raises(BatchError, match="batch: 0 rows"):
        sl.debug.bisect(squares, {"w": torch.ones(4, 4)}, None, ({"data": 2}, sl.zero(1)), torch.ones(0, 4))


def test_a_loss_that_takes_buffers_is_refused():
    def loss_fn(params, buffers, batch):
        return (batch @ params["w"]).sum(), buffers

    with pytest.raises(TypeError, match=r"takes buffers.*closes over constant ones"):
        sl.debug.bisect(loss_fn, {"w": torch.ones(2)}, None, ({"data": 2}, sl.zero(0)), torch.ones(4, 2))


def test_buffers_are_known_by_their_place():
    """In train steps, plans and evaluations of gradients too, which are given none."""

    def loss_fn(params, means, batch, rng):
        return (batch @ params["w"]).sum(), means

    params, batch, plan = {"w": torch.ones(2)}, torch.ones(4, 2), ({"data": 2}, sl.zero(0))
    for call in (
        lambda: sl.debug.check(plan, loss_fn, batch, params=params),
        lambda: sl.make_train_step(loss_fn, params, sl.optim.sgd(0.1)),
        lambda: sl.value_and_grad(loss_fn)(params, batch),
        lambda: sl.make_plan(params, sl.abstract_mesh(data=2), loss_fn=loss_fn, batch=batch),
    ):
        with pytest.raises(TypeError, match=r"takes buffers, \(params, means, batch\), and is given none: "):
            call()


def in_both(loss_fn, params, batch):
    """What both verbs are to refuse."""
    plan = ({"data": 2}, sl.zero(1))
    return (
        lambda: sl.debug.bisect(loss_fn, params, None, plan, batch),
        lambda: sl.debug.check(plan, loss_fn, batch, params=params),
    )


def test_a_loss_that_does_not_run_in_float64_is_refused():
    """In forward or in backward; one that fails in its own dtype too raises what it raises."""

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if grad.dtype == torch.float64:
                raise NotImplementedError("no kernel")
            return grad

    constant, params, batch = torch.ones(1, 4), {"w": torch.ones(4, 4)}, torch.ones(4, 4)
    for loss_fn, said in (
        (lambda params, batch: (batch @ params["w"] + constant @ params["w"]).mean(), r"RuntimeError \(.* same dtype"),
        (lambda params, batch: Narrow.apply(batch @ params["w"]).mean(), r"NotImplementedError \(no kernel\)"),
    ):
        for call in in_both(loss_fn, params, batch):
            with pytest.raises(
                LossError, match=f"raised {said}.* in float64, .* let it compute in its parameters' dtype"
            ):
                call()
    for call in in_both(lambda params, batch: 1 / 0, params, batch):
        with pytest.raises(ZeroDivisionError):
            call()


def test_a_batch_that_is_none_is_refused():
    """Unless the loss does without one."""
    params = {"w": torch.ones(4, 4)}
    for call in in_both(lambda params, batch: (batch["x"] @ params["w"]).mean(), params, None):
        with pytest.raises(
            BatchError, match=r"raised TypeError .* on a batch without tensors, NoneType: give the global"
        ):
            call()
    of_none = in_both(lambda params, batch: params["w"].square().mean(), params, None)
    assert not of_none[0]() and of_none[1]()


def four(step):
    return 4


def test_gathers_in_few_bits_are_left_out_and_told():
    loss_fn, params, batch = transformer()
    chain = sl.chain(sl.zero(3), sl.quantize(weights="int8"))
    result = sl.debug.bisect(loss_fn, params, None, ({"data": 2}, chain), batch, steps=2)
    assert not result, result
    assert [note.partition(" ")[0] for note in result.notes] == ["gathers"]


DROPPING = {
    "stage 3": lambda: (transformer(layers=3), {"data": 2}, [sl.zero(3), sl.remat()]),
    "stages": lambda: (
        transformer(layers=3, blocks=True),
        {"pipe": 2, "data": 2},
        [sl.pipeline("1f1b", microbatches=2), sl.zero(1)],
    ),
    "slices": lambda: (
        transformer(layers=3),
        {"data": 2, "model": 2},
        [sl.tensor_slicing(rules()), sl.zero(1), sl.accumulate(2)],
    ),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_layers_and_tokens_are_left_out_by_the_same_draws(kind):
    (loss_fn, params, batch), mesh, others = DROPPING[kind]()
    drop = sl.progressive_layer_drop(theta=0.2, gamma=10.0)
    plan = mesh, sl.chain(*others, drop, sl.random_ltd(four))
    result = sl.debug.bisect(loss_fn, params, None, plan, batch, steps=3)
    assert not result and not result.notes, result
    plan = sl.make_plan(params, sl.abstract_mesh(**mesh), plan[1])
    left_out = [plan.step.drops(step, sl.Key(0).fold_in(step)).dropped for step in range(3)]
    assert not left_out[0] and left_out[1] and left_out[2]


def drawn_elsewhere(monkeypatch, of, name, other):
    """``other`` in place of a function where ranks call it, which one device, in the main thread, does not."""
    right, main = getattr(of, name), threading.main_thread()
    here = lambda *args: (right if threading.current_thread() is main else other(right))(*args)  # noqa: E731
    monkeypatch.setattr(of, name, here)


def test_ranks_that_draw_other_tokens_are_found(monkeypatch):
    loss_fn, params, batch = transformer(layers=3)
    drawn_elsewhere(monkeypatch, layer_dropping, "drawn_tokens", lambda right: lambda *args: right(*args).flip(0))
    result = sl.debug.bisect(loss_fn, params, None, ({"data": 2}, sl.chain(sl.zero(1), sl.random_ltd(four))), batch)
    assert (result.finding.phase, result.finding.step, result.finding.block) == ("forward", 0, "blocks/1"), result


def test_ranks_that_leave_out_no_layer_are_found(monkeypatch):
    loss_fn, params, batch = transformer(layers=3)
    nothing = lambda right: lambda *args: dict.fromkeys(right(*args), True)  # noqa: E731
    drawn_elsewhere(monkeypatch, LayerDrop, "kept", nothing)
    drop = sl.progressive_layer_drop(theta=0.2, gamma=10.0)
    result = sl.debug.bisect(loss_fn, params, None, ({"data": 2}, sl.chain(sl.zero(1), drop)), batch, steps=2)
    assert (result.finding.phase, result.finding.step) == ("forward", 1), result
    assert result.finding.block.startswith("blocks/"), result


def test_an_optimizer_that_sums_itself_is_told():
    loss_fn, params, batch = transformer()
    tx = sl.optim.onebit_adam(1e-3, freeze_step=1)
    mesh = {"data": 2}
    for plan in (mesh, sl.zero(0)), sl.make_plan(params, sl.abstract_mesh(**mesh), sl.zero(0), optimizer=tx):
        result = sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=tx, steps=3)
        assert not result and result.notes == ("the sums and updates of onebit_adam, and the steps after the first",), (
            result
        )


def test_a_compiled_block_is_compared_call_by_call():
    block = sl.block(torch.compile(lambda layer, x: torch.tanh(x @ layer), backend="eager"))
    params, batch = [torch.randn(4, 4), torch.randn(4, 4)], torch.randn(8, 4)

    def loss_fn(params, x):
        for layer in params:
            x = block(layer, x)
        return x.square().mean()

    assert not sl.debug.bisect(loss_fn, params, None, ({"data": 2}, sl.zero(3)), batch)
