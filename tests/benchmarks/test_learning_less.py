"""Learning with less, at sizes that mean nothing: runs go on from a work folder, and are compared seed by seed."""

import pytest
import torch

from benchmarks.harness.case import Setting
from benchmarks.learning import byte_gpt, less


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(byte_gpt, "side_by_side", lambda job, arguments, processes: [job(*each) for each in arguments])


def test_a_measurement_goes_on_with_what_is_not_finished(tmp_path):
    setting = Setting("cpu", torch.device("cpu"), rounds=1, small=True, work=tmp_path)
    whole = less.measure(setting)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3 + 2 * 4 + 2 and whole.text.startswith("## ")
    assert all(len(row) == len(whole.header) for row in whole.samples)
    before = {file: file.read_text() for file in files}
    cut = next(file for file in files if "fewer layers" in file.name)
    cut.write_text("".join(before[cut].splitlines(keepends=True)[:2]))
    again = less.measure(setting)
    same = [file for file in files if file.read_text() == before[file]]
    assert len(same) >= len(files) - 1  # the run that was cut may have other times
    losses = [[row[5] for row in result.samples] for result in (whole, again)]
    assert losses[0] == losses[1]


def test_what_is_left_out_is_in_the_table(tmp_path):
    setting = Setting("cpu", torch.device("cpu"), rounds=1, small=True, work=tmp_path)
    rows = less.measure(setting).samples
    last = {row[:2]: row[-1] for row in rows if row[3] == 0 and row[4] == less.SMALL.steps}
    per_step = less.SMALL.batch * less.SMALL.sequence * less.SMALL.layers
    for model in less.MODELS:
        assert last[model, less.ALL] == per_step * less.SMALL.steps
        assert max(last[model, method] for method in less.COMPARED[model][1:]) < last[model, less.ALL]


def test_little_text_is_the_beginning_of_the_whole(tmp_path, monkeypatch):
    job, read, batch_at = less.Job("GPT on little text", less.ALL, 1e-3, 0), [], less.batch_at
    monkeypatch.setattr(
        less, "batch_at", lambda text, *args, **kinds: read.append(text) or batch_at(text, *args, **kinds)
    )
    less.train(less.SMALL, tmp_path, job)
    assert {bytes(text) for text in read} == {
        bytes(byte_gpt.texts()[0][:32])
    } and less.TASK.little * 16 == 2000 * 16 * 64


@pytest.mark.parametrize(
    ("method", "ratios", "verdict"),
    [
        (less.LAYERS, ([1.005], [0.79], [0.73]), "met"),
        (less.LAYERS, ([1.005], [0.81], [0.73]), "missed"),
        (less.TOKENS, ([1.0], [0.9], [0.7]), "met"),
        (less.TOKENS, ([1.02], [0.7], [0.7]), "missed"),
    ],
)
def test_verdicts(method, ratios, verdict):
    assert less._verdict(method, ratios) == verdict
