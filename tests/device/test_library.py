"""The library on a device with a memory of its own: the numbers are the CPU's, and nothing of the host meets the device's."""

import pytest
from helpers.optimizer_cases import CASES

# name -> (transforms, mesh); the functions run where the device is.
PLANS = {
    "stage 0": (lambda sl, rules: [sl.zero(0)], {"data": 2}),
    "stage 1": (lambda sl, rules: [sl.zero(1)], {"data": 2}),
    "stage 2": (lambda sl, rules: [sl.zero(2)], {"data": 2}),
    "stage 3": (lambda sl, rules: [sl.zero(3)], {"data": 4}),
    "hybrid": (lambda sl, rules: [sl.zero(3, axis="data", replicate="node")], {"node": 2, "data": 2}),
    "slices": (lambda sl, rules: [sl.tensor_slicing(rules, axis="model"), sl.zero(3)], {"data": 2, "model": 2}),
    "ulysses": (lambda sl, rules: [sl.sequence(axis="seq"), sl.zero(2)], {"data": 2, "seq": 2}),
    "ring": (lambda sl, rules: [sl.sequence(axis="seq", kind="ring"), sl.zero(1)], {"data": 1, "seq": 2}),
    "accumulated": (lambda sl, rules: [sl.zero(2), sl.accumulate(2)], {"data": 2}),
    "recomputed": (lambda sl, rules: [sl.zero(3), sl.remat()], {"data": 2}),
    "recomputed but for products": (lambda sl, rules: [sl.zero(2), sl.remat("dots")], {"data": 2}),
    "bf16": (lambda sl, rules: [sl.zero(3), sl.precision("bf16")], {"data": 2}),
    "fp16": (lambda sl, rules: [sl.zero(1), sl.precision("fp16")], {"data": 2}),
    "1-bit": (lambda sl, rules: [sl.zero(1), sl.onebit()], {"data": 2}),
    "int8": (lambda sl, rules: [sl.zero(3), sl.quantize("int8", "int8")], {"data": 2}),
    "int4": (lambda sl, rules: [sl.zero(1), sl.quantize(gradients="int4")], {"data": 2}),
    "fp8": (lambda sl, rules: [sl.zero(3), sl.quantize("fp8", "fp8")], {"data": 2}),
    "powersgd": (lambda sl, rules: [sl.zero(0), sl.powersgd(rank=2)], {"data": 2}),
    "frozen": (lambda sl, rules: [sl.zero(2), sl.freeze(["*mlp*"])], {"data": 2}),
    "reproducible": (lambda sl, rules: [sl.zero(2), sl.reproducible(8)], {"data": 2}),
}


def trained(plan, device, folder=None):
    """The losses of three steps of a small GPT with dropout on a simulated mesh; saved after two, if there is a folder."""
    import torch
    from helpers.models import share

    import shardlib as sl
    from shardlib.models import gpt

    make, shape = PLANS[plan]
    config = gpt.GPTConfig(vocab=29, layers=2, width=16, heads=4, sequence=8, dropout=0.1)
    drawn = torch.randint(29, (16, 9), generator=torch.Generator().manual_seed(4))

    def run(mesh):
        def start():
            params = sl.shard(gpt.init(config), mesh, sl.chain(*make(sl, gpt.slicing_rules(config))))
            tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(1e-2))
            return sl.make_train_step(gpt.make_loss(config), params, tx, rng=5)

        state, step = start()
        rows = share(drawn, mesh.coords.get("node", 0) * mesh.shape.get("data", 1) + mesh.coords.get("data", 0),
                     mesh.shape.get("node", 1) * mesh.shape.get("data", 1)).to(mesh.device)  # fmt: skip
        batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        losses = []
        for number in range(3):
            if number == 2 and folder:
                with sl.checkpoint.Manager(folder) as manager:
                    manager.save(state)
                state, step = start()
                state = sl.checkpoint.restore(folder, state)
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
        assert all(buffer.device == mesh.device for buffer in state.params.buffers.values())
        return losses

    return sl.simulate(run, mesh=shape, device=device)


@pytest.mark.parametrize("plan", PLANS)
def test_every_transform_trains_as_on_the_cpu(on_rig, plan, tmp_path):
    found, wanted = on_rig(lambda mesh: (trained(plan, "rig", tmp_path), trained(plan, "cpu")))
    tolerance = 1e-2 if plan in ("bf16", "fp16", "int8", "fp8", "1-bit") else 1e-5
    for rank, other in zip(found, wanted, strict=True):
        assert rank == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_steps_as_on_the_cpu(on_rig, name):
    def run(mesh):
        import torch
        from helpers.optimizer_cases import CASES, VECTORS, batches, model

        import shardlib as sl

        def losses(device):
            def rank(mesh):
                loss_fn, params = model()
                transform = sl.chain(sl.zero(1), sl.freeze(VECTORS)) if CASES[name].matrices else sl.zero(1)
                state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), CASES[name].make())
                seen = []
                for batch in batches(4):
                    rows = tuple(leaf.chunk(2)[mesh.rank].to(mesh.device) for leaf in batch)
                    state, metrics = step(state, rows)
                    seen.append(metrics["loss"].item())
                held = [leaf for leaf in torch.utils._pytree.tree_leaves(state.opt) if isinstance(leaf, torch.Tensor)]
                return seen, {str(leaf.device) for leaf in held if leaf.dim()}

            return sl.simulate(rank, mesh={"data": 2}, device=device)

        return losses("rig")[0], losses("cpu")[0]

    (found, where), (wanted, _) = on_rig(run)
    assert found == pytest.approx(wanted, rel=1e-5) and where <= {"rig:0"}
