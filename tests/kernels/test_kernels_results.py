"""Memory of kernels' results."""

import mmap

import pytest
import torch

from shardlib.common import thresholds
from shardlib.kernels.common import results


@pytest.mark.parametrize("shape", [(3, 5), (7, 1000), (64, 512), (0, 4)])
def test_huge_pages_are_asked_for_within_a_large_result_alone(shape, monkeypatch):
    asked = []
    monkeypatch.setattr(results, "_advise", lambda: lambda address, size: asked.append((address, size)))
    x = torch.ones(shape[::-1], dtype=torch.bfloat16).t()
    results.like(x)
    assert not asked
    with thresholds.small(1):
        made = results.like(x)
    assert made.shape == x.shape and made.dtype == x.dtype and made.is_contiguous()
    first, last = made.data_ptr(), made.data_ptr() + made.nbytes
    for address, size in asked:
        assert first <= address and address + size <= last
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 < size
    assert len(asked) == int(made.nbytes >= 2 * mmap.PAGESIZE)  # those between hold a whole page or not


def test_the_system_is_asked():
    with thresholds.small(1):
        assert torch.equal(results.empty(torch.empty(0), (64, 512)).fill_(2), torch.full((64, 512), 2.0))
