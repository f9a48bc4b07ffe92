"""Show a configuration of DeepSpeed, accelerate or torchtitan as a chain of transforms and Python."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlib.commands.arguments import positive, wrong_arguments
from shardlib.migration import migrate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="ds_config.json, YAML of accelerate config, or TOML of torchtitan")
    parser.add_argument("--ranks", type=positive, help="ranks that will train, where numbers of the batch depend on it")
    parser.add_argument("--out", type=Path, help="file of Python to write the code to")


def run(args: argparse.Namespace) -> int:
    with wrong_arguments():
        migrated = migrate(args.file, ranks=args.ranks, strict=False)
        if args.out:
            args.out.write_text(migrated.code)
    print(migrated)
    if migrated.refused:
        print(f"{len(migrated.refused)} keys are refused: change them, or write in their place what the table says")
    return 1 if migrated.refused else 0
