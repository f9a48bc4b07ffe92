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

    def run(mesh, transforms, fraction):
        import torch
        from helpers import rig
        from helpers.models import mlp, regression_batch, share

        import shardlib as sl

        loss_fn, params = mlp([16, 64, 64, 64, 64, 4], torch.float32)
        whole = share(regression_batch(8, 16, 4, torch.float32), mesh.rank, mesh.size)
        batch = tuple(leaf.to(mesh.device) for leaf in whole)
        seen = []
        for more in ([], [sl.offload("disk", params="disk", folder=tmp_path, fraction=fraction)]):
            tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(1e-2))
            sharded = sl.shard(params, mesh, sl.chain(*eval(transforms), *more))
            state, step = sl.make_train_step(loss_fn, sharded, tx)
            losses = []
            for _ in range(4):
                torch.accelerator.synchronize()
                rig.reset()
                with rig.limits(up=1e6, down=1e6):
                    state, metrics = step(state, batch)
                    torch.accelerator.synchronize()
                counts = rig.counts()
                losses.append(metrics["loss"].item())
            plan = sl.make_plan(
                params, mesh, sl.chain(*eval(transforms), *more), optimizer=tx, loss_fn=loss_fn, batch=batch
            )
            final = [leaf.cpu().tolist() for leaf in sl.unshard(state.params)["layers"][1].values()]
            seen.append((losses, final, counts.down, counts.up, plan.transfers(), plan.bytes("param", "device")))
            del state, step, sharded
        return seen

    for without, found in rigs.run(run, transforms, fraction, mesh={"data": ranks}):
        assert found[:2] == without[:2]
        assert found[5] == 0 < without[5]
        assert (found[2] - without[2], found[3] - without[3]) == (found[4]["down"], found[4]["up"])
        assert found[4]["up"] > 0 and found[4]["read"] > 0
