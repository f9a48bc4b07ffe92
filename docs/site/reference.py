"""The reference: a page for each room of public names, made of their docstrings."""

import importlib
import inspect
import re
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import shardlib as sl

# Room -> what is in it. Where a room has no `__all__`, what it defines itself is public.
ROOMS = {
    "shardlib": "meshes, transforms, sharding, training, plans",
    "shardlib.nn": "what losses are made of",
    "shardlib.nn.routers": "routers of layers of experts",
    "shardlib.optim": "optimizers, wrappers, schedules, averages",
    "shardlib.data": "loaders, token files, mixtures, curricula",
    "shardlib.checkpoint": "saving and restoring",
    "shardlib.models": "modules as functions, state dicts",
    "shardlib.models.gpt": "a GPT",
    "shardlib.models.bert": "a BERT",
    "shardlib.models.transformer_layer": "one layer, with its kernels",
    "shardlib.models.huggingface": "models of transformers",
    "shardlib.models.students": "students of a teacher",
    "shardlib.integrations.lightning": "a strategy of Lightning",
    "shardlib.integrations.transformers": "transformers' Trainer",
    "shardlib.report": "logs, predicted and measured times, profiles",
    "shardlib.debug": "the first operation that differs, the laws of a plan",
    "shardlib.plan": "transforms and plans of your own",
    "shardlib.schedules": "pipeline schedules",
    "shardlib.collectives": "collectives by axis name",
    "shardlib.collectives.codecs": "few bits for a message",
    "shardlib.collectives.tokens": "ways of tokens to experts",
    "shardlib.init": "initial values by counters",
    "shardlib.sparse": "layouts of sparse attention",
    "shardlib.kernels.common": "kernels of your own",
    "shardlib.errors": "exceptions",
}


def module(room: str) -> ModuleType:
    """By attributes first: `shardlib.nn.routers` is another module's name in its room."""
    _, _, path = room.partition(".")
    try:
        return attrgetter(path)(sl) if path else sl
    except AttributeError:
        return importlib.import_module(room)


def names(room: str) -> list[str]:
    """The public functions and classes of a room; further rooms have pages of their own."""
    made = module(room)
    if hasattr(made, "__all__"):
        listed = made.__all__
    else:
        listed = [name for name, value in vars(made).items() if getattr(value, "__module__", "") == made.__name__]
    values = {name: getattr(made, name) for name in listed if not name.startswith("_")}
    return sorted((name for name, value in values.items() if is_documented(value)), key=str.lower)


def is_documented(value: Any) -> bool:
    """Whether it is a function or a class; names of types and constants are explained where they are used."""
    return inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)) if callable(value) else False


def literal(text: str) -> str:
    """Docstrings have code in backticks and no emphasis, so other stars and underscores are themselves."""
    parts = re.split(r"(``.*?``|`[^`]*`)", text, flags=re.S)
    return "".join(
        part if number % 2 else re.sub(r"\*|(?<=\w)_(?!\w)", r"\\\g<0>", part) for number, part in enumerate(parts)
    )


def first_sentence(value: Any) -> str:
    text = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return literal(text.split(". ")[0].rstrip(".:")) + "."


def page(room: str) -> str:
    """A room as reStructuredText, which docstrings are written in."""
    made, listed = module(room), names(room)
    lines = [room, "=" * len(room), "", literal(inspect.cleandoc(made.__doc__ or "")), ""]
    lines += [f".. currentmodule:: {room}", "", ".. list-table::", "   :widths: 30 70", "   :class: summary", ""]
    for name in listed:
        lines += [f"   * - `~{room}.{name}`", f"     - {first_sentence(getattr(made, name))}"]
    for name in listed:
        kind = "class" if inspect.isclass(getattr(made, name)) else "function"
        lines += ["", name, "-" * len(name), "", f".. auto{kind}:: {name}"]
        lines += ["   :members:", "   :special-members: __call__"] if kind == "class" else []
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for room, what in ROOMS.items():
        (folder / f"{room}.rst").write_text(page(room))
        rows.append(f"| [{room}]({room}.rst) | {what} | {len(names(room))} |")
    toctree = "\n".join(ROOMS)
    (folder / "index.md").write_text(
        "# Reference\n\nEvery public name, with its docstring; examples assume `import shardlib as sl` and `import torch`, "
        "and the tests run them.\n\n| room | contents | names |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n{toctree}\n```\n"
    )
