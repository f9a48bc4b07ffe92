"""Run a script on several ranks of this host, and start it again when one fails."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardlib.commands.arguments import WrongArguments
from shardlib.mesh.launch.supervise import Counts, supervise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_counts, help="4, a range such as 2:4, or a list such as 1,2,4")
    parser.add_argument(
        "--restarts", type=_restarts, default=10, help="restarts without a new step after which the run ends"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's: all that stands behind it")


def run(args: argparse.Namespace) -> int:
    behind = [word for word in args.arguments if word.partition("=")[0] in ("--ranks", "--restarts")]
    if args.ranks is None:
        where = f", and before {args.script}, whose argument it is behind it" if behind else ""
        raise WrongArguments(f"on how many ranks? Give --ranks{where}: shardlib run --ranks 2 {args.script}")
    if behind:
        _say(f"{' '.join(behind)} goes to {args.script}, since it stands behind it")
    if not args.module and not Path(args.script).exists():
        raise WrongArguments(f"there is no {args.script}; a module's name follows -m")
    command = [sys.executable, *(["-m"] if args.module else []), args.script, *args.arguments]
    try:
        return supervise(command, args.ranks, args.restarts, _say)
    except KeyboardInterrupt:
        return 130


def _say(line: str) -> None:
    print(f"shardlib run: {line}", file=sys.stderr, flush=True)


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} restarts; give 0 or more")
    return int(text)


def _counts(text: str) -> Counts:
    try:
        return Counts.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
