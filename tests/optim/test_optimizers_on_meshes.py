"""Optimizers that depend on whole parameters, positions or paths: however leaves are cut, tied, frozen or replicated."""

import json
import math
import re
from pathlib import Path

import numpy as np
import optree
import pytest
import torch
from helpers import training
from helpers.cuts import CUTS, tiny_blocks
from helpers.measure import count_payload
from helpers.models import mlp, regression_batch, share, tiny_gpt, token_batches
from helpers.optimizer_cases import by_matrix
from helpers.strategies import MESHES, chains, models
from helpers.trees import assert_close, assert_same, copy_of
from hypothesis import given, note
from hypothesis import strategies as st

import shardlib as sl
from shardlib import checkpoint
from shardlib.kernels.global_norm import sum_of_squares
from shardlib.optim.optimizers.muon import NS_COEFFS, orthogonalize
from shardlib.optim.shards import MeshShards
from shardlib.optim.storing import optimizer_shards
from shardlib.sharded.tree import Sharded

opt = sl.optim
ON_CUTS = {
    "muon": lambda: by_matrix(opt.muon(0.02), opt.sgd(0.1)),
    "adafactor": lambda: opt.adafactor(0.05, 3, momentum=0.9, weight_decay_rate=0.01),
    "block norm": lambda: opt.chain(opt.clip_by_block_norm(0.3), opt.sgd(0.1)),
    "rows": lambda: opt.chain(opt.adaptive_grad_clip(0.3), opt.sgd(0.1)),
    "largest": lambda: opt.chain(opt.clip_by_global_norm(0.3, math.inf), opt.clip_by_global_norm(1.0, 1), opt.sgd(0.1)),
    "noise": lambda: opt.chain(opt.add_noise(0.01, 0.5, key=1), opt.sgd(0.1)),
    "masks": lambda: by_matrix(
        opt.chain(opt.masked(opt.clip_by_block_norm(0.1), "*", exclude="*attn*"), opt.lamb(0.02)),
        opt.adafactor(0.1, factored=False),
    ),
}


def gradients_of(sharded):
    """The parameters themselves, as gradients."""
    flat = optimizer_shards(sharded)
    return Sharded(sharded.plan, sharded.mesh, "grad", copy_of(flat))


@pytest.mark.parametrize("stage", [0, 3])
def test_muon_leaves_empty_matrices_alone(stage):
    params = {"empty": torch.zeros(0, 4), "other": {"empty": torch.zeros(3, 0)}, "full": torch.ones(3, 5)}

    def run(mesh):
        sharded, tx = sl.shard(params, mesh, sl.zero(stage)), opt.muon(0.1)
        return sl.unshard(
            sl.optim.apply_updates(sharded, tx.update(gradients_of(sharded), tx.init(sharded), sharded)[0])
        )

    tx = opt.muon(0.1)
    wanted = sl.optim.apply_updates(params, tx.update(params, tx.init(params), params)[0])
    for found in sl.simulate(run, mesh={"data": 2}):
        assert_close(found, wanted, 1e-6)


@pytest.mark.pairwise
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ON_CUTS)
def test_every_way_to_cut_parameters(name, cut, tie):
    """Gradients are the parameters, so nothing but the transformation is at work."""
    shape, transform = CUTS[cut]
    _, params = tiny_blocks(vocab=30, tie=tie)

    def run(mesh):
        tx, sharded = ON_CUTS[name](), sl.shard(params, mesh, transform)
        state = tx.init(sharded)
        for _ in range(3):
            grads = gradients_of(sharded)
            given = copy_of((grads.buffers, state, sharded.buffers))
            updates, after = tx.update(grads, state, sharded)
            assert_same((grads.buffers, state, sharded.buffers), given)  # pure
            sharded, state = sl.optim.apply_updates(sharded, updates), after
        return sl.unshard(sharded)

    tx, whole = ON_CUTS[name](), distinct(params)
    state = tx.init(whole)
    for _ in range(3):
        updates, state = tx.update(copy_of(whole), state, whole)
        whole = sl.optim.apply_updates(whole, updates)
    for found in sl.simulate(run, mesh=shape):
        assert_close(distinct(found), whole, 1e-10)


def distinct(params):
    """Path -> leaf, by a tied leaf's first path."""
    found, seen = {}, set()
    for path, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params)):
        if id(leaf) not in seen:
            found["/".join(map(str, path))] = leaf
        seen.add(id(leaf))
    return found


@pytest.mark.parametrize(("mesh", "stage"), [({"data": 4}, 1), ({"data": 2, "more": 2}, 3)])
def test_muon_sends_each_matrix_to_one_rank_and_back(mesh, stage):
    """Counted at the groups. Four equal matrices on four ranks: (n−1)/n of a quarter of the elements, there and back."""
    loss_fn, params = mlp([16] * 5, torch.float32)
    transform = sl.chain(*(sl.zero(stage, axis=axis) for axis in mesh), sl.freeze("*bias"))
    batch = regression_batch(4, 16, 16, torch.float32)

    def run(mesh):
        sharded, tx = sl.shard(params, mesh, transform), opt.muon(0.02)
        grads, state = gradients_of(sharded), tx.init(sharded)
        sent = count_payload(mesh)
        tx.update(grads, state, sharded)
        by_itself = sent()
        train_state, step = sl.make_train_step(loss_fn, sharded, tx)
        sent()
        step(train_state, batch)
        return by_itself, sent()

    matrices, element = 4 * 256, 4
    share_of_rank = matrices // 4 * element
    expected = {axis: 2 * share_of_rank * (size - 1) // size for axis, size in mesh.items()}
    plan = sl.make_plan(
        params, sl.abstract_mesh(**mesh), transform, optimizer=opt.muon(0.02), loss_fn=loss_fn, batch=batch
    )
    assert [needs.payload for needs in plan.needs] == [expected]
    for by_itself, in_a_step in sl.simulate(run, mesh=mesh):
        assert by_itself == expected
        assert in_a_step == plan.payload()


def test_matrices_are_dealt_out_evenly():
    """One of 64 elements to one rank, four of 16 to the other: messages of 64/2 elements for each of two ranks."""
    params = {name: torch.zeros(4, 4) for name in "abcd"} | {"e": torch.zeros(8, 8)}
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), stage=1, optimizer=opt.muon(0.02))
    assert [needs.payload for needs in plan.needs] == [{"data": 2 * (2 * 32 * 4) // 2}]
    assert re.search(r"optimizer +data +as it asks +in the update +1 +256 B", str(plan))


def test_each_matrix_is_orthogonalised_on_one_of_the_ranks_that_share_it():
    _, params = mlp([6, 9, 7, 4])
    calls = []

    def spy(number, matrix):
        calls.append((number, tuple(matrix.shape)))
        return matrix

    def run(mesh):
        sharded = sl.shard(params, mesh, sl.zero(2))
        shards = MeshShards(sharded.plan, mesh)
        same = shards.whole(spy, optimizer_shards(sharded))
        assert_same(same, optimizer_shards(sharded))

    sl.simulate(run, mesh={"data": 3})
    assert sorted(shape for _, shape in calls) == sorted(tuple(leaf.shape) for leaf in optree.tree_leaves(params))
    assert len({number for number, _ in calls}) == len(calls)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 4, 6)])
def test_orthogonalising_brings_singular_values_near_one(shape):
    """Against the singular value decomposition: the same factors, and values as the polynomial has them."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = NS_COEFFS
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    assert_close(orthogonalize(matrix, NS_COEFFS, 5, 1e-30), left @ torch.diag_embed(values) @ right, 1e-10)
    assert values.min() > 0.6 and values.max() < 1.3


# --- drawn: tied, frozen and replicated leaves ------------------------------------------------------------------


@given(st.data())
def test_norms_counts_and_masks_of_drawn_trees(data):
    """A tied leaf counts once and is masked by any of its paths, a frozen one not at all, copies once, padding never."""
    mesh = data.draw(MESHES)
    transforms, _, _ = data.draw(chains(mesh))
    model = data.draw(models())
    paths = ["/".join(map(str, path)) for path in optree.tree_paths(model.params)]
    leaves = optree.tree_leaves(model.params)
    frozen = {path for path in data.draw(st.lists(st.sampled_from(paths), max_size=2)) if path != "base"}
    chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True))
    named = {}  # every path of each distinct leaf
    for path, leaf in zip(paths, leaves):
        named.setdefault(id(leaf), (leaf, []))[1].append(path)
    trained = {
        names[0]: (leaf, names)
        for leaf, names in named.values()
        if leaf.is_floating_point() and not frozen.intersection(names)
    }
    masked = {path for path, (_, names) in trained.items() if set(names) & set(chosen)}
    chosen = [path for path in chosen if any(path in names for _, names in trained.values())] or ["base"]
    masked = masked or {"base"}
    note(f"{mesh} {transforms} frozen={frozen} chosen={chosen}")
    transform = sl.chain(*transforms, *([sl.freeze(sorted(frozen))] if frozen else []))

    def run(mesh):
        sharded = sl.shard(model.params, mesh, transform)
        tx = opt.chain(opt.masked(opt.clip_by_global_norm(0.1), tuple(chosen)), opt.clip_by_block_norm(1.0))
        updates, _ = tx.update(gradients_of(sharded), tx.init(sharded), sharded)
        shards = MeshShards(sharded.plan, mesh)
        flat = optimizer_shards(sharded)
        norm = shards.sum(sum_of_squares, flat).sqrt()
        elements = shards.sum(lambda part: torch.tensor(part.numel(), dtype=torch.float64), flat)
        return norm.item(), (shards.leaf_count(flat), elements.item()), distinct_parts(updates)

    norm = math.sqrt(sum(leaf.square().sum().item() for leaf, _ in trained.values()))
    inside = math.sqrt(sum(trained[path][0].square().sum().item() for path in masked))
    wanted = {}
    for path, (leaf, _) in trained.items():
        update = leaf * min(1, 0.1 / max(inside, 1e-30)) if path in masked else leaf
        wanted[path] = update * min(1, 1 / max(update.norm().item(), 1e-30))
    for found, count, updates in sl.simulate(run, mesh=mesh):
        assert found == pytest.approx(norm, rel=1e-12)
        assert count == (len(trained), sum(leaf.numel() for leaf, _ in trained.values()))
        assert_close({path: updates[path] for path in wanted}, wanted, 1e-10)


def distinct_parts(updates):
    """Path -> whole update, from a `Sharded` in the optimizer's layout."""
    whole = sl.unshard(updates)
    return {
        "/".join(map(str, path)): leaf
        for path, leaf in zip(optree.tree_paths(whole), optree.tree_leaves(whole))
        if leaf is not None
    }


PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
SNIPPET = re.search(r"```python\n(o = sl\.optim\n.*?)```", PAGE, re.S)[1]
EXAMPLES = re.split(r"^tx = ", SNIPPET, flags=re.M)[1:]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_pages_optimizers_train_the_gpt(number):
    """Training on shards equals training on one rank, and the loss falls."""
    tx = eval(EXAMPLES[number].strip(), {"o": opt, "torch": torch})
    loss_fn, params = tiny_gpt(torch.float64)
    batches = token_batches(1, rows=12) * 6
    losses, _, got = training.simulate({"data": 2}, loss_fn, params, batches, sl.zero(3), tx)
    assert losses[-1] < losses[0]
    wanted = training.simulate({"data": 1}, loss_fn, params, batches, sl.zero(0), tx)
    assert_close(got, wanted[2], 1e-10)


# --- averages of sharded parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("make", [lambda: opt.ema(0.7), opt.swa])
def test_averages_of_sharded_parameters(make, stage):
    """Parameters again, for an eval step; kept in the optimizer's layout; frozen leaves as they are."""
    loss_fn, params = mlp([6, 9, 4])
    batch = regression_batch(6, 6, 4)

    def run(mesh):
        transform = sl.chain(sl.zero(stage), sl.freeze("layers/0/bias"))
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), opt.adam(0.05), donate=False)
        average, evaluate = make(), sl.make_eval_step(loss_fn, state.params)
        kept, seen = average.init(state.params), []
        for _ in range(4):
            state, _ = step(state, share(batch, mesh.rank, mesh.size))
            before = copy_of(sl.unshard(state.params))
            averaged, kept = average.update(state.params, kept)
            assert_same(sl.unshard(state.params), before)
            seen.append(before)
        evaluate(averaged, batch)
        mean = kept.mean if hasattr(kept, "mean") else kept.ema
        assert all(flat.numel() == state.params.plan.bucket_of[name].owned for name, flat in mean.items())
        return seen, sl.unshard(averaged)

    weights = [1.0] * 4 if make is opt.swa else [0.7**age for age in (3, 2, 1, 0)]
    for seen, averaged in sl.simulate(run, mesh={"data": 3}):
        wanted = optree.tree_map(lambda *leaves: sum(w * x for w, x in zip(weights, leaves)) / sum(weights), *seen)
        assert_close(averaged, wanted, 1e-12)
        assert torch.equal(averaged["layers"][0]["bias"], params["layers"][0]["bias"])


def test_averages_of_16_bits_are_kept_in_32():
    leaf = {"w": torch.ones(3, dtype=torch.bfloat16)}
    for tx in (opt.ema(0.999), opt.swa()):
        _, state = tx.update(leaf, tx.init(leaf))
        (kept,) = optree.tree_leaves(state[1])
        assert kept.dtype == torch.float32


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_has_the_variance_that_is_asked_for():
    zero = {"a": torch.zeros(200, 250), "b": torch.zeros(50_000)}
    tx = opt.add_noise(0.5, 0.7, key=5)
    state, seen = tx.init(zero), []
    for step in range(3):
        noise, state = tx.update(zero, state)
        for leaf in noise.values():
            drawn = leaf.flatten().double() / math.sqrt(0.5 / (1 + step) ** 0.7)
            seen.append(drawn)
            # four standard errors of each moment of 50,000 standard normal numbers
            assert abs(drawn.mean()) < 4 / math.sqrt(50_000)
            assert abs(drawn.square().mean() - 1) < 4 * math.sqrt(2 / 50_000)
            assert abs(drawn.pow(4).mean() - 3) < 4 * math.sqrt(96 / 50_000)
    for one in range(6):
        for other in range(one):
            assert abs((seen[one] * seen[other]).mean()) < 4 / math.sqrt(50_000)


def test_noise_leaves_padding_zero():
    def run(mesh):
        sharded = sl.shard({"w": torch.zeros(5)}, mesh, stage=1)
        updates, _ = opt.add_noise(1.0, 0.0, key=1).update(
            gradients_of(sharded), opt.add_noise(1.0, 0.0, 1).init(sharded)
        )
        return next(iter(updates.buffers.values()))[-1].item()

    first, last = sl.simulate(run, mesh={"data": 2})
    assert first != 0 and last == 0


# --- updates that are not finite --------------------------------------------------------------------------------------


def test_nonfinite_values_on_one_rank_are_skipped_on_all():
    _, params = mlp([6, 9, 4])

    def run(mesh):
        sharded, message = sl.shard(params, mesh, sl.zero(2)), []
        tx = opt.skip_nonfinite(opt.adam(0.1), 2)
        state = tx.init(sharded)
        for bad in (False, True, True, False, True, True, True):
            grads = gradients_of(sharded)
            if bad and mesh.rank == 1:
                next(iter(grads.buffers.values()))[0] = torch.inf
            before = copy_of(state.inner_state)
            updates, state = tx.update(grads, state, sharded)
            used = int(state.inner_state.count) == int(before.count) + 1
            moves = any(flat.abs().max() > 0 for flat in updates.buffers.values())
            assert moves == used
            if not used:
                assert_same(state.inner_state, before)
            message.append((used, int(state.notfinite_count), bool(state.last_finite), int(state.total_notfinite)))
        return message

    wanted = [
        (True, 0, True, 0), (False, 1, False, 1), (False, 2, False, 2), (True, 0, True, 2),
        (False, 1, False, 3), (False, 2, False, 4), (True, 3, False, 5),
    ]  # fmt: skip
    assert sl.simulate(run, mesh={"data": 2}) == [wanted] * 2


# --- hyper-parameters and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["device", "host"])
def test_states_of_some_parameters_among_some(tmp_path, memory):
    """A choice within a choice: checkpoints, offload and replaced parameters know the leaves of it."""
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(n, 3, generator=generator, dtype=torch.float64)
        for name, n in zip("abcdef", (4, 2, 3, 5, 1, 2))
    }
    inner = lambda: opt.chain(opt.masked(opt.ema(0.5), "[bd]"), opt.lookahead(opt.adam(0.1), 2, 0.5))  # noqa: E731
    make = lambda: opt.partition({"some": inner(), "rest": opt.sgd(0.1, momentum=0.9)}, {"[bcde]": "some", "*": "rest"})  # noqa: E731
    batches = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(5)]

    def run(mesh, stage, batches, saves):
        transform = sl.chain(sl.zero(stage), *([sl.offload()] if memory == "host" else []))
        loss_fn = lambda p, x: sum((x @ leaf.T).square().mean() for leaf in p.values())  # noqa: E731
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), make())
        if checkpoint.latest(tmp_path) and not saves:
            state = checkpoint.restore(tmp_path, state)
        for batch in batches:
            state, _ = step(state, share(batch, mesh.rank, mesh.size))
        if saves:
            checkpoint.save(tmp_path, state)
            state = sl.replace_params(state, state.params)
        return sl.unshard(state.params)

    (wanted,) = sl.simulate(run, 0, batches, False, mesh={"data": 1})
    sl.simulate(run, 2, batches[:3], True, mesh={"data": 4})
    for stage, ranks in ((0, 1), (3, 2)):
        for found in sl.simulate(run, stage, batches[3:], False, mesh={"data": ranks}):
            assert_close(found, wanted, 1e-12)


@pytest.mark.parametrize("kind", [float, np.float32, torch.tensor])
def test_a_hyperparameter_may_be_replaced(tmp_path, kind):
    """By any number, as optax's may; a checkpoint has it before the next step, too."""

    def start():
        tx = opt.chain(opt.clip_by_value(9.0), opt.inject_hyperparams(opt.sgd)(1.0))
        return sl.make_train_step(lambda p, x: (p["w"] * x).sum(), {"w": torch.zeros(2)}, tx)

    state, step = start()
    state, _ = step(state, torch.ones(2))
    state.opt.inner[1].hyperparams["lr"] = kind(0.25)
    checkpoint.save(tmp_path, state)
    for each in (state, checkpoint.restore(tmp_path, start()[0])):
        after, _ = step(step(each, torch.ones(2))[0], torch.ones(2))
        assert sl.unshard(after.params)["w"].tolist() == [-1.5, -1.5]


def test_hyperparameters_are_read_written_and_saved(tmp_path):
    loss_fn, params = mlp([6, 9, 4])
    batch = regression_batch(6, 6, 4)

    def start(mesh):
        tx = opt.inject_hyperparams(opt.adamw)(opt.linear_schedule(0.1, 0.0, 10), weight_decay=1)
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.zero(1)), tx)

    def run(mesh):
        state, step = start(mesh)
        assert {name: value.item() for name, value in state.opt.inner.hyperparams.items()} == pytest.approx(
            {"lr": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1.0}
        )
        for _ in range(3):
            state, _ = step(state, batch)
        assert state.opt.inner.hyperparams["lr"].item() == pytest.approx(0.08)  # what the third step went by
        state.opt.inner.hyperparams["weight_decay"].fill_(0.25)
        state, _ = step(state, batch)
        checkpoint.save(tmp_path, state)
        again = checkpoint.restore(checkpoint.latest(tmp_path), start(mesh)[0])
        assert again.opt.inner.hyperparams["weight_decay"].item() == 0.25
        return sl.unshard(state.params)

    tx = opt.adamw(opt.linear_schedule(0.1, 0.0, 10), weight_decay=1.0)
    late = opt.adamw(opt.linear_schedule(0.1, 0.0, 10), weight_decay=0.25)
    whole, state = params, tx.init(params)
    for used in (tx, tx, tx, late):
        _, grads = sl.value_and_grad(loss_fn)(whole, batch)
        updates, state = used.update(grads, state, whole)
        whole = sl.optim.apply_updates(whole, updates)
    for found in sl.simulate(run, mesh={"data": 2}):
        assert_close(found, whole, 1e-12)


def test_names_of_a_checkpoint_are_those_of_the_chain(tmp_path):
    """Adding a transformation without a state does not change the names of the others."""
    loss_fn, params = mlp([6, 9, 4])
    batch = regression_batch(6, 6, 4)
    without = opt.named_chain(("adam", by_matrix(opt.adam(0.1), opt.sgd(0.1, momentum=0.9))))
    with_clip = opt.named_chain(
        ("clip", opt.clip_by_global_norm(1.0)), ("adam", by_matrix(opt.adam(0.1), opt.sgd(0.1, momentum=0.9)))
    )

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.zero(1)), without)
        state, _ = step(state, batch)
        checkpoint.save(tmp_path, state)
        other, _ = sl.make_train_step(loss_fn, sl.shard(params, mesh, sl.zero(0)), with_clip)
        other = checkpoint.restore(checkpoint.latest(tmp_path), other)
        return other.opt.inner["adam"]["matrix"].count.item()

    assert sl.simulate(run, mesh={"data": 2}) == [1.0, 1.0]
    names = set(json.loads((checkpoint.latest(tmp_path) / "manifest.json").read_text())["tensors"])
    assert {"opt/inner/adam/matrix/mu/layers/0/weight", "opt/inner/adam/rest/trace/layers/1/bias"} <= names
    assert not any("[" in name for name in names)


def test_torchs_counters_advance_on_ranks_without_parameters(tmp_path):
    """NAdam's, of the last stage alone: the first stage's rank saves them."""
    loss_fn, params = tiny_blocks()
    last = f"{len(params) - 1}/"
    pipeline = sl.chain(sl.zero(0), sl.pipeline("1f1b", 2))
    data = token_batches(4, rows=4)

    def start(mesh, transform):
        nadam = opt.from_torch(torch.optim.NAdam, lr=0.05)
        tx = opt.partition(
            {"last": nadam, "rest": opt.sgd(0.1)}, lambda path, shape: "last" if path.startswith(last) else "rest"
        )
        return sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), tx)

    def first(mesh):
        state, step = start(mesh, pipeline)
        for batch in data[:2]:
            state, _ = step(state, batch)
        checkpoint.save(tmp_path, state)
        for batch in data[2:]:
            state, _ = step(state, batch)
        return sl.unshard(state.params)

    def second(mesh):
        state, step = start(mesh, sl.zero(0))
        state = checkpoint.restore(checkpoint.latest(tmp_path), state)
        for batch in data[2:]:
            state, _ = step(state, batch)
        return sl.unshard(state.params)

    through = sl.simulate(first, mesh={"data": 1, "pipe": 2})[0]
    assert_close(sl.simulate(second, mesh={"data": 1})[0], through, 1e-10)


# --- what is refused ---------------------------------------------------------------------------------------------------

PARAMS = {"a": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}}
SGD = opt.sgd(0.1)
REFUSED = {
    "muon of vectors": (lambda: opt.muon(0.1).init(PARAMS), r"a/bias: shape \(3,\)\n.*partition"),
    "no label": (lambda: opt.partition({"x": SGD}, {"*weight": "x"}).init(PARAMS), r"no label for 1 parameters:\n  - a/bias"),
    "no such path": (
        lambda: opt.partition({"x": SGD}, {"*kernel": "x", "*": "x"}).init(PARAMS), r"'\*kernel' matches no trained parameter"
    ),
    "a label for nobody": (
        lambda: opt.partition({"x": SGD, "y": SGD}, {"*": "x", "a/*": "y"}).init(PARAMS), r"no parameter gets label 'y'"
    ),
    "masked nothing": (lambda: opt.masked(SGD, "b/*").init(PARAMS), r"masked: 'b/\*' matches no trained parameter"),
    "excluded nothing": (lambda: opt.masked(SGD, "*", exclude="b").init(PARAMS), r"masked: 'b' matches no"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_globs_that_match_no_parameter_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(sl.errors.IllegalComposition, match=message):
        make()


def test_a_function_may_have_labels_that_no_parameter_needs():
    """It is written for many models, as `shardlib.migrate` does."""
    tx = opt.partition(
        {"some": SGD, "others": opt.adamw(0.1)}, lambda path, shape: "some" if len(shape) < 3 else "others"
    )
    grads = {"a": {"weight": torch.ones(3, 2), "bias": torch.ones(3)}}
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert_close(updates, {"a": {"weight": torch.full((3, 2), -0.1), "bias": torch.full((3,), -0.1)}}, 1e-6)


ONE_BIT = opt.onebit_adam(0.1, 5)


@pytest.mark.parametrize("make", [
    lambda: opt.masked(ONE_BIT, "*"),
    lambda: opt.partition({"x": ONE_BIT}, {"*": "x"}),
    lambda: opt.lookahead(ONE_BIT, 5, 0.5),
    lambda: opt.skip_nonfinite(ONE_BIT, 3),
    lambda: opt.inject_hyperparams(opt.onebit_adam)(0.1, 5),
])  # fmt: skip
def test_nothing_goes_around_optimizers_that_sum_gradients_themselves(make):
    with pytest.raises(
        sl.errors.IllegalComposition, match="around onebit_adam, which reduces gradients over axis 'data' itself"
    ):
        make()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: opt.partition({"x": SGD}, {"*": "y"}), "no transformation for label 'y'; there are 'x'"),
    (lambda: opt.named_chain(("a", SGD), ("a", SGD)), "'a' more than once"),
    (lambda: opt.named_chain(), "needs at least one"),
    (lambda: opt.inject_hyperparams(opt.sgd, "rate"), "sgd has no argument 'rate'; it has lr, momentum, nesterov"),
    (lambda: opt.inject_hyperparams(opt.from_torch)(torch.optim.NAdam, lr=1e-3), "no argument of from_torch is a number"),
])  # fmt: skip
def test_impossible_combinations_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_nothing_follows_lookahead():
    after = opt.chain(opt.clip_by_value(1.0), opt.lookahead(SGD, 2, 0.5))
    for make in (lambda: opt.chain(after, opt.clip_by_value(1.0)), lambda: opt.named_chain(("a", after), ("b", SGD))):
        with pytest.raises(ValueError, match=r"lookahead sets parameters to its slow ones.*: put it last"):
            make()


# --- in real processes ------------------------------------------------------------------------------------------------


def test_in_real_processes(pool):
    """Four gloo processes: whole matrices and rows and columns really travel."""
    loss_fn, params = mlp([6, 9, 7, 4])
    batches = [regression_batch(8, 6, 4, seed=seed) for seed in range(3)]
    transform = sl.zero(3)

    def make():
        return opt.chain(opt.clip_by_global_norm(1.0), by_matrix(opt.muon(0.02), opt.adafactor(0.05, 1)))

    def run(mesh):
        return training.train(mesh, loss_fn, params, batches, transform, make())[2]

    wanted = training.simulate({"data": 1}, loss_fn, params, batches, transform, make())[2]
    for found in pool.run(run, mesh={"data": 4}):
        assert_close(found, wanted, 1e-10)
