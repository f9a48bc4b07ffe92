"""Ranks that hang, die or go astray: each rank says which call it waits in and for whom, and stops."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist
from helpers import hung

from shardlib.mesh.transport.watch import EXIT_HUNG

GATHER = r"all_gather\(\d+ × float64\) on axis 'data'"
CASES = ["sleeping", "returning", "raising", "killed", "stopped", "branching", "differing", "receiving", "on_a_device"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Case -> (exit codes, what each rank printed)."""
    folder = tmp_path_factory.mktemp("hung")
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in CASES]
    arguments = [text for case, store in zip(CASES, stores) for text in (case, str(store.port))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "helpers.hung", str(folder), *arguments]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=250, check=True)
    found = {}
    for line in map(json.loads, ran.stdout.splitlines()):
        texts = [(folder / f"{line['case']}-{rank}").read_text() for rank in range(len(line["ends"]))]
        found[line["case"]] = [code for code, _ in line["ends"]], texts
        print(line["case"], [f"{seconds:.1f} s" for _, seconds in line["ends"]], *texts, sep="\n")
    return found


def reports(text):
    """The reports in a rank's output: the one that it printed, and the message of the error that it raised."""
    printed = re.findall(r"^shardlib: (.*?)(?=^\[?rank\d|^shardlib: |^Traceback|\Z)", text, re.DOTALL | re.MULTILINE)
    raised = re.findall(r"shardlib.errors.RankFailure: (.*)", text, re.DOTALL)
    return printed[:1], [re.sub(r"^\[rank\d\]: ?", "", message, flags=re.MULTILINE) for message in raised]


def assert_says(text, *patterns, raised):
    """Both the report that a rank printed and the one that it raised, if it raised one, hold each pattern."""
    printed, errors = reports(text)
    assert len(printed) == 1 and len(errors) == raised, text
    for report in (*printed, *errors):
        for pattern in patterns:
            assert re.search(pattern, report, re.DOTALL), f"{pattern!r} is not in:\n{report}"


def head(rank, why, seconds=r"\d+"):
    """The head of the report of a rank that trains, in step 3."""
    return rf"^{GATHER} \(size 3\) \w.* on rank {rank} \(call \d+, for layers/0, in step 3, after {seconds} s\): {why}"


def test_a_rank_that_sleeps_is_told_so_and_ended(runs):
    codes, texts = runs["sleeping"]
    assert codes == [1, EXIT_HUNG, 1]
    for rank in (0, 2):
        assert_says(
            texts[rank],
            head(rank, "rank 1 has not made this call", f"{hung.TIMEOUT:.0f}"),
            r"rank 1 waits in no collective \(its last: [^\n]*, in step 2\)\); it runs\n.*sleep\(600\)",
            rf"rank {2 - rank} waits in {GATHER} \(call \d+, for layers/0, in step 3\) for rank 1, at\n.*tanh\(",
            raised=True,
        )
    assert_says(
        texts[1],
        r"^rank 1 waits in no collective, while other ranks wait; it runs\n.*time.sleep\(600\)",
        rf"rank 0, 2 wait in {GATHER} \(call \d+, for layers/0, in step 3\) for rank 1",
        raised=False,
    )
    assert f"rank 1 is ended with exit code {EXIT_HUNG}" in texts[1]


@pytest.mark.parametrize(
    "case, code, why, what",
    [
        ("returning", 0, "rank 1 has ended", "rank 1 has ended: its program came to its end"),
        ("raising", 1, "rank 1 has ended", "rank 1 has ended with ValueError: a bad sample"),
        ("killed", -9, "rank 1 no longer answers", r"rank 1 no longer answers: its process \(\d+\) has ended"),
        (
            "stopped",
            -9,
            "rank 1 no longer answers",
            r"rank 1 no longer answers: its process \(\d+\) was stopped by a signal",
        ),
    ],
)
def test_a_rank_that_is_gone(runs, case, code, why, what):
    """A rank that ended, one that was killed and one that was stopped are told apart."""
    codes, texts = runs[case]
    assert codes == [1, code, 1]
    for rank in (0, 2):
        assert_says(texts[rank], head(rank, why), what, raised=True)


def test_a_rank_in_another_axis_collective(runs):
    """Rank 1 waits for rank 3, which waits for rank 2 on the other axis."""
    codes, texts = runs["branching"]
    assert codes == [EXIT_HUNG, 1, EXIT_HUNG, 1]
    on = {axis: rf"all_reduce\(5 × float32\) on axis '{axis}'" for axis in ("data", "model")}
    assert_says(
        texts[1],
        rf"^{on['data']} \(size 2\) failed on rank 1 \(call 3, after \d+ s\): rank 3 has not made this call",
        rf"rank 3 waits in {on['model']} \(call 1\) for rank 2, at\n.*group\(axis\).all_reduce",
        r"rank 0, 2 wait in no collective \(its last: .*\(call 3\)\); it runs\n.*signal.pause\(\)",
        raised=True,
    )
    assert_says(texts[3], rf"^{on['model']} \(size 2\) failed on rank 3 \(call 1, .*rank 2 has not made", raised=True)
    assert_says(
        texts[2], rf"^rank 2 waits in no collective.*rank 3 waits in {on['model']} \(call 1\) for rank 2", raised=False
    )


def test_calls_of_different_sizes(runs):
    codes, texts = runs["differing"]
    assert codes == [1, 1]
    for text in texts:
        assert_says(
            text,
            r"the ranks' calls differ: rank 0 calls all_gather\(3 × float32\) on axis 'data'; "
            r"rank 1 calls all_gather\(4 × float32\) on axis 'data'",
            raised=True,
        )


def test_a_message_that_is_not_sent(runs):
    codes, texts = runs["receiving"]
    assert codes == [EXIT_HUNG, 1]
    assert_says(
        texts[1],
        r"^recv\(3 × float32\) on axis 'pipe' \(size 2\) failed on rank 1 \(call 2, .*: rank 0 has not made this call",
        r"its last: send\(3 × float32\) on axis 'pipe' \(call 1\)",
        raised=True,
    )


def test_a_call_that_only_the_device_waits_in(runs):
    codes, texts = runs["on_a_device"]
    assert codes == [EXIT_HUNG, EXIT_HUNG]
    assert_says(
        texts[0],
        r"^all_reduce\(3 × float32\) on axis 'data' \(size 2\) failed on rank 0 \(call 2, for layers/7, after \d+ s\): "
        "rank 1 has not made this call",
        raised=False,
    )
    assert_says(
        texts[1],
        r"rank 0 waits in all_reduce\(3 × float32\) on axis 'data' \(call 2, for layers/7\) for rank 1",
        raised=False,
    )
