"""Experts in host memory, on a device with a memory of its own: a missing wait shows as wrong tokens."""

import pytest


def generated(mesh, slots, rates=None, bits=None, ahead=True, prompts=((3, 1, 4, 1, 5), (9,)), new=6):
    """Texts, what was counted of experts, counts of the device, and bytes of the device's room and of all experts."""
    import gc

    import torch
    from helpers import rig
    from helpers.experts_on_host import CONFIG, experts_of, random_params

    import shardlib as sl

    gc.collect()
    device, params = mesh.device, random_params()
    if bits:
        params = sl.models.decoding.quantized(CONFIG, params, bits)
    size = sum(leaf.nbytes for leaf in experts_of(params))
    if slots is None:
        import optree

        kept, params = None, optree.tree_map(lambda leaf: leaf.to(device), params)
    else:
        params, kept = sl.models.decoding.experts_on_host(CONFIG, params, slots, ahead=ahead, device=device)
    torch.accelerator.synchronize()
    rig.reset()
    with rig.limits(**rates or {}):
        texts = sl.generate(CONFIG, params, prompts, new, temperature=0.8, seed=1)
        torch.accelerator.synchronize()
    counts = rig.counts()
    return [text.tolist() for text in texts], kept and kept.tally, counts, kept and kept.bytes, size


SLOW = {"up": 2e6}
UNTIL_AWAITED = {"up": -1.0}


@pytest.mark.parametrize("rates", [SLOW, UNTIL_AWAITED], ids=["slow", "until somebody waits"])
@pytest.mark.parametrize(("slots", "bits", "ahead"), [(1, None, True), (2, None, True), (3, 4, True), (8, 8, False)])
def test_tokens_bytes_and_room(on_rig, rates, slots, bits, ahead):
    def run(mesh):
        return generated(mesh, None, None, bits), generated(mesh, slots, rates, bits, ahead)

    (texts, _, before, _, size), (found, tally, counts, room, _) = on_rig(run)
    assert found == texts
    assert counts.up - before.up == tally.bytes > 0
    assert tally.used > tally.misses > 0 and bool(tally.ahead) == ahead and tally.right <= tally.ahead
    assert room == size * min(slots, 8) // 8
    assert counts.peak <= before.peak - size + room


def test_sharded_parameters_are_used_where_they_are(on_rig):
    """Host memory holds them once, and the device the other parameters and the room alone."""

    def run(mesh):
        import torch
        from helpers import rig
        from helpers.experts_on_host import CONFIG, experts_of, random_params

        import shardlib as sl

        def texts(params):
            return [text.tolist() for text in sl.generate(CONFIG, params, [[3, 1, 4], [5]], 6, seed=1)]

        params = sl.shard(random_params(), mesh, sl.chain(sl.zero(0), sl.offload(params="host")))
        wanted, size = texts(params), sum(leaf.nbytes for leaf in experts_of(params.tree))
        torch.accelerator.synchronize()
        before = rig.counts()
        held, kept = sl.models.decoding.experts_on_host(CONFIG, params, 2)
        after = rig.counts()
        with rig.limits(up=-1.0):
            found = texts(held)
        whole = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(params.tree))
        return found == wanted, after.pinned - before.pinned, after.live - before.live, whole - size + kept.bytes

    same, pinned, live, planned = on_rig(run)
    assert same and pinned == 0
    assert planned <= live <= planned + 4096  # parameters of a few bytes take a little more


def test_experts_that_are_fetched_ahead_come_while_others_compute(on_rig):
    """Routers of all layers choose alike, so that guesses are right."""

    def run(mesh):
        import time
        from dataclasses import replace

        import torch
        from helpers import rig
        from helpers.experts_on_host import CONFIG, EXPERTS, ROUTER

        import shardlib as sl
        from shardlib.models import gpt

        computing = []

        def expert(params, rows, product):
            rows = rows + 0  # the device is given its first work, which waits for the expert
            begin = time.monotonic()
            time.sleep(0.06)
            computing.append((begin, time.monotonic()))
            return product(torch.relu(product(rows, params["up"])), params["down"])

        config = replace(CONFIG, moe=gpt.Experts((EXPERTS,), sl.nn.MoEConfig(ROUTER, expert)))
        params = gpt.init(replace(CONFIG, moe=None))
        generator = torch.Generator().manual_seed(1)
        router, leaf = torch.randn(EXPERTS, CONFIG.width, generator=generator), torch.zeros(EXPERTS, 32, CONFIG.width)
        for block in params["blocks"]:
            del block["mlp"]
            block["attn"]["out"]["weight"].zero_()  # so that all layers see the token alone
            block["moe"] = {"router": {"weight": router}, "experts": {"up": leaf, "down": leaf.mT.contiguous()}}
        found = []
        for ahead in (False, True):
            held, kept = sl.models.decoding.experts_on_host(config, params, 2, ahead=ahead, device=mesh.device)
            computing.clear()
            with rig.limits(up=leaf[0].nbytes / 0.01), rig.recorded() as entries:
                sl.generate(config, held, [[3]], 3, seed=1)
                torch.accelerator.synchronize()
            copies = [each for each in entries if each.kind == "up" and each.bytes == leaf[0].nbytes]
            beside = [each for each in copies if any(begin < each.end < end for begin, end in computing)]
            found.append((len(copies), len(beside), kept.tally))
        return found

    (copies, beside, without), (ahead_copies, ahead_beside, tally) = on_rig(run)
    assert without.used == tally.used == 3 * 4 * 2
    assert tally.right == tally.ahead == 3 * tally.misses > 0
    assert copies == ahead_copies == 2 * without.misses == 2 * (tally.misses + tally.ahead)
    # Two tokens miss two experts in each of four layers, the first of which is waited for; one misses one, which comes while
    # the other computes. Fetched ahead, all but those of the first layer come while others compute.
    assert beside <= 2 * (20 - 8) < ahead_beside <= 2 * (20 - 2)
