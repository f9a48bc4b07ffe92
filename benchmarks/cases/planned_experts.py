"""Plans of DeepSpeed-MoE's largest models on 256 ranks, against formulas. Nothing runs: all of it is planned.

With D parameters outside of experts and X in experts, on d × e ranks ("data" × "expert"), in bf16, and states in fp32 (a copy
of the parameters and two moments), a rank holds 2 (D + X/e) bytes of parameters, at ZeRO stage 3 2 (D + X) / (d e),
2 (D + X) / (d e) of gradients and 12 (D + X) / (d e) of states. Gradients are reduce-scattered once, over "data" first.
Parameters are gathered after the update; at stage 3 in forward and in backward, and the embedding once more, being the output
layer too. Tokens travel to their experts and back, forward and backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import shardlib as sl
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.tables import grid, section
from shardlib.models import gpt
from shardlib.plan.plan import Plan

_HEADER = ("model", "stage", "what", "by formula", "by the plan")


class Model(NamedTuple):
    """A GPT with experts in every other layer.

    Attributes:
        experts: of each layer with experts.
        residual: whether such a layer has an MLP beside its experts (PR-MoE).
        expert, data: ranks over which experts are dealt out, and ranks that have the same experts.
        stage: of ZeRO, 2 or 3.
    """

    name: str
    layers: int
    width: int
    experts: tuple[int, ...]
    residual: bool
    expert: int
    data: int
    stage: int = 2
    vocab: int = 51200
    sequence: int = 2048

    @property
    def config(self) -> gpt.GPTConfig:
        config = sl.nn.MoEConfig(sl.nn.routers.switch(), "gelu_tanh")
        pattern = tuple(number for some in self.experts for number in (0, some))
        moe = gpt.Experts(pattern, config, residual=4 * self.width * self.residual)
        sizes = {"vocab": self.vocab, "layers": self.layers, "width": self.width, "sequence": self.sequence}
        return gpt.GPTConfig(**sizes, heads=self.width // 32, tie=True, moe=moe)

    @property
    def paper(self) -> int:
        """Parameters by the paper's formula, which counts the matrices of blocks: 12 L h² + Σ (E − 1) 8 h²."""
        more = sum(number - (not self.residual) for number in self.experts)
        return 12 * self.layers * self.width**2 + more * 8 * self.width**2

    @property
    def dense(self) -> int:
        """Parameters outside of experts."""
        h, layers = self.width, self.layers
        mlp, attention, norms = 8 * h**2 + 5 * h, 4 * h**2 + 4 * h, 2 * layers + 1
        mlps = layers - (0 if self.residual else len(self.experts))
        routers = sum(self.experts) * h + (2 * h + 2) * len(self.experts) * self.residual
        return (self.vocab + self.sequence) * h + layers * attention + norms * 2 * h + mlps * mlp + routers

    @property
    def in_experts(self) -> int:
        """Parameters of all experts."""
        return sum(self.experts) * (8 * self.width**2 + 5 * self.width)

    def formulas(self) -> dict[str, int]:
        """What a plan says, by formula: parameters of the model; bytes that a rank holds, and sends in a step."""
        d, e, experts = self.data, self.expert, self.in_experts
        # PR-MoE's shares have two biases, padded to one for each rank; all other leaves divide.
        dense = self.dense + -2 % (d * e) * len(self.experts) * self.residual
        times, again = (3, (self.vocab + self.sequence) * self.width) if self.stage == 3 else (2, 0)
        held = (dense + experts) // (d * e) if self.stage == 3 else dense + experts // e
        tokens = 4 * len(self.experts) * self.sequence * self.width * 2 + sum(self.experts) * 8
        return {
            "parameters": self.dense + experts,
            "bytes of parameters": 2 * held,
            "bytes of gradients": 2 * (dense + experts) // (d * e),
            "bytes of states": 12 * (dense + experts) // (d * e),
            "bytes along data": 2 * (times * (dense + experts // e) + again) * (d - 1) // d,
            "bytes along expert, of parameters": 2 * (times * dense + again) // d * (e - 1) // e,
            "bytes along expert, of tokens": tokens * (e - 1) // e,
        }

    def planned(self, plan: Plan) -> dict[str, int]:
        """The same by a plan."""
        tokens = sum(message.bytes for message in plan.messages() if message.what == "activations")
        return {
            "parameters": plan.parameters,
            "bytes of parameters": plan.bytes("param"),
            "bytes of gradients": plan.bytes("grad"),
            "bytes of states": plan.bytes("optimizer"),
            "bytes along data": plan.payload()["data"],
            "bytes along expert, of parameters": plan.payload()["expert"] - tokens,
            "bytes along expert, of tokens": tokens,
        }

    def plan(self) -> Plan:
        """The plan of a step in which every rank has one row of the longest sequence."""
        tokens = torch.empty(1, self.sequence, dtype=torch.int64, device="meta")
        parallel = sl.chain(
            sl.experts(), sl.zero(self.stage, axis=("data", "expert")), sl.precision("bf16", reduce_dtype="bf16")
        )
        return sl.make_plan(
            gpt.init(self.config, device="meta"),
            sl.abstract_mesh(data=self.data, expert=self.expert),
            parallel,
            optimizer=sl.optim.adamw(1e-3),
            loss_fn=gpt.make_loss(self.config),
            batch={"tokens": tokens, "targets": tokens},
        )


MODELS = (
    Model("1.3B + MoE-128", 24, 2048, (128,) * 12, False, 128, 2),
    Model("8B + MoE-128", 40, 4096, (128,) * 20, False, 128, 2),
    Model("47B + PR-MoE-64/128", 58, 8192, (64,) * 27 + (128,) * 2, True, 64, 4),
    Model("47B + PR-MoE-64/128", 58, 8192, (64,) * 27 + (128,) * 2, True, 64, 4, 3),
)
SMALL = (
    Model("small + MoE-8", 4, 64, (8, 8), False, 4, 2, 2, 256, 32),
    Model("small + PR-MoE-4/8", 6, 64, (4, 4, 8), True, 4, 2, 3, 256, 32),
)


def measure(setting: Setting) -> Result:
    samples, rows = [], []
    for model in SMALL if setting.small else MODELS:
        formulas, planned = model.formulas(), model.planned(model.plan())
        samples += [(model.name, model.stage, what, number, planned[what]) for what, number in formulas.items()]
        total, *others = formulas
        ranks = f"{model.data} × {model.expert}"
        cells = [_agreed(formulas[what], planned[what], 1e9) for what in others]
        about = [
            model.name,
            ranks,
            model.stage,
            f"{model.paper / 1e9:.1f}",
            _agreed(formulas[total], planned[total], 1e9),
        ]
        rows.append((*about, *cells))
    about = (
        'Every rank has one row of 2048 tokens, AdamW, `zero(stage, axis=("data", "expert"))`, `precision("bf16", '
        'reduce_dtype="bf16")`, top-1 routing that spreads tokens evenly. A rank holds and sends, in GB; parameters in '
        "billions, first those of the paper's formula (arXiv 2201.05596), which counts the matrices of blocks. A number is "
        "by formula and by the plan alike, else both are given."
    )
    columns = [
        "model",
        "data × expert",
        "stage",
        "paper's formula",
        "parameters",
        "holds parameters",
        "gradients",
        "states",
    ]
    columns += ["sends along data", "along expert", "tokens along expert"]
    text = section("DeepSpeed-MoE's models, planned", about, grid(columns, rows))
    return Result(text, _HEADER, samples)


def _agreed(formula: int, plan: int, unit: float) -> str:
    return f"{formula / unit:.3f}" if formula == plan else f"{formula / unit:.6f} (plan {plan / unit:.6f})"


CASE = Case("planned_experts", "plans of DeepSpeed-MoE's largest models on 256 ranks", {CPU: 1}, measure)
