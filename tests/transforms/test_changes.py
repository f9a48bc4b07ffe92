"""The changes that a refusal weighs: each can be made, and the search for them ends."""

import itertools

import pytest
import torch

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.plan.transform import Transform
from shardlib.transforms.accumulate import Accumulate
from shardlib.transforms.changes import changes, difference, largest, other_changes
from shardlib.transforms.offload import Offload


def edits(transform: Transform, kind: type, rows: int = 1) -> list:
    """What the changes of a chain make of its transform of one kind."""
    found = itertools.islice(changes(transform, {"device"}, {"data": 4}, rows, elementwise=True, disk=True), 1000)
    return [
        member
        for changed in found
        for member in changed.transforms
        if isinstance(member, kind) and member not in getattr(transform, "transforms", (transform,))
    ]


@pytest.mark.parametrize(
    ("rows", "cuts"),
    [
        (0, []),
        (1, []),
        (34, [2, 17, 34]),
        (12, [2, 4, 12]),
        (3087, [3, 7, 21, 49, 147]),
        (1 << 20, [2, 4, 8, 16, 32, 64, 128, 256]),
    ],
)
def test_micro_batches_are_divisors_of_the_rows(rows, cuts):
    assert [cut.microbatches for cut in edits(sl.zero(0), Accumulate, rows)] == cuts


@pytest.mark.parametrize("update", ["speculate", "delay"])
def test_updates_ahead_stay_on_the_host(update):
    parallel = sl.chain(sl.zero(0), sl.offload(**{update: True}))
    found = edits(parallel, Offload)
    assert {moved.optimizer for moved in found} == {"host", "disk"}
    assert all(moved.update == (None if moved.optimizer == "disk" else update) for moved in found)


@pytest.mark.parametrize(
    "impossible",
    [
        {"update": "speculate", "optimizer": "disk", "folders": ("a",)},
        {"update": "delay", "fraction": 0.5},
        {"optimizer": "disk"},
        {"folders": ("a",)},
        {"params": "disk"},
        {"fraction": 2.0},
    ],
)
def test_no_one_builds_what_offload_refuses(impossible):
    given = {"optimizer": "host", "params": None, "gradients": None, "fraction": 1.0}
    with pytest.raises(IllegalComposition, match=r"^offload\("):
        Offload(**{**given, **impossible})


def test_several_edits_are_told_as_one_difference():
    """From the first chain to the last: what came between is nobody's."""
    first = sl.chain(sl.zero(0), sl.remat(), sl.offload())
    last = sl.chain(sl.zero(2), sl.remat(store="host"))
    plan = sl.make_plan({"w": torch.ones(8)}, sl.abstract_mesh(data=4), last)
    assert difference(first, last, plan) == (
        "sl.zero(2) in place of sl.zero(); sl.remat(store='host') in place of sl.remat(); leave out sl.offload()"
    )


def test_recompute_of_no_block_is_told_as_left_out():
    before, after = (sl.chain(sl.zero(0), sl.remat(policy, store="host")) for policy in ("full", "auto"))
    made = sl.make_plan({"w": torch.ones(8)}, sl.abstract_mesh(data=1), sl.chain(sl.zero(0), sl.remat(blocks=0)))
    assert difference(before, after, made) == "leave out sl.remat(store='host')"


def test_rounded_sums_and_tiles_are_tried_where_nothing_else_fits():
    params = {"blocks": [{"up": torch.ones(64, 8), "gain": torch.ones(8)} for _ in range(2)], "head": torch.ones(32, 8)}
    parallel = sl.chain(sl.zero(3), sl.precision("bf16"))
    weights = largest(sl.make_plan(params, sl.abstract_mesh(data=2), parallel))
    assert weights == ["blocks/*/up", "head"]
    found = [
        set(changed.transforms) - set(parallel.transforms) for changed in other_changes(parallel, {"device"}, weights)
    ]
    rounded, *tiles = [new for (new,) in found]
    assert rounded == sl.precision("bf16", reduce_dtype="bf16")
    assert tiles == [sl.tile(glob, n) for glob in weights for n in (4, 16)]
    assert not [*other_changes(sl.chain(sl.zero(0)), {"host"}, weights)]


def test_a_refusal_names_rounded_sums_where_nothing_else_holds_less():
    def loss_fn(params, x):
        return (x @ params["w"]).sum()

    params, batch = {"w": torch.ones(256, 256)}, torch.ones(1, 256)
    parallel = sl.chain(sl.precision("bf16"), sl.offload(params="host", gradients="host"))
    given = {"loss_fn": loss_fn, "batch": batch, "optimizer": sl.optim.sgd(0.1)}
    peak = sl.make_plan(params, sl.abstract_mesh(data=1), parallel, **given).peak_bytes
    with pytest.raises(IllegalComposition, match=r"reduce_dtype='bf16'"):
        sl.make_plan(params, sl.abstract_mesh(data=1), parallel, device_memory=int(0.8 * peak), **given)
