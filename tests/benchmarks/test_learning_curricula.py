"""Learning with curricula: what is compared, runs that were stopped, and what a table says of them."""

import dataclasses
import math

import pytest
import torch

from benchmarks.harness.case import Setting
from benchmarks.learning import byte_gpt, curricula, curriculum_report
from benchmarks.learning.curriculum_arms import ARMS, BASE, FASTER, LARGER, SHORT, SMALL, TASK, WHOLE, Arm
from benchmarks.learning.curriculum_report import Point, Trial, shares


def trial(arm, seed, losses, held_out, largest=None):
    points = [
        Point(step, 100 * step, loss, 1.0, size, found)
        for step, (loss, found, size) in enumerate(zip(losses, held_out, largest or losses, strict=True), 1)
    ]
    return Trial(arm.name, seed, tuple(points))


def one_by_one(job, arguments, processes=None):
    yield from (job(*each) for each in arguments)


def test_arms_consume_the_same_tokens_and_grow_within_their_run():
    assert len({arm.name for arm in ARMS}) == len(ARMS) == 11
    for arm in ARMS:
        plan, steps = arm.plan(TASK), arm.steps(TASK)
        assert plan.tokens(steps - 1) < TASK.tokens <= plan.tokens(steps)
        assert plan.tokens_at(steps - 1) == arm.scale.rows * TASK.batch * TASK.config.sequence
        assert plan._tokens.starts[-1] < 0.5 * steps
        rate = arm.rate(TASK)
        assert float(rate(steps)) < 1e-12 and max(rate(torch.arange(steps)).tolist()) <= arm.scale.rate * TASK.rate
    assert Arm(SHORT, BASE).steps(TASK) > Arm(WHOLE, BASE).steps(TASK) == 1000


def test_losses_of_few_tokens_are_averaged():
    run = trial(Arm(WHOLE, BASE), 0, [4, 2, 3, 1, 5], [None] * 5)
    assert [point.loss for point in run.windows(100)] == [4, 2, 3, 1, 5]
    assert [(point.step, point.loss) for point in run.windows(101)] == [(2, 3), (5, 3)]  # what is left goes to the last
    assert [(point.step, point.loss) for point in run.windows(600)] == [(5, 3)]
    evaluated = trial(Arm(WHOLE, BASE), 0, [1] * 5, [0.9, None, None, 0.8, None]).windows(101)
    assert [point.held_out for point in evaluated] == [0.9, 0.8]
    uneven = run._replace(points=tuple(p._replace(tokens=t) for p, t in zip(run.points, (10, 40, 50, 90, 100))))
    assert [(point.step, point.loss) for point in uneven.windows(40)] == [(2, 2.5), (5, 2.0)]
    assert run.stability(101).spikes() == 0 and run.stability(100).spikes() == 2


def test_what_a_run_shows():
    base = trial(Arm(WHOLE, FASTER), 0, [4, 3, 2, 3], [3.0, None, 2.5, 2.0])
    mine = trial(Arm(SHORT, FASTER), 0, [4, 2, 2.5, 4], [None, 3.0, 1.0, 0.5], [1, 1, 2, 5])
    assert mine.stability(100).spikes() == 2 and mine.final == 0.5
    assert mine.correlation(100) == pytest.approx(3.3125 / (1.171875 * 10.75) ** 0.5)
    assert math.isnan(base._replace(points=tuple(p._replace(largest=1.0) for p in base.points)).correlation(100))
    assert shares([base, mine], Arm(SHORT, FASTER)) == [250 / 400]  # halfway from 3.0 to 1.0
    assert shares([base, mine._replace(seed=1)], Arm(SHORT, FASTER)) == []
    never = trial(Arm(SHORT, LARGER), 0, [math.nan, 1, 1, 1], [3.0] * 4)
    larger = trial(Arm(WHOLE, LARGER), 0, [4, 3, 2, 2], [3.0, None, 2.5, 2.0])
    assert shares([larger, never], Arm(SHORT, LARGER)) == [math.inf] and never.stability(100).spikes() == 1
    table = curriculum_report.text(dataclasses.replace(TASK, window=100), [base, mine, larger, never])
    assert "| short sequences first, 4 × rate: tokens until the loss of whole sequences | ≤ 0.8 | 0.62 | met |" in table
    assert "| 4 × rate: short sequences first has fewer spikes than whole sequences | fewer | 2 / 1 | missed |" in table
    assert "| 1 / 0 | no spikes to avoid |" in table and "not measured" in table and "| 1 of 1 | 2.00 |" in table


def test_a_stopped_measurement_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_gpt, "side_by_side", one_by_one)
    chosen = [Arm(WHOLE, BASE), Arm(SHORT, LARGER)]
    for module in (curricula, curriculum_report):
        monkeypatch.setattr(module, "ARMS", chosen)
    trained, train = [], curricula.train
    monkeypatch.setattr(curricula, "train", lambda *args: trained.append(args[2:]) or train(*args))
    setting = Setting("cpu", torch.device("cpu"), rounds=1, small=True, work=tmp_path)
    result = curricula.measure(setting)
    assert len(trained) == 2 and all(len(row) == len(result.header) for row in result.samples)
    stopped = curricula._file(tmp_path, chosen[1].name, 0)
    whole = stopped.read_text()
    stopped.write_text("".join(whole.splitlines(True)[:-2]))
    assert curricula.measure(setting).text == result.text and stopped.read_text() == whole
    assert trained[2:] == [(chosen[1].name, 0)]
    assert len(curricula.finished(SMALL, tmp_path, trained)) == 3
