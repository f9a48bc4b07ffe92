"""The library on a device with a memory of its own: the numbers are the CPU's, and nothing of the host meets the device's."""

import time

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
def test_every_transform_trains_as_on_the_cpu(on_device, plan, tmp_path):
    found, wanted = on_device(lambda mesh: (trained(plan, mesh.device, tmp_path), trained(plan, "cpu")))
    tolerance = 1e-2 if plan in ("bf16", "fp16", "int8", "fp8", "1-bit") else 1e-5
    for rank, other in zip(found, wanted, strict=True):
        assert rank == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_steps_as_on_the_cpu(on_device, name):
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

        return losses(mesh.device)[0], losses("cpu")[0], {str(mesh.device)}

    (found, where), (wanted, _), there = on_device(run)
    assert found == pytest.approx(wanted, rel=1e-5) and where <= there


def test_a_save_goes_on_while_later_steps_change_the_state(on_rig, tmp_path):
    """The copy to the host is still on its way when the next steps take over the state's memory."""

    def run(mesh):
        import torch
        from helpers import rig
        from helpers.models import mlp, regression_batch

        import shardlib as sl

        loss_fn, params = mlp([64, 64, 4])
        batch = tuple(leaf.to("rig") for leaf in regression_batch(8, 64, 4))
        state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=3), sl.optim.adamw(0.1))
        state, _ = step(state, batch)
        wanted = sl.unshard(state.params)["layers"][0]["weight"].cpu()
        with sl.checkpoint.Manager(tmp_path) as manager:
            rig.reset()
            with rig.limits(down=100_000):
                begun = time.perf_counter()
                manager.save(state)
                returned = time.perf_counter() - begun
                counts = rig.counts()
                for _ in range(2):
                    state, _ = step(state, batch)
                manager.wait()
        fresh, _ = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=3), sl.optim.adamw(0.1))
        found = sl.unshard(manager.restore(fresh).params)["layers"][0]["weight"].cpu()
        return torch.equal(found, wanted), counts.pinned_peak, returned

    same, pinned, returned = on_rig(run)
    # Parameters and two moments of 64 × 64 + 64 + 64 × 4 + 4 elements in float64 take 1 s; the call does not wait for them.
    assert same and pinned >= 3 * 8 * 4420 and returned < 0.9


def test_a_pipeline(on_device):
    def run(mesh):
        import torch

        import shardlib as sl

        blocks = [lambda p, carry, x: x @ p["w"], lambda p, carry, x: (carry @ p["w"]).square().mean()]
        weights = [{"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))} for seed in range(2)]
        parallel = sl.chain(sl.pipeline("1f1b", microbatches=4), sl.zero(1))

        def losses(device):
            def rank(mesh):
                state, step = sl.make_train_step(
                    sl.sequential(blocks), sl.shard(weights, mesh, parallel), sl.optim.sgd(0.1)
                )
                x = torch.arange(64.0).view(8, 8).chunk(2)[mesh.coords["data"]].to(mesh.device) / 64
                seen = []
                for _ in range(3):
                    state, metrics = step(state, x)
                    seen.append(metrics["loss"].item())
                return seen

            return sl.simulate(rank, mesh={"pipe": 2, "data": 2}, device=device)

        return losses(mesh.device), losses("cpu")

    found, wanted = on_device(run)
    assert found == [pytest.approx(rank, rel=1e-5) for rank in wanted]


def _models():
    from helpers.architectures import ARCHITECTURES

    # Mixtral counts its experts' tokens in integers, except on a CPU, whose kernels are the test device's, and cannot.
    kinds, quick = [kind for kind in ARCHITECTURES if kind != "mixtral"], ("gpt2", "llama", "bert")
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.nightly) for kind in kinds]


@pytest.mark.parametrize("kind", _models())
def test_a_model_of_transformers_trains_and_is_evaluated(on_device, kind):
    def run(mesh):
        import torch
        from helpers.architectures import ARCHITECTURES, SIZES
        from transformers import AutoConfig

        import shardlib as sl

        auto, changes = ARCHITECTURES[kind]
        config = AutoConfig.for_model(kind, **{**SIZES, **changes})
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(3, 50, (4, 8), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        if kind == "vit":
            batch = {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator), "labels": tokens[:, 0] % 5}

        def scores(device):
            def rank(mesh):
                torch.manual_seed(0)
                apply, params = sl.from_module(auto.from_config(config))
                loss_fn = lambda p, batch: apply(p, **batch).loss  # noqa: E731
                state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=3), sl.optim.adamw(1e-2))
                rows = {name: leaf.chunk(2)[mesh.rank].to(mesh.device) for name, leaf in batch.items()}
                state, _ = step(state, rows)
                state, metrics = step(state, rows)
                evaluate = sl.make_eval_step(lambda p, batch: {"loss": sl.Mean(loss_fn(p, batch) * 2, 2)}, state.params)
                return metrics["loss"].item(), evaluate(state, rows)["loss"].item()

            return sl.simulate(rank, mesh={"data": 2}, device=device)

        return scores(mesh.device), scores("cpu")

    found, wanted = on_device(run)
    assert found == [pytest.approx(rank, rel=1e-4) for rank in wanted]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_under_autocast(on_device, stage):
    """The device's casts are not the CPU's in every operation: products are in bf16, and their gradients fp32."""

    def run(mesh):
        import torch
        from helpers.models import mlp, regression_batch

        import shardlib as sl

        plain, params = mlp([16, 32, 4], dtype=torch.float32)
        batch = tuple(leaf.float() for leaf in regression_batch(8, 16, 4))
        seen = set()

        def losses(device):
            def rank(mesh):
                def loss_fn(p, batch):
                    with torch.autocast(mesh.device.type, torch.bfloat16):
                        seen.add((batch[0] @ p["layers"][0]["weight"].T).dtype)
                        return plain(p, batch)

                state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, stage=stage), sl.optim.adamw(1e-2))
                rows = tuple(leaf.chunk(2)[mesh.rank].to(mesh.device) for leaf in batch)
                found = []
                for _ in range(3):
                    state, metrics = step(state, rows)
                    found.append(metrics["loss"].item())
                return found

            return sl.simulate(rank, mesh={"data": 2}, device=device)

        return losses(mesh.device), losses("cpu"), seen

    found, wanted, seen = on_device(run)
    assert {str(dtype) for dtype in seen} == {"torch.bfloat16"}
    for rank, other in zip(found, wanted, strict=True):
        assert rank == pytest.approx(other, rel=2e-2)


def test_the_models_of_the_library_generate_the_same(on_device):
    def run(mesh):

        import shardlib as sl
        from shardlib.models import gpt

        config = gpt.GPTConfig(vocab=29, layers=2, width=16, heads=4, sequence=16)

        def text(device):
            def rank(mesh):
                params = sl.shard(gpt.init(config), mesh, stage=3)
                return sl.generate(config, params, [[1, 2, 3], [4]], 8, temperature=0)[0].tolist()

            return sl.simulate(rank, mesh={"data": 2}, device=device)

        return text(mesh.device) == text("cpu")

    assert on_device(run)


def test_batches_arrive_on_the_device_through_pinned_memory(on_device):
    def run(mesh):
        from contextlib import nullcontext

        import torch
        from helpers import rig

        import shardlib as sl

        rows = [{"x": torch.full((1000,), float(number)), "y": number} for number in range(12)]
        with rig.limits(up=10_000_000) if mesh.device.type == "rig" else nullcontext():
            seen = []
            for _, batch in zip(range(3), sl.data.loader(rows, mesh, batch=4, shuffle=False), strict=False):
                seen.append((str(batch["x"].device), batch["x"][:, ::999].tolist(), batch["y"].tolist()))
        return str(mesh.device), seen

    wanted = [[[float(row)] * 2 for row in range(first, first + 4)] for first in (0, 4, 8)]
    device, seen = on_device(run)
    assert seen == [(device, rows, [int(row) for row, _ in rows]) for rows in wanted]


def test_a_batch_on_the_host_is_refused(on_device):
    def run(mesh):
        import torch

        import shardlib as sl

        state, step = sl.make_train_step(
            lambda p, x: (p["w"] * x).sum(), sl.shard({"w": torch.ones(2)}, mesh), sl.optim.sgd(1.0)
        )
        step(state, torch.ones(2))

    with pytest.raises(Exception, match=r"on cpu, the mesh is on (\w+:0); move it with .to\('\1'\)"):
        on_device(run)
