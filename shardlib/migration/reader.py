"""Reading a configuration key by key: each is taken, not needed, or refused, and none is passed over."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

TAKEN, UNNEEDED, REFUSED = "taken", "not needed", "refused"
_OFF: tuple[Any, ...] = (None, False, 0, "", "none", "NONE", "no", "NO", [], {}, ())
_ENABLED = "enabled"
_MOST = 10**15  # no count is above it


class KeyEntry(NamedTuple):
    """What became of a key of a configuration.

    Attributes:
        key: the path of the key, with dots.
        value: its value there.
        verdict: "taken", "not needed" or "refused".
        note: what it became; why nothing is needed for it; or why it is refused, and what to do.
    """

    key: str
    value: Any
    verdict: str
    note: str

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{self.key} = {shown if len(shown) < 40 else shown[:36] + ' ...'}: {self.verdict}: {self.note}"


class Keys(NamedTuple):
    """The keys of a kind of configuration, as paths with dots, in which ``*`` stands for a name of the user's.

    Attributes:
        taken: key -> what it becomes.
        unneeded: key -> why nothing is needed in its place.
        refused: key -> why it cannot be taken, and what to do. A value that leaves it off is not needed.
    """

    taken: Mapping[str, str]
    unneeded: Mapping[str, str]
    refused: Mapping[str, str]

    def all(self) -> set[str]:
        """All keys."""
        return {*self.taken, *self.unneeded, *self.refused}

    def under(self, prefix: str) -> Keys:
        """The same keys in a section of another kind of configuration."""
        return Keys(*({f"{prefix}.{key}": note for key, note in notes.items()} for notes in self))

    def joined(self, *others: Keys) -> Keys:
        """All keys, of this value and of ``others``."""
        every = (self, *others)
        merged = ({key: note for keys in every for key, note in keys[at].items()} for at in range(3))
        return Keys(*merged)


def each(names: str, note: str, section: str = "") -> dict[str, str]:
    """The same note on several keys, of a section if there is one, whose names are separated by spaces."""
    return {f"{section}.{name}" if section else name: note for name in names.split()}


@dataclass
class Reader:
    """A configuration that is read by key, and what became of each.

    Reading a key takes it, with the note of `Keys.taken`; `skip` and `refuse` say otherwise.

    Attributes:
        source: the configuration.
        keys: the keys of this kind.
        filled: key -> value in the place of "auto", which stands for an argument of transformers' Trainer.
        prefix: of keys in the entries, of a configuration that another one names.
        usual: key -> its default, of configurations that have all keys.
    """

    source: Mapping[str, Any]
    keys: Keys
    filled: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    usual: Mapping[str, Any] = field(default_factory=dict)
    marks: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._leaves = dict(self._flat(self.source, ""))

    def given(self, key: str) -> bool:
        """Whether the configuration has the key, or a key in the section of this name."""
        return key in self._leaves or any(leaf.startswith(f"{key}.") for leaf in self._leaves)

    def names(self, section: str) -> list[str]:
        """The keys of a section."""
        inside = self.value(section, {})
        return list(inside) if isinstance(inside, Mapping) else []

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key or a section as it is; for "auto" what stands in its place. Marks nothing."""
        value: Any = self.source
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        if value == "auto":
            return self.filled.get(key, default)
        return value

    def read(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as taken."""
        value = self.value(key, default)
        if key in self._leaves:
            if self._leaves[key] == "auto" and key not in self.filled:
                self.refuse(
                    key,
                    "'auto' stands for an argument of transformers' Trainer; migrate the TrainingArguments, whose "
                    "deepspeed= is this file, or write the value",
                )
            else:
                self.marks.setdefault(key, (TAKEN, self._note(self.keys.taken, key) or "taken"))
        return value

    def number(self, key: str, default: Any = None) -> Any:
        """A finite number, or a text of one, as YAML reads 1e-5. null stands for the default."""
        value = self.read(key, default)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if value is None:
            self._null(key)
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return value
        self.refuse(key, f"{value!r} is no number; write one")
        return default

    def integer(self, key: str, default: Any = None, least: int | None = None) -> Any:
        """An integer, which may be written as a float (5e8), and is at least ``least``."""
        value = self.number(key, default)
        if value is None or value == default:
            return default
        if float(value).is_integer() and (least is None or value >= least) and abs(value) < _MOST:
            return int(value)
        self.refuse(key, f"{value!r} is no integer{'' if least is None else f' of at least {least}'}; write one")
        return default

    def texts(self, key: str) -> list[str]:
        """A list of texts; an empty one where there is none."""
        value = self.read(key)
        if value is None:
            self._null(key)
            return []
        if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
            return list(value)
        self.refuse(key, f"{value!r} is no list of texts; write one")
        return []

    def _null(self, key: str) -> None:
        if key in self._leaves and self._leaves[key] is None:
            self.skip(key, "null stands for its default")

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False, or a text of these."""
        value = self.read(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool):
            return value
        if value is None or value in (0, 1):
            return bool(value)
        self.refuse(key, f"{value!r} is neither true nor false; write one of them")
        return default

    def choice(self, key: str, choices: Collection[str], default: Any = None) -> Any:
        """One of some texts, in any case."""
        value = self.read(key, default)
        if value is None or value == default:
            return default
        found = [each for each in choices if each.lower() == str(value).lower()]
        if found:
            return found[0]
        near = get_close_matches(str(value), list(choices), 1)
        self.refuse(
            key, f"{value!r} is not known; write one of {', '.join(choices)}" + (f" ({near[0]}?)" if near else "")
        )
        return default

    def on(self, section: str) -> bool:
        """Whether a section is given and not switched off by its key ``enabled``. If it is, its keys are not needed."""
        if not self.given(section):
            return False
        inside = self.value(section)
        if isinstance(inside, Mapping) and self.flag(f"{section}.{_ENABLED}"):
            return True
        for leaf in self._leaves:
            if leaf == section or leaf.startswith(f"{section}."):
                self.skip(leaf, f"{section} is off")
        return False

    def skip(self, key: str, why: str) -> None:
        """Count a key as not needed, unless it is refused."""
        if self.marks.get(key, (TAKEN,))[0] != REFUSED:
            self.marks[key] = (UNNEEDED, why)

    def took(self, key: str, what: str) -> None:
        """Count a key as taken, with another note than `Keys.taken` has."""
        self.marks[key] = (TAKEN, what)

    def refuse(self, key: str, why: str) -> None:
        """Count a key as refused. ``why`` gives the reason and the remedy."""
        self.marks[key] = (REFUSED, why)

    def entries(self) -> list[KeyEntry]:
        """What became of each key, in the order of the configuration; then what is missing."""
        missing = [key for key, (verdict, _) in self.marks.items() if verdict == REFUSED and key not in self._leaves]
        return [
            KeyEntry(f"{self.prefix}{key}", value, *(self.marks.get(key) or self._static(key, value)))
            for key, value in {**self._leaves, **dict.fromkeys(missing)}.items()
        ]

    def _static(self, key: str, value: Any) -> tuple[str, str]:
        """The verdict on a key that was not read."""
        if note := self._note(self.keys.unneeded, key):
            return UNNEEDED, note
        if note := self._note(self.keys.refused, key):
            off = any(value == none and type(value) is type(none) for none in _OFF)
            off = off or (key in self.usual and self.usual[key] == value)
            return (UNNEEDED, "it is off") if off else (REFUSED, note)
        if self._note(self.keys.taken, key):
            return UNNEEDED, "the other settings make no use of it"
        if self._section(key):
            inside = sorted(name for name in self.keys.all() if name.startswith(f"{key}."))
            shown = f"keys in it, such as {inside[0]}" if inside else "keys in it"
            return (UNNEEDED, "it is empty") if value in ({}, None) else (REFUSED, f"it is a section; write {shown}")
        names = sorted(self.keys.all() | {part for known in self.keys.all() for part in _sections(known)})
        near = get_close_matches(key, names, 1, 0.6) or [
            name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]
        ]
        return REFUSED, "this key is not known; " + (f"write {near[0]}, or leave it out" if near else "leave it out")

    def _note(self, notes: Mapping[str, str], key: str) -> str | None:
        if key in notes:
            return notes[key]
        return next(
            (notes[known] for known in notes if "*" in known and fnmatchcase(key, known) and _alike(key, known)), None
        )

    def _section(self, key: str) -> bool:
        return any(
            name == key or ("*" in name and _alike(key, name) and fnmatchcase(key, name))
            for known in self.keys.all()
            for name in _sections(known)
        )

    def _flat(self, value: Any, key: str) -> Iterator[tuple[str, Any]]:
        """The leaves: what is no section of this kind of configuration."""
        if isinstance(value, Mapping) and value and (not key or self._section(key)):
            for name, inside in value.items():
                yield from self._flat(inside, f"{key}.{name}" if key else str(name))
        else:
            yield key, value


def _sections(key: str) -> list[str]:
    """The sections that a key is in: of a.b.c these are a and a.b."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _alike(key: str, known: str) -> bool:
    return key.count(".") == known.count(".")
