"""Which transforms compose: every pair of them is planned, at every ZeRO stage, and the planner's refusals are quoted."""

import html
from dataclasses import dataclass, field
from itertools import combinations

import shardlib as sl
from shardlib.errors import IllegalComposition
from shardlib.models import gpt
from shardlib.plan.transform import Transform

STAGES = (0, 1, 2, 3)
CONFIG = gpt.GPTConfig(vocab=64, layers=3, width=32, heads=4, sequence=16)
PARAMS = gpt.to_blocks(gpt.init(CONFIG, device="meta"))
RULES = gpt.slicing_rules(CONFIG, blocks=True)


@dataclass(frozen=True)
class Choice:
    """A transform, and the axes that it needs beside "data"."""

    code: str
    axes: dict[str, int] = field(default_factory=dict)

    def make(self) -> Transform:
        return eval(self.code, {"sl": sl, "rules": RULES})  # what the page shows is what is planned


CHOICES = (
    Choice("sl.accumulate(2)"),
    Choice("sl.pipeline('1f1b', 2)", {"pipe": 2}),
    Choice("sl.tensor_slicing(rules)", {"model": 2}),
    Choice("sl.sequence('seq', 'ring')", {"seq": 2}),
    Choice("sl.precision('bf16')"),
    Choice("sl.precision('fp8', leaves={'*norm*': 'bf16'})"),
    Choice("sl.remat()"),
    Choice("sl.remat(store='host')"),
    Choice("sl.freeze('*/bias')"),
    Choice("sl.tile('*/mlp/*', 2)"),
    Choice("sl.offload()"),
    Choice("sl.offload(params='host')"),
    Choice("sl.offload('disk', folder='files')"),
    Choice("sl.quantize(gradients='int8')"),
    Choice("sl.quantize(weights='int8')"),
    Choice("sl.onebit()"),
    Choice("sl.powersgd(4)"),
    Choice("sl.reproducible(4)"),
    Choice("sl.progressive_layer_drop()"),
    Choice("sl.random_ltd(sl.data.linear_pace(8, 16, 100, 8))"),
)


def short(code: str) -> str:
    """For a row's head: without the prefix."""
    return (
        code.removeprefix("sl.")
        .replace("sl.data.linear_pace(8, 16, 100, 8)", "pace")
        .replace(", leaves={'*norm*': 'bf16'}", "")
    )


def refusal(stage: int, *choices: Choice) -> str | None:
    """The planner's words, or None where it makes a plan."""
    axes = {axis: size for choice in choices for axis, size in choice.axes.items()}
    chain = sl.chain(sl.zero(stage), *(choice.make() for choice in choices))
    try:
        sl.make_plan(PARAMS, sl.abstract_mesh(data=2, **axes), chain, optimizer=sl.optim.adamw(1e-3))
    except IllegalComposition as refused:
        return str(refused)
    return None


def table() -> tuple[dict[tuple[int, int], tuple[int, ...]], dict[str, list[str]]]:
    """The stages at which each pair is planned, and reason -> what it refuses, at which stages."""
    planned: dict[tuple[int, int], tuple[int, ...]] = {}
    reasons: dict[str, dict[str, list[int]]] = {}
    alone = [(number, number) for number in range(len(CHOICES))]
    known: set[str] = set()  # what is said of a transform alone holds whatever stands beside it
    for first, second in [*alone, *combinations(range(len(CHOICES)), 2)]:
        pair = [CHOICES[number] for number in sorted({first, second})]
        said = {stage: refusal(stage, *pair) for stage in STAGES}
        planned[first, second] = planned[second, first] = tuple(stage for stage in STAGES if said[stage] is None)
        name = " with ".join(f"`{short(choice.code)}`" for choice in pair)
        for stage, reason in said.items():
            if reason and (first == second or reason not in known):
                reasons.setdefault(reason, {}).setdefault(name, []).append(stage)
        if first == second:
            known.update(filter(None, said.values()))
    return planned, {reason: [f"{name} {at(stages)}" for name, stages in of.items()] for reason, of in reasons.items()}


def at(stages: list[int]) -> str:
    return "at every stage" if len(stages) == len(STAGES) else f"at stage {', '.join(map(str, stages))}"


def cell(stages: tuple[int, ...]) -> str:
    if stages == STAGES:
        return '<td class="every" title="at every stage">all</td>'
    if not stages:
        return '<td class="none" title="refused at every stage">no</td>'
    return f'<td class="some" title="at these stages">{", ".join(map(str, stages))}</td>'


def page() -> str:
    stages, reasons = table()
    codes = [html.escape(short(choice.code)) for choice in CHOICES]
    heads = "".join(f"<th scope='col'><span>{code}</span></th>" for code in codes)
    rows = [
        f"<tr><th scope='row'>{code}</th>{''.join(cell(stages[row, column]) for column in range(len(CHOICES)))}</tr>"
        for row, code in enumerate(codes)
    ]
    lines = [
        "# What composes with what",
        "",
        f"Made with this site by asking the planner of shardlib {sl.__version__}: each pair, in a chain with "
        f"`sl.zero(stage)` of every stage, is planned for a GPT of {CONFIG.layers} blocks on two ranks of data and two of "
        "each axis that the pair names. A cell has the stages at which there is a plan; on the diagonal a transform is "
        "alone with ZeRO. Chains of three and more follow the same claims. What only a loss can show, such as operations "
        "on parts of a sequence, is refused in the first step: [limits](limits.md).",
        "",
        f'<div class="wide"><table class="composition"><thead><tr><td></td>{heads}</tr></thead>',
        f"<tbody>{''.join(rows)}</tbody></table></div>",
        "",
        "## Why not",
        "",
        "What is refused, and the planner's words. Of a transform that is named alone they hold with any other.",
        "",
    ]
    for reason, pairs in reasons.items():
        lines += ["; ".join(pairs), "", f'<pre class="said">{html.escape(reason)}</pre>', ""]
    return "\n".join(lines)
