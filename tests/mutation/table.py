"""The page of docs/ that says which test notices each defect."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from .defects import DEFECTS
from .planting import ROOT

PAGE = ROOT / "docs" / "mutation.md"

_HEAD = """# Defects that the tests notice

The tests are tested. `tests/mutation/` holds {count} defects of the kind that matter here: each replaces one expression of
the package by a wrong one, with which everything still imports and runs. They are planted one at a time in a copy of the
project, and a test must fail that needs no notebook, no command and no ranks in processes of their own. `make test` runs the
cases named here; `make nightly` plants each defect and runs its case; `python -m tests.mutation --write` looks for cases and
writes this page.

Noticed: {noticed} of {count}.

| kind | defects |
|---|---|
{kinds}

| defect | in `shardlib/` | what is wrong | the first case that fails |
|---|---|---|---|
{rows}
"""
_ROW = re.compile(r"^\| ([^|]+) \| `[^|]+` \| [^|]+ \| `((?:[^|]|\\\|)+)` \|$", re.M)


def written(noticed: Mapping[str, str]) -> str:
    """The page, from the test that noticed each defect."""
    rows = [
        f"| {defect.name} | `{defect.file}` | {defect.what} | `{_cell(noticed.get(defect.name, 'none'))}` |"
        for defect in DEFECTS
    ]
    kinds = Counter(defect.kind for defect in DEFECTS)
    return _HEAD.format(
        count=len(DEFECTS),
        noticed=sum(defect.name in noticed for defect in DEFECTS),
        kinds="\n".join(f"| {kind} | {count} |" for kind, count in kinds.most_common()),
        rows="\n".join(rows),
    )


def read() -> dict[str, str]:
    """What the page says: the test that noticed each defect."""
    found = _ROW.findall(PAGE.read_text()) if PAGE.exists() else []
    return {name: test.replace("\\|", "|") for name, test in found if test != "none"}


def _cell(test: str) -> str:
    return test.replace("|", "\\|")
