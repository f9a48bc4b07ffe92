"""Codecs that lose gradients beyond their noise are found, and the library's own are not."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives.codecs import named
from shardlib.collectives.codecs.integers import OneBit
from shardlib.debug.codec_laws import codec_laws

_DRAW = torch.Generator().manual_seed(0)
PARAMS = {"w": torch.randn(16, 8, generator=_DRAW) / 4}
BATCH = torch.randn(8, 8, generator=_DRAW)
FACTORS = {"one rank mute": 0.0, "one rank doubled": 2.0}
SPOILT = {
    "rolled by one": lambda sums: sums.roll(1),
    "half zeroed": lambda sums: sums * (torch.arange(len(sums)) % 2).to(sums.dtype),
}


def loss_fn(params, batch):
    return torch.tanh(batch @ params["w"].t()).square().mean()


@dataclass(frozen=True)
class Faulty:
    """A codec of the library's with a fault."""

    codec: Any
    fault: str
    whole = False

    @property
    def wide(self):
        return self.codec.wide

    def bind(self, rows):
        return self.codec.bind(rows)

    def exchange(self, mesh, axis, items, residuals):
        factor = FACTORS.get(self.fault, 1.0) if mesh.coords[axis] == 1 else 1.0
        given = [replace(item, buffer=item.buffer * factor) for item in items]
        return Sums(self.codec.exchange(mesh, axis, given, residuals), SPOILT.get(self.fault, lambda sums: sums))


@dataclass
class Sums:
    exchange: Any
    spoilt: Any

    def wait(self, out=None):
        return [self.spoilt(sums) for sums in self.exchange.wait()]


@dataclass(frozen=True)
class In(sl.plan.Transform):
    codec: Any
    name = "in few bits"

    def claims(self, sizes, leaves):
        yield sl.plan.Reduce("data", codec=self.codec)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("codec", [OneBit(feedback=False), named("int8")], ids=str)
@pytest.mark.parametrize("fault", ["", *FACTORS, *SPOILT])
def test_planted_codecs(fault, codec, stage):
    plan = {"data": 2}, sl.chain(sl.zero(stage), In(Faulty(codec, fault)))
    found = sl.debug.check(plan, loss_fn, BATCH, params=PARAMS)
    broken = [law.finding for law in found.laws if law.finding is not None]
    assert [each.phase for each in broken[-1:]] == ["reduction"] * bool(fault), str(found)
    if not fault:
        return
    due = {
        "one rank mute": "the share of rank",
        "one rank doubled": "the share of rank",
        "rolled by one": "they do not follow the sum",
        "half zeroed": "elements are lost",
    }
    assert due[fault] in broken[-1].note
    result = sl.debug.bisect(loss_fn, PARAMS, ({"data": 2}, sl.zero(stage)), plan, BATCH)
    assert result.finding is not None and result.finding.phase == "reduction"


OWN = [
    sl.onebit(),
    sl.onebit(feedback=False),
    sl.onebit(scales=64),
    *(sl.quantize(gradients=form, feedback=feedback) for form in ("int8", "int4", "fp8") for feedback in (True, False)),
    sl.powersgd(rank=1),
    sl.powersgd(rank=4),
]


@pytest.mark.parametrize("transform", OWN, ids=repr)
def test_the_librarys_own_pass(transform):
    for stage in (0, 2) if "powersgd" not in repr(transform) else (0,):
        plan = sl.make_plan({"w": torch.zeros(64, 32)}, sl.abstract_mesh(data=2), sl.chain(sl.zero(stage), transform))
        assert plan.channels and codec_laws(plan) is None
