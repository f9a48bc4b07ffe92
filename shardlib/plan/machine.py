"""`Machine`: what ranks compute and send per second, by which steps are predicted and plans are searched for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from shardlib.errors import MeshError
from shardlib.mesh.memories import WAYS
from shardlib.plan.tables import parse_size, size, table

# Checks of rates and of seconds, by which steps are predicted.


def is_rate(value: Any) -> bool:
    """Whether a value is a number per second: above 0, and infinite where there is no limit."""
    return not isinstance(value, bool) and isinstance(value, Real) and float(value) > 0


def is_seconds(value: Any) -> bool:
    """Whether a value is a finite number of seconds, 0 or more."""
    return not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf


def named(values: dict[str, Any]) -> str:
    """Names and values as text."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


# Precisions as `shardlib.precision` calls them -> dtype of the products.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Link:
    """A connection.

    Attributes:
        bandwidth: bytes per second, each way.
        latency: seconds of one hop, however little is sent. A collective over n ranks has n − 1 hops.
        processor: seconds that a rank's processor is kept from computing by each byte that the rank sends, and receives.
        sums: the same of all-reduces, whose latency is that of 1/(n − 1) of all that they wait for; None where they go as
            other messages do, over twice as many hops.
    """

    bandwidth: float
    latency: float = 0.0
    processor: float = 0.0
    sums: Link | None = None

    @property
    def summing(self) -> Link:
        """The link to all-reduces."""
        return self.sums or Link(self.bandwidth, 2 * self.latency, self.processor)


@dataclass(frozen=True)
class Overheads:
    """Seconds of a rank's processor that Python takes beside operators.

    Attributes:
        step: of a step, with its loss and metrics.
        walk: of a micro-batch's forward, and of its backward.
        unit: of a unit that is gathered for a use.
        bucket: of a bucket in the update.
        exchange: of a collective that a rank takes part in.
        recompute: of a block that is computed again.
    """

    step: float = 0.0
    walk: float = 0.0
    unit: float = 0.0
    bucket: float = 0.0
    exchange: float = 0.0
    recompute: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Hosts with equal ranks: what a rank has, and does per second. `shardlib doctor --measure` measures it.

    Attributes:
        memory: bytes of a rank's device. As text too: "80GiB".
        flops: precision ("fp32", "bf16", "fp16") -> floating-point operations per second, in products of matrices. Plans
            compute in no other precision.
        inside: the link of one rank to others of its host.
        between: the link of one host to others, which its ranks share; None where there is one host.
        ranks_per_host: ranks of a host, which are neighbours in the mesh.
        streaming: bytes per second that operators other than products read and write on the device.
        updating: bytes per second that an update reads and writes there, in place; None for those of ``streaming``.
        launches: operators per second that a device begins, however small they are.
        host_memory: bytes of a host, which its ranks share; None where no states are to be kept there. As text too.
        disk: bytes of a host's disks for states; None where none are to be kept there. As text too.
        ways: bytes per second of one rank: "down" to the host and "up" from it, "read" and "written" on its share of the
            disks, and "update", of states that the host updates. What is left out takes no time.
        overheads: of Python.
        crowd: ranks that share a processor as they compute. All rates are those of all ranks at once.

    Raises:
        TypeError: a link that is no `Link`, or rates that are not given by name.
        ValueError: a size that is none, a rate that is not above 0, a time below 0, an unknown precision or way, no whole
            number of ranks.

    >>> machine = sl.plan.Machine("80GiB", {"bf16": 4e14}, sl.plan.Link(2e11), sl.plan.Link(4e11), ranks_per_host=8)
    >>> machine.link({"data": 16, "model": 8}, "data").bandwidth  # each of a host's ranks is in a group of its own
    50000000000.0
    """

    memory: int
    flops: Mapping[str, float]
    inside: Link
    between: Link | None = None
    ranks_per_host: int = 1
    streaming: float = math.inf
    launches: float = math.inf
    host_memory: int | None = None
    disk: int | None = None
    ways: Mapping[str, float] = field(default_factory=dict)
    overheads: Overheads = Overheads()
    updating: float | None = None
    crowd: float = 1.0

    def __post_init__(self) -> None:
        self._require_kinds()
        for name in ("memory", "host_memory", "disk"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_size(given))
        for name, known in (("flops", tuple(PRECISIONS)), ("ways", (*WAYS, "update"))):
            if unknown := [key for key in getattr(self, name) if key not in known]:
                raise ValueError(f"Machine({name}=) names {', '.join(map(repr, unknown))}: use {', '.join(known)}")
        rates = {
            **self.flops,
            **self.ways,
            "streaming": self.streaming,
            "launches": self.launches,
            "updating": self.in_place,
        }
        times = {f"overheads.{name}": value for name, value in asdict(self.overheads).items()}
        for name, link in self._links.items():
            rates[f"{name}.bandwidth"] = link.bandwidth
            times |= {f"{name}.latency": link.latency, f"{name}.processor": link.processor}
        if wrong := {name: rate for name, rate in rates.items() if not is_rate(rate)}:
            raise ValueError(f"Machine has rates that are not above 0: {named(wrong)}")
        if wrong := {name: value for name, value in times.items() if not is_seconds(value)}:
            raise ValueError(f"Machine has times that are no seconds, finite ones of at least 0: {named(wrong)}")
        per_host: Any = self.ranks_per_host
        if isinstance(per_host, bool) or not isinstance(per_host, Integral) or per_host < 1:
            raise ValueError(f"Machine(ranks_per_host={per_host!r}): give an integer of at least 1")
        if not is_seconds(self.crowd) or self.crowd < 1:
            raise ValueError(f"Machine(crowd={self.crowd!r}): give at least 1, ranks with a processor each")

    def _require_kinds(self) -> None:
        links = {name: getattr(self, name) for name in ("inside", "between")}
        links |= {f"{name}.sums": link.sums for name, link in links.items() if isinstance(link, Link)}
        for name, link in links.items():
            if not isinstance(link, Link) and (link is not None or name == "inside"):
                raise TypeError(f"Machine({name}={link!r}): give a sl.plan.Link, such as sl.plan.Link(1e9, 1e-5)")
        for name, key in (("flops", "fp32"), ("ways", "down")):
            if not isinstance(given := getattr(self, name), Mapping):
                raise TypeError(f'Machine({name}={given!r}): give rates by name, such as {{"{key}": 1e12}}')
        if not isinstance(self.overheads, Overheads):
            raise TypeError(f"Machine(overheads={self.overheads!r}): give shardlib.plan.machine.Overheads")

    @property
    def in_place(self) -> float:
        """Bytes per second that an update reads and writes."""
        return self.streaming if self.updating is None else self.updating

    @property
    def _links(self) -> dict[str, Link]:
        links = {"inside": self.inside} | ({"between": self.between} if self.between else {})
        return links | {f"{name}, sums": link.sums for name, link in links.items() if link.sums}

    def apart(self, stages: int) -> Machine:
        """The machine on which one of some stages computes while the others wait, so that fewer ranks share a processor."""
        faster = self.crowd / max(1.0, self.crowd / stages)
        if faster == 1:
            return self
        return replace(
            self,
            flops={name: rate * faster for name, rate in self.flops.items()},
            inside=_quicker(self.inside, faster),
            between=self.between and _quicker(self.between, faster),
            streaming=self.streaming * faster,
            launches=self.launches * faster,
            overheads=Overheads(**{name: seconds / faster for name, seconds in asdict(self.overheads).items()}),
            updating=self.in_place * faster,
            crowd=self.crowd / faster,
        )

    def link(self, sizes: Mapping[str, int], axis: str) -> Link:
        """The link of one rank along an axis of a mesh, with the latency of the n − 1 hops of a collective over its ranks.

        Of a group that spans hosts a ring leaves each host once, and all groups with ranks on a host share its link.

        Args:
            sizes: axis -> size of the mesh, whose last axis varies fastest.

        Raises:
            MeshError: the mesh spans hosts, and the machine is one host.
        """
        ways, together = sizes[axis], self._together(sizes, axis)
        hosts = math.ceil(ways / together)
        if hosts > 1 and self.between is None:
            ranks = math.prod(sizes.values())
            raise MeshError(
                f"a mesh of {ranks} ranks has several hosts of {self.ranks_per_host}: give the machine's link between= them"
            )
        groups = min(self.ranks_per_host, math.prod(sizes.values())) // together

        def ring(inside: Link, between: Link | None) -> Link:
            latency = inside.latency * (ways - hosts)
            if hosts == 1 or between is None:
                return replace(inside, latency=latency, sums=None)
            bandwidth = between.bandwidth / max(1, groups)
            bandwidth = min(bandwidth, inside.bandwidth) if together > 1 else bandwidth
            return replace(between, bandwidth=bandwidth, latency=latency + between.latency * (hosts - 1), sums=None)

        sums = ring(self.inside.summing, self.between and self.between.summing)
        measured = self.inside.sums or (self.between and self.between.sums)
        return replace(ring(self.inside, self.between), sums=sums if measured else None)

    def line(self, sizes: Mapping[str, int], axis: str) -> str:
        """The name of a rank's link that an axis takes: "inside" or "between". Axes that take the same one share it."""
        return "inside" if self._together(sizes, axis) >= sizes[axis] else "between"

    def _together(self, sizes: Mapping[str, int], axis: str) -> int:
        """Ranks of one group along an axis that are on one host."""
        names = list(sizes)
        stride = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
        return max(1, min(sizes[axis], self.ranks_per_host // stride))

    def write(self, path: str | Path) -> None:
        """Writes the machine to a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Machine:
        """The machine that `write`, or a person, has written; what a file leaves out is as by default.

        Raises:
            ValueError: the file describes no machine.
        """
        try:
            given = json.loads(Path(path).read_text())
            if not isinstance(given, dict):
                raise ValueError(f"a {type(given).__name__} and no object with the names of attributes")
            links = {name: _link(given.pop(name)) for name in ("inside", "between") if given.get(name)}
            overheads = Overheads(**given.pop("overheads", {}))
            return cls(**{**given, **links, "overheads": overheads})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} describes no machine: {error}. `shardlib doctor --measure` writes one") from error

    def __str__(self) -> str:
        rows = [("a rank's memory", size(self.memory)), ("ranks per host", str(self.ranks_per_host))]
        rows += [(f"products, {name}", f"{rate:.3g} FLOP/s") for name, rate in self.flops.items()]
        rows += [("other operators", _rate(self.streaming))] if self.streaming < math.inf else []
        rows += [("updates", _rate(self.updating))] if self.updating else []
        rows += [("launches", f"{self.launches:,.0f} operators per second")] if self.launches < math.inf else []
        rows += [
            (f"link {name}", f"{_rate(link.bandwidth)}, {link.latency * 1e6:.3g} µs a hop{_processor(link)}")
            for name, link in self._links.items()
        ]
        rows += [
            (what, size(held)) for what, held in (("a host's memory", self.host_memory), ("disk", self.disk)) if held
        ]
        rows += [(name, _rate(rate)) for name, rate in self.ways.items()]
        rows += [("ranks that share a processor", f"{self.crowd:g}")] if self.crowd > 1 else []
        rows += [
            (f"Python, a {name}", f"{value * 1e6:.3g} µs") for name, value in asdict(self.overheads).items() if value
        ]
        return table(("machine", ""), rows)


def require_machine(what: str, given: object) -> None:
    """Refuse an argument of ``what`` that is no `Machine`.

    Raises:
        TypeError: says how to make one.
    """
    if not isinstance(given, Machine):
        raise TypeError(
            f"{what} takes a sl.plan.Machine, not {type(given).__name__} {given!r}: make one, or read one that "
            "`shardlib doctor --measure` wrote, sl.plan.Machine.read(path)"
        )


def _link(given: Mapping[str, Any]) -> Link:
    """A link from its description in a file."""
    return Link(**{**given, "sums": _link(given["sums"]) if given.get("sums") else None})


def _quicker(link: Link, times: float) -> Link:
    """A link whose ranks' processors are so many times as quick."""
    sums = link.sums and _quicker(link.sums, times)
    return replace(link, processor=link.processor / times, sums=sums)


def _processor(link: Link) -> str:
    return f", {link.processor * 1e9:.3g} ns a byte of the processor" if link.processor else ""


def _rate(bandwidth: float) -> str:
    return f"{size(int(bandwidth))}/s" if bandwidth < math.inf else "no limit"
