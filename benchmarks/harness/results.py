"""Tables as files: Markdown with its provenance, the samples as CSV, a plot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.case import Result, Table
from benchmarks.harness.plots import draw

FOLDER = Path(__file__).parents[1] / "results"


def read_rows(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows, by its header."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A CSV file."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows(rows)


def write(table: Table, of_cases: list[Result], source: Mapping[str, str], folder: Path) -> Path:
    """All of a table's files; returns the one to read."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {table.title}", "", *(f"- {what}: {value}" for what, value in source.items()), ""]
    page = folder / f"{table.name}.md"
    page.write_text("\n".join([*lines, *(result.text for result in of_cases)]))
    write_rows(page.with_suffix(".csv"), of_cases[0].header, [row for result in of_cases for row in result.samples])
    if table.plot is not None:
        draw(table.plot, page.with_suffix(".png"), of_cases)
    return page
