"""All defects, by the rooms they are planted in."""

from ..planting import Defect
from . import (
    checkpoints,
    communication,
    curricula,
    debug,
    disk,
    experts,
    hangs,
    keys,
    offload,
    optimizers,
    parts,
    plans,
    profiles,
    reproducible,
    runs,
    steps,
    thinning,
    tiles,
)

DEFECTS: tuple[Defect, ...] = (
    *communication.DEFECTS,
    *hangs.DEFECTS,
    *plans.DEFECTS,
    *profiles.DEFECTS,
    *steps.DEFECTS,
    *keys.DEFECTS,
    *optimizers.DEFECTS,
    *offload.DEFECTS,
    *parts.DEFECTS,
    *checkpoints.DEFECTS,
    *disk.DEFECTS,
    *runs.DEFECTS,
    *curricula.DEFECTS,
    *reproducible.DEFECTS,
    *tiles.DEFECTS,
    *experts.DEFECTS,
    *debug.DEFECTS,
    *thinning.DEFECTS,
)
