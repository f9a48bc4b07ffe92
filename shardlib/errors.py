"""The exceptions shardlib raises.

Every message names what was found (a parameter's path, sizes, an axis and its size) and a remedy, and all
failures of one kind come together in one message.
"""

from collections.abc import Iterable


class ShardlibError(Exception):
    """Base of every error raised by shardlib itself."""


class SpecError(ShardlibError, ValueError):
    """A partition spec that is malformed, or does not fit a shape or a mesh."""


class MeshError(ShardlibError, ValueError):
    """A mesh that does not fit the processes at hand, or an axis it does not have."""


class IllegalComposition(ShardlibError, ValueError):
    """Transforms that do not compose; names them, what each claimed, and the fix."""


class TreeError(ShardlibError, TypeError):
    """A pytree with leaves that shardlib cannot shard, or that differs from the plan's."""


class BatchError(ShardlibError, ValueError):
    """A batch that cannot be split as the plan asks."""


class ScheduleError(ShardlibError, ValueError):
    """A pipeline schedule, or a cut into stages, that cannot be made or cannot run; names the actions and the remedy."""


class LossError(ShardlibError, ValueError):
    """A loss function whose result cannot be differentiated or averaged."""


class HandleError(ShardlibError, RuntimeError):
    """A use of a gathered parameter that stage 3 cannot honour; names the remedy."""


class NonFiniteError(ShardlibError, ArithmeticError):
    """A loss or gradient with NaN or infinity; the state is unchanged and usable."""


class DonatedStateError(ShardlibError, RuntimeError):
    """A state whose memory a later step has taken over."""


class RankMismatch(ShardlibError, RuntimeError):
    """Ranks that disagree: different collectives, parameter trees, plans or initial values."""


class RankFailure(ShardlibError, RuntimeError):
    """A rank that died or stopped answering while others waited for it."""


REENTRANT = (
    "calls torch.utils.checkpoint with use_reentrant=True, which loses gradients of parameters here; pass "
    "use_reentrant=False, or mark blocks with sl.block and add sl.remat() to the plan. transformers' models take "
    "model.gradient_checkpointing_enable({'use_reentrant': False})"
)


def axes_named(axes: Iterable[str]) -> str:
    """ "axis 'a'", or "axes 'a', 'b' and 'c'"."""
    *first, last = map(repr, axes)
    return f"axes {', '.join(first)} and {last}" if first else f"axis {last}"


def listing(failures: list[str], limit: int = 20) -> str:
    """Join failures one per line, telling how many were left out beyond ``limit``."""
    lines = [f"  - {failure}" for failure in failures[:limit]]
    if len(failures) > limit:
        lines.append(f"  ... and {len(failures) - limit} more")
    return "\n".join(lines)
