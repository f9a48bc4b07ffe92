"""Reports of a run: progress, metrics, plots, predicted and measured times, and losses of n-gram models to compare with."""

from shardlib.plan.prediction import StepTime, predict_on, predict_step
from shardlib.report.log import CsvWriter, JsonlWriter, Log, TensorBoardWriter, WandbWriter, Writer
from shardlib.report.measure import measure_blocks, measure_launches, measure_peak
from shardlib.report.profile import Comm, Memory, Profile, Stragglers, comm, memory, stragglers
from shardlib.report.stability import SecondMoments, Stability, second_moments, stability

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
