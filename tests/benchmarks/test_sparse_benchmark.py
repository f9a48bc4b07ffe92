"""The benchmark of sparse attention runs at a tiny size."""

import pytest
import torch

from benchmarks.cases import sparse_attention as sparse
from benchmarks.harness.case import Setting


@pytest.mark.parametrize("kept", [sparse._KEPT, 4 << 20], ids=["all heads at once", "Fixed a head at a time"])
def test_every_row_is_measured(kept, monkeypatch):
    monkeypatch.setattr(sparse, "_KEPT", kept)
    shapes = set()
    gradient = torch.autograd.grad

    def noted(out, *rest):
        shapes.add(out.shape[1])
        return gradient(out, *rest)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    setting = Setting("cpu", torch.device("cpu"), rounds=1, small=True)
    lines = sparse.measure(setting).text.splitlines()
    rows = [line for line in lines if line.startswith("| 512 |")]
    assert len(rows) == len(sparse._DTYPES) * len(sparse._LAYOUTS) * len(sparse._PASSES)
    assert all(line.count("|") == 13 and "| |" not in line for line in rows)
    assert shapes == ({2} if kept == 8 << 30 else {1, 2})
