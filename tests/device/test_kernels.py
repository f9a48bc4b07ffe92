"""Every kernel's operation serves a device: the implementation that is chosen there gives the reference's numbers."""

import pytest

CASES = ("communication_kernels", "optimizer_kernels", "layer_kernels", "sparse_attention")


@pytest.mark.parametrize("case", CASES)
def test_what_is_chosen_for_the_device_is_right(on_device, case):
    def run(mesh):
        from unittest.mock import patch

        from benchmarks.harness import rates
        from benchmarks.tables import tables

        (found,) = [made for table in tables("cuda") for made in table.cases if made.name == case]
        with patch.object(rates, "implementations", lambda device: (None,)):  # the one that is chosen
            return found.check(mesh.device)

    checks = on_device(run)
    assert checks and [what for what in checks if not what[1].startswith("ok")] == []
