"""The kernels and the plain torch that the benchmark of a layer compares compute the same."""

import torch

from benchmarks.cases.layer_kernels import SMALL
from benchmarks.cases.layer_operations import layer, operations


def test_kernels_and_plain_torch_agree():
    assert SMALL.dropout == 0  # masks would not be equal
    every = {**operations(SMALL, torch.float32, torch.device("cpu")), "layer": layer(SMALL, torch.float32)}
    assert len(every) == 12
    for name, operation in every.items():
        with torch.no_grad():
            kernels, plain = operation.kernel(*operation.inputs), operation.plain(*operation.inputs)
        torch.testing.assert_close(kernels, plain, msg=lambda m, name=name: f"{name}: {m}")
