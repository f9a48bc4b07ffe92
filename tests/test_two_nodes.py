"""The main job on two hosts: torchrun in each of two network namespaces, joined by a veth pair."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

SPACES = ("shardhost0", "shardhost1")
LINKS = ("shardport0", "shardport1")
ADDRESSES = ("192.168.212.1", "192.168.212.2")


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True)


@contextmanager
def two_hosts():
    """The namespaces, gone afterwards whatever happens."""
    try:
        for space in SPACES:
            ip("netns", "add", space)
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for space, link, address in zip(SPACES, LINKS, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/30", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


@pytest.fixture
def hosts():
    try:
        context = two_hosts()
        context.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root and iproute2 to make network namespaces ({type(error).__name__})")
    yield
    context.__exit__(None, None, None)


def start(node, *options):
    """torchrun on one of the hosts, two processes each, as a user starts it there."""
    command = [
        *("ip", "netns", "exec", SPACES[node], str(Path(sys.executable).with_name("torchrun"))),
        *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)),
        *("--master-addr", ADDRESSES[0], "--master-port", "29571"),
        *("-m", "shardlib.cli", "train", *map(str, options)),
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LINKS[node], "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [("--mesh", "data=2,model=2", "--stage", 2), ("--mesh", "data=4", "--stage", 3)])
def test_the_main_job_on_two_hosts(hosts, tmp_path, options):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    small = ("--layers", 2, "--width", 32, "--heads", 4, "--sequence", 32, "--batch", 8, "--precision", "fp32")
    arguments = ("--data", text, "--out", tmp_path / "run", "--steps", 12, *small, *options)
    running = [start(node, *arguments) for node in (0, 1)]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert re.search(r"step 12/12  loss \d\.\d{3}", outputs[0])
    sent = re.findall(r"^sent on (\w+)\s+(\d.*? \w+)\s{2,}(\d.*? \w+)\s*$", outputs[0], re.MULTILINE)
    assert sent and all(predicted == measured for _, predicted, measured in sent), outputs[0]
