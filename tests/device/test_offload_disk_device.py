"""States, parameters and gradients on disk beside a device with a memory of its own: a missing wait, a block that is written
before its copy has come, or one that is lent too briefly, is a wrong number."""

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


CASES = {
    "stage 0": ("[]", 1),
    "bf16": ("[sl.precision('bf16')]", 1),
    "stage 1, bf16 sums": ("[sl.zero(1), sl.precision('bf16', reduce_dtype='bf16')]", 2),
    "stage 3": ("[sl.zero(3)]", 2),
    "a share": ("[sl.zero(3), sl.precision('bf16')]", 1),
    "accumulated": ("[sl.zero(2), sl.precision('bf16'), sl.accumulate(3)]", 2),
}


@pytest.mark.parametrize("gradients", [None, "disk"])
@pytest.mark.parametrize("case", CASES)
def test_parameters_and_gradients_beside_states(rigs, tmp_path, case, gradients):
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
        disk = sl.offload("disk", params="disk", gradients=gradients, folder=tmp_path, fraction=fraction)
        failing = left_in_backward if mesh.size == 1 and gradients else None
        return compared(mesh, [16, 64, 64, 64, 64, 4], 12, [plan, [*plan, disk]], failing)

    for without, found in rigs.run(run, mesh={"data": ranks}):
        found.assert_moves_what_is_planned(without)
        # The host squares sums of several micro-batches, and rounds their sum in another order.
        rounded = case == "accumulated" and gradients
        assert found.norms == (pytest.approx(without.norms, rel=1e-14) if rounded else without.norms)
        assert found.params == 0 < without.params
        assert found.planned["up"] > 0 and found.planned["read"] > 0
        assert not gradients or without.grads == 0 < found.grads


@pytest.mark.parametrize("optimizer", ["adamw8bit", "lamb", "adafactor", "muon"])
def test_optimizers_that_are_coded_or_exchange_bucket_by_bucket(rigs, tmp_path, optimizer):
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
