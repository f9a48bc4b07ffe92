"""shardlib: pure functions turn a parameter pytree into sharded state and a train step."""

import lazy_loader

from shardlib.common.version import VERSION

# What `__init__.pyi` lists is loaded at its first use: all of it takes most of a second of processor time. No file is called
# like a function that it has: its import would stand in the function's place, and lazy_loader would give the package a class
# that pickle refuses, and with it every function of a notebook that uses `sl`.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = VERSION
