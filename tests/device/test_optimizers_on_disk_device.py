"""Optimizers whose states on disk are coded, or that make exchanges bucket by bucket, beside a device with its own memory."""

import pytest


@pytest.mark.parametrize("optimizer", ["adamw8bit", "lamb", "adafactor", "muon"])
def test_numbers_are_those_of_states_in_host_memory(rigs, tmp_path, optimizer):
    def run(mesh):
        import torch
        from helpers import rig

        import shardlib as sl

        def loss_fn(params, x):
            for layer in params:
                x = torch.tanh(x @ layer["w"])
            return x.float().square().mean()

        tx = {
            "adamw8bit": sl.optim.adamw8bit(0.1),
            "lamb": sl.optim.lamb(0.1),
            "adafactor": sl.optim.adafactor(0.1, 32, momentum=0.9),
            "muon": sl.optim.muon(0.1),
        }[optimizer]
        params = [{"w": torch.randn(96, 96, generator=torch.Generator().manual_seed(i)) / 10} for i in range(3)]
        seen = []
        for memory in (sl.offload(), sl.offload("disk", folder=tmp_path)):
            transform = sl.chain(sl.zero(2), sl.precision("bf16"), memory)
            state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), tx)
            for number in range(3):
                draw = torch.Generator().manual_seed(10 * mesh.rank + number)
                with rig.limits(up=1e7, down=1e7):
                    state, metrics = step(state, torch.randn(8, 96, generator=draw).to(mesh.device))
            seen.append((metrics["loss"].item(), [leaf["w"].cpu().tolist() for leaf in sl.unshard(state.params)]))
        return seen

    for in_memory, on_disk in rigs.run(run, mesh={"data": 2}):
        assert on_disk == in_memory
