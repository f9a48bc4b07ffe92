"""Traces of functions that look at values, or whose sizes depend on them: what is planned is held in a step."""

import pytest
import torch
import torch.nn.functional as F
from helpers.architectures import build
from helpers.measure import WatchPeak, stored_bytes
from helpers.trees import assert_same, copy_of

import shardlib as sl
from shardlib.errors import IllegalComposition, LossError

TX = sl.optim.adamw(1e-3)
PARAMS = {"up": torch.ones(8, 16), "down": torch.ones(16, 8)}
X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def peaks(loss_fn, params, batch, transform=None):
    """The plan, its peak with the batch, and the bytes that a step holds at once, counted from outside."""
    plan = sl.make_plan(params, sl.make_mesh(), transform, loss_fn=loss_fn, batch=batch, optimizer=TX)
    state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), transform), TX)
    for _ in range(2):
        state, _ = step(state, batch)
    stored = stored_bytes((state.params.buffers, state.opt, batch), counters=True)
    with WatchPeak() as watch:
        step(state, batch)
    return plan, plan.peak_bytes + sum(leaf.nbytes for leaf in batch.values()), watch.peak() + stored


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_transformers_models_take_the_way_of_a_step(kind, padded):
    """Without padding they leave masks out, for a kernel that needs none; the experts' product is one of any dtype."""
    torch.manual_seed(0)
    apply, params = sl.from_module(build(kind).train())
    ids = torch.randint(3, 50, (8, 16))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][0, 12:] = not padded
    plan, planned, held = peaks(lambda params, batch: apply(params, **batch).loss, params, batch)
    assert planned == pytest.approx(held, rel=0.01)
    assert "The loss reads integers of its batch: traced as with those of this one" in str(plan)


def hidden(params, x):
    return torch.tanh(x @ params["up"]) @ params["down"]


def by_mask(params, batch):
    y = hidden(params, batch["x"])
    return y[y > y.mean()].square().mean()


def by_selection(params, batch):
    y = hidden(params, batch["x"])
    return torch.masked_select(y, y > 0).square().sum()


def by_place(params, batch):
    y = hidden(params, batch["x"]).flatten()
    return y[(y > 0).nonzero()[:, 0]].square().sum() + y.unique().sum().detach()


@pytest.mark.parametrize(
    ("loss_fn", "named"), [(by_mask, "a mask as index"), (by_selection, "masked_select"), (by_place, "nonzero, unique")]
)
def test_sizes_that_depend_on_values_are_the_largest(loss_fn, named):
    for transform in sl.zero(0), sl.zero(3):
        plan, planned, held = peaks(loss_fn, PARAMS, {"x": X}, transform)
        assert f"Sizes depend on values ({named}): traced as if every element were chosen" in str(plan)
        assert planned >= 0.99 * held
    given = {"loss_fn": loss_fn, "batch": {"x": X}, "optimizer": TX}
    assert sl.make_plan(PARAMS, sl.make_mesh(), stage=3, device_memory=planned, **given).peak_bytes == plan.peak_bytes


def test_sizes_that_depend_on_the_batch_are_its_own():
    chosen = torch.arange(32) % 8 == 0

    def loss_fn(params, batch):
        count = int(batch["chosen"].sum())
        return hidden(params, batch["x"])[batch["chosen"]].view(count, 8).square().mean()

    plan, planned, held = peaks(loss_fn, PARAMS, {"x": X, "chosen": chosen})
    assert planned == pytest.approx(held, rel=0.01)
    assert "The loss reads integers of its batch" in str(plan) and "Sizes depend" not in str(plan)


def test_what_cannot_be_traced_is_named():
    def reads(params, batch):
        y = hidden(params, batch["x"])
        return y.mean() * y.sum().item()

    def four_of_each(params, batch):
        y = hidden(params, batch["x"])
        return y[y >= y.topk(4, -1).values[:, -1:]].view(32, 4).mean()

    given = {"mesh": sl.abstract_mesh(data=2), "batch": {"x": X}, "optimizer": TX}
    for loss_fn, why in (
        (reads, r"the loss reads values \(aten._local_scalar_dense"),
        (four_of_each, r"sizes depend on values \(a mask as index\): shape '\[32, 4\]' is invalid"),
    ):
        assert sl.make_plan(PARAMS, loss_fn=loss_fn, **given).traces is None
        with pytest.raises(
            IllegalComposition, match=rf"device_memory= .* cannot: {why}.*torch.where.*or give no limit"
        ):
            sl.make_plan(PARAMS, loss_fn=loss_fn, device_memory="1GiB", **given)
    with pytest.raises(LossError, match="the loss must be a scalar"):  # an error of the library's stays what it is
        sl.make_plan(PARAMS, loss_fn=lambda p, b: hidden(p, b["x"])[hidden(p, b["x"]) > 0], **given)


def test_a_trace_leaves_the_batch_as_it_was():
    batch = {"x": X, "ids": torch.arange(32)}

    def loss_fn(params, batch):
        batch["ids"].add_(1).remainder_(8)
        return F.cross_entropy(hidden(params, batch["x"]), batch["ids"])

    before = copy_of(batch)
    sl.make_plan(PARAMS, sl.abstract_mesh(data=2), loss_fn=loss_fn, batch=batch)
    assert_same(batch, before)


def test_what_would_be_large_is_not_computed():
    """2 TB of comparisons, of which nobody reads a value."""

    def loss_fn(params, batch):
        same = batch["ids"][:, None] == batch["ids"][None]
        return hidden(params, same.sum(1)[:32, None].expand(-1, 8).float()).mean()

    plan = sl.make_plan(
        PARAMS, sl.abstract_mesh(data=2), loss_fn=loss_fn, batch={"ids": torch.arange(1 << 20)}, optimizer=TX
    )
    assert plan.peak_bytes > 1 << 40 and "reads" not in str(plan)
