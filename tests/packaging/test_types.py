"""What type checkers know of the library: of each public name, and in a user's script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, SCRIPT = Path(__file__).parents[2], Path(__file__).with_name("user_script.py")
# Where a checker looks for packages: those of this Python, and the library's folder.
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT),
    "MYPYPATH": str(ROOT),
}


def said(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=SCRIPT.parent, env=ENVIRONMENT
    )
    assert done.stdout, done.stderr
    return done.stdout


def by_mypy():
    """(line, whether it is an error, message) of all that mypy says of the script."""
    options = (
        "--strict",
        "--follow-imports=silent",
        "--no-error-summary",
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "user"),
    )
    for line in said("mypy", *options, "--config-file", os.devnull, str(SCRIPT)).splitlines():
        if found := re.match(r".*user_script\.py:(\d+): (error|note): (.*)", line):
            yield int(found[1]), found[2] == "error", found[3]


def by_pyright():
    """The same of pyright."""
    for each in json.loads(said("pyright", "--outputjson", str(SCRIPT)))["generalDiagnostics"]:
        yield each["range"]["start"]["line"] + 1, each["severity"] == "error", each["message"]


def plain(name):
    """A type as both checkers write it: without modules."""
    return re.sub(r"\b\w+\.", "", name).replace("builtins.", "")


@pytest.mark.parametrize("checker", [by_pyright, by_mypy])
def test_a_users_script_is_known_and_what_is_wrong_is_found(checker):
    lines = SCRIPT.read_text().splitlines()
    wanted = {number: line.rpartition("  # ")[2] for number, line in enumerate(lines, 1) if "reveal_type(" in line}
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("  # wrong")}
    found = list(checker())
    revealed = {
        number: plain(match[1])
        for number, error, message in found
        if not error and (match := re.search(r'(?:Revealed t|T)ype .*?is "(.*)"$', message))
    }
    assert revealed == wanted
    assert {number for number, error, _ in found if error} == wrong
    assert len(wanted) > 40 and len(wrong) >= 20


def test_each_public_name_has_a_known_type():
    """pyright's own measure of a package with ``py.typed``; of all modules, since any of them can be imported."""
    found = json.loads(said("pyright", "--verifytypes", "shardlib", "--ignoreexternal", "--outputjson"))
    counts = found["typeCompleteness"]["exportedSymbolCounts"]
    unknown = [
        symbol["name"]
        for symbol in found["typeCompleteness"]["symbols"]
        if symbol["isExported"] and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
    ]
    assert counts["withKnownType"] > 8000
    assert found["typeCompleteness"]["completenessScore"] >= 0.98, unknown[:20]
