"""Training states in the host's memory (ZeRO-Offload, arXiv 2101.06840), or on disk (ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import IllegalComposition
from shardlib.mesh.memories import MEMORIES
from shardlib.plan.arguments import choice, flag, number, texts
from shardlib.plan.claims import Claim, LeafInfo, Live, Step
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class Offload(CodedTransform):
    """The transform that `offload` makes, with the arguments given there."""

    optimizer: str
    params: str | None
    gradients: str | None
    fraction: float
    folders: tuple[str, ...] = ()
    update: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", number("offload", "fraction", self.fraction, 0, 1))
        for name, memory in (("params", self.params), ("gradients", self.gradients)):
            if memory == "disk" and self.optimizer != "disk":
                raise IllegalComposition(
                    f"offload({self.optimizer!r}, {name}='disk') has them on disk and states, which are larger, in memory: "
                    f"use offload('disk', {name}='disk', folder=...)"
                )
        if (self.optimizer == "disk") != bool(self.folders):
            raise IllegalComposition(
                f"{self.name}: states on disk need a folder, others have none; give folder= with 'disk' alone"
            )
        if len({str(Path(each).resolve()) for each in self.folders}) < len(self.folders):
            raise IllegalComposition(f"{self.name} names a folder twice; name each disk once")
        if self.update and self.optimizer != "host":
            raise IllegalComposition(
                f"{self.name} would keep old states beside new ones in host memory; use offload('host', {self.update}=True), "
                f"or leave {self.update} out"
            )
        if self.update == "delay" and self.fraction < 1:
            raise IllegalComposition(
                f"{self.name} would apply some gradients a step later than others; use fraction=1.0"
            )

    @property
    def call(self) -> CodeCall:
        states = {"optimizer": self.optimizer, "params": self.params, "gradients": self.gradients}
        updates = {"speculate": self.update == "speculate", "delay": self.update == "delay"}
        return CodeCall(offload, {**states, "fraction": self.fraction, "folder": one_or_list(self.folders), **updates})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for role, memory in (("param", self.params), ("grad", self.gradients)):
            if memory:
                yield Live(role, memory=memory, folders=self.folders if memory == "disk" else None)
        share = self.fraction if self.fraction < 1 else None
        yield Live("optimizer", memory=self.optimizer, share=share, folders=self.folders or None)
        if self.update:
            yield Step(update=self.update)

    def check(self, resolved: Resolved) -> None:
        microbatches = max(resolved.step.microbatches or 1, resolved.step.total_microbatches or 1)
        if self.update == "speculate" and self.gradients == "host" and microbatches > 1:
            raise IllegalComposition(
                f"{self.name} sums {microbatches} micro-batches in host memory, so none is complete before backward ends; "
                "leave out gradients='host'"
            )


def offload(
    optimizer: str = "host",
    params: str | None = None,
    gradients: str | None = None,
    *,
    fraction: float = 1.0,
    folder: str | Path | Sequence[str | Path] = (),
    speculate: bool = False,
    delay: bool = False,
) -> Offload:
    """Keep the optimizer's states and the fp32 masters in another memory than the device's, and update them there.

    Gradients go down bucket by bucket while backward goes on, as soon as they are summed, and their device memory is freed.
    The update runs on the host's kernels, and new parameters go up. The numbers are those of the same kernels without
    offload. Composes with every stage, axis, precision and codec.

    Args:
        optimizer: the memory of states and masters: "host"; or "disk", from which a few buckets at a time come to the host,
            for optimizers that read no further than one parameter.
        params: the memory of parameters: "host", or None for the device. Units then come up for each use, one ahead, as at
            ZeRO stage 3, where what comes up is a shard that is gathered on the device. "disk", with states there too: units
            are read three ahead, and never are all parameters in host memory, from `shard` on.
        gradients: the memory in which gradients of several micro-batches are accumulated: "host", or None for the device.
            Each micro-batch's gradient then goes down as soon as it is reduced, and the host adds it. Gradients that ranks
            reduce once, after the last micro-batch (below ZeRO stage 2), are accumulated on the device all the same. "disk",
            with states there too: gradients are written as they land, and read again by the update (and by each further
            micro-batch), so that never are all in host memory.
        fraction: the share of the states that lives there; the states whose gradients come last stay on the device.
        folder: of the files on disk: one or several, on different disks. They are given space for two copies of the states
            (and of the parameters, if they are there) and for one of the gradients, and belong to one run at a time; what is
            to be kept goes into checkpoints.
        speculate: whether a bucket is updated as soon as its gradient has arrived, beside backward, as if the step were
            neither skipped nor clipped; where it is, the update is made again. The numbers stay the same. Until then old
            states are kept beside new ones, so host memory holds them twice. For elementwise optimizers.
        delay: whether a step's gradients are applied while the next step computes (ZeRO-Offload's delayed parameter update).
            A step then computes with parameters that lack the gradients of the step before it, which are in
            ``state.opt.pending``. Memory as with ``speculate``, and the gradients. For elementwise optimizers.

    Raises:
        IllegalComposition: both ``speculate`` and ``delay``, either of them with "disk", ``delay`` with a fraction, or
            ``speculate`` with gradients accumulated on the host; a fraction outside 0 to 1; "disk" without a folder, a folder
            without it, or one folder twice; an unknown memory; when a step is made, an optimizer that
            reads across elements with states in two memories or updated ahead, or across parameters with states on disk.
        StorageError: when a step is made, or by `shard` with parameters on disk: the folder is in use, holds another plan's
            states, or has too little space. When a step runs: a disk fails; the state that the step was given is as it was,
            unless a ``fraction`` is elsewhere.

    >>> params, parallel = {"w": torch.ones(256, 256)}, sl.chain(sl.zero(0), sl.precision("bf16"), sl.offload())
    >>> plan = sl.make_plan(params, sl.abstract_mesh(data=1), parallel, optimizer=sl.optim.adamw(1e-3))
    >>> plan.bytes("optimizer", "host"), plan.bytes("optimizer", "device")
    (786432, 0)
    """
    optimizer = choice("offload", "optimizer", optimizer, MEMORIES)
    params, gradients = (
        choice("offload", name, memory, (None, *MEMORIES))
        for name, memory in {"params": params, "gradients": gradients}.items()
    )
    speculate, delay = flag("offload", "speculate", speculate), flag("offload", "delay", delay)
    if speculate and delay:
        raise IllegalComposition(
            "offload(speculate=True, delay=True) would update both in backward and in the next step; keep one"
        )
    given = str(folder) if isinstance(folder, Path) else folder
    if not isinstance(given, str) and isinstance(given, Sequence):
        given = [str(each) if isinstance(each, Path) else each for each in given]
    folders = texts("offload", "folder", given, "folder", 0)
    update = "speculate" if speculate else "delay" if delay else None
    return Offload(optimizer, params, gradients, fraction, folders, update)
