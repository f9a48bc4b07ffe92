"""The host memory of a store."""

import pytest

from shardlib.sharded.disk.pool import Pool


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_what_is_held_does_not_depend_on_how_soon_blocks_come_back(at_once):
    pool = Pool(4 * 4096 + 100, pinned=False)
    seen = set()
    for _ in range(8 // at_once):
        blocks = [pool.take(4096) for _ in range(at_once)]
        seen |= {block.data_ptr() for block in blocks}
        for block in blocks:
            pool.give(block)
    assert len(seen) == 4 == len(pool._idle)


def test_blocks_of_other_sizes_make_room():
    pool = Pool(4 * 4096, pinned=False)
    for size in (4096, 8192, 4096, 12288, 4096, 8192):
        pool.give(pool.take(size))
        assert sum(block.numel() for block in pool._idle) <= 4 * 4096
    assert pool.room([4 * 4096])
