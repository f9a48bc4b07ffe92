"""shardlib: pure functions turn a parameter pytree into sharded state and a train step."""

import copyreg as _copyreg
import sys as _sys
from importlib import import_module as _import_module

import lazy_loader

from shardlib.common.version import VERSION

# What `__init__.pyi` lists is loaded at its first use: loading all of it takes as long as loading a third of torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = VERSION

# The module has a class of lazy_loader's now, which pickle refuses, and with it each function of a notebook that reads `sl`.
_copyreg.pickle(type(_sys.modules[__name__]), lambda module: (_import_module, (module.__name__,)))
