"""Offload: a step's gradients on disk train to the last bit as gradients in memory, and a few buckets at most are in memory."""

import os
import re

import pytest
import torch
from helpers.faults import BROKEN, FULL, Faults
from helpers.models import mlp, regression_batch, share
from helpers.offloaded import OVERFLOWING, assert_alike, trained, tx
from helpers.trees import assert_same

import shardlib as sl
from shardlib.errors import IllegalComposition, NonFiniteError, RankFailure, StorageError
from shardlib.execute.live import LiveBytes
from shardlib.plan.transfers import transfers
from shardlib.sharded.gradients_on_disk import FOLDER

PLANS = {
    "one device": ([sl.zero(0)], {"data": 1}),
    "stage 0, bf16": ([sl.zero(0), sl.precision("bf16")], {"data": 2}),
    "stage 0, bf16 sums": ([sl.zero(0), sl.precision("bf16", reduce_dtype="bf16")], {"data": 1}),
    "stage 1": ([sl.zero(1)], {"data": 2}),
    "stage 1, fp16": ([sl.zero(1), OVERFLOWING], {"data": 2}),
    "stage 2, bf16": ([sl.zero(2), sl.precision("bf16")], {"data": 2}),
    "stage 3": ([sl.zero(3)], {"data": 2}),
    "int8": ([sl.zero(3), sl.quantize("int8", "int8")], {"data": 2}),
    "frozen": ([sl.zero(2), sl.freeze(["*mlp*"])], {"data": 2}),
    "accumulated": ([sl.zero(3), sl.accumulate(3)], {"data": 2}),
    "accumulated on one device": ([sl.zero(0), sl.precision("bf16"), sl.accumulate(4)], {"data": 1}),
    "accumulated on the device": ([sl.zero(1), sl.accumulate(2)], {"data": 2}),
    "recomputed": ([sl.zero(3), sl.remat("full")], {"data": 1}),
    "tiles": ([sl.zero(3), sl.tile(["*mlp/up/weight"], 2)], {"data": 2}),
    "reproducible": ([sl.zero(2), sl.reproducible(4)], {"data": 2}),
    "pipeline": ([sl.pipeline("1f1b", microbatches=4), sl.zero(2)], {"pipe": 2, "data": 2}),
}  # fmt: skip


def on_disk(folder, params="disk", **options):
    return sl.offload("disk", params=params, gradients="disk", folder=folder, **options)


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_the_same_to_the_last_bit(plan, tmp_path):
    wanted = trained(*PLANS[plan], 5)
    for number, more in enumerate([{}, {"fraction": 0.5, "params": None}]):
        folder = [tmp_path / f"{number}/{name}" for name in "ab"]
        assert_alike(trained(*PLANS[plan], 5, on_disk(folder, **more)), wanted)
