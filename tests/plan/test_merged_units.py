"""Small neighbouring elements of a list are one unit: which ones, and under which names."""

import pytest
import torch
from helpers.merging import merging

import shardlib as sl

LIMIT = 1 << 10


def matrix(*shape):
    return {"w": torch.empty(shape, device="meta")}


def units(params, transform=None, mesh=None, most=LIMIT):
    with merging(most):
        plan = sl.make_plan(params, sl.abstract_mesh(**(mesh or {"data": 2})), transform or sl.zero(3))
    return list(plan.units)


def test_neighbours_are_merged_up_to_the_limit_in_their_order():
    layers = [matrix(8, 8) for _ in range(9)]  # of 256 bytes
    assert units({"layers": layers}) == ["layers/0…3", "layers/4…7", "layers/8"]
    assert units({"layers": layers}, most=255) == units({"layers": layers}, most=0) == [f"layers/{n}" for n in range(9)]
    assert units(layers, most=1 << 20) == ["0…8"]
    assert units({"layers": layers}, sl.chain(sl.zero(1), sl.precision("bf16"))) == ["layers/0…7", "layers/8"]


def test_what_is_large_is_a_unit_by_itself_and_nothing_is_merged_across_it():
    layers = [matrix(8, 8), matrix(8, 8), matrix(32, 32), matrix(8, 8), matrix(8, 8)]
    assert units({"b": layers, "a": matrix(2, 2)}) == ["a", "b/0…1", "b/2", "b/3…4"]


def test_sizes_are_those_of_slices():
    layers = [{"weight": torch.empty(16, 16, device="meta")} for _ in range(4)]
    sliced = sl.chain(sl.zero(3), sl.tensor_slicing({"layers/*": "column"}))
    assert units({"layers": layers}) == [f"layers/{n}" for n in range(4)]
    assert units({"layers": layers}, sliced, {"data": 2, "model": 2}) == ["layers/0…1", "layers/2…3"]


def test_lists_within_an_element_are_merged_with_it_or_among_themselves():
    def element(parts, width):
        return {"own": matrix(2, 2), "parts": [matrix(width, width) for _ in range(parts)]}

    assert units({"layers": [element(2, 2), element(2, 2), element(8, 8)]}) == [
        "layers/0…1", "layers/2", "layers/2/parts/0…3", "layers/2/parts/4…7",
    ]  # fmt: skip
    assert units([element(2, 2)], most=0) == ["0", "0/parts/0", "0/parts/1"]
    assert units([element(2, 2)]) == ["0"]


def test_elements_without_leaves_of_their_own_neither_join_nor_part():
    layer, other = matrix(2, 2), matrix(2, 2)
    with merging(LIMIT):
        plan = sl.make_plan([layer, {}, other, layer], sl.abstract_mesh(data=2), sl.zero(3))
    (bucket,) = plan.buckets
    assert (bucket.unit, bucket.paths) == ("0…2", ("0/w", "2/w"))
    assert plan.placement_of["0/w"].aliases == ("3/w",)


def test_names_of_buckets_are_unique_and_derived():
    layers = [{"w": torch.empty(4, 4), "n": torch.empty(4, dtype=torch.float64)} for _ in range(2)]
    with merging(LIMIT):
        plan = sl.make_plan({"layers": layers}, sl.abstract_mesh(data=2), sl.zero(3))
    assert [bucket.name for bucket in plan.buckets] == ["layers/0…1/float32", "layers/0…1/float64"]
    assert "layers/0…1" in str(plan)


def leave(params, carry, batch):
    return (carry @ params["w"]).square().mean()


@pytest.mark.parametrize("interleaved", [1, 2])
def test_nothing_is_merged_across_stages(interleaved):
    params = [matrix(2, 2) for _ in range(8)]
    schedule = "1f1b" if interleaved == 1 else "interleaved-1f1b"
    pipeline = sl.pipeline(schedule, 4, partition="count", **({} if interleaved == 1 else {"chunks": 2}))
    found = units(params, sl.chain(sl.zero(1), pipeline), {"data": 2, "pipe": 2})
    assert found == (["0…3", "4…7"] if interleaved == 1 else ["0…1", "2…3", "4…5", "6…7"])


def test_units_stay_where_steps_leave_out_layers():
    params = {"layers": [matrix(2, 2) for _ in range(3)]}
    assert units(params, sl.chain(sl.zero(3), sl.progressive_layer_drop(0.5))) == [f"layers/{n}" for n in range(3)]


def test_units_stay_where_parameters_or_a_share_of_the_bytes_live_elsewhere():
    params = {"layers": [matrix(2, 2) for _ in range(3)]}
    for offload in (sl.offload(fraction=0.5), sl.offload(params="host")):
        assert units(params, sl.chain(sl.zero(3), offload)) == [f"layers/{n}" for n in range(3)]
    assert units(params, sl.chain(sl.zero(3), sl.offload())) == ["layers/0…2"]


def test_what_is_gathered_in_tiles_stays_by_itself():
    params = {"layers": [matrix(2, 2), matrix(2, 2), matrix(4, 4), matrix(2, 2)]}
    assert units(params, sl.chain(sl.zero(3), sl.tile("layers/2", 2))) == ["layers/0…1", "layers/2", "layers/3"]
