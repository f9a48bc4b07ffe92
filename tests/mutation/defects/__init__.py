"""All defects, by the rooms they are planted in."""

from ..planting import Defect
from . import communication, optimizers, parts, steps

DEFECTS: tuple[Defect, ...] = (*communication.DEFECTS, *steps.DEFECTS, *optimizers.DEFECTS, *parts.DEFECTS)
