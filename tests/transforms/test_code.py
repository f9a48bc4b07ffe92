"""Transforms as code: a repr makes the transform again."""

import functools
import pathlib
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointPolicy

import shardlib as sl
from shardlib.collectives.sequence import Ring
from shardlib.collectives.styles import Style
from shardlib.errors import ShardlibError
from shardlib.mesh.specs import P
from shardlib.plan.claims import LeafInfo

PARAMS = [{"up": torch.ones(48, 8), "down": torch.ones(8, 48), "ln": torch.ones(8)} for _ in range(4)]
MESH = sl.abstract_mesh(data=2, pipe=2, model=2, seq=2, node=2)
NAMESPACE = {"sl": sl, "re": re, "pathlib": pathlib, "functools": functools, __name__: sys.modules[__name__]}


def policy(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


class Longest(Ring):
    name = "longest"


class Halved(Style):
    name = "halved"

    def spec(self, shape, ways):
        return P(self.axis) if len(shape) > 1 else None


def options(**values):
    return st.fixed_dictionaries({}, optional=values)


def axes(*names):
    return st.sampled_from(names)


def made(function, *arguments, **values):
    """Calls of a function with any of these options."""
    return options(**values).map(lambda given: function(*arguments, **given))


TABLE = sl.schedules.write_table(sl.schedules.one_f_one_b(2, 4))
GPIPE = sl.schedules.gpipe(2, 4)
SCALES = (
    *(None, 8, 0.5, sl.plan.LossScale(), sl.plan.LossScale(window=7), sl.plan.LossScale(4.0, hysteresis=3)),
    *(sl.plan.LossScale(0.5, minimum=0.25), sl.plan.LossScale(2.0**20, minimum=2.0**17)),
)
RULES = (
    {"*/up": "column", "*/down": sl.row()},
    {"*/up": "shared", "*/down": "replicated"},
    {"*/up": sl.column(heads=4, transposed=True)},
    {"*/up": Halved()},
)
CUTS = ("count", (1, 2, 3.5, 4), re.compile("up|ln$", re.IGNORECASE), re.compile("u" * 300 + "|up"))
TRANSFORMS = {
    "zero": made(sl.zero, stage=st.integers(0, 3), axis=axes("seq"), replicate=axes("node"), prefetch=st.booleans()),
    "kept": made(sl.zero, 3, keep=axes("forward", 4096)),
    "accumulate": st.builds(sl.accumulate, st.integers(1, 8), axes(None, "last")),
    "precision": made(
        sl.precision,
        compute=axes("bf16", "fp16"),
        reduce_dtype=axes("bf16", "fp32"),
        keep=axes("*/ln", ["*/ln", "0/*"]),
        leaves=axes({"*/up": "fp32"}),
        master=st.booleans(),
    ),
    "loss scale": made(sl.precision, "fp16", loss_scale=axes(*SCALES)),
    "remat": made(
        sl.remat,
        policy=axes("dots", policy),
        store=axes("device", "host", ("sharded", "host")),
        smallest=axes(1, 1 << 16),
        blocks=axes(0, 2),
    ),
    "names": made(sl.remat, save=axes("a", ["b", "a"])),
    "offload": made(sl.offload, params=axes("host"), gradients=axes("host"), fraction=axes(0, 0.5, 1, 1.0)),
    "disk": st.builds(lambda folder: sl.offload("disk", folder=folder), axes("a", ["a", "b"], pathlib.Path("c"))),
    "ahead": st.builds(lambda how: sl.offload(**{how: True}), axes("speculate", "delay")),
    "pipeline": made(
        functools.partial(sl.pipeline, microbatches=4),
        schedule=axes("1f1b", "GPipe", "ZBVZeroBubble", TABLE, GPIPE, GPIPE.orders),
        partition=axes("parameters", *CUTS),
        sync=axes(None, "last"),
    ),
    "chunks": made(sl.pipeline, "interleaved-1f1b", 4, chunks=axes(2, None)),
    "tensor_slicing": axes(*RULES).map(sl.tensor_slicing),
    "tile": axes("*/up", ["*/up", "*/down"]).map(lambda globs: sl.tile(globs, 2)),
    "freeze": made(sl.freeze, ["*/ln", "0/*"], exclude=axes((), "1/ln")) | st.just(sl.freeze("*/ln")),
    "onebit": made(sl.onebit, axis=axes("node"), scales=axes("leaf", 16), feedback=st.booleans()),
    "powersgd": made(sl.powersgd, axis=axes("node"), rank=axes(1, 4)),
    "quantize": made(
        functools.partial(sl.quantize, gradients="int8"),
        weights=axes("fp8", "int8"),
        axis=axes("node"),
        block=axes(64),
        feedback=st.booleans(),
    ),
    "progressive_layer_drop": made(
        sl.progressive_layer_drop, theta=axes(0.5, 1, 0.25), gamma=axes(0.001, 0), layers=axes((), "*", ["0", "1"])
    ),
    "random_ltd": st.builds(
        sl.random_ltd,
        axes(4, sl.data.linear_pace(4, 8, 3)),
        ends=axes(0, 1, 3),
        layers=axes((), ["0", "1", "2"]),
    ),
    "sequence": made(sl.sequence, "seq", kind=axes("ulysses", "ring", Longest, functools.partial(Longest))),
    "hierarchical": axes("local", "data").map(sl.hierarchical),
    "reproducible": axes(4, 8).map(sl.reproducible),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
@settings(max_examples=25)
@given(data=st.data())
def test_a_repr_makes_the_transform_again(kind, data):
    transform = data.draw(TRANSFORMS[kind])
    again = eval(repr(transform), NAMESPACE)
    assert again == transform and repr(again) == repr(transform)
    assert resolved(again) == resolved(transform)


def resolved(transform):
    """What the transform claims on the parameters, or why it refuses them."""
    blocks = enumerate(PARAMS)
    leaves = [LeafInfo(f"{i}/{name}", tuple(leaf.shape), leaf.dtype) for i, b in blocks for name, leaf in b.items()]
    try:
        return list(transform.claims(MESH.shape, leaves))
    except ShardlibError as error:
        return str(error)


SLICING = "sl.tensor_slicing({'*/up': 'column', '*': 'rowwise_split_input'})"
DISKS = "sl.chain(sl.zero(1), sl.offload('disk', folder=['a', 'b']))"
SCALED = "sl.precision('fp16', loss_scale=sl.plan.LossScale(window=7))"


@pytest.mark.parametrize(
    ("transform", "code"),
    [
        (sl.zero(), "sl.zero()"),
        (sl.zero(3, prefetch=True), "sl.zero(3)"),
        (sl.zero(3, prefetch=False), "sl.zero(3, prefetch=False)"),
        (sl.zero(axis="dp"), "sl.zero(axis='dp')"),
        (sl.precision("fp16", loss_scale=8), "sl.precision('fp16', loss_scale=8.0)"),
        (sl.precision("fp16", loss_scale=sl.plan.LossScale(window=7)), SCALED),
        (sl.tensor_slicing({"*/up": sl.column(), "*": sl.row(split=True)}), SLICING),
        (sl.remat(policy), f"sl.remat({__name__}.policy)"),
        (sl.pipeline("GPipe", 2), "sl.pipeline('gpipe', microbatches=2)"),
        (sl.chain(sl.zero(1), sl.offload("disk", folder=["a", "b"])), DISKS),
    ],
)
def test_code_has_what_differs_from_the_defaults(transform, code):
    assert repr(transform) == code


def test_long_code_is_cut_in_names_alone():
    rules = {f"layers/{number}/up": "column" for number in range(100)}
    transform = sl.tensor_slicing(rules, axis="tp")
    assert len(transform.name) == 160 and transform.name.endswith(", axis='tp')") and " … " in transform.name
    assert eval(repr(transform), NAMESPACE) == transform
