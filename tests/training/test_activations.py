"""Where the inputs of recomputed blocks are kept: refusals, values to the bit, payload, and what the plan says of them."""

from dataclasses import replace

import pytest
import torch
from helpers import training
from helpers.measure import Counted
from helpers.models import share, tiny_gpt, token_batches
from helpers.trees import assert_same
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.errors import HandleError, IllegalComposition
from shardlib.execute.activation_stores import HostBuffers, HostLink
from shardlib.execute.values.keeping import Between, Keeping, keep
from shardlib.mesh.memories import Transfers
from shardlib.models import gpt
from shardlib.plan.limits import Planner
from shardlib.plan.recompute import fewest

AT = torch.ops.aten
CONFIG = gpt.GPTConfig(vocab=29, layers=2, width=8, heads=2, sequence=4)
RULES = sl.tensor_slicing(gpt.slicing_rules(CONFIG), axis="model")


def trained(mesh, *transforms, dtype=torch.float64, rows=8, **changes):
    """Losses, norms and parameters after two steps."""
    config = replace(CONFIG, dtype=dtype, dropout=0.2, **changes)
    loss_fn, params = tiny_gpt(**vars(config))
    batches = token_batches(2, rows, config)
    return training.simulate(mesh, loss_fn, params, batches, sl.chain(*transforms), sl.optim.sgd(0.1), rng=3)


MLP = sl.tensor_slicing({"blocks/*/mlp/up": "column", "blocks/*/mlp/down": "row"}, axis="model")
CASES = {
    "slices": ({"model": 2}, (RULES,), {}),
    "slices in fp32": ({"model": 2}, (RULES,), {"dtype": torch.float32}),
    "shares with padding": ({"model": 2}, (MLP,), {"heads": 1, "width": 9, "rows": 7, "sequence": 5}),
    "stage 3": ({"data": 2, "model": 2}, (RULES, sl.zero(3)), {}),
    "accumulated": ({"data": 2, "model": 2}, (RULES, sl.zero(2), sl.accumulate(2)), {}),
    "megatron": ({"data": 1, "model": 2}, (RULES, sl.sequence("model", "megatron"), sl.zero(1)), {}),
    "ulysses": ({"seq": 2}, (sl.sequence("seq"), sl.zero(3, axis="seq")), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_are_kept_without_recomputation(case):
    mesh, others, changes = CASES[case]
    kept = trained(mesh, *others, **changes)
    for how in (("full", "sharded"), ("dots", ("sharded", "host"))):
        found = trained(mesh, *others, sl.remat(how[0], store=how[1], smallest=1), **changes)
        assert found[:2] == kept[:2], how
        assert_same(found[2], kept[2])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines_of_sliced_blocks(schedule):
    loss_fn, params = gpt.make_sequential(CONFIG), gpt.to_blocks(gpt.init(CONFIG))
    rules = sl.tensor_slicing(gpt.slicing_rules(CONFIG, blocks=True), axis="model")

    def run(*more):
        parallel = sl.chain(rules, sl.pipeline(schedule, 2), sl.zero(1), *more)
        return training.simulate(
            {"pipe": 2, "model": 2, "data": 1},
            loss_fn,
            params,
            token_batches(2, 8, CONFIG),
            parallel,
            sl.optim.sgd(0.1),
        )

    kept, divided = run(), run(sl.remat(store="sharded", smallest=1))
    assert divided[:2] == kept[:2]
    assert_same(divided[2], kept[2])


@pytest.mark.parametrize("parts", [(), (sl.sequence("model", "megatron"),)])
def test_a_stage_of_recomputed_slices_keeps_inputs_of_blocks_alone(parts):
    """Not what the last block's layers got: a copy, or the whole sequence that was gathered from its parts."""
    config = replace(CONFIG, layers=4)
    rules = sl.tensor_slicing(gpt.slicing_rules(config, blocks=True), axis="model")
    plan = sl.make_plan(
        gpt.to_blocks(gpt.init(config, device="meta")),
        sl.abstract_mesh(pipe=2, data=1, model=2),
        sl.chain(rules, *parts, sl.pipeline("1f1b", 2), sl.remat()),
        loss_fn=gpt.make_sequential(config),
        batch=token_batches(1, 4, config)[0],
    )
    for trace, blocks in zip(plan.traces, (2, 2), strict=True):
        carry = 2 * config.sequence * config.width * 4 // (2 if parts else 1)
        assert trace.kept < (blocks + 2) * carry, (trace.kept / carry, blocks)


def test_each_block_costs_one_more_gather():
    """The payload that is sent is the plan's: an input is gathered once, by shares."""
    (batch,), (loss_fn, params) = token_batches(1, 4, CONFIG), tiny_gpt(**vars(CONFIG))
    sizes = {"data": 2, "model": 2}

    def run(mesh, parallel):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), sl.optim.sgd(0.1))
        rows = share(batch, mesh.coords["data"], 2)
        sent = []
        for _ in range(2):
            mesh.traffic.reset()
            state, _ = step(state, rows)
            sent.append(dict(mesh.traffic.payload))
        return sent

    planned = {}
    for store in ("device", "sharded"):
        parallel = sl.chain(RULES, sl.zero(1), sl.remat(store=store, smallest=1))
        plan = sl.make_plan(params, sl.abstract_mesh(**sizes), parallel, loss_fn=loss_fn, batch=share(batch, 0, 2))
        planned[store] = plan.payload()
        for sent in sl.simulate(run, parallel, mesh=sizes):
            assert sent == [planned[store]] * 2
    inputs = CONFIG.layers * 2 * CONFIG.sequence * CONFIG.width * 4
    assert planned["sharded"]["model"] - planned["device"]["model"] == inputs // 2  # each sends its half
    assert planned["sharded"]["data"] == planned["device"]["data"]


def test_what_cannot_be_divided_is_refused():
    params = gpt.init(CONFIG)
    with pytest.raises(IllegalComposition, match=r"the axis of tensor_slicing.*there is none.*store='host'"):
        sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(1), sl.remat(store="sharded")))
    with pytest.raises(IllegalComposition, match=r"store='disk'\): use 'device', 'host', 'sharded' or"):
        sl.remat(store="disk")
    parallel = sl.chain(RULES, sl.sequence("model", "megatron"), sl.remat(store="sharded"))
    plan = sl.make_plan(params, sl.abstract_mesh(model=2), parallel)
    assert plan.step.remat.axis is None and "parts of sequences over axis 'model' already" in str(plan)
    alone = sl.make_plan(params, sl.abstract_mesh(model=1), sl.chain(RULES, sl.remat(store="sharded")))
    assert alone.step.remat.axis is None


def test_blocks_that_begin_between_column_and_row_are_refused():
    """Their inputs are other values on each rank, and none could be made of shares."""
    rules = sl.tensor_slicing({"up": "column", "down": "row"}, axis="model")
    block = sl.block(lambda weight, x: torch.nn.functional.linear(torch.tanh(x), weight))
    params = {"up": torch.randn(8, 4), "down": torch.randn(4, 8)}

    def loss_fn(params, x):
        return block(params["down"], torch.nn.functional.linear(x, params["up"])).square().mean()

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.chain(rules, sl.remat(store="sharded", smallest=1)))
        return sl.value_and_grad(loss_fn)(sharded, torch.ones(2, 4))

    torch.manual_seed(0)
    with pytest.raises(HandleError, match=r"a block's inputs \(2, 4\) differ along axis 'model'"):
        sl.simulate(run, mesh={"model": 2})


def test_buffers_are_used_again():
    """As many as are in use at once: a longer batch takes larger ones in the place of those that it cannot use."""
    memory = HostBuffers(HostLink(Transfers(torch.device("cpu"), abstract=True), fake=True))
    first = [memory.take(size) for size in (10, 30, 20)]
    assert memory.held == 60
    for buffer in first:
        memory.give(buffer)
    again = [memory.take(size) for size in (30, 20, 10)]
    assert [len(buffer) for buffer in again] == [30, 20, 10] and memory.held == 60
    for buffer in again:
        memory.give(buffer)
    longer = [memory.take(size) for size in (40, 20, 15)]
    assert [len(buffer) for buffer in longer] == [40, 20, 15] and memory.held == 75


def test_what_an_error_leaves_in_a_store_is_given_up():
    """A graph that ends between forward and backward."""
    memory = HostBuffers(HostLink(Transfers(torch.device("cpu"), abstract=True), fake=True))
    between = Between(sl.remat(store="host").how, sl.make_mesh(), memory)
    link = Keeping(between, between.store, "an input", torch.empty(8, device="meta"))
    keep(torch.ones(8), link.number)
    between.close()
    assert len(memory.take(32)) == 32 == memory.held and not between.there


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(0, 600))
def test_the_fewest_blocks_that_fit(savings, budget):
    """As trying all numbers finds, in at most three times the calls of bisecting."""
    peaks = [sum(savings[blocks:]) for blocks in range(len(savings) + 1)]
    calls = []
    found = fewest(len(savings), lambda blocks: calls.append(blocks) or peaks[blocks], budget)
    assert found == next((blocks for blocks, peak in enumerate(peaks) if peak <= budget), None)
    assert len(calls) <= 2 + 3 * len(savings).bit_length()


@given(st.integers(2, 1000), st.integers(1, 100), st.integers(0, 100_000))
def test_blocks_that_save_alike_take_four_calls(count, saving, budget):
    calls = []
    found = fewest(count, lambda blocks: calls.append(blocks) or (count - blocks) * saving, budget)
    assert found == max(0, count - budget // saving) and len(calls) <= 4


def test_a_plan_recomputes_as_few_blocks_as_fit(monkeypatch):
    monkeypatch.setattr(Planner, "_advice", lambda *_: "")  # the search for a remedy, which test_limits.py tests
    loss_fn, params = tiny_gpt(layers=3, width=8)
    (batch,) = token_batches(1, rows=8)

    def plan(*transforms, **budget):
        parallel = sl.chain(sl.zero(0), *transforms)
        return sl.make_plan(
            params, sl.abstract_mesh(data=1), parallel, loss_fn=loss_fn, batch=batch, optimizer=tx, **budget
        )

    tx = sl.optim.adamw(1e-3)
    plans = [plan(sl.remat(blocks=blocks)) for blocks in range(4)]
    peaks = [made.peak_bytes + sum(leaf.nbytes for leaf in batch.values()) for made in plans]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.3 * peaks[3]
    for blocks in (0, 1, 3):
        chosen = plan(sl.remat("auto"), device_memory=peaks[blocks])
        assert chosen == plans[peaks.index(peaks[blocks])]
        assert f"{chosen.step.remat.blocks} of 3 blocks are recomputed, for a peak of" in str(chosen)
    with pytest.raises(
        IllegalComposition, match=r"remat\('auto'\): 3 of 3 blocks are recomputed, for a peak of [^;]*\n"
    ):
        plan(sl.remat("auto"), device_memory=peaks[3] - 1)
    for decide in (plan, lambda auto: sl.shard(params, sl.make_mesh(), auto)):
        with pytest.raises(IllegalComposition, match=r"needs a budget and a trace.*sl\.remat\(blocks="):
            decide(sl.remat("auto"))
    assert plan(sl.remat(), device_memory=peaks[3]) == plan(sl.remat())
    with pytest.raises(IllegalComposition, match=r"a rank holds .* in device memory, .* \+ batch .*; device_memory="):
        plan(sl.remat(), device_memory=peaks[3] - 1)
    with pytest.raises(TypeError, match="give loss_fn=, batch= and optimizer= too"):
        sl.make_plan(params, sl.abstract_mesh(data=1), loss_fn=loss_fn, batch=batch, device_memory=peaks[0])
    reads = lambda params, batch: (loss := loss_fn(params, batch)) * (1 if loss.item() else 2)  # noqa: E731
    with pytest.raises(
        IllegalComposition, match=r"a loss that can be traced.*experts_implementation='grouped_mm'\), or give no limit"
    ):
        sl.make_plan(
            params,
            sl.abstract_mesh(data=1),
            sl.remat("auto"),
            loss_fn=reads,
            batch=batch,
            optimizer=tx,
            device_memory=1 << 30,
        )
    kept, some = trained({"data": 2}, sl.zero(3)), trained({"data": 2}, sl.zero(3), sl.remat(blocks=1))
    assert some[:2] == kept[:2]
    assert_same(some[2], kept[2])


NAMED = {
    "one device": ({"data": 1}, ()),
    "stage 3": ({"data": 2}, (sl.zero(3),)),
    "slices": ({"data": 1, "model": 2}, (RULES, sl.zero(1))),
    "ring": ({"data": 1, "seq": 2}, (sl.sequence("seq", "ring"),)),
}


@pytest.mark.parametrize("case", NAMED)
def test_named_values_are_kept_and_change_nothing(case):
    (mesh, others), save = NAMED[case], ["attn/out", "mlp/hidden"]
    kept = trained(mesh, *others)
    found = trained(mesh, *others, sl.remat(save=save, store="host"))
    assert found[:2] == kept[:2]
    assert_same(found[2], kept[2])


def test_blocks_that_are_recomputed_are_counted_by_the_outermost():
    """Also where a user's hooks keep what is saved."""
    calls = []
    inner = sl.block(lambda w, x: torch.tanh(x @ w))

    def fn(w, x):
        calls.append(1)
        return inner(w, inner(w, x))

    outer, w = sl.block(fn), torch.eye(4)

    def loss_fn(p, x):
        with torch.autograd.graph.save_on_cpu():
            return outer(p["w"], outer(p["w"], x)).sum()

    for blocks in range(3):
        parallel = sl.chain(sl.zero(0), sl.remat(blocks=blocks))
        plan = sl.make_plan({"w": w}, sl.abstract_mesh(data=1), parallel, loss_fn=loss_fn, batch=torch.ones(2, 4))
        assert plan.traces[0].blocks == 2
        calls.clear()
        sl.value_and_grad(loss_fn)(sl.shard({"w": w}, sl.make_mesh(), parallel), torch.ones(2, 4))
        assert len(calls) == 2 + blocks


def test_what_makes_a_named_value_is_not_computed_again():
    name = sl.nn.checkpoint_name

    @sl.block
    def named(w, x):
        y = name(x.cos(), "cosine")
        return torch.tanh(name(torch.sin(y @ w) @ w, "second")) * y

    def loss_fn(params, x):
        for w in params:
            x = named(w, x)
        return x.square().mean()

    found, grads = {}, {}
    for save in ((), ["second"], ["cosine", "second"]):
        sharded = sl.shard([torch.eye(4) * 0.5] * 3, sl.make_mesh(), sl.remat(save=save))
        with Counted() as counted:
            _, grads[len(save)] = sl.value_and_grad(loss_fn)(sharded, torch.ones(2, 4))
        found[len(save)] = [counted.calls[op] for op in (AT.mm.default, AT.sin.default, AT.cos.default)]
    products, sines, cosines = found[0]
    assert found[1] == [products - 3, sines, cosines]
    assert found[2] == [products - 3, sines, cosines - 3]
    assert_same(grads[1].tree, grads[0].tree)
    assert_same(grads[2].tree, grads[0].tree)


def test_a_named_value_that_was_written_to_is_copied():
    def fn(w, x):
        y = x @ w
        y.mul_(2)
        return torch.tanh(sl.nn.checkpoint_name(y, "twice")) * y

    grads = {}
    for save in ((), ["twice"]):
        sharded = sl.shard([torch.eye(4) * 0.5] * 2, sl.make_mesh(), sl.remat(save=save))
        loss_fn = lambda params, x: sl.block(fn)(params[1], sl.block(fn)(params[0], x)).square().mean()  # noqa: E731
        _, grads[len(save)] = sl.value_and_grad(loss_fn)(sharded, torch.ones(2, 4))
    assert_same(grads[1].tree, grads[0].tree)


def test_names_that_no_value_has_are_refused():
    (batch,), (loss_fn, params) = token_batches(1, 8, CONFIG), tiny_gpt(**vars(CONFIG))
    wrong = sl.remat(save=["attn/out", "attn/in"])
    with pytest.raises(HandleError, match=r"'attn/in', and no block.*there are 'attn/out', 'mlp/hidden'"):
        sl.value_and_grad(loss_fn)(sl.shard(params, sl.make_mesh(), wrong), batch)
    with pytest.raises(HandleError, match="'attn/in', and no block"):
        sl.make_plan(params, sl.abstract_mesh(data=1), wrong, loss_fn=loss_fn, batch=batch)
    blocks, pipe = gpt.make_sequential(CONFIG), sl.chain(sl.pipeline("1f1b", 2), wrong)
    with pytest.raises(HandleError, match="'attn/in', and no block"):
        sl.simulate(
            lambda mesh: sl.value_and_grad(blocks)(sl.shard(gpt.to_blocks(gpt.init(CONFIG)), mesh, pipe), batch),
            mesh={"pipe": 2, "data": 1},
        )
    assert sl.remat(save="attn/out") == sl.remat(save=["attn/out"])
    with pytest.raises(IllegalComposition, match="names are for policy 'full'"):
        sl.remat("dots", save=["attn/out"])
