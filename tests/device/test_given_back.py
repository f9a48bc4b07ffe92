"""Pinned memory that a step keeps for the next one: given back when the state moves away, and made anew."""

import pytest

CASES = {
    "host": "[sl.zero(1), sl.precision('bf16'), sl.offload()]",
    "fp32": "[sl.offload(params='host', gradients='host')]",
    "speculate": "[sl.precision('bf16'), sl.offload(speculate=True)]",
    "delay": "[sl.precision('bf16'), sl.offload(delay=True)]",
    "states on disk": "[sl.precision('bf16'), sl.offload('disk', folder=folder)]",
    "all on disk": "[sl.precision('bf16'), sl.offload('disk', params='disk', folder=folder)]",
    "gradients on disk": "[sl.precision('bf16'), sl.offload('disk', params='disk', gradients='disk', folder=folder)]",
    "inputs of blocks": "[sl.remat(store='host', smallest=1)]",
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_that_moves_away_leaves_no_pinned_memory(on_rig, tmp_path, case):
    def run(mesh, transforms, folder):
        import gc

        import torch
        from helpers import rig

        import shardlib as sl

        @sl.block
        def layer(params, x):
            return torch.tanh(x @ params["w"])

        def loss_fn(params, x):
            for each in params:
                x = layer(each, x)
            return x.float().square().mean()

        torch.manual_seed(0)
        whole = [{"w": torch.randn(32, 32) / 6} for _ in range(5)]
        batch = torch.ones(4, 32, device=mesh.device)

        def pinned():
            gc.collect()
            return rig.counts().pinned

        def trained(moves):
            params = sl.shard(whole, mesh, sl.chain(*eval(transforms)))
            state, step = sl.make_train_step(loss_fn, params, sl.optim.adamw(1e-2))
            del params
            losses, held = [], []
            for number in range(3):
                state, metrics = step(state, batch)
                losses.append(metrics["loss"].item())
                if moves:
                    kept = pinned()
                    state = sl.to_disk(state, f"{folder}/parked{number}")
                    held.append((kept, pinned()))
                    state = sl.to_device(state)
            return losses, [leaf.tolist() for each in sl.unshard(state.params) for leaf in each.values()], held

        before = pinned()
        *moved, held = trained(True)
        *wanted, _ = trained(False)
        return moved == wanted, [(kept - before, left - before) for kept, left in held]

    same, held = on_rig(run, CASES[case], str(tmp_path))
    assert same
    for kept, left in held:
        assert kept > 0 == left
