"""Values returned beside the loss, and results of eval steps: paired by key across ranks, and free of graphs and handles."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.models import mlp, regression_batch, share
from helpers.trees import assert_same, copy_of

import shardlib as sl
from shardlib.errors import HandleError, LossError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FIT, PARAMS = mlp([6, 9, 4])
BLOCKS = PARAMS["layers"]
BATCH = regression_batch(8, 6, 4)


def first(p, x, batch):
    return torch.tanh(F.linear(batch[0], p["weight"], p["bias"]))


def last(p, x, batch):
    return (F.linear(x, p["weight"], p["bias"]) - batch[1]).square().mean()


def whole(params, batch):
    one, two = params["layers"]
    return last(two, first(one, None, batch), batch)


def aux_of(mesh, loss_fn, transform, params=PARAMS, steps=1, batch=None, **options):
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.sgd(0.5), **options)
    for _ in range(steps):
        state, metrics = step(state, share(BATCH, mesh.coords["data"], mesh.shape["data"]) if batch is None else batch)
    return metrics["aux"]


# --- means are paired by key ---------------------------------------------------------------------------------------


def with_means(names):
    """A loss with a mean of its own per name: the sum of the batch, times the name's number."""

    def loss_fn(params, batch):
        aux = {name: sl.Mean(batch[0].sum() * number, len(batch[0])) for name, number in names(batch).items()}
        return whole(params, batch), aux

    return loss_fn


def is_first(batch):
    return torch.equal(batch[0][0], BATCH[0][0])


REFUSED = r"micro-batch 1 has sl.Mean at 'b', 'c' of aux and the one before at 'a', 'b'; return the same ones"


@STAGES
def test_keys_that_differ_between_micro_batches(stage):
    loss_fn = with_means(lambda batch: {"a": 1, "b": 2} if is_first(batch) else {"b": 2, "c": 3})

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.accumulate(2))
        with pytest.raises(LossError, match=REFUSED) as caught:
            aux_of(mesh, loss_fn, transform)
        return str(caught.value)

    one, other = sl.simulate(run, mesh={"data": 2})
    assert one == other and "rank 0" in one and "rank 1" not in one


def test_keys_that_differ_between_micro_batches_of_a_pipeline():
    def ends(p, x, batch):
        return last(p, x, batch), {("a" if is_first(batch) else "b"): sl.Mean(1.0, 1)}

    def run(mesh):
        with pytest.raises(LossError, match=r"micro-batch 1 has sl.Mean at 'b' of aux and the one before at 'a'"):
            aux_of(mesh, sl.sequential([first, ends]), sl.chain(sl.zero(1), sl.pipeline("1f1b", 2)), BLOCKS)

    sl.simulate(run, mesh={"data": 2, "pipe": 2})


@STAGES
def test_the_order_of_keys_does_not_matter(stage):
    forth = {"a": 1, "b": 2}
    loss_fn = with_means(lambda batch: forth if is_first(batch) else dict(reversed(forth.items())))
    transform = sl.chain(sl.zero(stage), sl.accumulate(2))
    for aux in sl.simulate(lambda mesh: aux_of(mesh, loss_fn, transform), mesh={"data": 2}):
        assert aux["a"].item() == pytest.approx(BATCH[0].sum().item() / 8)
        assert aux["b"].item() == pytest.approx(BATCH[0].sum().item() / 4)


@STAGES
@pytest.mark.parametrize("names", [{"b": 1}, {"a": 1, "b": 1}, {}])
def test_ranks_whose_means_differ(stage, names):
    def run(mesh):
        loss_fn = with_means(lambda batch: names if mesh.rank == 1 else {"a": 1})
        with pytest.raises(LossError, match="the ranks' results differ in form") as caught:
            aux_of(mesh, loss_fn, sl.zero(stage))
        return str(caught.value)

    messages = sl.simulate(run, mesh={"data": 3})
    assert len(set(messages)) == 1
    assert "rank 0, 2: a scalar as the loss, aux with sl.Mean at 'a'" in messages[0] and "rank 1: a sc" in messages[0]


def means_in_a_process(mesh):
    aux_of(mesh, with_means(lambda batch: {"a": 1} if mesh.rank else {"a": 1, "b": 1}), sl.zero(1))


def test_real_ranks_whose_means_differ(pool):
    for _, error in pool.outcomes(means_in_a_process, mesh={"data": 2}):
        assert isinstance(error, LossError) and "rank 0: a scalar as the loss, aux with sl.Mean at 'a', 'b'" in str(
            error
        )


def test_values_other_than_means_may_differ_between_ranks():
    def run(mesh):
        def loss_fn(params, batch):
            return whole(params, batch), {"mean": sl.Mean(1.0, 2), "rows": batch[0][:1] if mesh.rank else None}

        return aux_of(mesh, loss_fn, sl.zero(1))

    one, other = sl.simulate(run, mesh={"data": 2})
    assert one["rows"] is None and other["rows"].shape == (1, 6) and one["mean"] == other["mean"] == 0.5


@pytest.mark.parametrize(
    "mean",
    [
        sl.Mean(torch.tensor([3.0]), torch.tensor([[4]])),
        sl.Mean(3, torch.tensor(4, dtype=torch.int8)),
        sl.Mean(torch.tensor(3.0, dtype=torch.bfloat16), 4.0),
        sl.Mean(torch.tensor([3.0]).numpy()[0], torch.tensor([4]).numpy()[0]),
    ],
)
def test_means_of_one_number_in_any_form(mean):
    aux = sl.simulate(
        lambda mesh: aux_of(mesh, lambda p, b: (whole(p, b), [mean]), sl.chain(sl.zero(1), sl.accumulate(2))),
        mesh={"data": 2},
    )
    assert [value.item() for (value,) in aux] == [0.75, 0.75] and aux[0][0].shape == ()


@pytest.mark.parametrize(
    ("mean", "match"),
    [
        (sl.Mean(torch.ones(3), 3), r"m total is a tensor of shape \(3,\); reduce it with .sum\(\)"),
        (sl.Mean(torch.ones(()), torch.ones(2)), r"m weight is a tensor of shape \(2,\)"),
        (sl.Mean("3", 3), "m total is str"),
        (sl.Mean(torch.ones((), dtype=torch.complex64), 3), "m total is a complex tensor"),
    ],
)
def test_means_of_values_that_are_not_single_numbers(mean, match):
    def run(mesh):
        recorded = {"m": mean if mesh.rank == 0 else sl.Mean(1, 1)}  # one rank's mean differs: all ranks raise
        match_all = f"a sl.Mean is of real numbers, one total and one weight, and {match}"
        with pytest.raises(LossError, match=f"rank 0: aux: {match_all}"):
            aux_of(mesh, lambda p, b: (whole(p, b), recorded), sl.zero(2))
        sharded = sl.shard(PARAMS, mesh, stage=2)
        evaluate = sl.make_eval_step(lambda p, b: recorded, sharded)
        for act in (lambda: evaluate(sharded, BATCH), lambda: evaluate.over(sharded, [BATCH])):
            with pytest.raises(LossError, match=f"rank 0: the result: {match_all}"):
                act()

    sl.simulate(run, mesh={"data": 2})


def test_the_remedy_for_a_vector_works():
    def loss_fn(params, batch):
        errors = (first(params["layers"][0], None, batch) > 0).double()
        return whole(params, batch), [sl.Mean(column.sum(), len(column)) for column in errors.unbind(1)]

    for aux in sl.simulate(lambda mesh: aux_of(mesh, loss_fn, sl.zero(1)), mesh={"data": 2}):
        wanted = (first(BLOCKS[0], None, BATCH) > 0).double().mean(0)
        torch.testing.assert_close(torch.stack(aux), wanted)


def test_evaluation_whose_means_differ():
    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=1)
        separate = sl.make_eval_step(lambda p, b: {("a" if mesh.rank else "b"): sl.Mean(b.sum(), 1)}, sharded)
        for act in (lambda: separate(sharded, BATCH[0]), lambda: separate.over(sharded, [BATCH[0]])):
            with pytest.raises(LossError, match=r"rank 0: the result with sl.Mean at 'b'"):
                act()
        by_size = sl.make_eval_step(lambda p, b: {("a" if len(b) > 2 else "b"): sl.Mean(b.sum(), 1)}, sharded)
        few = [BATCH[0], BATCH[0][:1]] if mesh.rank else [BATCH[0], BATCH[0]]
        with pytest.raises(
            LossError, match=r"rank 1: batch 1 has sl.Mean at 'b' of the result and the one before at 'a'"
        ):
            by_size.over(sharded, few)
        with pytest.raises(LossError, match="rank 1: evaluation over no batches has no mean; give each rank"):
            by_size.over(sharded, [] if mesh.rank else [BATCH[0]])

    sl.simulate(run, mesh={"data": 2})


# --- values of their own -------------------------------------------------------------------------------------------


TAKEN = {
    "itself": lambda w: w,
    "view": lambda w: w.view(-1)[:5],
    "transposed": lambda w: w.T,
    "row": lambda w: w[1],
    "nested": lambda w: [{"w": w}, (w[:, 0], "text", 3, None)],
}


@STAGES
@pytest.mark.parametrize("kind", TAKEN)
def test_parameters_in_aux_have_the_values_of_the_loss(stage, kind):
    take = TAKEN[kind]
    wanted = take(BLOCKS[0]["weight"])

    def loss_fn(params, batch):
        return whole(params, batch), take(params["layers"][0]["weight"])

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, stage=stage)
        (_, aux), _ = sl.value_and_grad(loss_fn)(sharded, BATCH)
        evaluate = sl.make_eval_step(loss_fn, sharded)
        found = [aux_of(mesh, loss_fn, sl.zero(stage)), aux, evaluate(sharded, BATCH)[1]]
        with torch.no_grad():
            for buffer in sharded.buffers.values():
                buffer.zero_()  # aux must be a copy
        for result in found:
            assert_same(result, wanted)
            for leaf in torch.utils._pytree.tree_leaves(result):
                assert not isinstance(leaf, torch.Tensor) or (type(leaf) is torch.Tensor and not leaf.requires_grad)

    sl.simulate(run, mesh={"data": 2})


def test_parameters_returned_by_a_pipeline():
    def ends(p, x, batch):
        return last(p, x, batch), {"w": p["weight"], "row": p["weight"][1]}

    def run(mesh):
        transform = sl.chain(sl.zero(3 * mesh.shape["data"] - 3), sl.pipeline("1f1b", 2))
        loss_fn = sl.sequential([first, ends])
        aux = aux_of(mesh, loss_fn, transform, BLOCKS)
        sharded = sl.shard(BLOCKS, mesh, transform)
        recorded = sl.make_eval_step(loss_fn, sharded)(sharded, BATCH)[1]
        with torch.no_grad():
            for buffer in sharded.buffers.values():
                buffer.zero_()
        for found in (aux, recorded):
            assert_same(found, {"w": BLOCKS[1]["weight"], "row": BLOCKS[1]["weight"][1]})

    for mesh in ({"data": 1, "pipe": 2}, {"data": 2, "pipe": 2}, {"data": 2, "pipe": 1}):
        sl.simulate(run, mesh=mesh)


def test_a_slice_is_refused_and_what_is_whole_is_not():
    rules = {"layers/0/*": "column", "layers/1/weight": "row"}

    def run(mesh):
        transform = sl.chain(sl.zero(1), sl.tensor_slicing(rules))
        params = {"layers": mlp([6, 8, 4])[1]["layers"]}
        with pytest.raises(HandleError, match=r"clone uses layers/0/weight, of which this rank holds a slice"):
            aux_of(mesh, lambda p, b: (whole(p, b), p["layers"][0]["weight"]), transform, params)
        aux = aux_of(mesh, lambda p, b: (whole(p, b), p["layers"][1]["bias"]), transform, params)
        assert_same(aux, params["layers"][1]["bias"])

    sl.simulate(run, mesh={"data": 1, "model": 2})


@STAGES
def test_aux_holds_no_graph_and_no_gathered_parameters(stage):
    graphs = []

    def loss_fn(params, batch):
        x = first(params["layers"][0], None, batch)
        graphs.append(weakref.ref(x))
        return last(params["layers"][1], x, batch), {"first": x.sum(), "row": params["layers"][1]["weight"][0]}

    def run(mesh):
        aux = aux_of(mesh, loss_fn, sl.chain(sl.zero(stage), sl.accumulate(2)))
        gc.collect()
        assert not aux["first"].requires_grad
        assert aux["row"].untyped_storage().nbytes() == aux["row"].nbytes
        return aux

    kept = sl.simulate(run, mesh={"data": 2})
    assert kept and len(graphs) == 4 and all(ref() is None for ref in graphs)


# --- buffers -------------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_are_values_of_their_own(stage, ranks):
    """One that holds the parameters of the step before, one that was computed of them, through micro-batches."""

    def loss_fn(params, buffers, batch):
        w = params["layers"][0]["weight"]
        penalty = (w - buffers["before"]).square().sum() + 1e-3 * (w.sum() - buffers["sum"]).square()
        return whole(params, batch) + penalty, {"before": w, "sum": w.sum()}

    def run(mesh):
        sharded = sl.shard(PARAMS, mesh, sl.chain(sl.zero(stage), sl.accumulate(2)))
        buffers = {"before": torch.zeros(9, 6, dtype=torch.float64), "sum": torch.zeros((), dtype=torch.float64)}
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.01), buffers=buffers)
        for _ in range(3):
            before = copy_of(sl.unshard(state.params))["layers"][0]["weight"]
            state, _ = step(state, share(BATCH, mesh.rank, ranks))
            torch.testing.assert_close(state.buffers["before"], before, rtol=1e-15, atol=0)
            assert not state.buffers["sum"].requires_grad and type(state.buffers["before"]) is torch.Tensor

    sl.simulate(run, mesh={"data": ranks})


def test_ranks_whose_buffers_differ():
    def run(mesh):
        def loss_fn(params, buffers, batch):
            return whole(params, batch), {"a": torch.ones(2 + mesh.rank), "b": torch.ones(3 - mesh.rank)}

        sharded = sl.shard(PARAMS, mesh, stage=1)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1), buffers={})
        with pytest.raises(LossError, match=r"rank 1: .* buffers a \(3,\) torch.float32, b \(2,\)"):
            step(state, BATCH)

    sl.simulate(run, mesh={"data": 2})
