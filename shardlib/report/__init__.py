"""What a run reports: its progress, metrics, plots, and the byte models it has to get below."""

from shardlib.report.log import Log, Writer
from shardlib.report.writers import CsvWriter, JsonlWriter, TensorBoardWriter, WandbWriter

__all__ = ["CsvWriter", "JsonlWriter", "Log", "TensorBoardWriter", "WandbWriter", "Writer"]
