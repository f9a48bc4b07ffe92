"""What the benchmark of a layer's pieces compares computes the same."""

import torch

from benchmarks.cases.layer_kernels import SMALL
from benchmarks.cases.layer_pieces import layer, pieces


def test_both_sides_are_the_same():
    assert SMALL.dropout == 0  # masks would not be equal
    every = {**pieces(SMALL, torch.float32, torch.device("cpu")), "layer": layer(SMALL, torch.float32)}
    assert len(every) == 12
    for name, piece in every.items():
        with torch.no_grad():
            ours, plain = piece.ours(*piece.inputs), piece.plain(*piece.inputs)
        torch.testing.assert_close(ours, plain, msg=lambda m, name=name: f"{name}: {m}")
