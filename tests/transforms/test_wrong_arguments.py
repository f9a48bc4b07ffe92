"""Wrong arguments of transforms: every one is refused where it is given, with the argument's name and a remedy."""

import inspect
import re

import numpy as np
import pytest
import torch

import shardlib as sl
from shardlib import transforms
from shardlib.errors import IllegalComposition, ShardlibError

VALUES = {
    "three": 3,
    "NumPy three": np.int64(3),
    "zero": 0,
    "minus one": -1,
    "half": 0.5,
    "NumPy half": np.float64(0.5),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "True": True,
    "NumPy True": np.bool_(True),
    "None": None,
    "text": "nonsense",
    "NumPy text": np.str_("nonsense"),
    "no text": "",
    "bytes": b"x",
    "list": ["nonsense"],
    "NumPy texts": np.array(["nonsense"]),
    "no list": [],
    "list of numbers": [3],
    "mixed list": ("a", 3),
    "array": np.array([1.0, 2.0]),
    "no dimensions": np.array(3),
    "tensor": torch.tensor(3),
    "dictionary": {"a": 1},
    "no dictionary": {},
    "object": object(),
}
INTEGER = {"three", "NumPy three"}
COUNT = {*INTEGER, "zero"}
FLAG = {"True"}
AXIS = {"text", "NumPy text"}
AXES = {*AXIS, "list"}
SHARE = {"half", "NumPy half", "zero"}
GLOBS = {*AXIS, "list", "NumPy texts"}
ANY_GLOBS = {*GLOBS, "no list"}
NAME = set()  # one of a few
LEFT_OUT = {"None"}
RULES = {"no dictionary"}

# A function, arguments that it takes, and for every argument the values above that are good.
TABLE = [
    (sl.accumulate, {"n": 2}, {"n": INTEGER, "sync": NAME | LEFT_OUT}),
    (
        sl.experts,
        {},
        {
            "axis": AXES,
            "rules": GLOBS,
            "codec": NAME | LEFT_OUT,
            "back_codec": NAME | LEFT_OUT,
            "padded": FLAG,
            "kind": LEFT_OUT,
            "spare": COUNT,
        },
    ),
    (sl.freeze, {"globs": "*"}, {"globs": ANY_GLOBS, "exclude": ANY_GLOBS}),
    (sl.hierarchical, {}, {"axis": AXIS}),
    (
        sl.offload,
        {},
        {
            "optimizer": NAME,
            "params": NAME | LEFT_OUT,
            "gradients": NAME | LEFT_OUT,
            "fraction": SHARE,
            "folder": {"no list"},
            "speculate": FLAG,
            "delay": FLAG,
        },
    ),
    (sl.offload, {"optimizer": "disk", "folder": "a"}, {"folder": GLOBS}),
    (sl.onebit, {}, {"axis": AXIS, "scales": NAME, "feedback": FLAG}),
    (
        sl.pipeline,
        {},
        {
            "schedule": {*AXIS, "no text"},  # a schedule is refused with the plan, where files are read
            "microbatches": INTEGER,
            "axis": AXIS,
            "chunks": INTEGER | LEFT_OUT,
            "partition": {"no list", "list of numbers", "array"},  # so are costs of other numbers of blocks
            "sync": NAME | LEFT_OUT,
        },
    ),
    (sl.powersgd, {}, {"rank": INTEGER, "axis": AXIS}),
    (
        sl.precision,
        {"compute": "fp16"},
        {
            "compute": NAME,
            "reduce_dtype": NAME,
            "keep": ANY_GLOBS,
            "leaves": RULES | LEFT_OUT,
            "master": FLAG,
            "autocast": FLAG,
            "loss_scale": {*INTEGER, "half", "NumPy half"} | LEFT_OUT,
        },
    ),
    (
        sl.progressive_layer_drop,
        {},
        {"theta": SHARE - {"zero"}, "gamma": {*INTEGER, *SHARE}, "layers": ANY_GLOBS},
    ),
    (
        sl.quantize,
        {"weights": "int8", "gradients": "int8"},
        {
            "weights": NAME | LEFT_OUT,
            "gradients": NAME | LEFT_OUT,
            "axis": AXIS,
            "block": NAME,
            "feedback": FLAG,
        },
    ),
    (
        sl.random_ltd,
        {"kept": 4},
        {"kept": INTEGER, "ends": COUNT, "layers": ANY_GLOBS},
    ),
    (
        sl.remat,
        {},
        {"policy": NAME, "save": ANY_GLOBS, "store": NAME, "smallest": COUNT, "blocks": COUNT | LEFT_OUT},
    ),
    (sl.reproducible, {"microbatches": 2}, {"microbatches": INTEGER}),
    (sl.sequence, {"axis": "seq"}, {"axis": AXIS, "kind": NAME}),
    (sl.tensor_slicing, {"rules": {}}, {"rules": RULES, "axis": AXIS}),
    (sl.column, {}, {"heads": COUNT, "transposed": FLAG, "gather": FLAG, "experts": FLAG}),
    (sl.row, {}, {"heads": COUNT, "transposed": FLAG, "split": FLAG, "experts": FLAG}),
    (sl.tile, {"globs": "*", "n": 2}, {"globs": GLOBS, "n": INTEGER, "along": NAME}),
    (sl.zero, {}, {"stage": COUNT, "axis": AXES, "replicate": AXIS | LEFT_OUT, "prefetch": FLAG}),
    (sl.zero, {"stage": 3}, {"keep": INTEGER | LEFT_OUT}),
    (sl.zero, {"stage": 2}, {"keep": LEFT_OUT}),
]
CASES = [
    (function, given, argument, good) for function, given, arguments in TABLE for argument, good in arguments.items()
]


def test_the_table_has_every_argument_of_every_transform():
    listed = {(function.__name__, argument) for function, _, argument, _ in CASES}
    there = {(name, each) for name in transforms.__all__ for each in inspect.signature(getattr(sl, name)).parameters}
    assert listed == there


@pytest.mark.parametrize(
    ("function", "given", "argument", "good"), CASES, ids=[f"{case[0].__name__}({case[2]})" for case in CASES]
)
def test_wrong_arguments_are_refused_by_name(function, given, argument, good):
    for name, value in VALUES.items():
        if name in good:
            made = function(**{**given, argument: value})
            if name.startswith("NumPy"):  # makes what Python's own value makes
                plain = function(**{**given, argument: value.tolist() if hasattr(value, "tolist") else str(value)})
                assert made == plain and repr(made) == repr(plain)
            continue
        with pytest.raises(ShardlibError) as refused:
            function(**{**given, argument: value})
        message = str(refused.value)
        assert f"{argument}=" in message and re.search(r"\b(use|give|name|knows|subclass)\b", message), (name, message)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_is_no_transform_is_refused(value):
    with pytest.raises(IllegalComposition, match=r"is no transform, as sl\.zero"):
        sl.chain(sl.zero(), value)
    if value is not None:
        with pytest.raises(IllegalComposition, match=r"is no transform, as sl\.zero"):
            sl.make_plan({"w": torch.ones(4)}, sl.abstract_mesh(data=2), value)


def test_sets_of_globs_do_not_depend_on_a_processs_hashes():
    names = [f"*/{letter}" for letter in "fbdace"]
    assert sl.freeze(set(names)) == sl.freeze(sorted(names)) and sl.freeze(iter(names)) == sl.freeze(names)


@pytest.mark.parametrize("theta", [-1, 0, 2])
def test_the_remedy_of_a_share_of_layers_is_true(theta):
    with pytest.raises(IllegalComposition, match=r"use a number above 0 and up to 1|use more than 0"):
        sl.progressive_layer_drop(theta)
