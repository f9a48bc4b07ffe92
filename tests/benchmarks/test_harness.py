"""Tables are written with their provenance if all of their cases were measured in full, and left alone otherwise."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import tables as benchmarks_tables
from benchmarks.harness import provenance, tables
from benchmarks.harness.case import Case, Setting, Table
from benchmarks.harness.run import chosen, run
from benchmarks.harness.timing import interleave

ROOT = Path(__file__).parents[2]
SOURCE = {"command": "`a command`", "commit": "c0ffee with changes"}
CPU = torch.device("cpu")


def case(name, kinds=("cpu",), missing=False, fails=False, check=None):
    def measure(setting):
        if fails:
            raise RuntimeError("it broke")
        times = {"ours": [1.0] * setting.rounds, "theirs": [2.0] * setting.rounds}
        reference = "absent" if missing else "theirs"
        return tables.compared(name, "", [tables.row(times, "ours", reference, 1.0)], times)

    return Case(name, "", dict.fromkeys(kinds, 3), measure, check)


def kept(folder):
    return sorted(path.name for path in folder.iterdir())


def tried(folder, cases, names=(), kind="cpu", **setting):
    """Whether the run succeeded, and the files of its folder, which had a table "one" before."""
    for suffix in ("md", "csv"):
        (folder / f"one.{suffix}").write_text("as it was")
    given = {"rounds": 0, **setting}
    well = run([Table("one", "One table", tuple(cases))], names, Setting(kind, CPU, **given), SOURCE, folder)
    return well, (folder / "one.md").read_text()


def test_a_full_measurement_is_written_with_its_source(tmp_path):
    well, text = tried(tmp_path, [case("a"), case("b")])
    assert well and kept(tmp_path) == ["one.csv", "one.md"]
    lines = text.splitlines()
    assert lines[:4] == ["# One table", "", "- command: `a command`", "- commit: c0ffee with changes"]
    assert lines.count("| ours | theirs | 1 / 2 | 0.500 | 0.500 – 0.500 | ≤ 1.00 | met |") == 2
    samples = (tmp_path / "one.csv").read_text().splitlines()
    assert samples[0] == "section,what,round,seconds" and len(samples) == 1 + 2 * 2 * 3


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rounds": 1}, "a: 1 of 3 rounds"),
        ({"small": True}, "a: at a small size"),
        ({"names": ["a"]}, "b: not measured"),
        ({"b": case("b", fails=True)}, "b: failed: RuntimeError('it broke')"),
        ({"b": case("b", missing=True)}, "b: ours against absent is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_partial_measurement_leaves_the_table_unchanged(given, message, tmp_path, capsys):
    b = given.pop("b", case("b"))
    well, text = tried(tmp_path, [case("a"), b], **given)
    assert text == "as it was" and (tmp_path / "one.csv").read_text() == "as it was"
    said = capsys.readouterr().out
    assert "one is not written" in said and message in said
    assert well == ("failed" not in message)


def test_more_rounds_are_a_full_measurement(tmp_path):
    assert tried(tmp_path, [case("a")], rounds=4)[1] != "as it was"


def test_a_gpu_is_checked_before_anything_is_measured(tmp_path, capsys):
    good, wrong = ("first", "ok"), ("second", "WRONG (1.0)")
    cases = [case(name, ("cuda",), check=lambda _, found=found: [found]) for name, found in (("a", good), ("b", good))]
    well, text = tried(tmp_path, cases, kind="cuda")
    assert well and text.index("## Checks") < text.index("## a") and "| first | ok |" in text
    said = capsys.readouterr().out
    assert said.index("## Checks") < said.index("## a")
    well, text = tried(tmp_path, [cases[0], case("b", ("cuda",), check=lambda _: [wrong])], kind="cuda")
    assert not well and text == "as it was"


def test_names_are_of_cases_and_tables():
    known = [Table("one", "", (case("a"), case("b"))), Table("two", "", (case("c"),))]
    assert [found.name for found in chosen(known, [])] == ["a", "b", "c"]
    assert [found.name for found in chosen(known, ["two", "a"])] == ["a", "c"]
    with pytest.raises(ValueError, match="no case or table is called d"):
        chosen(known, ["a", "d"])


def test_every_case_can_be_called_by_a_name_of_its_own():
    for kind in ("cpu", "cuda"):
        known = benchmarks_tables.tables(kind)
        names = [found.name for found in chosen(known, [])]
        assert len(names) == len(set(names)) and all(kind in c.rounds for table in known for c in table.cases)


def test_a_source_names_the_commit_and_whether_files_differ(tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert provenance.commit() == "unknown"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "a commit")
    name = git("rev-parse", "--short=12", "HEAD")
    assert provenance.commit() == name
    (tmp_path / "file").write_text("new")
    assert provenance.commit() == f"{name} with changes"
    source = provenance.provenance(["run", "cpu"], CPU)
    assert source["command"] == "`python -m benchmarks run cpu`" and source["torch"].startswith(torch.__version__)
    assert set(source) == {"command", "commit", "torch", "machine", "date"} and "cores" in source["machine"]


def test_calls_take_turns_in_an_order_that_rotates():
    order = []
    calls = {name: lambda number, name=name: order.append((number, name)) for name in "ab"}
    times = interleave(calls, 2, warm=1)
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}


def test_the_command_lists_everything():
    done = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True)
    for table in benchmarks_tables.tables("cpu"):
        assert table.name in done.stdout and all(c.name in done.stdout for c in table.cases)
