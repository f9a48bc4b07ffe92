"""Comparing pytrees of tensors."""

import optree
import torch


def relative_error(actual, expected):
    """Largest difference in a leaf over the largest number in it, and the path of the worst leaf.

    Not element by element: a number that happens to be near zero carries the rounding of its neighbours.
    """
    paths, ours, structure = optree.tree_flatten_with_path(actual)
    _, theirs, other = optree.tree_flatten_with_path(expected)
    assert structure == other, f"{structure} is not {other}"
    worst = (0.0, None)
    for path, a, b in zip(paths, ours, theirs):
        assert a.shape == b.shape, f"{path}: shape {a.shape} instead of {b.shape}"
        assert a.dtype == b.dtype, f"{path}: dtype {a.dtype} instead of {b.dtype}"
        if a.numel():
            assert torch.isfinite(a).all(), f"{path} is not finite"
            scale = b.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
            worst = max(worst, (((a - b).abs().max() / scale).item(), path), key=lambda pair: pair[0])
    return worst


def assert_close(actual, expected, tolerance):
    error, path = relative_error(actual, expected)
    assert error <= tolerance, f"{path} differs by {error:.2e} relative, allowed are {tolerance:.0e}"


def assert_same(actual, expected):
    """Equal to the last bit."""
    _, ours, structure = optree.tree_flatten_with_path(actual)
    _, theirs, other = optree.tree_flatten_with_path(expected)
    assert structure == other
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs) if isinstance(a, torch.Tensor))


def copy_of(tree):
    return optree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)
