"""The search for a plan against brute force: every choice of a small space is measured, on links that are limited too.

A rank on each of two or four hosts; all ranks measure what they do per second, then train by one choice after the other, in
turns. Without a limit all ranks are one host's. Needs root and iproute2.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import interleave, medians
from benchmarks.network.namespaces import NoNetwork, network
from shardlib.commands.measure import measure_machine
from shardlib.models import gpt
from shardlib.search import Choice, Space
from shardlib.search.model import Model
from shardlib.search.searching import Searching
from shardlib.search.space import choices

_TITLE = "Searched for and measured"
_RATES = {"unlimited": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
_ROWS = 8
_MOST = 12  # choices of one network
_SPACE = Space(precisions=("fp32",), schedules=("1f1b",), offloads=(None,))
_CONFIG = gpt.GPTConfig(vocab=256, layers=4, width=256, heads=4, sequence=128)
_SMALL = gpt.GPTConfig(vocab=64, layers=2, width=32, heads=2, sequence=16)
_WARM = 2
_HEADER = ("section", "what", "round", "seconds")


def measure(ranks: int, setting: Setting) -> Result:
    """Predicted and measured seconds of every choice, and what the searched for one takes beyond the quickest."""
    title = f"{_TITLE}, {ranks} ranks"
    try:
        with network(ranks) as hosts:
            found = {}
            for name, rate in _RATES.items():
                hosts.limit(rate)
                small = ["small"] * setting.small
                found[name] = json.loads(hosts.run(__name__, str(setting.rounds), name, *small, timeout=1800))
    except NoNetwork as error:
        return Result(f"## {title}\n\nNot measured: {error}.\n", _HEADER, [], missing=["a network"])
    lines, samples, errors = [], [], []
    for name, answer in found.items():
        seconds = medians(answer["times"])
        errors += [abs(answer["predicted"][choice] / seconds[choice] - 1) for choice in seconds]
        for budget, winner in answer["winners"].items():
            fitting = {choice: seconds[choice] for choice in seconds if answer["bytes"][choice] <= float(budget)}
            regret = seconds[winner] / min(fitting.values()) - 1
            over = "" if winner in fitting else "over the budget"
            ratio = answer["predicted"][winner] / seconds[winner]
            lines.append((name, len(fitting), winner, f"{seconds[winner]:.3g}", f"{ratio:.2f}", f"{regret:.1%}", over))
        samples += [
            (f"{title}, {name}", c, n, f"{t:.9f}") for c, ts in answer["times"].items() for n, t in enumerate(ts)
        ]
    columns = ("links", "choices that fit", "searched for", "measured, s", "predicted / measured", "regret", "")
    within = sum(error <= 0.15 for error in errors)
    about = (
        f"A GPT of {_CONFIG.layers} layers of width {_CONFIG.width}, {_ROWS} rows of {_CONFIG.sequence} tokens of all ranks, "
        f"fp32, one thread a rank, {setting.rounds} rounds, in which all choices take turns. For each network two searches: "
        "with any memory, and with that which half of the choices hold. Regret is what the choice that is searched for takes "
        f"beyond the quickest that fits, both measured. Of {len(errors)} choices {within} are predicted within 15 %."
    )
    return Result(tables.section(title, about, tables.grid(columns, lines)), _HEADER, samples)


def _rank(rounds: int, rate: str, small: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    world, config = sl.make_mesh(), _SMALL if small else _CONFIG
    machine = measure_machine(world)
    rules, optimizer = gpt.slicing_rules(config, blocks=True), sl.optim.adamw(1e-3)
    loss_fn, tree = gpt.make_sequential(config), gpt.to_blocks(gpt.init(config))
    model = Model(loss_fn, tree, _batch(config, _ROWS), optimizer, rules)
    plans, calls = {}, {}
    for choice in _some(
        choices(_SPACE, world.size, _ROWS, blocks=model.count, slices=True, experts=0, memories=frozenset())
    ):
        plans[choice] = model.exact(choice)
        calls[str(choice)] = _step(config, choice, rules, loss_fn, tree, optimizer)
    times = interleave(calls, rounds, warm=_WARM, barrier=dist.barrier)
    held = {choice: _peak(model, machine, world.size, choice) for choice in plans}
    winners = {}
    for budget in (machine.memory, int(statistics.median(held.values()))):
        searching = Searching(model, replace(machine, memory=budget), world.size, list(plans), 0.0)
        found = searching.quickest(budget)
        assert found is not None
        winners[budget] = str(found.choice)
    predicted = {str(choice): sl.report.predict_on(plan, machine).total for choice, plan in plans.items()}
    return {"times": times, "predicted": predicted, "bytes": {str(c): b for c, b in held.items()}, "winners": winners}


def _some(found: Any) -> list[Choice]:
    """Choices, evenly taken from all."""
    everything = list(found)
    return everything[:: max(1, -(-len(everything) // _MOST))]


def _peak(model: Model, machine: Any, ranks: int, choice: Choice) -> int:
    found = Searching(model, machine, ranks, [choice], 0.0).quickest(machine.memory)
    assert found is not None
    return found.bytes


def _step(
    config: gpt.GPTConfig, choice: Choice, rules: Mapping[str, Any], loss_fn: Any, tree: Any, optimizer: Any
) -> Callable[[int], Any]:
    """A step by a choice, on this rank."""
    params = sl.shard(tree, sl.make_mesh(**choice.mesh), choice.transform(rules))
    state, train = sl.make_train_step(loss_fn, params, optimizer)
    batch = _batch(config, choice.rows * choice.microbatches)

    def step(number: int) -> None:
        nonlocal state
        state, metrics = train(state, batch)
        metrics["loss"].item()

    return step


def _batch(config: gpt.GPTConfig, rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, config.sequence, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens}


CASES = tuple(
    Case(
        f"planner_{ranks}",
        f"the search for a plan against brute force on {ranks} ranks; needs root",
        {CPU: 7},
        partial(measure, ranks),
    )
    for ranks in (2, 4)
)

if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[1]), sys.argv[2], "small" in sys.argv)))
