"""The main job on two hosts: torchrun in each of two network namespaces, joined by a veth pair."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network.namespaces import NoNetwork, network


@pytest.fixture
def hosts():
    try:
        with network(2) as made:
            yield made
    except NoNetwork as error:
        pytest.skip(str(error))


def start(hosts, node, *options):
    """torchrun on one of the hosts, two processes each, as a user starts it there."""
    command = [
        *(str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "2"),
        *("--node-rank", str(node), "--master-addr", hosts.address(0), "--master-port", "29571"),
        *("-m", "shardlib.commands", "train", *map(str, options)),
    ]
    return hosts.start(node, command, env={"COLUMNS": "200"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [("--mesh", "data=2,model=2", "--stage", 2), ("--mesh", "data=4", "--stage", 3)])
def test_the_main_job_on_two_hosts(hosts, tmp_path, options):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    small = ("--layers", 2, "--width", 32, "--heads", 4, "--sequence", 32, "--batch", 8, "--precision", "fp32")
    arguments = ("--data", text, "--out", tmp_path / "run", "--steps", 12, *small, *options)
    running = [start(hosts, node, *arguments) for node in (0, 1)]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert re.search(r"step 12/12  loss \d\.\d{3}", outputs[0])
    sent = re.findall(r"^sent on (\w+)\s+(\d.*? \w+)\s{2,}(\d.*? \w+)\s*$", outputs[0], re.MULTILINE)
    assert sent and all(predicted == measured for _, predicted, measured in sent), outputs[0]
