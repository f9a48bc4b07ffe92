"""Learning with curricula: what is compared, runs that were stopped, and what a table says of them."""

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


def test_what_a_run_shows():
    base = trial(Arm(WHOLE, BASE), 0, [4, 3, 2, 2], [3.0, None, 2.5, 2.0])
    mine = trial(Arm(SHORT, FASTER), 0, [4, 2, 2.5, 4], [None, 3.0, 1.0, 0.5], [1, 1, 2, 5])
    assert mine.stability.spikes() == 2 and mine.final == 0.5
    assert mine.correlation(lambda point: point.largest) == pytest.approx(3.3125 / (1.171875 * 10.75) ** 0.5)
    assert math.isnan(mine.correlation(lambda point: point.norm))
    assert shares([base, mine], Arm(SHORT, FASTER)) == [250 / 400]  # halfway from 3.0 to 1.0
    assert shares([base, mine._replace(seed=1)], Arm(SHORT, FASTER)) == []
    never = trial(Arm(SHORT, LARGER), 0, [math.nan, 1, 1, 1], [3.0] * 4)
    assert shares([base, never], Arm(SHORT, LARGER)) == [math.inf] and never.stability.spikes() == 1
    table = curriculum_report.text(TASK, [base, mine, never])
    assert "| short sequences first, 4 × rate: tokens until the baseline's loss | ≤ 0.8 | 0.62 | met |" in table
    assert "not measured" in table


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
