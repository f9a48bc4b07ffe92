"""A Slurm cluster of this machine: slurmctld and slurmd of the system's packages on hosts in network namespaces.

Host 0 runs slurmctld and is where jobs are submitted. Every host has a name, and a slurmd of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.network.namespaces import Network, network

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

# The partition "urgent" preempts jobs of "usual", which have `grace` seconds to end and then go to the queue again.
_CONFIGURATION = """
ClusterName=tried
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmdTimeout={timeout}
KillWait=5
ReturnToService=2
NodeName=host[0-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Hosts with slurmd; `cluster` makes and removes it."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder

    def start(self, host: int, *command: str, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """``command`` on a host, by its name, with its /etc/hosts and the cluster's configuration."""
        where = f'hostname host{host} && mount --bind {self._folder}/hosts /etc/hosts && exec "$@"'
        return self._hosts.start(
            host,
            ["unshare", "--uts", "--mount", "bash", "-c", where, "bash", *command],
            env={"SLURM_CONF": f"{self._folder}/slurm.conf"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )

    def run(self, *command: str) -> str:
        """What a command prints on host 0."""
        process = self.start(0, *command)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0, said
        return said

    def daemon(self, host: int) -> None:
        self.start(host, "slurmd", "-D", "-N", f"host{host}", out=subprocess.DEVNULL)

    def kill(self, host: int) -> None:
        """The host dies, with its slurmd."""
        self._hosts.kill(host)

    def state(self, job: str) -> str:
        """The job's state, PENDING, RUNNING, COMPLETED or another."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word.split("=", 1)[1] for word in shown.split() if word.startswith(f"{name}="))

    def wait(self, what, seconds: float) -> None:
        """Wait until ``what()`` is true."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, self.run("squeue") + self.run("sinfo") + self.logs()
            time.sleep(0.5)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self._folder.glob("*.log")))


@contextmanager
def cluster(size: int, folder: Path, *, grace: int = 60, timeout: int = 10) -> Iterator[Cluster]:
    """A cluster of ``size`` hosts.

    Args:
        folder: an empty one, for the cluster's own files.
        grace: seconds that a preempted job has to end.
        timeout: seconds after which a host that does not answer counts as dead.

    Raises:
        NoNetwork: this needs root and iproute2.
    """
    with network(size) as hosts:
        addresses = [f"{hosts.address(host)} host{host}\n" for host in range(size)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(addresses))
        cpus = os.cpu_count()
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, last=size - 1, cpus=cpus, grace=grace, timeout=timeout)
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # found out by itself, it needs /sys/fs/cgroup
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        files = [
            f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        # All end with the network.
        made = Cluster(hosts, folder)
        made.start(0, "munged", "--foreground", "--force", f"--key-file={folder}/key", *files, out=subprocess.DEVNULL)
        made.start(0, "slurmctld", "-D", out=subprocess.DEVNULL)
        for host in range(size):
            made.daemon(host)
        made.wait(lambda: made.run("sinfo", "-h", "-o", "%T %D", "-p", "usual") == f"idle {size}\n", 60)
        yield made


def missing() -> list[str]:
    """Programs that a cluster needs and this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program) is None]
