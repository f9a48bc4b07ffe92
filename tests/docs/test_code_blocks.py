"""Every block of code in README.md and docs/: Python runs, page by page, and the commands of shells exist."""

import itertools
import re
import shlex
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import shardlib as sl
from shardlib.commands.__main__ import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Blocks marked `<!-- not run: reason -->`, by page. A new one is added here, with a reason that a reader accepts.
NOT_RUN = {"clusters.md": 1, "faults.md": 1, "launching.md": 1}

# The Makefile's targets, and torchrun's options.
TARGETS = set(re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())[1].split())
TORCHRUN = ArgumentParser(prog="torchrun", allow_abbrev=False)
TORCHRUN.add_argument("--standalone", action="store_true")
for option in ("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts"):
    TORCHRUN.add_argument(option)
TORCHRUN.add_argument("-m", dest="module", required=True)


class Block(NamedTuple):
    language: str
    line: int  # of its first line of code, from 1
    code: str
    reason: str  # why it is not run, or nothing


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"(?:<!-- not run: (.+?) -->\n)?^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(m[2], text.count("\n", 0, m.start(3)) + 1, m[3], m[1] or "") for m in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    """In order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks(page):
        if block.language == "python" and not block.reason:
            code = "\n" * (block.line - 1) + block.code  # a traceback names the page's line
            exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shells_find_their_commands(page):
    for block in blocks(page):
        if block.language == "sh" and not block.reason:
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    check(words)


def check(words: list[str]) -> None:
    """A target of the Makefile, a module of the project, or a command whose options parse."""
    program, *rest = words
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        assert set(targets) <= TARGETS, words
        given = dict(word.split("=", 1) for word in rest if "=" in word)
        assert given.keys() <= {"ARGS", "RANKS", "SECONDS", "PYTHON", "VENV"}, words
        if targets == ["train"]:
            make_parser().parse_args(["train", *shlex.split(given.get("ARGS", ""))])
    elif program == "torchrun":
        where = rest.index("-m") + 2
        assert TORCHRUN.parse_args(rest[:where]).module == "shardlib.commands", words
        make_parser().parse_args(rest[where:])
    elif program == "shardlib":
        make_parser().parse_args(rest)
    elif program == "pip":
        assert rest == ["install", "."], words
    elif program == "sbatch":
        where = next(index for index, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (ROOT / rest[where]).is_file() and rest[where + 1 : where + 3] == ["-m", "shardlib.commands"], words
        make_parser().parse_args(rest[where + 3 :])
    elif program == "python" and rest[0].endswith(".py"):
        script = (ROOT / rest[0]).read_text()
        assert all(f'"{word}"' in script for word in rest if word.startswith("--")), words
    else:
        assert program == "python" and rest[0] == "-m", words
        module = ROOT / rest[1].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), words


def test_every_block_has_a_language_that_is_checked():
    languages = {(page.name, block.language) for page in PAGES for block in blocks(page)}
    assert {language for _, language in languages} <= {"python", "sh", "text"}, languages


def test_blocks_that_are_not_run_are_known():
    counts = {page.name: sum(bool(block.reason) for block in blocks(page)) for page in PAGES}
    assert {name: count for name, count in counts.items() if count} == NOT_RUN


@pytest.mark.parametrize(("page", "rows"), [("README.md", 10), ("docs/chains.md", 25)])
def test_every_chain_of_the_tables_is_one(page, rows):
    """ "You want ... -> this chain": the second column is code."""
    table = re.search(r"\| you want \|.*?\n\n", (ROOT / page).read_text(), re.S)[0].strip()
    cells = [row.strip("| ").split(" | ")[1] for row in table.splitlines()[2:]]
    chains = [re.findall(r"`(.+?)`", cell) for cell in cells]
    assert len(chains) >= rows and all(chains)
    for code in itertools.chain(*chains):
        eval(code, {"sl": sl, "rules": {"*": "column"}})


def test_every_message_of_the_troubleshooting_is_one():
    """What a row quotes, … standing for names and sizes, is the text of some message."""
    source = "\n".join(path.read_text() for path in (ROOT / "shardlib").rglob("*.py"))
    said = re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", source))  # of f-strings, on one line
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Without a message")[0]
    messages = re.findall(r"^\| `(.+?)` \|", page, re.M)
    assert len(messages) > 25
    assert not [message for message in messages if message not in said]


def test_every_measured_number_of_the_readme_is_in_its_table():
    table = (ROOT / "README.md").read_text().split("## Five numbers")[1].split("\n\n")[2]
    rows = table.splitlines()[2:]
    assert len(rows) == 5
    for row in rows:
        _, number, command = row.strip("| ").split(" | ")
        results = (ROOT / re.search(r"\((benchmarks/results/\w+\.md)\)", command)[1]).read_text()
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", results), row
        check(shlex.split(re.search(r"`(python .+?)`", command)[1]))


def test_every_link_between_pages_leads_somewhere():
    broken = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        broken += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_in_the_index():
    """By which the site and readers find it."""
    listed = re.findall(r"^\| \[[^]]+\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert sorted([*listed, "README.md", "index.md"]) == sorted(page.name for page in PAGES)


def test_every_file_and_function_that_the_architecture_names_exists():
    """A path within shardlib/, or a name that some file there defines."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "shardlib").rglob("*.py"))
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", page)
    assert len(paths) > 40
    missing = {path for path in paths if not (ROOT / path).exists() and not any((ROOT / "shardlib").rglob(path))}
    assert not missing
    names = re.findall(r"`(?:[A-Z]\w+\.)?(\w+)`", page)
    assert not [name for name in names if not re.search(rf"\b{name}\b", source)]


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
