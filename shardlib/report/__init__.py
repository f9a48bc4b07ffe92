"""Reports of a run: progress, metrics, plots, predicted and measured times, and losses of n-gram models to compare with."""

from shardlib.plan.prediction import StepTime, predict_on, predict_step
from shardlib.report.html import HtmlWriter
from shardlib.report.log import CsvWriter, JsonlWriter, Log, TensorBoardWriter, WandbWriter, Writer
from shardlib.report.measure import measure_blocks, measure_launches, measure_peak
from shardlib.report.profile import Comm, Memory, Profile, Stragglers, comm, memory, stragglers
from shardlib.report.progress import Progress
from shardlib.report.rates import StepRates
from shardlib.report.stability import SecondMoments, Stability, second_moments, stability
from shardlib.report.watch import Watch

__all__ = [
    "Comm",
    "CsvWriter",
    "HtmlWriter",
    "JsonlWriter",
    "Log",
    "Memory",
    "Profile",
    "Progress",
    "StepRates",
    "SecondMoments",
    "Stability",
    "StepTime",
    "Stragglers",
    "TensorBoardWriter",
    "WandbWriter",
    "Watch",
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
