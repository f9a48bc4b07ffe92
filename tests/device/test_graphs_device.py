"""A step as a graph beside a device with a memory of its own: a missing wait is a wrong number, and bytes are counted."""

import pytest

CASES = {
    "stage 0": ("[sl.zero(0)]", {"params": "host"}, 1),
    "stage 3": ("[sl.zero(3), sl.accumulate(2)]", {"params": "host", "gradients": "host"}, 2),
    "states": ("[sl.zero(2), sl.precision('bf16')]", {"speculate": True}, 2),
    "tiles": ("[sl.zero(3), sl.accumulate(2), sl.tile('*', 2)]", {"params": "host", "gradients": "host"}, 2),
    "disk": ("[sl.zero(3)]", {"optimizer": "disk", "params": "disk", "gradients": "disk"}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_without_a_graph(rigs, tmp_path, case):
    transforms, options, ranks = CASES[case]

    def run(mesh):
        from helpers.linked import compared

        import shardlib as sl

        disk = {"folder": tmp_path} if case == "disk" else {}
        plan = eval(transforms)
        ways = {"mesh": mesh, "sizes": [16, 64, 64, 64, 64, 4], "rows": 8}
        plain, here = compared(**ways, plans=[plan, [*plan, sl.offload(**options, **disk)]])
        plain_graph, graph = compared(**ways, plans=[plan, [*plan, sl.offload(**options, **disk)]], compile=True)
        return plain, here, plain_graph, graph

    for plain, here, plain_graph, graph in rigs.run(run, mesh={"data": ranks}):
        assert graph.numbers == here.numbers == plain.numbers
        assert graph.down - plain_graph.down == here.down - plain.down > 0
        assert graph.up - plain_graph.up <= here.up - plain.up
