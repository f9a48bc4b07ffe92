"""What steps reach: learning rate, tokens per second, model FLOPs utilisation, memory; and its live view."""

import io
import math

import pytest
import torch
from helpers.models import mlp, regression_batch
from rich.console import Console

import shardlib as sl
from shardlib.common.display.braille import curve_text
from shardlib.report import Log, StepRates, Watch, rates


def steps(tx, rates, count=3, **options):
    """The values after each of some steps."""
    loss_fn, params = mlp([6, 9, 4])
    state, step = sl.make_train_step(loss_fn, params, tx, **options)
    found = []
    for _ in range(count):
        state, _ = step(state, regression_batch(6, 6, 4))
        found.append(rates(state))
    return found


def test_the_rate_is_that_of_the_update():
    """Of three steps the second's gradient is not finite: it makes no update, and the schedule does not advance."""
    schedule = sl.optim.linear_schedule(0.5, 0.0, 10)
    loss_fn, params = mlp([6, 9, 4])
    state, step = sl.make_train_step(loss_fn, params, sl.optim.chain(sl.optim.adam(schedule)), nonfinite="skip")
    reach, found = StepRates(1, schedule), []
    for factor in (1.0, math.inf, 1.0):
        state, _ = step(state, tuple(leaf * factor for leaf in regression_batch(6, 6, 4)))
        found.append(reach(state)["lr"])
    assert found == pytest.approx([0.5, 0.5, 0.45])


def test_a_rate_in_the_state_is_found():
    injected = sl.optim.inject_hyperparams(sl.optim.sgd)(0.25)
    assert [found["lr"] for found in steps(injected, StepRates(1))] == [0.25] * 3
    reach = StepRates(1)
    assert "lr" not in steps(sl.optim.sgd(0.1), reach, 1)[0] and "give lr=" in reach.unknown["lr"]


def test_tokens_and_utilisation_by_the_clock():
    ticks = iter([0.0, 2.0, 4.0, 5.0])
    found = steps(sl.optim.sgd(0.1), StepRates(100, 0.1, flops=30.0, peak=60.0, clock=lambda: next(ticks)))
    assert [each["tokens_per_second"] for each in found] == pytest.approx([50, 50, 60])
    assert [each["mfu"] for each in found] == pytest.approx([0.25, 0.25, 0.3])
    assert all(each["memory"] > 50e6 for each in found)  # of a process with torch in it


def test_a_cpu_has_no_peak_that_is_made_up():
    reach = StepRates(1, 0.1, flops=30.0)
    assert "mfu" not in steps(sl.optim.sgd(0.1), reach, 1)[0]
    assert reach.unknown == {"mfu": "no published peak is known of this cpu device: give peak="}
    assert rates.published_peak(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize("remat", [False, True])
def test_operations_are_those_of_the_model(remat):
    """6·P·T of a network of products (2 forward, 4 backward), and no more of it where blocks are computed again."""

    def loss_fn(params, batch):
        x = batch
        for block in params["blocks"]:
            x = sl.block(lambda block, x: torch.tanh(x @ block))(block, x)
        return x.square().mean()

    params, batch = {"blocks": [torch.ones(16, 16) for _ in range(3)]}, torch.ones(8, 16, requires_grad=False)
    chain = sl.chain(sl.zero(3), *([sl.remat()] if remat else []), sl.accumulate(2))
    plan = sl.make_plan(params, sl.abstract_mesh(data=2), chain, loss_fn=loss_fn, batch=batch)
    # The first block's input needs no gradient.
    assert rates.model_flops(plan) in (8 * 256 * (6 * 3 - 2), 8 * 256 * 6 * 3)
    assert rates.model_flops(sl.make_plan(params, sl.abstract_mesh(data=2), sl.zero(3))) is None


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 1, "peak": -1.0}, {"tokens": 1, "flops": math.nan}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="are above 0"):
        StepRates(**wrong)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(stream, **options):
    ticks = iter(range(10**6))
    watch = Watch(4, 1000, stream=stream, clock=lambda: float(next(ticks)), every=2, **options)
    with Log(watch) as log:
        for step in range(1, 5):
            log.write(step, {"loss": 4.0 / step, "lr": 0.5, "memory": 2.5e9, "tokens_per_second": 1000.0})
        log.write(4, {"validation": {"loss": 1.5}})
    return stream.getvalue()


def test_the_live_view(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = watched(Screen(), unknown={"mfu": "no peak"})
    for text in (
        "loss by step",
        "learning rate",
        "2.5 GB",
        "unknown: no peak",
        "validation loss",
        "1.5000",
        "step 4/4",
    ):
        assert text in shown
    assert any(0x2800 < ord(char) < 0x2900 for char in shown)


def test_elsewhere_than_in_a_terminal_the_view_is_lines():
    lines = watched(io.StringIO()).splitlines()
    assert len(lines) == 2 and lines[-1].startswith("step 4/4  loss 1.000  1,000 tokens/s")
    assert lines[-1].endswith("lr 0.5  memory 2.5 GB") and "\x1b" not in "".join(lines)
    assert watched(io.StringIO(), rank=1) == ""


def test_a_curve_in_dots():
    lines = curve_text([(step, float(step)) for step in range(21)], width=10, height=3)
    assert lines[0].startswith("20 ┤") and lines[2].startswith(" 0 ┤") and lines[3].split() == ["0", "20"]
    assert lines[0][-1] != chr(0x2800) != lines[2][4] and lines[0][4] == chr(0x2800)  # from below left to above right
    assert curve_text([(1, math.nan)]) == ["nothing yet"] and len(curve_text([(1, 2.0)])) == 9
    Console(file=io.StringIO()).print("\n".join(lines))
