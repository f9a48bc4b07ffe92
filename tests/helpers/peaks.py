"""Training steps whose peak of device memory is counted at the test device and compared with the plan's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What a step is made of.

    Attributes:
        precision: "", "bf16", or "bf16 sums" for gradients that are summed in bf16 too.
        remat: "", "full", "dots", "host", or "names" for full recomputation but for named values.
        tiles: tiles of each weight of an MLP; 1 for none.
        offload: "", "states", "half" of the states, "params", "all" for parameters and gradients too, or all on "disk".
        microbatches: how many a step has.
        merged: bytes up to which blocks are merged.
    """

    stage: int = 0
    ranks: int = 1
    precision: str = ""
    remat: str = ""
    tiles: int = 1
    offload: str = ""
    microbatches: int = 1
    merged: int = 0
    layers: int = 2
    width: int = 64
    vocab: int = 256
    sequence: int = 32
    samples: int = 8


def transforms(case, folder):
    import shardlib as sl

    made = [sl.zero(case.stage)]
    if case.precision:
        made.append(sl.precision("bf16", reduce_dtype="bf16") if "sums" in case.precision else sl.precision("bf16"))
    if case.remat:
        made.append(
            {
                "full": lambda: sl.remat(),
                "dots": lambda: sl.remat("dots"),
                "host": lambda: sl.remat(store="host", smallest=1),
                "names": lambda: sl.remat(save=["attn/out"]),
            }[case.remat]()
        )
    if case.tiles > 1:
        made.append(sl.tile("*/mlp/*/weight", case.tiles))
    if case.offload:
        made.append(
            {
                "states": lambda: sl.offload(),
                "half": lambda: sl.offload(fraction=0.5),
                "params": lambda: sl.offload(params="host"),
                "all": lambda: sl.offload(params="host", gradients="host"),
                "disk": lambda: sl.offload("disk", params="disk", gradients="disk", folder=folder),
            }[case.offload]()
        )
    if case.microbatches > 1:
        made.append(sl.accumulate(case.microbatches))
    return sl.chain(*made)


def measured(mesh, case, folder, steps=2):
    """The plan, bytes of the batch, and the peak that the device counts in each of some steps."""
    from helpers.merging import merging

    with merging(case.merged):
        return _measured(mesh, case, folder, steps)


def _measured(mesh, case, folder, steps):
    import gc
    from unittest import mock

    import torch

    import shardlib as sl
    from helpers import rig
    from shardlib.common import thresholds
    from shardlib.common.thresholds import Threshold
    from shardlib.models import gpt

    gc.collect()
    torch.accelerator.synchronize()
    before = rig.counts().live  # what earlier cases still hold
    config = gpt.GPTConfig(vocab=case.vocab, layers=case.layers, width=case.width, heads=4, sequence=case.sequence)
    params, loss_fn = gpt.init(config), gpt.make_loss(config)
    optimizer = sl.optim.adamw(1e-3)
    drawn = torch.randint(case.vocab, (case.samples * case.microbatches, case.sequence + 1))
    batch = {"tokens": drawn[:, :-1].contiguous().to(mesh.device), "targets": drawn[:, 1:].contiguous().to(mesh.device)}
    parallel = transforms(case, folder)
    state, step = sl.make_train_step(loss_fn, sl.shard(params, mesh, parallel), optimizer)
    peaks = []
    for _ in range(steps):
        rig.reset()
        # On this device plain torch updates, whose intermediate results have the size of a chunk. Copies take as long as they
        # may, so that whether they have ended does not depend on how fast the machine is.
        with mock.patch.object(thresholds, "_IN_MEMORY", Threshold(1 << 10)), rig.limits(up=-1, down=-1):
            state, _ = step(state, batch)
            torch.accelerator.synchronize()
        peaks.append(rig.counts().peak - before)
    plan = sl.make_plan(params, mesh, parallel, loss_fn=loss_fn, optimizer=optimizer, batch=batch)
    return plan, sum(leaf.nbytes for leaf in batch.values()), peaks
