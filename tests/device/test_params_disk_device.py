"""Parameters on disk beside a device with a memory of its own: a block of host memory that is lent too briefly, or a missing
wait, is a wrong number."""

import pytest

CASES = {
    "stage 0": ("[]", 1),
    "bf16": ("[sl.precision('bf16')]", 1),
    "stage 1, bf16": ("[sl.zero(1), sl.precision('bf16')]", 2),
    "stage 3": ("[sl.zero(3)]", 2),
    "a share": ("[sl.zero(3), sl.precision('bf16')]", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_at_the_links_are_the_plans_and_numbers_those_without(rigs, tmp_path, case):
    transforms, ranks = CASES[case]
    fraction = 0.5 if case == "a share" else 1.0

    def run(mesh):
        from helpers.linked import compared

        import shardlib as sl

        plan = eval(transforms)
        disk = sl.offload("disk", params="disk", folder=tmp_path, fraction=fraction)
        return compared(mesh, [16, 64, 64, 64, 64, 4], 8, [plan, [*plan, disk]])

    for without, found in rigs.run(run, mesh={"data": ranks}):
        found.assert_moves_what_is_planned(without)
        assert found.params == 0 < without.params
        assert found.planned["up"] > 0 and found.planned["read"] > 0
