"""The exceptions that shardlib raises.

Every message names what was found (a parameter's path, sizes, an axis and its size) and a remedy. All failures of one kind
are in one message.
"""

from collections.abc import Iterable


class ShardlibError(Exception):
    """Base class of all errors that shardlib raises."""


class SpecError(ShardlibError, ValueError):
    """A partition spec that is malformed, or does not fit a shape or a mesh."""


class MeshError(ShardlibError, ValueError):
    """A mesh that does not fit the running processes, or an axis that a mesh does not have."""


class IllegalComposition(ShardlibError, ValueError):
    """Transforms that do not compose; names the transforms, what each claimed, and the remedy."""


class TreeError(ShardlibError, TypeError):
    """A pytree with leaves that shardlib cannot shard, or with another structure than the plan's."""


class BatchError(ShardlibError, ValueError):
    """A batch that does not fit the plan."""


class ScheduleError(ShardlibError, ValueError):
    """A pipeline schedule, or a cut into stages, that cannot be made or cannot run; names the actions and the remedy."""


class LossError(ShardlibError, ValueError):
    """A loss function whose result cannot be differentiated or averaged."""


class HandleError(ShardlibError, RuntimeError):
    """A use of a gathered or sliced parameter that is not supported; names the remedy."""


class NonFiniteError(ShardlibError, ArithmeticError):
    """A loss or gradient with NaN or infinity; the state is unchanged and usable."""


class DonatedStateError(ShardlibError, RuntimeError):
    """A state whose memory a later step has taken over."""


class RankMismatch(ShardlibError, RuntimeError):
    """Ranks that disagree: different collectives, parameter trees, plans or initial values."""


class CheckpointError(ShardlibError, RuntimeError):
    """A checkpoint that is damaged, incomplete or of another format; names the file and the leaf, and the remedy."""


class MigrationError(ShardlibError, ValueError):
    """A configuration with keys that cannot be taken; names each, with the reason and the remedy."""


class StorageError(ShardlibError, RuntimeError):
    """Buffers on disk that cannot be written or read; names the file and the buffer, and the remedy."""


class UnsupportedError(ShardlibError, NotImplementedError):
    """Something that this operating system has no calls for; names both, and the remedy."""


class RankFailure(ShardlibError, RuntimeError):
    """A rank that died or stopped answering while others waited for it."""


REENTRANT = (
    "calls torch.utils.checkpoint with use_reentrant=True, which loses gradients of parameters. Pass use_reentrant=False "
    "(transformers: model.gradient_checkpointing_enable({'use_reentrant': False})), or use sl.block and sl.remat()"
)


def axes_named(axes: Iterable[str]) -> str:
    """The axes as text: "axis 'a'", or "axes 'a', 'b' and 'c'"."""
    *first, last = map(repr, axes)
    return f"axes {', '.join(first)} and {last}" if first else f"axis {last}"


def listing(failures: list[str], limit: int = 20) -> str:
    """Failures, one per line; beyond ``limit`` only their number."""
    lines = [f"  - {failure}" for failure in failures[:limit]]
    if len(failures) > limit:
        lines.append(f"  ... and {len(failures) - limit} more")
    return "\n".join(lines)
