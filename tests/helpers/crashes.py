"""What a crash may leave of files: a record of what processes did to them, and every state of the disk afterwards.

The model of a disk: a file's data are safe once the file was synced, a name once its folder was synced. What was not synced
may be there, wholly or in part, in any order, or not. A rename is one change: both names change, or none.
"""

import io
import os
import random
import threading

SECTOR = 512


class Disk:
    """A tree of folders and files, each as programs see it and as it surely is on the disk.

    Attributes:
        files: number of a file -> [content seen, content on the disk].
        folders: number of a folder -> [names seen, names on the disk, changes that are not on the disk yet].
    """

    def __init__(self):
        self.files, self.folders = {}, {0: [{}, {}, []]}
        self._next = 1

    def apply(self, operation):
        kind, *arguments = operation
        getattr(self, f"_{kind}")(*arguments)

    def _folder(self, path):
        """The number of a folder, by the names that programs see."""
        at = 0
        for name in path.split("/") if path else ():
            at = self.folders[at][0][name]
        return at

    def _change(self, folder, **names):
        seen, _, pending = self.folders[folder]
        for name, number in names.items():
            seen.pop(name, None) if number is None else seen.__setitem__(name, number)
        pending.append(names)

    def _create(self, path, folder=False):
        parent, _, name = path.rpartition("/")
        number, self._next = self._next, self._next + 1
        if folder:
            self.folders[number] = [{}, {}, []]
        else:
            self.files[number] = [b"", b""]
        self._change(self._folder(parent), **{name: number})

    def _mkdir(self, path):
        self._create(path, folder=True)

    def _write(self, path, offset, data):
        parent, _, name = path.rpartition("/")
        content = self.files[self.folders[self._folder(parent)][0][name]]
        seen = content[0].ljust(offset, b"\0")
        content[0] = seen[:offset] + data + seen[offset + len(data) :]

    def _reserve(self, path, size):
        parent, _, name = path.rpartition("/")
        content = self.files[self.folders[self._folder(parent)][0][name]]
        content[0] = content[0].ljust(size, b"\0")

    def _sync(self, path):
        parent, _, name = path.rpartition("/")
        number = self.folders[self._folder(parent)][0][name] if path else 0
        if number in self.files:
            self.files[number][1] = self.files[number][0]
        else:
            folder = self.folders[number]
            folder[1], folder[2] = dict(folder[0]), []

    def _rename(self, old, new):
        (parent, _, name), (other, _, new_name) = old.rpartition("/"), new.rpartition("/")
        assert parent == other, "a rename within one folder is one change"
        folder = self._folder(parent)
        self._change(folder, **{name: None, new_name: self.folders[folder][0][name]})

    def _unlink(self, path):
        parent, _, name = path.rpartition("/")
        self._change(self._folder(parent), **{name: None})

    def after_crash(self, keep):
        """Path -> content of the files that a crash leaves; ``keep()`` says of each unsynced change whether it is there."""
        found = {}

        def walk(number, prefix):
            _, names, pending = self.folders[number]
            names = dict(names)
            for change in pending:
                if keep():
                    names |= change
            for name, child in names.items():
                if child in self.folders:
                    found[f"{prefix}{name}/"] = None
                    walk(child, f"{prefix}{name}/")
                elif child is not None:
                    found[prefix + name] = self._content(child, keep)

        walk(0, "")
        return found

    def _content(self, number, keep):
        seen, safe = self.files[number]
        if seen == safe:
            return safe
        size = len(seen) if keep() else len(safe)
        content = bytearray(safe[:size].ljust(size, b"\0"))
        for at in range(0, size, SECTOR):
            if keep():
                content[at : at + SECTOR] = seen[at : at + SECTOR].ljust(len(content[at : at + SECTOR]), b"\0")
        return bytes(content)


class Recorder:
    """Records the operations on files below ``root``, of all threads, while it patches ``os`` and ``io``."""

    def __init__(self, root, patch):
        self.root, self.log = os.path.realpath(root), []
        self._lock = threading.Lock()
        self._real = {
            name: getattr(os, name)
            for name in (
                "open", "pwritev", "fsync", "fdatasync", "posix_fallocate", "rename", "unlink", "mkdir", "rmdir",
            )
        }  # fmt: skip
        for name in self._real:
            patch.setattr(os, name, getattr(self, f"_{name}"))
        patch.setattr(io, "open", self._io_open)
        for name in ("write", "pwrite", "truncate", "ftruncate", "link", "symlink", "removedirs", "sendfile"):
            patch.setattr(os, name, self._unknown(name))

    def _unknown(self, name):
        def fail(*args, **kwargs):
            raise AssertionError(f"os.{name} is not recorded")

        return fail

    def _inside(self, path, dir_fd=None):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.path.abspath(path)
        if path == self.root:
            return ""
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else None

    def _do(self, name, operation, *args, **kwargs):
        with self._lock:
            result = self._real[name](*args, **kwargs)
            if operation is not None:
                self.log.append(operation)
            return result

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        inside = self._inside(path, dir_fd)
        new = inside is not None and flags & os.O_CREAT and not os.path.exists(path)
        return self._do("open", ("create", inside) if new else None, path, flags, mode, dir_fd=dir_fd)

    def _io_open(self, path, mode="r", *args, **kwargs):
        """Of `Path.write_text`: reports, in one write, never synced."""
        if "w" not in mode or self._inside(path) is None:
            return io.TextIOWrapper(io.FileIO(path)) if "b" not in mode else io.FileIO(path)
        with self._lock:
            self.log.append(("create", self._inside(path)))
        return io.FileIO(path, "w") if "b" in mode else io.TextIOWrapper(io.FileIO(path, "w"))

    def _pwritev(self, fd, buffers, offset):
        inside, data = self._inside(fd), b"".join(buffers)
        return self._do("pwritev", inside and ("write", inside, offset, data), fd, buffers, offset)

    def _fsync(self, fd):
        inside = self._inside(fd)
        return self._do("fsync", None if inside is None else ("sync", inside), fd)

    def _fdatasync(self, fd):
        inside = self._inside(fd)
        return self._do("fdatasync", None if inside is None else ("sync", inside), fd)

    def _posix_fallocate(self, fd, offset, length):
        inside = self._inside(fd)
        return self._do("posix_fallocate", inside and ("reserve", inside, offset + length), fd, offset, length)

    def _rename(self, old, new, **kwargs):
        names = self._inside(old), self._inside(new)
        return self._do("rename", None if None in names else ("rename", *names), old, new, **kwargs)

    def _unlink(self, path, *, dir_fd=None):
        inside = self._inside(path, dir_fd)
        return self._do("unlink", inside and ("unlink", inside), path, dir_fd=dir_fd)

    def _rmdir(self, path, *, dir_fd=None):
        inside = self._inside(path, dir_fd)
        return self._do("rmdir", inside and ("unlink", inside), path, dir_fd=dir_fd)

    def _mkdir(self, path, mode=0o777, *, dir_fd=None):
        inside = self._inside(path, dir_fd)
        return self._do("mkdir", inside and ("mkdir", inside), path, mode, dir_fd=dir_fd)


def write(root, found):
    """Make the files that a crash has left below a folder."""
    for path, content in sorted(found.items()):
        if content is None:
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)


def remake(found):
    """The log of the operations that make the files which a crash has left, and have them on the disk."""
    log = []
    for path, content in sorted(found.items()):
        if content is None:
            log.append(("mkdir", path.rstrip("/")))
        else:
            log += [("create", path), ("write", path, 0, content), ("sync", path)]
    return [*log, *[("sync", path.rstrip("/")) for path, content in found.items() if content is None], ("sync", "")]


def crashes(log, each, seed=0):
    """(operations done, path -> content) for a crash after every prefix of a log: nothing that was not synced is there, all
    of it, and ``each`` times any of it."""
    draw = random.Random(seed)
    disk = Disk()
    for done in range(len(log) + 1):
        if done:
            disk.apply(log[done - 1])
        yield done, disk.after_crash(lambda: False)
        yield done, disk.after_crash(lambda: True)
        for _ in range(each):
            share = draw.random()
            yield done, disk.after_crash(lambda share=share: draw.random() < share)
