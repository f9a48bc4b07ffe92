"""Defects of buffers on disk."""

from ..planting import Defect

_CRASHES = ("tests/disk/test_crashes.py::test_a_crash_leaves_a_whole_step",)

DEFECTS = (
    Defect(
        "a record before its buffers",
        "order",
        "sharded/disk/store.py",
        "a step is recorded before its buffers are on the disk",
        "for number in sorted(self._changed)]",
        "for number in ()]",
        _CRASHES,
    ),
    Defect(
        "a record over the last one",
        "order",
        "sharded/disk/record.py",
        "a crash in a commit damages the only record",
        "sequence % 2 * self._size",
        "0 * self._size",
        _CRASHES,
    ),
    Defect(
        "a buffer over the last step's",
        "offset",
        "sharded/disk/store.py",
        "a write goes to the slot that the last commit names",
        "slot = 1 - self._committed.slots[name] if",
        "slot = self._committed.slots[name] if",
        _CRASHES,
    ),
    Defect(
        "a step that was given up and comes back",
        "stale",
        "sharded/disk/record.py",
        "a return to the step before leaves the newer record on the disk",
        "        del self.records[0]\n        self.settle()",
        "        del self.records[0]",
        _CRASHES,
    ),
    Defect(
        "data files whose names are not on the disk",
        "order",
        "sharded/disk/files.py",
        "a header is there before the names of its data files",
        "        os.close(fd)\n    sync_folder(path.parent)",
        "        os.close(fd)",
        _CRASHES,
    ),
    Defect(
        "a write that failed unnoticed",
        "mask",
        "sharded/disk/store.py",
        "a thread's error is not kept for the next call",
        "            self._failure = self._failure or error",
        "            del error",
        ("tests/disk/test_faults.py::test_a_failed_write_is_an_error_of_the_next_call",),
    ),
    Defect(
        "checksums that nobody compares",
        "mask",
        "sharded/disk/store.py",
        "bytes that a disk has changed are taken for what was written",
        "if zlib.crc32(view) != self._sums[name][index]:",
        "if zlib.crc32(view) < 0:",
        ("tests/disk/test_faults.py::test_every_bit_that_flips_in_a_buffer_is_noticed",),
    ),
)
