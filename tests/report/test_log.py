"""Metrics on their way to files and services."""

import csv
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.models import mlp, regression_batch

import shardlib as sl
from shardlib.report import CsvWriter, JsonlWriter, Log, TensorBoardWriter, WandbWriter


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.rows, self.closed = [], False

    def write(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts how often a tensor's values are read by the host."""

    reads = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.reads += op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default)
        return op(*args, **(kwargs or {}))


def test_tensors_are_read_together_when_the_time_has_come():
    ticks, kept = iter([0.0, 0.3, 0.6, 1.2, 1.2, 1.3, 9.0, 9.0]), Kept()
    log = Log(kept, every=1.0, clock=lambda: next(ticks))
    with log, Counted() as counted:
        for step in (1, 2):
            log.write(step, {"loss": torch.tensor(0.5 * step), "aux": {"right": torch.tensor([step])}, "tokens": 7})
        assert counted.reads == 0 and kept.rows == []
        log.write(3, {"loss": torch.tensor(1.5)})  # 1.2 seconds in
        assert [step for step, _ in kept.rows] == [1, 2]
        log.write(3, {"validation": {"loss": 1.25}})
    assert kept.rows == [
        (1, {"loss": 0.5, "aux/right": 1.0, "tokens": 7.0}),
        (2, {"loss": 1.0, "aux/right": 2.0, "tokens": 7.0}),
        (3, {"loss": 1.5, "validation/loss": 1.25}),
    ]
    assert kept.closed


def test_values_are_copied_when_logged():
    rate, kept = torch.tensor(0.5), Kept()
    with Log(kept) as log:
        log.write(1, {"lr": rate})
        rate.fill_(0.25)  # as hyper-parameters are
        log.write(2, {"lr": rate})
    assert kept.rows == [(1, {"lr": 0.5}), (2, {"lr": 0.25})]


def test_what_a_train_step_returns_is_logged():
    loss_fn, params = mlp([6, 9, 4])
    state, step = sl.make_train_step(
        lambda p, b: (loss_fn(p, b), {"double": 2 * loss_fn(p, b)}), params, sl.optim.sgd(0.1)
    )
    kept = Kept()
    with Log(kept) as log:
        for number in (1, 2):
            state, metrics = step(state, regression_batch(6, 6, 4))
            log.write(number, metrics)
    assert [sorted(values) for _, values in kept.rows] == [["aux/double", "finite", "grad_norm", "loss"]] * 2
    assert kept.rows[0][1]["aux/double"] == pytest.approx(2 * kept.rows[0][1]["loss"])
    assert kept.rows[0][1]["loss"] > kept.rows[1][1]["loss"] == metrics["loss"].item()


def test_writers_get_pending_metrics_and_are_closed_when_a_run_fails():
    kept = Kept()
    with pytest.raises(KeyError), Log(kept) as log:
        log.write(1, {"loss": 2.0})
        raise KeyError
    assert kept.rows == [(1, {"loss": 2.0})] and kept.closed


def test_metrics_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match=r"step 4 are not numbers: name: str, scores: a tensor of shape \(3,\)"):
        Log(Kept()).write(4, {"loss": 1.0, "name": "x", "scores": torch.zeros(3)})
    Log().write(4, {"scores": torch.zeros(3)})  # nobody listens


def csv_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_gets_columns_as_they_come(tmp_path):
    path = tmp_path / "deep" / "metrics.csv"
    with Log(CsvWriter(path)) as log:
        log.write(1, {"loss": 0.5})
        log.write(2, {"loss": 0.25, "validation": {"loss": 1 / 3}})
        log.write(3, {"loss": 0.125})
    assert csv_rows(path) == [
        {"step": "1", "loss": "0.5", "validation/loss": ""},
        {"step": "2", "loss": "0.25", "validation/loss": str(1 / 3)},
        {"step": "3", "loss": "0.125", "validation/loss": ""},
    ]


def test_lines_of_skipped_steps_are_json(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    with Log(JsonlWriter(tmp_path / "metrics.jsonl")) as log:
        log.write(1, {"loss": torch.tensor(torch.nan), "grad_norm": torch.inf, "finite": False})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "grad_norm": None, "finite": 0.0}


@pytest.mark.parametrize("writer", [CsvWriter, JsonlWriter])
def test_a_resumed_run_drops_rows_after_its_checkpoint(tmp_path, writer):
    path = tmp_path / "metrics"
    first = writer(path)
    for step in range(1, 26):
        first.write(step, {"loss": 1.0})
    first.close()
    path.write_text(path.read_text()[:-6])  # interrupted within a line
    second = writer(path, start=20)
    second.write(21, {"loss": 2.0})
    second.close()
    if writer is CsvWriter:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv_rows(path)]
    else:
        rows = [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())]
    assert rows == [*((step, 1.0) for step in range(1, 21)), (21, 2.0)]
    fresh = writer(path)
    fresh.close()
    assert len(path.read_text().splitlines()) <= 1


def test_tensorboard(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Log(TensorBoardWriter(tmp_path, start=4)) as log:
        log.write(5, {"loss": torch.tensor(0.5)})
    assert calls == [(str(tmp_path), 5), ("loss", 0.5, 5), "closed"]


def test_weights_and_biases(monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finished")
    )
    module = ModuleType("wandb")
    module.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    with Log(WandbWriter(project="gpt")) as log:
        log.write(5, {"loss": torch.tensor(0.5)})
    assert calls == [{"project": "gpt"}, ({"loss": 0.5}, 5), "finished"]


@pytest.mark.parametrize(
    ("module", "make"),
    [("torch.utils.tensorboard", lambda: TensorBoardWriter("x")), ("wandb", lambda: WandbWriter())],
)
def test_a_missing_package_is_named(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'shardlib\[logging\]'"):
        make()
