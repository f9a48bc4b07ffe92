"""The n-gram losses against counting by hand, the plot and the progress line."""

import io
import math
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

from shardlib.data.bytes import load_bytes, split
from shardlib.report.ngram import byte_scores, ngram_losses
from shardlib.report.plot import plot_losses, plot_range_test
from shardlib.report.progress import Progress
from shardlib.report.range_test import has_diverged, propose_rate


def counted_by_hand(train: bytes, validation: bytes, highest: int) -> list[float]:
    """The same models by dictionaries, one byte at a time."""
    seen: dict[bytes, Counter] = defaultdict(Counter)
    for order in range(highest + 1):
        for i in range(order, len(train)):
            seen[train[i - order : i]][train[i]] += 1

    def probability(context: bytes, byte: int) -> float:
        shorter = probability(context[1:], byte) if context else 1 / 256
        n, d = seen[context].total(), len(seen[context])
        return (seen[context][byte] + d * shorter) / (n + d) if n else shorter

    at = range(highest, len(validation))
    losses = []
    for order in range(highest + 1):
        odds = [probability(validation[i - order : i], validation[i]) for i in at]
        losses.append(-sum(map(math.log, odds)) / len(odds))
    return losses


def test_ngrams_are_counted_right():
    train = b"the cat sat on the mat, that cat; the hat sat." * 3
    validation = b"that fat cat ate the oats, the rat!"
    arrays = [np.frombuffer(text, dtype=np.uint8) for text in (train, validation)]
    assert ngram_losses(*arrays) == pytest.approx(counted_by_hand(train, validation, 2), rel=1e-12)


def test_on_python_source_each_order_helps():
    losses = ngram_losses(*split(load_bytes()))
    assert losses == pytest.approx([3.24, 2.41, 1.75], abs=0.15)


def test_orders_and_texts_that_cannot_be_counted_are_refused():
    text = np.zeros(10, dtype=np.uint8)
    with pytest.raises(ValueError, match="highest=3"):
        ngram_losses(text, text, highest=3)
    with pytest.raises(ValueError, match="more than 2 bytes"):
        ngram_losses(text, text[:2])


@pytest.mark.parametrize("length", [1, 2, 500])
def test_a_plot_is_a_png(tmp_path, length):
    pytest.importorskip("matplotlib")
    train = [(step, 5 / (1 + step)) for step in range(length)]
    plot_losses(tmp_path / "deep" / "loss.png", train, [(0, 5.0)], [3.24, 2.41, 1.75])
    assert (tmp_path / "deep" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'shardlib\[notebooks\]'"):
        plot_losses(tmp_path / "loss.png", [(0, 1.0)])


def test_a_range_test_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot_range_test(tmp_path / "test.png", [1e-4, 1e-3, 1e-2], [3.0, 2.0, 2.5], 1e-3)
    assert (tmp_path / "test.png").read_bytes().startswith(b"\x89PNG")


def test_the_rate_at_which_the_loss_falls_fastest():
    """A fall by a sigmoid of the rate's logarithm is steepest in its middle; what diverges later does not count."""
    exponents = np.linspace(-5, 0, 101)
    losses = 5 - 3 / (1 + np.exp(-4 * (exponents + 3))) + np.exp(12 * (exponents + 1))
    assert propose_rate(10**exponents, losses) == pytest.approx(1e-3, rel=0.06)
    noisy = losses + 0.05 * np.random.default_rng(1).standard_normal(101)
    assert propose_rate(10**exponents, noisy) == pytest.approx(1e-3, rel=0.6)
    with pytest.raises(ValueError, match="never fell"):
        propose_rate(10**exponents, np.linspace(2, 3, 101))
    with pytest.raises(ValueError, match="of 9 steps is too short"):
        propose_rate(10 ** exponents[:9], losses[:9])


def test_a_range_test_ends_when_the_loss_diverges():
    assert [has_diverged([3.0, 2.0, last]) for last in (2.5, 8.0, 8.1, math.nan, math.inf)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_bits_per_byte_and_perplexity():
    # A model that knows nothing: 8 bits, one of 256.
    scores = byte_scores(math.log(256))
    assert scores == {"loss": math.log(256), "bits_per_byte": pytest.approx(8), "perplexity": pytest.approx(256)}
    assert byte_scores(1e4)["perplexity"] == math.inf  # a diverged run is reported, not an OverflowError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream, steps=10, **options):
    """A run of ``steps`` steps on a clock that moves by itself, with one note in the middle."""
    now = iter(range(10**6))
    progress = Progress(steps, 1000, stream=stream, clock=lambda: float(next(now)), **options)
    for step in range(options.get("start", 0) + 1, steps + 1):
        progress.write(step, {"loss": 5.0 / step})
        if step == 7:
            progress.note("[7] validation 1.5")
    progress.close()
    return stream.getvalue()


def test_away_from_a_terminal_a_line_every_few_seconds():
    lines = run(io.StringIO(), every=4).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 4/10",
        "[7] validation 1.5",
        "step 8/10",
        "step 10/10",
    ]
    assert lines[2].startswith("step 8/10  loss 0.625  1,000 tokens/s  0:02 left")


def test_rate_and_time_left():
    ticks = iter([0, 2, 4])  # made, step 51, step 52
    stream = io.StringIO()
    progress = Progress(100, 1000, start=50, every=0, stream=stream, clock=lambda: next(ticks))
    progress.write(51, {"loss": 2.5})
    progress.write(52, {"loss": 2.25})
    assert stream.getvalue().splitlines() == [
        "step 51/100  loss 2.500  500 tokens/s  1:38 left",
        "step 52/100  loss 2.250  500 tokens/s  1:36 left",
    ]


def test_a_step_without_a_loss_shows_the_one_before():
    """As any writer, it also gets steps without a loss."""
    stream = io.StringIO()
    progress = Progress(100, 1000, every=0, stream=stream, clock=lambda: 1.0)
    for step, values in enumerate([{"lr": 0.5}, {"loss": 2.5}, {"validation/loss": 3.0}]):
        progress.write(step, values)
    assert stream.getvalue().splitlines() == ["step 0/100", "step 1/100  loss 2.500", "step 2/100  loss 2.500"]


def test_on_a_terminal_the_line_is_redrawn(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = run(Terminal())
    assert "step 10/10  loss 0.500" in shown and "[7] validation 1.5" in shown
    assert "\x1b[" in shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_are_silent(stream):
    assert run(stream, rank=1) == ""
