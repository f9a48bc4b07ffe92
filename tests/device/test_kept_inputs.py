"""Inputs of recomputed blocks on a device with a memory of its own: where they are, what is moved, and how long it takes."""

import pytest


def trained(mesh, *transforms, steps=2, layers=5, rates=0.0, compile=False, **changes):
    """Losses and parameters of a GPT after some steps on the test device, what it counted in the last one, and the plan."""
    import gc

    import torch
    from helpers import rig

    import shardlib as sl
    from shardlib.models import gpt

    gc.collect()
    before = rig.counts()  # what earlier runs still hold
    config = gpt.GPTConfig(vocab=29, layers=layers, width=32, heads=4, sequence=16, **changes)
    drawn = torch.randint(29, (32, 17), generator=torch.Generator().manual_seed(4)).to(mesh.device)
    batch = {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}
    parallel, tx, loss_fn = sl.chain(*transforms), sl.optim.sgd(0.1), gpt.make_loss(config)
    params = sl.shard(gpt.init(config), mesh, parallel)
    state, step = sl.make_train_step(loss_fn, params, tx, rng=5, compile=compile)
    losses = []
    for number in range(steps):
        if number == steps - 1:
            rig.reset()
        with rig.limits(up=rates, down=rates):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
    counts = rig.counts()
    counts = counts._replace(peak=counts.peak - before.live, pinned_peak=counts.pinned_peak - before.pinned)
    plan = sl.make_plan(gpt.init(config), mesh, parallel, loss_fn=loss_fn, optimizer=tx, batch=batch)
    weights = [leaf.cpu() for leaf in torch.utils._pytree.tree_leaves(sl.unshard(state.params))]
    return losses, weights, counts, plan, drawn.nbytes + sum(leaf.nbytes for leaf in batch.values())


# What a step copies beside activations: numbers of the loss and of the gradients.
SCALARS = 256


@pytest.mark.parametrize("others", ["stage 0", "stage 3", "dots", "dropout", "accumulated", "bf16"])
def test_values_copies_and_memory(on_rig, others):
    """The values are those without a store, to the bit; copies, pinned memory and the peak are those of the plan."""

    def run(mesh, others):
        import torch

        import shardlib as sl

        more = {
            "stage 3": [sl.zero(3)],
            "accumulated": [sl.accumulate(2)],
            "bf16": [sl.zero(2), sl.precision("bf16")],
        }.get(others, [])
        policy, dropout = "dots" if others == "dots" else "full", 0.2 * (others == "dropout")
        stay = trained(mesh, *more, sl.remat(policy), dropout=dropout)
        # On links on which a copy takes longer than a block, so that one that is not waited for is not there in time.
        moved = trained(mesh, *more, sl.remat(policy, store="host", smallest=1), dropout=dropout, rates=2e6)
        same = all(map(torch.equal, stay[1], moved[1]))
        said = [(plan.peak_bytes + batch, counts.peak) for _, _, counts, plan, batch in (stay, moved)]
        counts, plan = moved[2], moved[3]
        return stay[0] == moved[0], same, said, counts, plan.traces[0], plan.step.microbatches, str(plan)

    losses, same, said, counts, trace, times, text = on_rig(run, others)
    assert losses and same
    block = 32 * 16 * 32 * (2 if others == "bf16" else 4) // times
    assert trace.down == trace.up == trace.host == 5 * block and counts.pinned_peak == trace.host
    assert 0 <= counts.down - times * trace.down <= SCALARS and 0 <= counts.up - times * trace.up <= SCALARS
    for planned, measured in said:
        assert measured == pytest.approx(planned, rel=0.01)
    assert (
        said[1][1] < said[0][1] or others == "bf16"
    )  # whose peak is at the end of backward, when all gradients are there
    assert "in host memory, from the end of forward: inputs of blocks" in text and "inputs of blocks  down" in text


GRAPHS = {
    "stage 3, dropout": ("[sl.zero(3)]", "full"),
    "accumulated": ("[sl.accumulate(2)]", "dots"),
    "bf16": ("[sl.zero(2), sl.precision('bf16')]", "full"),
    "parameters too": ("[sl.zero(3), sl.offload(params='host')]", "full"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_in_a_graph(on_rig, case):
    """The values, copies and pinned memory are those without a graph, and the device holds as little."""

    def run(mesh, case):
        import torch

        import shardlib as sl

        chain, policy = GRAPHS[case]
        found = []
        for compile in (False, True):
            for store in ("device", "host"):
                remat, dropout = sl.remat(policy, store=store, smallest=1), 0.2 * ("dropout" in case)
                ways = {"rates": 2e6 * (store == "host"), "steps": 3, "dropout": dropout, "compile": compile}
                found.append(trained(mesh, *eval(chain), remat, **ways)[:3])
        same = all(all(map(torch.equal, found[0][1], other[1])) for other in found)
        return [losses for losses, *_ in found], same, [counts for *_, counts in found]

    losses, same, (stay, moved, stay_in_graph, moved_in_graph) = on_rig(run, case)
    assert losses == losses[:1] * 4 and same
    for way in ("down", "up"):
        more = getattr(moved_in_graph, way) - getattr(stay_in_graph, way)
        assert more == getattr(moved, way) - getattr(stay, way) > 0
    assert moved_in_graph.pinned_peak == moved.pinned_peak
    if "dropout" not in case:  # whose kernel of this device holds more than anything else
        assert moved_in_graph.peak <= moved.peak + SCALARS
        assert moved_in_graph.peak < stay_in_graph.peak or case == "bf16"


def test_small_inputs_stay(on_rig):
    def run(mesh):
        import shardlib as sl

        _, _, counts, plan, _ = trained(mesh, sl.remat(store="host"))
        _, _, less, halves, _ = trained(mesh, sl.remat(store="host"), sl.accumulate(2))
        return (counts.pinned_peak, plan.traces[0].down), (less.pinned_peak, halves.traces[0].down)

    assert on_rig(run) == ((5 * 2**16, 5 * 2**16), (0, 0))


def test_transfers_take_place_while_blocks_compute(on_rig):
    """On a link so slow that copies take as long as all else, a step takes little more than the copies."""

    def run(mesh):
        import time

        import torch
        from helpers import rig

        import shardlib as sl

        config = {"blocks": 6, "work": 0.03}
        weights = [{"w": torch.eye(64)} for _ in range(config["blocks"])]

        @sl.block
        def block(p, x):
            time.sleep(config["work"])  # the device's kernels run in the caller's thread
            return torch.tanh(x @ p["w"])

        def loss_fn(params, x):
            x = x.requires_grad_()
            for p in params:
                x = block(p, x)
            return x.square().mean()

        x = torch.ones(256, 64, device=mesh.device)
        rate = x.nbytes / config["work"]
        took = {}
        for store in ("device", "host"):
            sharded = sl.shard(weights, mesh, sl.chain(sl.zero(0), sl.remat(store=store, smallest=1)))
            state, step = sl.make_train_step(loss_fn, sharded, sl.optim.sgd(0.1))
            state, _ = step(state, x)
            best = float("inf")
            for _ in range(3):
                with rig.limits(up=rate, down=rate):
                    begun = time.perf_counter()
                    state, metrics = step(state, x)
                    metrics["loss"].item()
                    best = min(best, time.perf_counter() - begun)
            took[store] = best
        return took, config

    took, config = on_rig(run)
    compute = 2 * config["blocks"] * config["work"]
    assert took["device"] >= compute
    # The first input goes down, and the last one comes up, before anything can be computed beside them.
    assert took["host"] <= 1.15 * max(took["device"], compute) + 2 * config["work"]


def test_a_tensor_that_blocks_share_is_moved_once(on_rig):
    def run(mesh):
        import torch
        from helpers import rig

        import shardlib as sl

        block = sl.block(lambda p, x, shared: torch.tanh(x @ p["w"]) + shared["skip"] * p["w"].sum())
        weights = {"first": {"w": torch.eye(16)}, "blocks": [{"w": torch.eye(16) * n} for n in (1, 2, 3)]}

        def loss_fn(params, x):
            first = x @ params["first"]["w"]
            x = first.sin()
            for p in params["blocks"]:
                x = block(p, x, {"skip": first})
            return x.square().mean()

        x, found = torch.ones(8, 16, device=mesh.device) / 8, {}
        for store in ("device", "host"):
            sharded = sl.shard(weights, mesh, sl.remat(store=store, smallest=1))
            rig.reset()
            _, grads = sl.value_and_grad(loss_fn)(sharded, x)
            counts = rig.counts()
            found[store] = [leaf.cpu() for leaf in torch.utils._pytree.tree_leaves(grads.tree)], counts
        return all(map(torch.equal, found["device"][0], found["host"][0])), *(found[store][1] for store in found)

    same, stay, moved = on_rig(run)
    assert same
    # Three inputs of their own, and one that all have.
    assert moved.down - stay.down == moved.up - stay.up == 4 * 8 * 16 * 4


def test_an_input_that_is_written_to_later_is_refused(on_rig):
    def run(mesh):
        import torch

        import shardlib as sl

        block = sl.block(lambda p, x: torch.tanh(x @ p["w"]))

        def loss_fn(params, x):
            x = x @ params["w"]
            y = block(params, x)
            x.add_(1)
            return y.square().mean()

        sharded = sl.shard({"w": torch.eye(16)}, mesh, sl.remat(store="host", smallest=1))
        try:
            sl.value_and_grad(loss_fn)(sharded, torch.ones(8, 16, device=mesh.device))
        except RuntimeError as error:
            return str(error)

    assert "modified by an inplace operation" in on_rig(run)


@pytest.mark.parametrize("compile", [False, True])
def test_checkpoints_that_a_model_makes_itself(on_rig, compile):
    """Gradient checkpointing of transformers' models keeps its inputs where the plan says."""

    def run(mesh, compile):
        import torch
        from helpers import rig
        from helpers.architectures import ARCHITECTURES, SIZES
        from transformers import AutoConfig

        import shardlib as sl

        auto, changes = ARCHITECTURES["llama"]
        config = AutoConfig.for_model("llama", **{**SIZES, **changes})
        tokens = torch.randint(3, 50, (4, 8), generator=torch.Generator().manual_seed(2)).to(mesh.device)
        found = {}
        for store in ("device", "host"):
            torch.manual_seed(0)
            model = auto.from_config(config)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            apply, params = sl.from_module(model.train())
            sharded = sl.shard(params, mesh, sl.chain(sl.zero(3), sl.remat(store=store, smallest=1)))
            state, step = sl.make_train_step(
                lambda p, batch, apply=apply: apply(p, batch, labels=batch, use_cache=False).loss,
                sharded,
                sl.optim.sgd(0.1),
                compile=compile,
            )
            if compile:
                state, _ = step(state, tokens)
            rig.reset()
            state, metrics = step(state, tokens)
            found[store] = metrics["loss"].item(), rig.counts(), [b.cpu() for b in state.params.buffers.values()]
        same = all(map(torch.equal, found["device"][2], found["host"][2]))
        return same, found["device"][:2], found["host"][:2], config.num_hidden_layers * 4 * 8 * config.hidden_size * 4

    same, (loss, stay), (other, moved), inputs = on_rig(run, compile)
    assert same and loss == other
    assert moved.down - stay.down == moved.up - stay.up == inputs


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 3), ("zb-h1", 0)])
def test_pipelines(on_rig, schedule, stage, compile):
    """Micro-batches in flight have buffers of their own, as many as the plan says."""

    def run(mesh, schedule, stage, compile):
        import gc

        import torch
        from helpers import rig

        import shardlib as sl
        from shardlib.models import gpt
        from shardlib.plan.memory import memory_peaks

        config = gpt.GPTConfig(vocab=29, layers=2, width=16, heads=4, sequence=8)
        params, loss_fn = gpt.to_blocks(gpt.init(config)), gpt.make_sequential(config)
        drawn = torch.randint(29, (16, 9), generator=torch.Generator().manual_seed(4))
        batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}

        def parallel(store):
            return sl.chain(sl.pipeline(schedule, 4), sl.zero(stage), sl.remat(store=store, smallest=1))

        def rank(store):
            def train(mesh):
                state, step = sl.make_train_step(
                    loss_fn, sl.shard(params, mesh, parallel(store)), sl.optim.sgd(0.1), rng=3, compile=compile
                )
                rows = {name: leaf.to(mesh.device) for name, leaf in batch.items()}
                losses = []
                for _ in range(2):
                    state, metrics = step(state, rows)
                    losses.append(metrics["loss"].item())
                return losses, [leaf.cpu() for leaf in state.params.buffers.values()]

            return train

        found = {}
        for store in ("device", "device", "host"):  # the first run also makes what later ones find
            gc.collect()
            rig.reset()
            pinned = rig.counts().pinned  # of other tests in this process
            trained = sl.simulate(rank(store), mesh={"pipe": 2, "data": 1}, device="rig")
            counts = rig.counts()
            found[store] = trained, counts._replace(pinned_peak=counts.pinned_peak - pinned)
        plan = sl.make_plan(params, sl.abstract_mesh(pipe=2, data=1), parallel("host"), loss_fn=loss_fn, batch=batch)
        same = all(
            losses == others and all(map(torch.equal, mine, theirs))
            for (losses, mine), (others, theirs) in zip(found["device"][0], found["host"][0])
        )
        moved = [sum(view.transfers()[way] for view in plan.views) for way in ("down", "up")]
        return (
            same,
            found["device"][1],
            found["host"][1],
            moved,
            sum(memory_peaks(view)["host"].parts["inputs of blocks"] for view in plan.views),
        )

    same, stay, counts, (down, up), held = on_rig(run, schedule, stage, compile)
    assert same
    assert (counts.down - stay.down, counts.up - stay.up) == (2 * down, 2 * up)
    assert counts.pinned_peak == held
