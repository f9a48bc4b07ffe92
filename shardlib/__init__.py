"""shardlib: pure functions turn a parameter pytree into sharded state and a train step."""

import copyreg
import importlib
import sys

import lazy_loader

from shardlib.common.version import VERSION

# What `__init__.pyi` lists is loaded at its first use: loading all of it takes as long as loading a third of torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# The package's class is lazy_loader's by now, and functions that use `sl` are sent to other processes (`launch`).
copyreg.pickle(type(sys.modules[__name__]), lambda package: (importlib.import_module, (package.__name__,)))

__version__ = VERSION
