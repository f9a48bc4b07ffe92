"""Code paths that begin above a size give the same results when they are forced at small sizes."""

import ast
from pathlib import Path

import optree
import pytest
import torch
from helpers.optimizer_cases import CASES, batches, model
from helpers.trees import assert_close

import shardlib as sl
from shardlib import sparse
from shardlib.common import thresholds

SOURCES = Path(sl.__file__).parent
NUMBERS = ast.Constant | ast.BinOp | ast.operator | ast.Tuple | ast.expr_context
COMPRESSING = {
    "onebit_adam": lambda: sl.optim.onebit_adam(0.02, 2, b2=0.9),
    "onebit_lamb": lambda: sl.optim.onebit_lamb(0.02, 2, b2=0.9),
    "zero_one_adam": lambda: sl.optim.zero_one_adam(0.02, 2, b2=0.9),
}
MATRICES_ALONE = {name for name, case in CASES.items() if case.matrices}


def trained(make, mesh, transform, steps=4):
    loss_fn, params = model()

    def run(mesh):
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), make())
        for batch in batches(steps):
            state, _ = step(state, batch)
        return sl.unshard(state.params)

    return sl.simulate(run, mesh=mesh)[0]


def test_a_threshold_is_small_only_within():
    limit = thresholds.Threshold(100)
    with thresholds.small(7):
        assert limit() == 7
        with thresholds.small(1000):
            assert limit() == 100
        assert limit() == 7
    assert limit() == 100
    one, other = thresholds.small(7), thresholds.small(9)  # as of two threads, of which the first ends first
    with one:
        other.__enter__()
    assert limit() == 9
    other.__exit__(None, None, None)
    assert limit() == 100


def test_no_other_large_size_decides_anything():
    """Sizes with which modules compare are `Threshold`s, which tests can set."""
    # Bytes of a message's head and of a text's chunks, numbers of exchanges, pixels, a mask of bits; the size from which
    # moments are coded, which tests reach; what the C++ kernels' sums are cut by, and a checksum, which they reach too.
    known = {"_HEAD", "_CHUNK", "_EXCHANGES, _SIZES, _SINGLE", "_FIRST", "_PIXELS", "_MASK", "_SMALL", "_SPAN"}
    known |= {"_WORDS", "_ROWS_ELSEWHERE"}
    # Bits of a number, what a file's arrays begin after and pieces in which they are read, the longest pattern of a mixture
    # and the most samples of an order.
    known |= {"_LOW", "_MANTISSA", "START", "CHUNK", "_LONGEST", "_LARGEST"}
    known |= {"SHARD", "SMALLEST"}  # of an exported file, of what is moved to the host: the defaults of arguments
    known |= {"BLOCK", "NOTES"}  # of a disk, and what a step there may say
    known |= {"_PART", "_ROOM"}  # samples that are analyzed and merged at once: arguments, which tests give
    known |= {"_SIDES"}  # of matrices that are timed
    known |= {"_MOST", "_SEQUENCE"}  # values that an object is searched for; the tokens of a row by default
    known |= {"_SEEDS, _STARTS, _ROOM, _UNKNOWN"}  # numbers that stand for others in a trace
    found = set()
    for path in SOURCES.rglob("*.py"):
        if path.name not in ("triton.py", "cuda.py", "tiles.py"):  # tiles, of which tests have several
            for line in ast.parse(path.read_text()).body:
                if isinstance(line, ast.Assign) and all(isinstance(part, NUMBERS) for part in ast.walk(line.value)):
                    values = eval(ast.unparse(line.value))
                    if any(isinstance(value, int) and value >= 1000 for value in optree.tree_leaves(values)):
                        found.add(ast.unparse(line.targets[0]).strip("()"))
    assert found == known


@pytest.mark.parametrize("name", sorted(CASES.keys() - MATRICES_ALONE))
def test_optimizers_take_large_leaves_by_chunks(name):
    """Chunks begin and end anywhere in a row, and each leaf is sent alone."""
    wanted = trained(CASES[name].make, {"data": 2}, sl.zero(2))
    with thresholds.small(4):
        assert_close(trained(CASES[name].make, {"data": 2}, sl.zero(2)), wanted, 1e-9)


@pytest.mark.parametrize("name", COMPRESSING)
def test_compressed_means_of_many_buckets_are_several_exchanges(name):
    wanted = trained(COMPRESSING[name], {"data": 2}, sl.zero(0), 8)
    with thresholds.small(4):
        assert_close(trained(COMPRESSING[name], {"data": 2}, sl.zero(0), 8), wanted, 1e-9)


@pytest.mark.parametrize("stage", [0, 3])
def test_initial_values_of_large_leaves_are_drawn_by_chunks(stage):
    def init():
        return {"w": sl.init.normal(sl.Key(1), (7, 9)), "v": sl.init.uniform(sl.Key(2), (33,))}

    def run(mesh):
        return sl.unshard(sl.shard(init, mesh, stage=stage))

    wanted = sl.simulate(run, mesh={"data": 2})[0]
    with thresholds.small(5):
        found = sl.simulate(run, mesh={"data": 2})[0]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_layouts_of_many_blocks_are_written_by_chunks(causal):
    def made():
        return (
            sparse.bigbird(640, block=16, random=2, causal=causal),
            sparse.longformer(640, block=16, global_blocks=[0, 5], causal=causal),
            sparse.sliding_window(640, block=16, causal=causal),
            sparse.fixed(640, block=16, heads=4, patterns=4, causal=causal),
            sparse.variable(640, block=16, random=1, windows=[2, 3], heads=2, causal=causal),
        )

    wanted = made()
    with thresholds.small(100):  # two rows of 40 blocks
        found = made()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.row_offsets, other.row_offsets) and torch.equal(one.columns, other.columns)


def test_block_masks_of_many_blocks_are_read_by_chunks():
    layout = sparse.bigbird(300, block=32, heads=2, causal=True)
    mask = sparse.to_block_mask(layout, 300, causal=True)
    with thresholds.small(3):
        assert torch.equal(sparse.from_block_mask(mask, causal=True).to_dense(), layout.to_dense())
        with pytest.raises(ValueError, match="hides other pairs than causal=False does"):
            sparse.from_block_mask(mask)
