"""A defect of `tests/mutation`, planted in the running package: its functions get the code of the changed text, and a changed
assignment of the module is made."""

import ast
import importlib
from contextlib import contextmanager
from functools import cached_property
from types import CodeType, FunctionType

from mutation.planting import ROOT, Defect


@contextmanager
def planted(defect: Defect):
    """While the defect is planted."""
    path = ROOT / "shardlib" / defect.file
    source, module = path.read_text(), importlib.import_module(defect.module)
    before, after = (dict(_codes(compile(text, str(path), "exec"))) for text in (source, defect.planted(source)))
    changed = {name: code for name, code in after.items() if code != before[name]}
    functions = {f: f.__code__ for f in _functions(module) if f.__code__.co_qualname in changed}
    old, new = (list(map(ast.unparse, ast.parse(text).body)) for text in (source, defect.planted(source)))
    made = [] if functions else [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
    assert functions or made, f"{defect.name}: no function of {defect.module} has other code"
    try:
        for function, code in functions.items():
            function.__code__ = changed[code.co_qualname]
        for _, assignment in made:
            exec(assignment, vars(module))
        yield
    finally:
        for function, code in functions.items():
            function.__code__ = code
        for assignment, _ in made:
            exec(assignment, vars(module))


def _functions(owner):
    """The functions of a module and of its classes, those that are decorated too."""
    for name, value in vars(owner).items():
        inside = name if not isinstance(owner, type) else f"{owner.__qualname__}.{name}"
        if isinstance(value, type) and (value.__module__, value.__qualname__) == (_module(owner), inside):
            yield from _functions(value)
        for found in (value, *_inside(value)):
            if isinstance(found, FunctionType):
                yield found


def _module(owner):
    return owner.__module__ if isinstance(owner, type) else owner.__name__


def _inside(value):
    if isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, cached_property):
        yield value.func
    elif isinstance(value, property):
        yield value.fget
    elif hasattr(value, "__wrapped__"):
        yield value.__wrapped__


def _codes(code: CodeType):
    """Name and code of every function in some code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
