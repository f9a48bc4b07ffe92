"""States that are moved to host memory or to disk and back, for runs that share a device with other work.

What moves are storages, whole: tensors that share one, and views of it, do so again when they are back, and every bit is as
it was. States that lie on disk anyway are copied to the folder of a state that is moved to disk, and back.

`verbs` has the functions that users call, `skeleton` takes states apart and puts them together, `moved` is what stands for a
state meanwhile, and `files` writes and reads them, on all ranks or on none.
"""

from shardlib.optim.moving.verbs import to_device, to_disk, to_host

__all__ = ["to_device", "to_disk", "to_host"]
