"""The command line, ``shardlib``: a command is a file of this folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from shardlib.commands import (
    analyze,
    checkpoint,
    doctor,
    finetune,
    generate,
    lr_range_test,
    plan,
    profile,
    run,
    tokenize,
    train,
)
from shardlib.commands.arguments import Parser, WrongArguments
from shardlib.common.optional import MissingPackage
from shardlib.common.version import VERSION
from shardlib.mesh.launch.orphans import end_with
from shardlib.mesh.launch.supervised import INTERRUPT, exit_code


def make_parser() -> Parser:
    """The parser of all commands; the parsed arguments have the chosen command's function as ``run``."""
    parser = Parser(prog="shardlib", description="Functional sharding on PyTorch.")
    parser.add_argument("--version", action="version", version=f"shardlib {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (train, finetune, generate, run, lr_range_test, plan, profile, tokenize, analyze, checkpoint, doctor):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words, argparse.Namespace(words=words))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())  # otherwise ranks keep running when their torchrun is killed
    try:
        status = args.run(args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return status
    except MissingPackage as missing:
        # The package is missing on every rank; rank 0 prints the message.
        raise SystemExit(1 if os.environ.get("RANK", "0") != "0" else f"shardlib {args.command}: {missing}") from None
    except WrongArguments as wrong:
        raise SystemExit(f"shardlib {args.command}: {wrong}") from None
    except KeyboardInterrupt:  # where nothing is to be saved
        if os.environ.get("RANK", "0") == "0":
            print(f"\nshardlib {args.command}: stopped by Ctrl-C", file=sys.stderr)
        return exit_code(INTERRUPT)


if __name__ == "__main__":
    raise SystemExit(main())
