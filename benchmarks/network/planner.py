"""The search for a plan against brute force: choices of a small space are measured, on links that are limited too.

A rank on each of two or four hosts; all ranks measure what they do per second, then train by one choice after the other, in
turns. Plans are made, searched for and predicted before and after, by one process. Without a limit all ranks are one host's.
Needs root and iproute2.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Setting
from benchmarks.harness.timing import Times, interleave, medians
from benchmarks.network.namespaces import Network, NoNetwork, network
from shardlib.commands.measure import measure_machine
from shardlib.models import gpt
from shardlib.plan import Machine
from shardlib.search import Choice, Space
from shardlib.search.model import Model
from shardlib.search.space import choices, meshes
from shardlib.search.verb import Searching

_TITLE = "Searched for and measured"
# Rates of links, and what passes at once after a pause: a quarter of a millisecond's, so that small messages are limited too.
_RATES = {"no limit": (None, "32kb"), "1 Gbit/s": ("1gbit", "32kb"), "100 Mbit/s": ("100mbit", "4kb")}
_ROWS = 8
_PICKED, _RECOMPUTED = 10, 2  # choices without recompute; how many of them are tried with it too
_WITHIN = 0.15  # what a prediction may be off
_SPACE = Space(precisions=("fp32",), schedules=("1f1b",), offloads=(None,))
_CONFIG = gpt.GPTConfig(vocab=256, layers=4, width=256, heads=4, sequence=128)
_SMALL = gpt.GPTConfig(vocab=64, layers=4, width=32, heads=4, sequence=16)
_WARM = 1
_HEADER = ("section", "what", "round", "seconds")
_PREDICTED = "predicted"  # stands for the number of a round


class _Tried(NamedTuple):
    """Choices that are measured on one network.

    Attributes:
        times: seconds of each choice in each round.
        predicted: seconds of each.
        held: bytes of a rank's device in each, by its plan.
        winners: budget of bytes -> the choice that is searched for.
    """

    times: Times
    predicted: dict[str, float]
    held: dict[str, int]
    winners: dict[int, str]


class _Job:
    """A small GPT, with what it is trained and planned by."""

    def __init__(self, small: bool) -> None:
        self.config = _SMALL if small else _CONFIG
        self.rules, self.optimizer = gpt.slicing_rules(self.config, blocks=True), sl.optim.adamw(1e-3)
        self.loss_fn, self.params = gpt.make_sequential(self.config), gpt.to_blocks(gpt.init(self.config))

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(rows, self.config.sequence, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens}

    def model(self) -> Model:
        return Model(self.loss_fn, self.params, self.batch(_ROWS), self.optimizer, self.rules)

    def step(self, choice: Choice) -> Callable[[int], Any]:
        """A step by a choice, on this rank."""
        params = sl.shard(self.params, sl.make_mesh(**choice.mesh), choice.transform(self.rules))
        state, train = sl.make_train_step(self.loss_fn, params, self.optimizer)
        batch = self.batch(choice.rows * choice.microbatches)

        def step(number: int) -> None:
            nonlocal state
            state, metrics = train(state, batch)
            metrics["loss"].item()

        return step


def measure(ranks: int, setting: Setting) -> Result:
    """Predicted and measured seconds of each choice, and what the searched for one takes beyond the quickest."""
    title = f"{_TITLE}, {ranks} ranks"
    model = _Job(setting.small).model()
    plans = {choice: model.exact(choice) for choice in picked(ranks, model.count)}
    try:
        with network(ranks) as hosts:
            found = {name: _tried(hosts, limit, model, plans, setting) for name, limit in _RATES.items()}
    except NoNetwork as error:
        return Result(f"## {title}\n\nNot measured: {error}.\n", _HEADER, [], missing=["a network"])
    return _result(title, found, setting)


def picked(ranks: int, blocks: int) -> list[Choice]:
    """Choices that are measured, drawn at random: of each mesh in turn one, of another stage of ZeRO each time it has one."""
    everything = choices(_SPACE, meshes(_SPACE, ranks, blocks, True, 0), _ROWS, frozenset())
    drawn = [choice for choice in everything if choice.recompute is None]
    dice = random.Random(0)
    dice.shuffle(drawn)
    in_turns = _in_turns(_in_turns(drawn, lambda choice: (choice.sizes, choice.stage)), lambda choice: choice.sizes)
    found = in_turns[:_PICKED]
    return [*found, *(replace(choice, recompute="full") for choice in dice.sample(found, _RECOMPUTED))]


def _in_turns(some: Iterable[Choice], key: Callable[[Choice], Any]) -> list[Choice]:
    """Choices, the first of every key before the second of any."""
    turns = Counter[Any]()
    numbered = []
    for choice in some:
        numbered.append((turns[key(choice)], choice))
        turns[key(choice)] += 1
    return [choice for _, choice in sorted(numbered, key=lambda each: each[0])]


def _tried(
    hosts: Network, limit: tuple[str | None, str], model: Model, plans: Mapping[Choice, Any], setting: Setting
) -> _Tried:
    """The choices on one network, measured by all ranks and then searched through."""
    hosts.limit(*limit)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        arguments = str(hosts.hosts), str(setting.rounds), str(path), *["small"] * setting.small
        times = json.loads(hosts.run(__name__, *arguments, timeout=600))
        machine = Machine.read(path)
    predicted = {str(choice): sl.report.predict_on(plan, machine).total for choice, plan in plans.items()}
    held = {str(choice): _searched(model, machine, hosts.hosts, [choice], machine.memory)[1] for choice in plans}
    budgets = machine.memory, int(statistics.median(held.values()))
    winners = {budget: str(_searched(model, machine, hosts.hosts, plans, budget)[0]) for budget in budgets}
    return _Tried(times, predicted, held, winners)


def _searched(model: Model, machine: Machine, ranks: int, some: Iterable[Choice], budget: int) -> tuple[Choice, int]:
    """The quickest of some choices that holds no more than a budget, and its bytes."""
    found = Searching(model, replace(machine, memory=budget), ranks, list(some), 0.0).quickest(budget)
    assert found is not None
    return found.choice, found.bytes


def _result(title: str, found: Mapping[str, _Tried], setting: Setting) -> Result:
    searches, each, errors = [], [], []
    samples: list[tuple[Any, ...]] = []
    for name, tried in found.items():
        seconds = medians(tried.times)
        ratios = {choice: tried.predicted[choice] / seconds[choice] for choice in seconds}
        errors += [abs(ratio - 1) for ratio in ratios.values()]
        for budget, winner in tried.winners.items():
            fitting = {choice: seconds[choice] for choice in seconds if tried.held[choice] <= budget}
            regret = seconds[winner] / min(fitting.values()) - 1
            over = "" if winner in fitting else "over the budget"
            cells = f"{seconds[winner]:.3g}", f"{ratios[winner]:.2f}", f"{regret:.1%}", over
            searches.append((name, len(fitting), winner, *cells))
        section = f"{title}, {name}"
        samples += [(section, what, n, f"{t:.9f}") for what, ts in tried.times.items() for n, t in enumerate(ts)]
        samples += [(section, what, _PREDICTED, f"{t:.9f}") for what, t in tried.predicted.items()]
        each.append({choice: f"{seconds[choice]:.3g}, {ratio:.2f}" for choice, ratio in ratios.items()})
    rows = [(choice, *(column[choice] for column in each)) for choice in each[0]]
    within = sum(error <= _WITHIN for error in errors)
    about = (
        f"A GPT of {_CONFIG.layers} layers of width {_CONFIG.width}, {_ROWS} rows of {_CONFIG.sequence} tokens of all ranks, "
        f"fp32, one thread a rank, {setting.rounds} rounds, in which all choices take turns. For each network two searches: "
        "with any memory, and with that which half of the choices hold. Regret is what the choice that is searched for takes "
        f"beyond the quickest that fits, both measured. Of {len(errors)} predictions {within} are within 15 %. For each "
        "choice and network: seconds measured, and predicted / measured."
    )
    columns = ("links", "choices that fit", "searched for", "measured, s", "predicted / measured", "regret", "")
    lines = [*tables.grid(columns, searches), "", *tables.grid(("choice", *found), rows)]
    return Result(tables.section(title, about, lines), _HEADER, samples)


def _rank(ranks: int, rounds: int, path: str, small: bool) -> Times:
    """Seconds of every choice; rank 0 writes the machine that all ranks measured."""
    torch.set_num_threads(1)
    world, job = sl.make_mesh(), _Job(small)
    machine = measure_machine(world)
    if world.rank == 0:
        machine.write(path)
    calls = {str(choice): job.step(choice) for choice in picked(ranks, len(job.params))}
    return interleave(calls, rounds, warm=_WARM, barrier=dist.barrier)


CASES = tuple(
    Case(
        f"planner_{ranks}",
        f"the search for a plan against brute force on {ranks} ranks; needs root",
        {CPU: 5},
        partial(measure, ranks),
    )
    for ranks in (2, 4)
)

if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "small" in sys.argv)))
