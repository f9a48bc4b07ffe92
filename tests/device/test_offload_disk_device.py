"""States on disk beside a device with a memory of its own: a missing wait, or memory lent too briefly, is a wrong number."""

import pytest


@pytest.mark.parametrize("reduce", ["bf16", "fp32", None])
def test_bytes_at_the_links_are_the_plans_and_numbers_those_without(on_rig, tmp_path, reduce):
    def run(mesh):
        from helpers.linked import compared

        import shardlib as sl

        plan = [sl.precision("bf16", reduce_dtype=reduce)] if reduce else []
        whole = sl.offload("disk", folder=tmp_path)
        half = sl.offload("disk", fraction=0.5, folder=tmp_path / "b")
        return compared(mesh, [16, 64, 64, 4], 8, [plan, [*plan, whole], [*plan, half]])

    without, *others = on_rig(run)
    for found in others:
        found.assert_moves_what_is_planned(without)
        assert found.planned["down"] > 0 and found.live < without.live


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_in_host_memory_beside_states_on_disk(rigs, tmp_path, stage):
    """Both are worked on in host memory. At these stages each rank's new parameters wait there until all are gathered."""

    def run(mesh):
        import torch

        import shardlib as sl

        def loss_fn(params, x):
            for layer in params:
                x = torch.tanh(x @ layer["w"])
            return x.float().square().mean()

        params = [{"w": torch.randn(16, 16, generator=torch.Generator().manual_seed(i))} for i in range(4)]
        seen = []
        for more in ([], [sl.offload("disk", params="host", folder=tmp_path)]):
            transform = sl.chain(sl.zero(stage), sl.precision("bf16"), *more)
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.adamw(0.1))
            for number in range(3):
                draw = torch.Generator().manual_seed(10 * mesh.rank + number)
                state, metrics = step(state, torch.randn(4, 16, generator=draw).to(mesh.device))
            seen.append((metrics["loss"].item(), [leaf["w"].cpu().tolist() for leaf in sl.unshard(state.params)]))
        return seen

    for without, found in rigs.run(run, mesh={"data": 2}):
        assert found == without
