"""LAMB at eight times the batch learns what AdamW does from as many samples: the byte-level GPT on real text."""

import functools
import math

import pytest

from benchmarks.harness.results import FOLDER
from benchmarks.learning import byte_gpt, large_batch
from benchmarks.learning.large_batch import (
    ADAMW,
    LAMB,
    METHODS,
    SCALED,
    SEEDS,
    Trial,
    gap,
    losses_of,
    rate_of,
    read,
    table,
)


@functools.cache
def losses(name):
    """Losses by seed, at the rate of the committed grid."""
    return [large_batch.train(name, rate_of(name, read()), seed) for seed in SEEDS]


def test_the_batches_differ_by_eight_and_the_grids_are_as_long():
    assert METHODS[LAMB].batch == METHODS[SCALED].batch == 8 * METHODS[ADAMW].batch
    assert len(METHODS[LAMB].rates) == len(METHODS[ADAMW].rates)


def test_every_run_sees_as_many_samples(monkeypatch):
    runs = []
    monkeypatch.setattr(byte_gpt.Run, "train", lambda run, seed: runs.append(run) or 0.0)
    for name in METHODS:
        large_batch.train(name, 1e-3, 0)
    assert [run.batch * run.steps for run in runs] == [large_batch.ROWS] * len(METHODS)


def test_the_rate_is_the_best_of_the_grid_and_scales_by_the_root():
    grid = [Trial(ADAMW, 1e-3, 3, 2.1), Trial(ADAMW, 2e-3, 3, 2.0), Trial(LAMB, 0.01, 3, 1.9)]
    trials = [*grid, Trial(ADAMW, 4e-3, 0, 1.5)]  # a seed that is compared does not tune
    assert rate_of(ADAMW, trials) == 2e-3
    assert rate_of(LAMB, trials) == 0.01
    assert rate_of(SCALED, trials) == pytest.approx(2e-3 * math.sqrt(8))


def test_a_gap_has_the_error_of_both_means():
    found = gap([2.0, 2.1, 2.2], [1.0, 1.0, 1.0])
    assert found.difference == pytest.approx(1.1)
    assert found.error == pytest.approx(0.1 / math.sqrt(3))  # σ of the first, of three values


def test_the_committed_table_is_made_from_the_committed_trials():
    def recorded(text):
        return [line for line in text.splitlines() if line.startswith(("|", "Final"))]  # all but where it comes from

    assert recorded((FOLDER / "large_batch.md").read_text()) == recorded(table(read()))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_lamb_at_eight_times_the_batch_reaches_adamw():
    # One standard error, from the spreads of the seeds: means of three seeds do not distinguish smaller differences.
    found = gap(losses(LAMB), losses(ADAMW))
    assert found.difference <= found.error


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_adamw_at_eight_times_the_batch_does_not():
    found = gap(losses(SCALED), losses(ADAMW))
    assert found.difference > 3 * found.error


def test_losses_come_by_seed():
    trials = [Trial(LAMB, 0.01, seed, float(seed)) for seed in (2, 3, 0, 1)]
    assert losses_of(LAMB, trials) == [0.0, 1.0, 2.0]
