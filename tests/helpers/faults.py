"""Files that fail: what a disk that is full, broken or cut does to the calls of `os`, for paths that a test names."""

import errno
import os

from shardlib.errors import StorageError


class Faults:
    """Patches ``os`` so that calls on files whose path contains ``part`` fail as told.

    Each method arms one fault; ``after`` lets so many calls through before it, and ``times`` ends it again.
    """

    def __init__(self, patch):
        self._patch = patch

    def fails(self, call, number, part="", after=0, times=1 << 30):
        """``call`` raises an error of the system."""

        def fail(real, args, kwargs):
            raise OSError(number, os.strerror(number))

        self._arm(call, part, after, times, fail)

    def short(self, call, size, part="", after=0, times=1 << 30):
        """``preadv`` or ``pwritev`` moves ``size`` bytes at most."""

        def less(real, args, kwargs):
            fd, (view,), offset = args
            done = min(size, len(view))
            if call == "preadv":
                done = min(size, real(fd, [view], offset))
                view[done:] = bytes(len(view) - done)
            elif done // 4096:
                real(fd, [view[: done // 4096 * 4096]], offset)
            return done

        self._arm(call, part, after, times, less)

    def _arm(self, call, part, after, times, act):
        real, seen = getattr(os, call), [0]

        def patched(*args, **kwargs):
            path = args[0] if not isinstance(args[0], int) else os.readlink(f"/proc/self/fd/{args[0]}")
            if part in str(path):
                seen[0] += 1
                if after < seen[0] <= after + times:
                    return act(real, args, kwargs)
            return real(*args, **kwargs)

        self._patch.setattr(os, call, patched)


def damages(store):
    """What of a store's buffers cannot be read, a line each."""
    found = []
    for name in store._layout.buffers:
        try:
            store.release(store.fetch(name).result())
        except StorageError as error:
            found.append(str(error))
    return found


FULL, BROKEN, READ_ONLY, DENIED = errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES
