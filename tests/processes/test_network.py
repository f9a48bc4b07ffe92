"""Hosts in network namespaces: joined by links of limited speed, and removed with all that runs on them."""

import itertools
import os
import subprocess
import sys
import time

import pytest

from benchmarks.network.namespaces import NoNetwork, network

BYTES = 1 << 20
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    left = int(sys.argv[2])
    while left:
        left -= len(connection.recv(1 << 16))
"""
CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5001))
start = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)  # until the other side has read everything and closed
print(time.perf_counter() - start)
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    """Skips where there can be none."""
    try:
        with network(2):
            pass
    except NoNetwork as error:
        pytest.skip(str(error))


def seconds(hosts, sender, receiver):
    """Seconds to send ``BYTES`` from one host to another."""
    python, where = [sys.executable, "-c"], [hosts.address(receiver), str(BYTES)]
    server = hosts.start(receiver, [*python, SERVER, *where], stdout=subprocess.PIPE)
    assert server.stdout.readline() == "ready\n"
    client = hosts.start(sender, [*python, CLIENT, *where], stdout=subprocess.PIPE)
    return float(client.communicate(timeout=30)[0])


def spaces():
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@pytest.mark.parametrize("size", [2, 3])
def test_every_link_has_the_limited_speed(size):
    with network(size) as hosts:
        hosts.limit("20mbit")
        for sender, receiver in itertools.permutations(range(size), 2):
            # A burst of 256 KiB goes through at once at each end of a link, of which a way through a bridge has four.
            assert seconds(hosts, sender, receiver) > 8 * (BYTES - (512 << 10)) / 20e6
        hosts.limit(None)
        assert seconds(hosts, 0, 1) < 8 * (BYTES - (512 << 10)) / 20e6


def test_nothing_is_left_after_an_interrupt():
    before = spaces()
    with pytest.raises(KeyboardInterrupt), network(3) as hosts:
        assert len(spaces() - before) == 4
        running = hosts.start(2, ["sleep", "60"])
        raise KeyboardInterrupt
    assert spaces() == before
    assert running.wait(timeout=5) != 0


def test_networks_of_killed_processes_are_removed_and_others_kept():
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, kept = f"shardlib-{dead.pid}-0", f"shardlib-{os.getppid()}-0"
    try:
        for space in (left, kept):
            subprocess.run(["ip", "netns", "add", space], check=True)
        running = subprocess.Popen(["ip", "netns", "exec", left, "sleep", "60"])
        while not subprocess.run(["ip", "netns", "pids", left], capture_output=True).stdout:
            time.sleep(0.01)
        with network(2):
            assert kept in spaces() and left not in spaces()
        assert running.wait(timeout=5) != 0
    finally:
        for space in (left, kept):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def test_a_rank_that_fails_stops_the_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('gone')\ntime.sleep(60)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with network(2) as hosts, pytest.raises(RuntimeError, match="rank 1 exited with code 1"):
        hosts.run("fails", timeout=30)
    assert "ValueError: gone" in capfd.readouterr().err
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)")
    with network(2) as hosts, pytest.raises(RuntimeError, match="rank 0 still ran"):
        hosts.run("waits", timeout=0.5)


def test_without_iproute2_it_says_what_is_needed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoNetwork, match="root and iproute2"), network(2):
        pass
