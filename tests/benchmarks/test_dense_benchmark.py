"""What the benchmark of the dense pieces compares computes the same."""

from unittest.mock import patch

import torch

from benchmarks import dense_kernels


def test_both_sides_are_the_same():
    sizes = {"_TOKENS": 64, "_WIDTH": 32, "_HEADS": 4, "_SEQUENCE": 32, "_WORDS": 50}
    with patch.multiple(dense_kernels, _P=0.0, **sizes):  # masks would not be equal
        pieces = dense_kernels._pieces(torch.float32)
        del pieces["bias + dropout + residual"]  # whose kernel has a probability of its own
        assert len(pieces) == 10
        for name, piece in pieces.items():
            with torch.no_grad():
                ours, eager = piece.ours(*piece.inputs), piece.eager(*piece.inputs)
            torch.testing.assert_close(ours, eager, msg=lambda m, name=name: f"{name}: {m}")
