"""Programs under supervision: started like torchrun's ranks, started again when one fails, gone with their supervisor."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from shardlib.mesh.launch.supervise import Counts, supervise
from shardlib.mesh.launch.supervised import RankProgress, Supervisor, progress

# Each rank notes its environment in a file of its own, then does what the program is about.
NOTE = """
import json, os, pathlib, signal, sys, time
folder, rank, attempt = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / "new").mkdir(exist_ok=True)
noted = folder / f"{attempt}-{rank}"
(folder / "new" / noted.name).write_text(json.dumps({"pid": os.getpid(), **os.environ}))
(folder / "new" / noted.name).rename(noted)
"""


class Program:
    """A program of ``text`` that ranks run, and what its supervisor says."""

    def __init__(self, folder, text):
        self.folder, self.lines = folder, []
        self.file = folder / "program.py"
        self.file.write_text(NOTE + text)
        self.command = [sys.executable, str(self.file), str(folder)]

    def run(self, counts, restarts=10):
        return supervise(self.command, Counts.parse(counts), restarts, self.lines.append)

    def noted(self):
        """The environment of each rank that has been started: (attempt, rank) -> variables."""
        files = [path for path in self.folder.iterdir() if path.name[0].isdigit()]
        return {tuple(map(int, path.name.split("-"))): json.loads(path.read_text()) for path in files}

    def wait_for(self, ranks):
        """Wait until so many ranks have been started; they were started in vain if 60 s do not do."""
        until = time.monotonic() + 60
        while len(self.noted()) < ranks and time.monotonic() < until:
            time.sleep(0.01)
        return self.noted()


def gone(pid):
    """Whether a process has ended within 60 s, or is a zombie."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_ranks_are_started_as_torchrun_would(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = Program(tmp_path, "")
    assert program.run("3") == 0 and program.lines == []
    noted = program.noted()
    assert sorted(noted) == [(0, 0), (0, 1), (0, 2)]
    for (_, rank), found in noted.items():
        wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1"}
        assert {name: found[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}
        assert found["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 3))
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True" and found["SHARDLIB_SAVES"] == "0"
        assert found["SHARDLIB_SUPERVISOR"] == f"127.0.0.1:{found['MASTER_PORT']}"


def test_those_that_are_left_go_on_when_a_rank_is_killed(tmp_path):
    """The others, which would run for ever, are killed; the store is another one."""
    program = Program(
        tmp_path,
        """
while attempt == 0 and len(list(folder.glob("0-*"))) < 4: time.sleep(0.01)
if attempt == 0 and rank in (1, 2): os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0: time.sleep(1000)
""",
    )
    assert program.run("1:4") == 0
    first, second = ([each for each in program.noted() if each[0] == attempt] for attempt in (0, 1))
    assert len(first) == 4 and len(second) in (2, 3)  # the second kill may have come later than the look
    assert program.lines[0].endswith("of 4 was killed by SIGKILL before its first step") and len(program.lines) == 1
    noted = program.noted()
    assert noted[0, 0]["MASTER_PORT"] != noted[1, 0]["MASTER_PORT"] and noted[1, 0]["SHARDLIB_SAVES"] == "1"
    assert all(gone(found["pid"]) for found in noted.values())


def test_a_program_with_a_bug_ends_with_its_traceback_and_code(tmp_path, capfd):
    program = Program(tmp_path, "if rank == 1: sys.exit(17 if attempt == 2 else 16)\ntime.sleep(1000)")
    assert program.run("2") == 17
    assert program.lines == [
        "rank 1 of 2 exited with code 16 before its first step",
        "rank 1 of 2 exited with code 16 before its first step",
        "rank 1 of 2 exited with code 17 before its first step",
        "gives up: failed 3 times in a row at the same step",
    ]
    program = Program(tmp_path, "raise ValueError('a bug')")
    assert program.run("1") == 1 and "ValueError: a bug" in capfd.readouterr().err


def test_kills_without_progress_come_to_an_end(tmp_path):
    program = Program(tmp_path, "os.kill(os.getpid(), signal.SIGABRT)")
    assert program.run("1", restarts=4) == 134
    assert len(program.noted()) == 5 and program.lines[-1] == "gives up: started again 4 times without a new step"


@pytest.mark.parametrize("code", [138, 143])
def test_ranks_that_have_saved_and_ended_are_not_started_again(tmp_path, code):
    """The code is the run's, also if the exit of one has broken another rank's connection."""
    program = Program(
        tmp_path,
        f"""
if rank: sys.exit({code})
while not (folder / "0-1").exists(): time.sleep(0.01)
stat = pathlib.Path(f"/proc/{{json.loads((folder / '0-1').read_text())['pid']}}/stat")
while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
sys.exit(1)
""",
    )
    assert program.run("2") == code and program.lines == [] and len(program.noted()) == 2


def test_a_program_that_ends_with_the_code_of_a_change_of_ranks(tmp_path):
    """Nobody has asked it for one, so it has failed; otherwise it would start for ever."""
    program = Program(tmp_path, "sys.exit(75)")
    assert program.run("1") == 75 and len(program.noted()) == 3
    assert program.lines[-1] == "gives up: failed 3 times in a row at the same step"


def test_ranks_are_taken_back(tmp_path, monkeypatch):
    """Threads are the same in all attempts: sums inside a rank depend on them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    program = Program(
        tmp_path,
        """
if attempt == 0 and rank == 2: sys.exit(9)
if attempt == 0: time.sleep(1000)
if os.environ["SHARDLIB_SAVES"] == "1": sys.exit(75)
""",
    )
    assert program.run("1,3") == 0
    assert sorted(program.noted())[-4:] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert {found["OMP_NUM_THREADS"] for found in program.noted().values()} == {"2"}
    assert program.lines[1] == "step None is saved: 3 ranks start"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("caught", [True, False])
def test_a_signal_is_passed_on_and_ends_the_run(tmp_path, number, caught):
    """Whether the ranks save first, or know nothing of it and die."""
    catch = f"signal.signal({number}, lambda *_: sys.exit({128 + number}))\n" if caught else ""
    program = Program(tmp_path, "time.sleep(1000)")
    program.file.write_text("import signal, sys\n" + catch + program.file.read_text())

    def send():
        program.wait_for(2)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    assert program.run("1:2") == 128 + number
    sender.join()
    assert len(program.noted()) == 2 and signal.getsignal(number) == before


def test_no_rank_outlives_its_supervisor(tmp_path):
    """Not even one that has changed its program or started a session of its own."""
    program = Program(tmp_path, "time.sleep(1000)")
    code = (
        "import sys; from shardlib.mesh.launch.supervise import supervise; "
        "from shardlib.mesh.launch.supervise import Counts; supervise(sys.argv[1:], Counts((2,)), 0, print)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, *program.command])
    try:
        noted = program.wait_for(2)
        assert len(noted) == 2
    finally:
        supervisor.kill()
        supervisor.wait()
    assert all(gone(found["pid"]) for found in noted.values())


def test_rank_0_tells_how_far_the_ranks_are():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"SHARDLIB_SUPERVISOR": f"127.0.0.1:{store.port}", "SHARDLIB_SAVES": "2"}
    assert progress(store) == RankProgress()
    other = Supervisor(variables | {"RANK": "1"})
    other.done(4)
    assert progress(store) == RankProgress()
    rank = Supervisor(variables | {"RANK": "0"})
    before = time.time()
    rank.begun(10)
    assert progress(store) == RankProgress(10)
    rank.done(11)
    rank.done(12)
    rank.saved(12)
    found = progress(store)
    assert found == RankProgress(10, 12, 12, found.first) and before <= found.first <= time.time()
    assert [rank.resizes() for _ in range(3)] == [other.resizes() for _ in range(3)] == [False, True, False]
    fresh = Supervisor(variables | {"RANK": "0"})
    fresh.done(31)
    assert progress(store).begun == 30
    assert not any(Supervisor(variables | {"RANK": "0", "SHARDLIB_SAVES": "0"}).resizes() for _ in range(3))
