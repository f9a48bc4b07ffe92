"""Gradients on disk beside a device with a memory of its own: a block that is written before its copy has come, or lent too
briefly, is a wrong number."""

import pytest

CASES = {
    "stage 0, bf16": ("[sl.precision('bf16')]", 1),
    "stage 1, bf16 sums": ("[sl.zero(1), sl.precision('bf16', reduce_dtype='bf16')]", 2),
    "stage 3": ("[sl.zero(3)]", 2),
    "a share": ("[sl.zero(3), sl.precision('bf16')]", 1),
    "accumulated": ("[sl.zero(2), sl.precision('bf16'), sl.accumulate(3)]", 2),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_at_the_links_are_the_plans_and_numbers_those_without(rigs, tmp_path, case):
    transforms, ranks = CASES[case]
    fraction = 0.5 if case == "a share" else 1.0

    def run(mesh):
        from helpers import rig
        from helpers.linked import compared

        import shardlib as sl

        def left_in_backward(step, state, batch):
            """With gradients on their way."""
            with rig.limits(up=1e6, down=1e5):
                try:
                    step(state, batch)
                except ZeroDivisionError:
                    return
            raise AssertionError("the step did not fail")

        plan = eval(transforms)
        disk = sl.offload("disk", params="disk", gradients="disk", folder=tmp_path, fraction=fraction)
        failing = left_in_backward if mesh.size == 1 else None
        return compared(mesh, [16, 64, 64, 64, 64, 4], 12, [plan, [*plan, disk]], failing)

    for without, found in rigs.run(run, mesh={"data": ranks}):
        found.assert_moves_what_is_planned(without)
        # The host squares sums of several micro-batches, and rounds their sum in another order.
        accumulated = case == "accumulated"
        assert found.norms == (pytest.approx(without.norms, rel=1e-14) if accumulated else without.norms)
        assert without.grads == 0 < found.grads
