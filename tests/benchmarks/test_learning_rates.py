"""The sweep over learning rates: the choice of the next runs, and the committed table against its trials."""

import math

import pytest

from benchmarks.harness.results import FOLDER
from benchmarks.learning import byte_gpt, rates
from benchmarks.learning.methods import TASK, methods
from benchmarks.learning.rates import METHODS, SEEDS, Trial, best_rate, missing, rate_at, read, reported, sweep, table
from shardlib.errors import NonFiniteError

BEST = {"Adam": 1, "1-bit Adam": 0, "0/1 Adam": -3, "LAMB": 5, "1-bit LAMB": -1}  # steps of √2 from the middle


def trial(name, rate, seed):
    """Losses that are lowest at `BEST`; what is reported is lowest elsewhere. Infinite far above."""
    away = 2 * math.log2(rate / rate_at(name, BEST[name]))
    return Trial(name, rate, seed, away**2 if away < 7 else math.inf, rate)


def finished():
    trials = []
    while jobs := missing(trials):
        assert not set(jobs) & {t[:3] for t in trials}
        trials += [trial(*job) for job in jobs]
    return trials


def test_grids_grow_until_no_best_rate_is_at_their_end():
    trials = finished()
    for name, reference in METHODS.items():
        tried = {t.rate for t in trials if t.method == name}
        assert best_rate(name, trials) == rate_at(name, BEST[name])
        assert {rate_at(name, BEST[name] + by) for by in (-1, 1)} <= tried
        assert rate_at(name, BEST[reference]) in tried
    assert all(sum(t[:2] == other[:2] for t in trials) == len(SEEDS) for other in trials)


def test_rates_are_chosen_on_one_half_of_the_text_and_reported_on_the_other():
    trials = finished()
    assert reported("Adam", best_rate("Adam", trials), trials) == [rate_at("Adam", BEST["Adam"])] * len(SEEDS)


def test_an_interrupted_sweep_resumes(tmp_path, monkeypatch):
    file, ran = tmp_path / "learning_rates.csv", []

    def side_by_side(job, jobs, processes):
        for number, each in enumerate(jobs):
            if number == 4 and len(ran) <= 8:
                raise KeyboardInterrupt
            ran.append(each)
            yield trial(*each)

    monkeypatch.setattr(byte_gpt, "side_by_side", side_by_side)
    for stopped in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            sweep(file)
        assert [t[:3] for t in read(file)] == ran and len(ran) == 4 * stopped
    assert {t[:3] for t in sweep(file)} == {t[:3] for t in finished()}
    assert len(ran) == len(set(ran)) == len(finished())


def test_a_run_that_diverges_counts_as_infinite(monkeypatch):
    def diverge(run, seed):
        raise NonFiniteError("step 3")

    monkeypatch.setattr(byte_gpt.Run, "train_on_halves", diverge)
    assert rates.train(TASK, "LAMB", 1.0, 2) == Trial("LAMB", 1.0, 2, math.inf, math.inf)


def test_halves_of_the_validation_text_do_not_overlap(monkeypatch):
    parts = []
    monkeypatch.setattr(byte_gpt, "windows", lambda data, *_, **__: parts.append(data) or [])
    monkeypatch.setattr(byte_gpt.statistics, "fmean", lambda losses: float(len(list(losses))))
    run = byte_gpt.Run(TASK.config, 2, 0, methods()[0].optimizer(TASK), ranks=1)
    run.train(0)
    assert run.train_on_halves(0) == (0.0, 0.0)
    whole, one, other = parts
    assert len(one) + len(other) == len(whole) and abs(len(one) - len(other)) <= 1 << 14
    assert bytes(one[:64]) == bytes(whole[:64]) and bytes(other[:64]) == bytes(whole[1 << 14 :][:64])


def test_the_committed_table_is_made_from_the_committed_trials():
    def recorded(text):
        return [line for line in text.splitlines() if line.startswith(("|", "Final"))]  # all but where it comes from

    assert not missing(read())
    assert recorded((FOLDER / "learning_rates.md").read_text()) == recorded(table(read()))
