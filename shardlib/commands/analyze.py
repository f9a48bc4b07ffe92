"""Write a metric of each sample of a dataset to an index file, for `sl.data.curriculum`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.commands.arguments import WrongArguments, positive, wrong_arguments
from shardlib.data.analyze import analyze
from shardlib.data.files import IndexFile
from shardlib.data.tokens import packed, tokens
from shardlib.errors import ShardlibError

_SEQUENCE = 1024
_SHOWN = (0, 1, 10, 50, 90, 99, 100)  # percentiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="a token file, in windows of --sequence")
    parser.add_argument("--sequence", type=positive, help="tokens of a sample of the file (default: 1024)")
    parser.add_argument("--packed", action="store_true", help="samples are rows of packed documents, not windows")
    parser.add_argument("--dataset", help="module:function that returns a map-style dataset, in place of a token file")
    parser.add_argument(
        "--metric", default="rarity", help="length, rarity, or module:function, from a sample to a number"
    )
    parser.add_argument("--out", type=Path, required=True, help="the index file")
    parser.add_argument("--processes", type=positive, default=1, help="that read side by side")


def run(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.dataset is None):
        raise WrongArguments("a token file, or --dataset: give one of them")
    if args.dataset is not None and (args.sequence or args.packed):
        raise WrongArguments("--sequence and --packed cut a token file into samples, and --dataset has its own")
    metric = _named(args.metric) if ":" in args.metric else args.metric
    start = time.perf_counter()
    dataset = _dataset(args)
    try:
        index = analyze(dataset, metric, args.out, processes=args.processes, progress=_say)
    except ShardlibError as error:
        raise WrongArguments(str(error).removeprefix("analyze: ")) from None
    seconds = time.perf_counter() - start
    print(f"{args.out}: {args.metric} of {len(index):,} samples, {len(index) / seconds:,.0f} per second")
    print(_percentiles(index))
    return 0


def _dataset(args: argparse.Namespace) -> Any:
    if args.dataset is not None:
        return _named(args.dataset)()
    with wrong_arguments():
        return (packed if args.packed else tokens)(args.file, args.sequence or _SEQUENCE)


def _named(name: str) -> Any:
    """What ``module:function`` names; modules of the current folder are found too."""
    module, _, function = name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise WrongArguments(f"{name}: {error}; use module:function, of a module that can be imported") from None


def _percentiles(index: IndexFile) -> str:
    ranks = [(len(index) - 1) * percent // 100 for percent in _SHOWN]
    values = index.values[index.samples[np.array(ranks)]]
    return "percentiles: " + ", ".join(f"{percent} %: {value:.4g}" for percent, value in zip(_SHOWN, values))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
