"""Every public function has an example, and it runs."""

import doctest
import inspect
from operator import attrgetter

import pytest
import torch

import shardlib as sl

ROOMS = (
    "nn",
    "nn.routers",
    "collectives",
    "collectives.tokens",
    "init",
    "sparse",
    "schedules",
    "report",
    "checkpoint",
    "data",
    "optim",
    "kernels.common",
)


def public():
    """Name -> function or class, each under the first name by which a user meets it."""
    found, seen = {}, set()
    for room, names in [("sl", sl), *((f"sl.{name}", attrgetter(name)(sl)) for name in ROOMS)]:
        for name in names.__all__:
            value = getattr(names, name)
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{room}.{name}"] = value
    return found


PUBLIC = public()
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(inspect.unwrap(value))}
EXAMPLES = {name: value for name, value in PUBLIC.items() if ">>>" in (value.__doc__ or "")}


def test_every_public_function_has_an_example():
    assert len(FUNCTIONS) > 120
    assert sorted(FUNCTIONS.keys() - EXAMPLES.keys()) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path, monkeypatch):
    """With ``sl`` and ``torch`` imported, in an empty folder; random numbers from one seed."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    output = []
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, {"sl": sl, "torch": torch}, name, None, 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed = doctest.DocTestRunner(optionflags=flags).run(test, out=output.append).failed
    assert not failed, "".join(output)
