"""AdamW with moments in 8 bits: every step equals a plain simulation bit for bit, and its state can be saved and moved.

Blocks lie in flat shards. So given the same gradients stages 1 to 3 on as many ranks train alike to the last bit, and so does
stage 0 on any number; where state is split otherwise, blocks are others.
"""

import functools
import math

import optree
import pytest
import torch
from helpers.measure import stored_bytes
from helpers.trees import assert_close, assert_same, copy_of
from oracle import eight_bits as oracle

import shardlib as sl
from shardlib import checkpoint
from shardlib.kernels.adamw8 import BLOCK, SIGNED, UNSIGNED
from shardlib.optim.base import Packed
from shardlib.optim.storing import optimizer_shards

STEPS = 50
HOW = {"lr": 0.01, "b1": 0.9, "b2": 0.98, "eps": 1e-8}
PATHS = ["net/a", "net/b", "net/c", "small/w"]
GROUPS = [[0, 1, 2], [3]]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
MESHES = pytest.mark.parametrize(("ranks", "stage"), [(1, 0), *((n, s) for n in (2, 3, 4) for s in range(4))])


def model():
    """A unit whose shards on four ranks are large enough for codes, and one that never is."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator)

    return {"net": {"a": leaf(131, 130), "b": leaf(37), "c": leaf(3, 67)}, "small": {"w": leaf(50)}}


def flat_model():
    return [leaf.reshape(-1) for leaf in optree.tree_leaves(model())]


def loss_fn(params, batch):
    """Its gradient is the batch."""
    return sum((p * b).sum() for p, b in zip(optree.tree_leaves(params), batch, strict=True))


def mean_batch(step):
    """Gradients of every size, and zero for rare rows; sums of a few are exact."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for leaf in optree.tree_leaves(model()):
        whole = torch.randint(-64, 65, leaf.shape, generator=generator).float()
        sizes = torch.randint(-12, 1, leaf.shape[:1], generator=torch.Generator().manual_seed(1))
        met = torch.rand(leaf.shape[:1], generator=generator) < 0.7
        rows = met * torch.pow(2.0, sizes)
        found.append(whole * rows.view(-1, *[1] * (leaf.dim() - 1)))
    return found


def batch_of(mesh, step):
    """This rank's gradients: different on every rank, with the same mean on every mesh."""
    return [leaf * weight(mesh.rank, mesh.size) for leaf in mean_batch(step)]


def weight(rank, ranks):
    """1 on average."""
    return 1 + rank - (ranks - 1) / 2


def start(mesh, stage, tx, **options):
    return sl.make_train_step(loss_fn, sl.shard(model(), mesh, stage=stage), tx, **options)


def optimizer(decay=0.1):
    return sl.optim.adamw8bit(**HOW, weight_decay=decay)


def moments(state):
    """This rank's shards of both, leaf by leaf, padding left out: ``{name: [leaf]}``."""
    recorded, plan, mesh = {}, state.params.plan, state.params.mesh
    for name in ("mu", "nu"):
        found = {}
        for bucket in plan.trained:
            held = getattr(state.opt.inner, name)[bucket.name]
            whole = held.unpacked() if isinstance(held, Packed) else held
            cuts = bucket.leaf_segments(whole, bucket.levels)
            spans = bucket.filled(mesh.coords, bucket.levels)
            for path, part, (first, last) in zip(bucket.paths, cuts, spans):
                found[path] = part[: last - first].clone()
        recorded[name] = [found[path] for path in PATHS]
    return recorded


def parameters(state):
    return [leaf.reshape(-1).clone() for leaf in optree.tree_leaves(sl.unshard(state.params))]


@functools.cache
def table(coding):
    """The magnitudes that have codes, and from where on each is taken, found by halving."""
    count = 2**coding.bits
    numbers = coding.decode(torch.arange(count, dtype=torch.uint8), torch.ones(1))
    low, high = torch.zeros(count - 1, dtype=torch.int32), torch.ones(count - 1).view(torch.int32).clone()
    while (high - low > 1).any():
        middle = (low + high) // 2
        blocks = torch.ones(count - 1, BLOCK)
        blocks[:, 0] = middle.view(torch.float32)
        codes = coding.encode(blocks)[0][:, 0].int()
        reached = codes >= torch.arange(1, count)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return oracle.Table(numbers, high.view(torch.float32))


@functools.cache
def simulated(owners, ranks):
    tables = (table(SIGNED), table(UNSIGNED))

    def grads(step):
        """The sum of each rank's share, by a power of two, and then what is left of the mean: for three ranks 4/3."""
        power = 2 ** math.ceil(math.log2(ranks))
        share, rest = torch.tensor(1 / power), torch.tensor(power / ranks)
        return [
            sum(leaf.reshape(-1) * (weight(rank, ranks) * share) for rank in range(ranks)) * rest
            for leaf in mean_batch(step)
        ]

    return list(oracle.adamw(flat_model(), GROUPS, grads, STEPS, owners, *tables, **HOW, decay=0.1))


@MESHES
def test_every_step_is_the_plain_simulations(ranks, stage):
    def run(mesh):
        state, step = start(mesh, stage, optimizer())
        recorded = []
        for number in range(STEPS):
            state, _ = step(state, batch_of(mesh, number))
            recorded.append({"params": parameters(state)} | moments(state))
        return recorded

    owners = ranks if stage else 1
    wanted = simulated(owners, ranks)
    for rank, recorded in enumerate(sl.simulate(run, mesh={"data": ranks})):
        for step, (ours, theirs) in enumerate(zip(recorded, wanted, strict=True)):
            for name, leaves in ours.items():
                for i, leaf in enumerate(leaves):
                    whole = theirs[name][i]
                    mine = whole if name == "params" or owners == 1 else oracle.cut(whole, rank, owners)[: len(leaf)]
                    assert torch.equal(leaf, mine), f"step {step}, rank {rank}: {name} of {PATHS[i]}"


def test_large_states_are_in_bytes_and_small_ones_in_fp32():
    params, tx, plain = model(), optimizer(), sl.optim.adamw(**HOW, weight_decay=0.1)
    state, theirs = tx.init(params), plain.init(params)
    assert isinstance(state.mu["net"]["a"], Packed) and state.mu["net"]["a"].codes.dtype == torch.uint8
    assert stored_bytes(state) < 0.27 * stored_bytes(theirs)
    ours, others = copy_of(params), copy_of(params)
    for step in range(5):
        grads = optree.tree_unflatten(optree.tree_structure(params), mean_batch(step))
        state, theirs = tx.apply(ours, copy_of(grads), state), plain.apply(others, grads, theirs)
    assert_same(ours["small"], others["small"])
    assert not torch.equal(ours["net"]["a"], others["net"]["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_is_the_step_that_apply_takes(dtype):
    params = optree.tree_map(lambda leaf: leaf.to(dtype), model())
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(2.0), optimizer())
    current, state = params, tx.init(params)
    in_place, its_state = copy_of(params), tx.init(params)
    for step in range(4):
        grads = optree.tree_unflatten(optree.tree_structure(params), [g.to(dtype) for g in mean_batch(step)])
        given = copy_of((grads, state, current))
        updates, after = tx.update(grads, state, current)
        assert_same((grads, state, current), given)  # pure
        current, state = sl.optim.apply_updates(current, updates), after
        its_state = tx.apply(in_place, grads, its_state)
    assert_close(in_place, current, 1e-6 if dtype == torch.float32 else 1e-12)


@STAGES
def test_16_bit_parameters_are_masters_rounded(stage):
    def run(mesh):
        sharded = sl.shard(model(), mesh, sl.chain(sl.zero(stage), sl.precision("bf16")))
        state, step = sl.make_train_step(loss_fn, sharded, optimizer())
        for number in range(3):
            state, _ = step(state, batch_of(mesh, number))
        for name, shard in optimizer_shards(state.params).items():
            assert torch.equal(shard, state.opt.masters[name].bfloat16())
        return parameters(state)

    first, second = sl.simulate(run, mesh={"data": 2})
    assert_same(first, second)
    before = [leaf.bfloat16() for leaf in flat_model()]
    assert not any(torch.equal(leaf, old) for leaf, old in zip(first, before))


@STAGES
def test_without_donation_the_old_state_is_kept_and_the_new_one_is_the_same(stage):
    def run(mesh):
        state, step = start(mesh, stage, optimizer())
        kept, keeping = start(mesh, stage, optimizer(), donate=False)
        for number in range(3):
            state, _ = step(state, batch_of(mesh, number))
            before, was = kept, copy_of(optree.tree_leaves(kept))
            kept, _ = keeping(kept, batch_of(mesh, number))
            assert_same(optree.tree_leaves(before), was)
        assert_same(optree.tree_leaves(kept), optree.tree_leaves(state))

    sl.simulate(run, mesh={"data": 2})


@STAGES
def test_a_skipped_step_changes_nothing(stage):
    def run(mesh):
        state, step = start(mesh, stage, optimizer(), nonfinite="skip")
        state, _ = step(state, batch_of(mesh, 0))
        before = copy_of((optree.tree_leaves(state.opt), parameters(state)))
        wrong = batch_of(mesh, 1)
        wrong[0][0, 0] = torch.inf
        state, metrics = step(state, wrong)
        assert not metrics["finite"]
        assert_same((optree.tree_leaves(state.opt), parameters(state)), before)

    sl.simulate(run, mesh={"data": 2})


@pytest.mark.parametrize("precision", [None, "bf16"])
@MESHES
def test_state_bytes_are_the_plans(ranks, stage, precision):
    transform = sl.zero(stage) if precision is None else sl.chain(sl.zero(stage), sl.precision(precision))

    def run(mesh):
        plan = sl.make_plan(model(), mesh, transform, optimizer=optimizer())
        state, step = sl.make_train_step(loss_fn, sl.shard(model(), mesh, transform), optimizer())
        held = {stored_bytes(state.opt, counters=True)}
        state, _ = step(state, batch_of(mesh, 0))
        return held | {stored_bytes(state.opt, counters=True)}, plan.bytes("optimizer")

    for held, planned in sl.simulate(run, mesh={"data": ranks}):
        assert held == {planned}


# --- checkpoints -----------------------------------------------------------------------------------------------


def trained(mesh, stage, tx, steps):
    state, step = start(mesh, stage, tx)
    for number in range(steps):
        state, _ = step(state, batch_of(mesh, number))
    return state, step


def restored(mesh, stage, tx, folder):
    state, step = start(mesh, stage, tx)
    return checkpoint.restore(checkpoint.latest(folder), state), step


@MESHES
def test_a_checkpoint_keeps_every_code_if_shards_are_equal(tmp_path, ranks, stage):
    def run(mesh):
        state, step = trained(mesh, stage, optimizer(), 5)
        checkpoint.save(tmp_path, state)
        other = stage % 3 + 1 if stage else 0
        again, step_again = restored(mesh, other, optimizer(), tmp_path)
        assert_same(optree.tree_leaves(again.opt), optree.tree_leaves(state.opt))
        for number in range(5, 8):
            state, _ = step(state, batch_of(mesh, number))
            again, _ = step_again(again, batch_of(mesh, number))
        assert_same(
            (parameters(again), optree.tree_leaves(again.opt)), (parameters(state), optree.tree_leaves(state.opt))
        )

    sl.simulate(run, mesh={"data": ranks})


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3), (3, 1), (4, 2)])
def test_moments_are_coded_again_on_another_mesh(tmp_path, ranks, stage):
    """Each moment is within half the widest gap of its new block, whose largest number was saved."""

    def save(mesh):
        state, _ = trained(mesh, 2, optimizer(), 5)
        checkpoint.save(tmp_path, state)
        return moments(state), parameters(state)

    def resume(mesh):
        plain, _ = restored(mesh, stage, sl.optim.adamw(**HOW), tmp_path)  # the same numbers, as they are
        state, _ = restored(mesh, stage, optimizer(), tmp_path)
        for name, coding in (("mu", SIGNED), ("nu", UNSIGNED)):
            kept = getattr(state.opt.inner, name)
            for bucket, saved in getattr(plain.opt.inner, name).items():
                if isinstance(kept[bucket], Packed):
                    found = kept[bucket].unpacked()
                    gap = (
                        kept[bucket].scales.repeat_interleave(BLOCK)[: len(found)] * table(coding).numbers.diff().max()
                    )
                    assert ((found - saved).abs() <= 0.5001 * gap).all()
                    assert torch.equal(*(torch.stack([x[:BLOCK].abs().max()]) for x in (found, saved)))
                else:
                    assert torch.equal(kept[bucket], saved)
        return moments(plain), parameters(state)

    two = sl.simulate(save, mesh={"data": 2})
    found = sl.simulate(resume, mesh={"data": ranks})
    for _, params in found:
        assert_same(params, two[0][1])
    for name in ("mu", "nu"):
        owners = ranks if stage else 1
        saved, read = (
            [torch.cat([mine[name][leaf] for mine, _ in ours]) for leaf in range(len(PATHS))]
            for ours in (two, found[:owners])
        )
        assert_same(read, saved)  # as one number per element


def test_a_checkpoint_of_adamw_resumes_in_8_bits(tmp_path):
    def run(mesh):
        state, _ = trained(mesh, 2, sl.optim.adamw(**HOW), 5)
        checkpoint.save(tmp_path, state)
        again, _ = restored(mesh, 2, optimizer(), tmp_path)
        for name, tensor in state.opt.inner.nu.items():
            kept = again.opt.inner.nu[name]
            wanted = UNSIGNED.decode(*UNSIGNED.encode(tensor)) if isinstance(kept, Packed) else tensor
            assert torch.equal(kept.unpacked() if isinstance(kept, Packed) else kept, wanted)

    sl.simulate(run, mesh={"data": 2})
