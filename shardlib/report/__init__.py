"""Reports of a run: progress, metrics, plots, predicted and measured times, and losses of n-gram models to compare with."""

from shardlib.plan.prediction import StepTime, predict_on, predict_step
from shardlib.report.launches import measure_launches
from shardlib.report.log import Log, Writer
from shardlib.report.measure import measure_blocks
from shardlib.report.profile import Comm, Memory, Profile, Stragglers, comm, measure_peak, memory, stragglers
from shardlib.report.stability import SecondMoments, Stability, second_moments, stability
from shardlib.report.writers import CsvWriter, JsonlWriter, TensorBoardWriter, WandbWriter

__all__ = [
    "Comm",
    "CsvWriter",
    "JsonlWriter",
    "Log",
    "Memory",
    "Profile",
    "SecondMoments",
    "Stability",
    "StepTime",
    "Stragglers",
    "TensorBoardWriter",
    "WandbWriter",
    "Writer",
    "measure_blocks",
    "comm",
    "measure_launches",
    "measure_peak",
    "memory",
    "predict_on",
    "predict_step",
    "second_moments",
    "stability",
    "stragglers",
]
