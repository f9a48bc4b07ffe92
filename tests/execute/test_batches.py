"""Leaves of batches: every kind is accepted or refused with a remedy, in every function that takes a batch."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import BatchError, TreeError
from shardlib.execute.batches import split_batch

FIT, PARAMS = mlp([6, 9, 4])
BATCH = regression_batch(8, 6, 4)
ARRAYS = tuple(t.numpy() for t in BATCH)
FOUR = sl.chain(sl.zero(1), sl.accumulate(4))


def first(p, x, batch):
    return torch.tanh(F.linear(batch[0], p["weight"], p["bias"]))


def last(p, x, batch):
    return (F.linear(x, p["weight"], p["bias"]) - batch[1]).square().mean()


def stepped(loss_fn, batch, transform=None, params=PARAMS, mesh=None):
    """The loss that a train step and `value_and_grad` tell."""

    def run(mesh):
        sharded = sl.shard(params, mesh, transform or sl.zero(1))
        loss, _ = sl.value_and_grad(loss_fn)(sharded, batch)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        assert step(state, batch)[1]["loss"] == loss
        return loss.item()

    return sl.simulate(run, mesh=mesh or {"data": 2})[0]


def test_micro_batches_of_reproducible_begin_allocations():
    """Their products may be rounded by where rows lie, which another mesh would change."""
    batch = {"x": torch.arange(30.0).view(6, 5), "n": torch.arange(6), "scale": torch.arange(3.0)[1], "name": "a"}

    def cut(mesh):
        plan = sl.make_plan({"w": torch.ones(2)}, mesh, sl.chain(sl.zero(), sl.reproducible(6)))
        return split_batch(batch, plan, mesh)

    (parts,) = sl.simulate(cut, mesh={"data": 1})
    assert_same([part["x"] for part in parts], list(batch["x"].split(1)))
    assert [part["x"].data_ptr() % 64 for part in parts] == [0] * 6
    assert parts[2]["scale"] == 1 and parts[2]["scale"].data_ptr() % 64 == 0 and parts[2]["name"] == "a"
    assert parts[2]["n"].data_ptr() == batch["n"][2:].data_ptr()  # integers are not rounded


@pytest.mark.parametrize("stage", [0, 3])
def test_micro_batches_that_are_cut_already_may_have_other_shapes(stage):
    """The mean of a sum over all their rows is one device's, and the padding of one does not reach the others."""
    rows = [torch.randn(2, 3, 6), torch.randn(1, 5, 6), torch.randn(4, 2, 6)]
    params = {"weight": torch.randn(4, 6), "bias": torch.randn(4)}

    def loss_fn(p, x):
        out = F.linear(x, p["weight"], p["bias"])
        return sl.Mean(out.square().sum(), out[..., 0].numel())

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(sl.zero(stage), sl.accumulate(3)))
        shift = mesh.coords["data"]
        batch = sl.Microbatches(tuple(part + shift for part in rows))
        loss, grads = sl.value_and_grad(loss_fn)(sharded, batch)
        with pytest.raises(BatchError, match="2 micro-batches for a plan with 3"):
            sl.value_and_grad(loss_fn)(sharded, sl.Microbatches(batch.parts[:2]))
        return loss, sl.unshard(grads)

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    whole = torch.cat([(part + shift).reshape(-1, 6) for part in rows for shift in (0, 1)])
    expected = F.linear(whole, leaves["weight"], leaves["bias"]).square().sum() / len(whole)
    expected.backward()
    for loss, grads in sl.simulate(run, mesh={"data": 2}):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, leaf in leaves.items():
            torch.testing.assert_close(grads[name], leaf.grad)


def test_micro_batches_of_a_pipeline_have_one_shape():
    params = [
        {"weight": torch.randn(4, 6), "bias": torch.randn(4)},
        {"weight": torch.randn(4, 4), "bias": torch.randn(4)},
    ]

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.pipeline(microbatches=2, axis="stage"))
        with pytest.raises(BatchError, match="one shape"):
            sl.value_and_grad(sl.sequential([first, last]))(
                sharded, sl.Microbatches(tuple((torch.ones(n, 6), torch.ones(n, 4)) for n in (1, 2)))
            )
        batch = sl.Microbatches(tuple((torch.ones(2, 6), torch.ones(2, 4)) for _ in range(2)))
        whole = torch.ones(4, 6), torch.ones(4, 4)
        found, plain = (sl.value_and_grad(sl.sequential([first, last]))(sharded, each)[0] for each in (batch, whole))
        assert found == plain

    sl.simulate(run, mesh={"stage": 2})


# --- NumPy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [sl.zero(1), FOUR, sl.chain(sl.zero(3), sl.precision("bf16"))], ids=str)
def test_arrays_train_as_tensors(transform):
    assert stepped(FIT, ARRAYS, transform) == stepped(FIT, BATCH, transform)


def test_arrays_at_every_other_entrance():
    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=3)
        evaluate = sl.make_eval_step(lambda p, b: sl.Mean(FIT(p, b), 1), sharded)
        assert evaluate(sharded, ARRAYS) == evaluate(sharded, BATCH) == evaluate.over(sharded, [ARRAYS, BATCH])

    sl.simulate(run, mesh={"data": 2})
    shapes = tuple(t.to("meta") for t in BATCH)
    plans = [
        sl.make_plan(PARAMS, sl.abstract_mesh(data=2), stage=3, loss_fn=FIT, batch=batch)
        for batch in (ARRAYS, BATCH, shapes)
    ]
    assert plans[0] == plans[1] == plans[2] and plans[0].traces
    blocks = sl.sequential([first, last])
    assert len(sl.report.measure_blocks(blocks, PARAMS["layers"], ARRAYS, rounds=1)) == 2
    transform = sl.chain(sl.zero(1), sl.pipeline("1f1b", 4))
    mesh = {"data": 1, "pipe": 2}
    piped = [stepped(blocks, batch, transform, PARAMS["layers"], mesh) for batch in (ARRAYS, BATCH)]
    assert piped[0] == piped[1]
    planned = sl.make_plan(PARAMS["layers"], sl.abstract_mesh(**mesh), transform, loss_fn=blocks, batch=ARRAYS)
    assert planned.traces


def seen_by(batch):
    """The batch that a loss function gets."""
    seen = []

    def loss_fn(params, batch):
        seen.append(batch)
        return FIT(params, BATCH)

    sl.value_and_grad(loss_fn)(PARAMS, batch)
    return seen[0]


def frozen(array):
    array.flags.writeable = False
    return array


ODD = {
    "read only": frozen(np.arange(8.0)),
    "backwards": np.arange(8)[::-1],
    "columns": np.asfortranarray(np.arange(8.0).reshape(2, 4)),
    "big endian": np.arange(8, dtype=">f4"),
    "no dimensions": np.array(3.5),
    "none": np.zeros((0, 3), dtype=np.int32),
    "truth": np.array([True, False]),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.filterwarnings("error")
def test_arrays_of_every_layout(kind):
    seen = seen_by({"x": ODD[kind]})["x"]
    assert isinstance(seen, torch.Tensor) and seen.shape == ODD[kind].shape
    assert np.array_equal(seen.numpy(), ODD[kind]) and seen.dtype.itemsize == ODD[kind].dtype.itemsize


def test_arrays_that_have_no_rows_are_unchanged():
    marker = object()
    batch = {
        "n": np.int64(3),
        "f": np.float32(0.5),
        "b": np.bool_(True),
        "s": "text",
        "none": None,
        "t": 2.5,
        "o": marker,
    }
    seen = seen_by(batch)
    assert seen["n"] == 3 and type(seen["n"]) is int and type(seen["f"]) is float and seen["b"] is True
    assert seen["s"] == "text" and seen["none"] is None and seen["t"] == 2.5 and seen["o"] is marker


def test_numpys_numbers_multiply_tensors_from_either_side():
    def loss_fn(params, batch):
        return FIT(params, batch["xy"]) * batch["by"] + batch["by"] * params["layers"][0]["bias"].sum()

    recorded = stepped(loss_fn, {"xy": BATCH, "by": np.float64(0.5)}, FOUR)
    assert recorded == pytest.approx(stepped(loss_fn, {"xy": BATCH, "by": 0.5}), rel=1e-12)


@pytest.mark.parametrize(
    "array", [np.array(["a", "b"]), np.array([{}, []], dtype=object), np.array(["2026-01-01"], "M8[D]")]
)
def test_arrays_of_objects_stay_arrays(array):
    assert seen_by({"x": [array]})["x"][0] is array


# --- micro-batches -------------------------------------------------------------------------------------------------


def test_leaves_that_every_micro_batch_gets_whole():
    seen = []

    def loss_fn(params, batch):
        seen.append(batch)
        return FIT(params, batch["xy"])

    whole = {
        "t": torch.tensor(2.0),
        "n": 3,
        "s": "text",
        "none": None,
        "size": (6, 4),
        "few": [0.1, 0.2, 0.3],
        "f": np.float32(1),
        "rows of another": [[1, 2], [3, 4]],
        "config": Labelled(["a", "b"]),
        "nobody": [None] * 8,
    }
    sl.simulate(
        lambda mesh: sl.value_and_grad(loss_fn)(sl.shard(PARAMS, mesh, FOUR), {"xy": BATCH, **whole}), mesh={"data": 1}
    )
    assert len(seen) == 4
    for index, batch in enumerate(seen):
        assert_same(batch.pop("xy"), share(BATCH, index, 4))
        assert batch == whole


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slim:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Labelled:
    names: list[str]


class Nested:
    def __init__(self, layers):
        self.layers = layers


UNCUT = {
    "ragged lists": (
        {"xy": BATCH, "targets": [[0.0, 1.0], [2.0]] * 4},
        r"targets: a list with list for each of 8 rows; make it a tensor",
    ),
    "square lists": ({"xy": BATCH, "boxes": ([[0] * 4] * 8,)}, r"boxes/0: a list with list for each of 8 rows"),
    "dictionaries": ({"xy": BATCH, "notes": [{"a": 1}] * 8}, r"notes: a list with dict for each of 8 rows"),
    "numbers of torch": ({"xy": BATCH, "s": [torch.tensor(1.0)] * 8}, r"s: a list with Tensor for each of 8 rows"),
    "objects": ({"xy": BATCH, "o": [object()] * 8}, r"o: a list with object for each of 8 rows"),
    "a deque": ({"xy": BATCH, "d": collections.deque(range(8))}, r"d: a deque with int for each of 8 rows"),
    "like a list": ({"xy": BATCH, "r": range(8)}, r"r: a range with an entry for each of 8 rows"),
    "slots": ([Slim(*BATCH)], r"0: Slim is not a pytree, .*pass a dict of the tensors in it"),
    "nested objects": (
        {"xy": BATCH, "n": Nested([Nested({"x": BATCH[0]})])},
        r"n: Nested is not a pytree, .*pass a dict of the tensors in it",
    ),
    "lists in an object": ({"xy": BATCH, "l": Labelled(list("abcdefgh"))}, r"l: Labelled is not a pytree"),
    "lists in a mapping": ({"xy": BATCH, "l": collections.UserDict(a=[[1]] * 8)}, r"l: UserDict is .*pass dict\(...\)"),
    "other rows": (
        {"xy": BATCH, "table": torch.ones(12, 2)},
        r"xy/1|table: 12 rows \(shape \(12, 2\)\) in a batch of 8 rows.* close over",
    ),
    "numbers": ({"xy": BATCH, "labels": [0, 1] * 4}, r"labels: a list with int for each of 8 rows; make it a tensor"),
    "numpy's numbers": ({"xy": BATCH, "labels": list(np.arange(8))}, r"labels: a list with int for each of 8 rows"),
    "strings": (
        {"xy": BATCH, "names": tuple("abcdefgh")},
        r"names: a tuple with str for each of 8 rows; .*leave it out",
    ),
    "array of strings": (
        {"xy": BATCH, "names": np.array(list("abcdefgh"))},
        r"names: a NumPy array of <U1 with 8 rows, which no tensor",
    ),
    "sparse": ({"xy": BATCH, "s": torch.eye(8).to_sparse()}, r"s: layout torch.sparse_coo, .*call .to_dense\(\)"),
    "user's mapping": (collections.UserDict(x=BATCH[0]), r"batch: UserDict is not a pytree, .*pass dict\(...\) of it"),
    "user's class": ([Sample(*BATCH)], r"0: Sample is not a pytree, .*pass vars\(...\) of it"),
}


@pytest.mark.parametrize("kind", UNCUT)
def test_leaves_that_cannot_be_cut_into_micro_batches(kind):
    batch, match = UNCUT[kind]

    def run(mesh, transform, loss_fn, params):
        with pytest.raises(BatchError, match=rf"(?s)rank {mesh.rank}'s batch cannot be cut into 4 .*({match})"):
            sl.value_and_grad(loss_fn)(sl.shard(params, mesh, transform), batch)

    sl.simulate(run, FOUR, FIT, PARAMS, mesh={"data": 2})
    piped = sl.chain(sl.zero(1), sl.pipeline("1f1b", 4))
    sl.simulate(run, piped, sl.sequential([first, last]), PARAMS["layers"], mesh={"data": 1, "pipe": 2})


def test_the_remedies_for_batches_work():
    table = torch.ones(12, 2, dtype=torch.float64)

    def loss_fn(params, batch):
        return FIT(params, (batch["x"], batch["y"])) + batch["labels"].mean() * table.mean()

    batch = {"x": BATCH[0], "y": BATCH[1], "labels": torch.tensor([0.0, 1.0] * 4)}
    assert stepped(loss_fn, batch, FOUR) == pytest.approx(FIT(PARAMS, BATCH).item() + 0.5, rel=1e-12)
    for held in (dict(collections.UserDict(batch)), {**vars(Sample(*BATCH)), "labels": batch["labels"]}):
        assert stepped(loss_fn, held, FOUR) == stepped(loss_fn, batch, FOUR)


def test_a_list_of_as_many_tensors_as_rows_is_cut():
    """Each of its tensors has all rows."""
    columns = [BATCH[0][:, n % 6] for n in range(8)]

    def loss_fn(params, batch):
        assert [len(column) for column in batch["columns"]] == [2] * 8
        return FIT(params, batch["xy"])

    stepped(loss_fn, {"xy": BATCH, "columns": columns}, FOUR)


def test_without_micro_batches_a_batch_is_given_as_it_is():
    for kind, (batch, _) in UNCUT.items():
        if kind != "numpy's numbers":
            assert str(seen_by(batch)) == str(batch)


def test_micro_batches_share_one_cast_batch():
    """Each leaf is cast and cut once, so a step holds the batch and one copy of it, not a copy for each micro-batch."""
    plan = sl.make_plan(PARAMS, sl.abstract_mesh(data=1), sl.chain(FOUR, sl.precision("bf16")))
    mesh = sl.abstract_mesh(data=1)
    parts = split_batch((BATCH[0], "name", torch.tensor(1.0)), plan, mesh)
    assert len(parts) == 4 and all(part[1] == "name" and part[2].dtype == torch.bfloat16 for part in parts)
    assert torch.equal(torch.cat([part[0] for part in parts]), BATCH[0].bfloat16())
    assert len({part[0].untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_what_would_get_no_gradient_is_refused(stage):
    """A batch, or parameters, that a caller would differentiate by."""
    c = torch.tensor(2.0, requires_grad=True)
    params = {"w": torch.ones(2)}

    def loss_fn(params, batch):
        return (params["w"] * batch["x"]).sum()

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=stage)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
        batch = {"x": c * torch.ones(2), "y": torch.ones(1)}
        for act in (lambda: sl.value_and_grad(loss_fn)(sharded, batch), lambda: step(state, batch)):
            with pytest.raises(BatchError, match=r"(?s)- x: shape \(2,\), of MulBackward.*Detach them"):
                act()
        step(state, {"x": batch["x"].detach()})

    sl.simulate(run, mesh={"data": 2})
    with pytest.raises(TreeError, match=r"(?s)- w: shape \(2,\), of MulBackward.*Detach them"):
        sl.value_and_grad(loss_fn)({"w": c * params["w"]}, {"x": torch.ones(2)})
