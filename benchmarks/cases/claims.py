"""Plans of the largest models that DeepSpeed's authors published, on the hardware that they name, beside what they measured.

Nothing runs: memory and payload are the plan's, seconds those of the virtual clock. What products of matrices reach is
taken to be a share of the device's peak; the other rates are those of data sheets, and latencies are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.tables import grid, section
from shardlib.models import bert, gpt
from shardlib.plan import Link, Machine
from shardlib.plan.limits import Limits
from shardlib.plan.plan import Plan
from shardlib.plan.tables import count, size

_PEAK, _SHARE = 125e12, 0.5  # of a V100 in fp16, and the share that products of matrices reach
_HEADER = ("claim", "unit", "by the plan", "published")
_FP16 = sl.precision("fp16", reduce_dtype="fp16")

# 16 V100 with 32 GB on NVSwitch, and eight links of 100 Gbit/s; latencies are assumed.
DGX_2 = Machine(
    memory="32GB",
    flops={"fp16": _SHARE * _PEAK, "fp32": _SHARE * 15.7e12},
    inside=Link(1.5e11, 5e-6),
    between=Link(1e11, 1e-5),
    ranks_per_host=16,
    streaming=9e11,
    launches=2e5,
    host_memory="1.5TB",
    ways={"down": 1.2e10, "up": 1.2e10, "update": 1e10},
)
# Four V100 with 16 GB on PCI Express, and one link of 40 Gbit/s.
SLOW = Machine(
    memory="16GB",
    flops=DGX_2.flops,
    inside=Link(1e10, 5e-6),
    between=Link(5e9, 3e-5),
    ranks_per_host=4,
    streaming=9e11,
    launches=2e5,
)


class Job(NamedTuple):
    """A step of a model on a mesh.

    Attributes:
        rows: of one rank.
        adam: whether the optimizer is AdamW; else it is LAMB.
    """

    machine: Machine
    mesh: dict[str, int]
    config: Any
    rows: int
    transforms: tuple[Any, ...]
    adam: bool = True

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def plan(self) -> Plan:
        loss_fn, params, batch = _bert(self) if isinstance(self.config, bert.BERTConfig) else _gpt(self)
        return sl.make_plan(
            params,
            sl.abstract_mesh(**self.mesh),
            sl.chain(_FP16, *self.transforms),
            loss_fn=loss_fn,
            batch=batch,
            optimizer=sl.optim.adamw(1e-3) if self.adam else sl.optim.lamb(1e-3),
        )


def _gpt(job: Job) -> tuple[Any, Any, Any]:
    """Loss, parameters and batch; blocks for a pipeline."""
    tokens = torch.empty(job.rows, job.config.sequence, dtype=torch.int64, device="meta")
    params, batch = gpt.init(job.config, device="meta"), {"tokens": tokens, "targets": tokens}
    if "pipe" in job.mesh:
        return gpt.make_sequential(job.config), gpt.to_blocks(params), batch
    return gpt.make_loss(job.config), params, batch


def _bert(job: Job) -> tuple[Any, Any, Any]:
    tokens = torch.empty(job.rows, job.config.sequence, dtype=torch.int64, device="meta")
    return bert.make_loss(job.config), bert.init(job.config, device="meta"), {"tokens": tokens, "targets": tokens}


class Found(NamedTuple):
    """What the plan of a job says.

    Attributes:
        seconds: of a step, on the virtual clock.
        device, host: bytes at their peaks, of a rank and of all ranks of a host.
        payload: axis -> bytes that a rank sends in a step.
        rate: operations of products per second and rank, with what is recomputed.
    """

    parameters: int
    seconds: float
    device: int
    host: int
    payload: dict[str, int]
    rate: float


def found(job: Job) -> Found:
    plan = job.plan()
    limits = Limits.given(job.machine.memory, job.machine.host_memory, None, job.machine.ranks_per_host, 0)
    assert limits is not None and plan.traces is not None
    used = {use.peak.memory: use.bytes for use in limits.uses(plan)}
    seconds = sl.report.predict_on(plan, job.machine).total
    done = sum(sum(trace.flops) for trace in plan.traces) * plan.step.microbatches / job.mesh.get("pipe", 1)
    sent = {axis: number for axis, number in plan.payload().items() if number}
    return Found(plan.parameters, seconds, used["device"], used.get("host", 0), sent, done / seconds)


def _large(layers: int, width: int, heads: int, sequence: int = 1024) -> gpt.GPTConfig:
    return gpt.GPTConfig(vocab=51200, layers=layers, width=width, heads=heads, sequence=sequence)


def _bert_large(sequence: int) -> bert.BERTConfig:
    return bert.BERTConfig(vocab=30528, layers=24, width=1024, heads=16, sequence=sequence)


def jobs() -> dict[str, Job]:
    """What a claim is about, by name."""
    sharded = sl.remat(store="sharded")
    large, sliced = _large(48, 1600, 16), sl.tensor_slicing
    turing, hundred, trillion = _large(78, 4256, 28), _large(125, 8192, 64), _large(128, 25600, 160)
    return {
        "BERT-large, sequences of 128": Job(DGX_2, {"data": 1024}, _bert_large(128), 64, (sl.zero(0),), adam=False),
        "BERT-large, sequences of 512": Job(
            DGX_2, {"data": 1024}, _bert_large(512), 32, (sl.zero(0), sl.accumulate(4)), adam=False
        ),
        "GPT-2 1.5B, stage 1": Job(SLOW, {"data": 64}, large, 8, (sl.zero(1), sl.remat())),
        "GPT-2 1.5B, slices": Job(
            SLOW,
            {"data": 16, "model": 4},
            large,
            32,
            (sl.zero(0), sliced(gpt.slicing_rules(large)), sl.accumulate(4), sl.remat()),
        ),
        "Turing-NLG 17B": Job(
            DGX_2, {"data": 64, "model": 4}, turing, 8, (sl.zero(1), sliced(gpt.slicing_rules(turing)), sl.remat())
        ),
        "13B on one device": Job(
            DGX_2,
            {"data": 1},
            _large(40, 5120, 40),
            16,
            (sl.zero(0), sl.accumulate(4), sl.remat(), sl.offload(gradients="host")),
        ),
        "100B, stage 2": Job(
            DGX_2, {"data": 25, "model": 16}, hundred, 32, (sl.zero(2), sliced(gpt.slicing_rules(hundred)), sharded)
        ),
        "1T, three dimensions": Job(
            DGX_2,
            {"pipe": 50, "data": 1, "model": 16},
            trillion,
            512,
            (
                sl.zero(1),
                sliced(gpt.slicing_rules(trillion, blocks=True)),
                sl.pipeline(microbatches=512),
                sharded,
            ),
        ),
    }


def small_jobs() -> dict[str, Job]:
    """The same on sizes that mean nothing."""
    narrow = gpt.GPTConfig(vocab=64, layers=4, width=32, heads=4, sequence=16)
    rules, blocks = gpt.slicing_rules(narrow), gpt.slicing_rules(narrow, blocks=True)
    short = bert.BERTConfig(vocab=64, layers=2, width=32, heads=4, sequence=16)
    transforms = {
        "BERT-large, sequences of 128": ({"data": 4}, (sl.zero(0),)),
        "BERT-large, sequences of 512": ({"data": 4}, (sl.zero(0), sl.accumulate(4))),
        "GPT-2 1.5B, stage 1": ({"data": 4}, (sl.zero(1), sl.remat())),
        "GPT-2 1.5B, slices": ({"data": 2, "model": 2}, (sl.zero(0), sl.tensor_slicing(rules), sl.accumulate(2))),
        "Turing-NLG 17B": ({"data": 2, "model": 2}, (sl.zero(1), sl.tensor_slicing(rules), sl.remat())),
        "13B on one device": ({"data": 1}, (sl.zero(0), sl.accumulate(4), sl.offload(gradients="host"))),
        "100B, stage 2": ({"data": 2, "model": 2}, (sl.zero(2), sl.tensor_slicing(rules), sl.remat(store="sharded"))),
        "1T, three dimensions": (
            {"pipe": 2, "data": 1, "model": 2},
            (sl.zero(1), sl.tensor_slicing(blocks), sl.pipeline(microbatches=4)),
        ),
    }
    return {
        name: Job(DGX_2, mesh, short if name.startswith("BERT") else narrow, 8, members, not name.startswith("BERT"))
        for name, (mesh, members) in transforms.items()
    }


class Claim(NamedTuple):
    """A published number beside the plan's.

    Attributes:
        planned: returns the number, from what is found of the jobs by name.
        unit: and the precision in which it is written.
    """

    what: str
    published: str
    unit: str
    planned: Callable[[dict[str, Found]], float]


def _minutes(plans: dict[str, Found]) -> float:
    """403 million samples in batches of 65,536, then 20 million in batches of 32,768."""
    first, second = (plans[f"BERT-large, sequences of {length}"].seconds for length in (128, 512))
    return (403e6 / 65536 * first + 20e6 / 32768 * second) / 60


def _rate(name: str) -> Callable[[dict[str, Found]], float]:
    return lambda plans: plans[name].rate / 1e12


CLAIMS = (
    Claim("BERT-large on 1,024 V100", "44 minutes", "{:.0f} minutes", _minutes),
    Claim("BERT-large, sequences of 128", "64 TFLOPS", "{:.0f} TFLOPS", _rate("BERT-large, sequences of 128")),
    Claim("BERT-large, sequences of 512", "53 TFLOPS", "{:.0f} TFLOPS", _rate("BERT-large, sequences of 512")),
    Claim(
        "GPT-2 1.5B, stage 1 against slices over the ranks of a host",
        "3.75 times as fast",
        "{:.2f} times as fast",
        lambda plans: plans["GPT-2 1.5B, slices"].seconds / plans["GPT-2 1.5B, stage 1"].seconds,
    ),
    Claim("13B on one device", "> 30 TFLOPS", "{:.0f} TFLOPS", _rate("13B on one device")),
    Claim("100B, stage 2, on 400 V100", "38 TFLOPS", "{:.0f} TFLOPS", _rate("100B, stage 2")),
)


def measure(setting: Setting) -> Result:
    rows, plans = [], {}
    for name, job in (small_jobs() if setting.small else jobs()).items():
        plans[name] = each = found(job)
        mesh = " × ".join(f"{axis} {number}" for axis, number in job.mesh.items())
        sent = ", ".join(f"{size(number)} along {axis}" for axis, number in each.payload.items())
        fits = "" if each.device <= job.machine.memory else f" (of {size(job.machine.memory)}: too much)"
        host = size(each.host) if each.host else ""
        rows.append(
            (name, mesh, count(each.parameters), size(each.device) + fits, host, sent, f"{each.seconds:.3g} s",
             f"{each.rate / 1e12:.0f}")
        )  # fmt: skip
        print(" | ".join(map(str, rows[-1])), flush=True)
    columns = (
        "model",
        "ranks",
        "parameters",
        "a rank holds",
        "a host holds",
        "a rank sends in a step",
        "step",
        "TFLOPS",
    )
    numbers = [(claim, claim.planned(plans)) for claim in CLAIMS]
    compared = grid(
        ("", "by the plan", "published"), [(c.what, c.unit.format(number), c.published) for c, number in numbers]
    )
    about = (
        "Nothing here was run: bytes are those of plans, seconds those of the virtual clock, on the hardware of the claims: "
        "V100 in hosts of 16 (NVSwitch, 8 × 100 Gbit/s), and for GPT-2 in hosts of 4 (PCI Express, 40 Gbit/s). Products of "
        f"matrices are taken to reach {_SHARE:.0%} of the peak of 125 TFLOPS, as BERT's did; operators that stream the "
        "memory's 900 GB/s; a hop 5 µs inside a host, 10 or 30 µs between hosts, which nobody published. AdamW, and LAMB "
        "for BERT; fp16, gradients reduced in fp16; sequences of 1,024 tokens where none are given. TFLOPS count products "
        "of one rank, with those that are computed again. Where a paper leaves a size open (rows of GPT-2, 13B and 1T, "
        "layers of 100B and 1T) it was chosen here. Half of the peak is an assumption, so a rate says how much of it the "
        "links and the bubble leave, and no more."
    )
    text = section("Published claims, planned", about, [*grid(columns, rows), "", *compared])
    samples = [(claim.what, claim.unit.partition(" ")[2], number, claim.published) for claim, number in numbers]
    return Result(text, _HEADER, samples)


CASE = Case("claims", "what plans say of published models on the hardware of their claims", {CPU: 1}, measure)
