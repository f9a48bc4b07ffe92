"""List, show, verify and export checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from shardlib import checkpoint
from shardlib.checkpoint.manifest import Entry
from shardlib.checkpoint.reading import open_checkpoint
from shardlib.checkpoint.safetensors import convert
from shardlib.commands.arguments import WrongArguments, folder
from shardlib.errors import CheckpointError
from shardlib.plan.tables import count, size, table
from shardlib.tree import matches

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    for name, action, what in (
        ("list", _list, "the complete checkpoints in a folder"),
        ("show", _show, "what a checkpoint holds"),
        ("verify", _verify, "read all of a checkpoint; status 1 if a byte of it is not as it was written"),
        ("export", _export, "write a checkpoint's parameters as safetensors files, without building the model"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("path", type=Path, help="a folder of checkpoints, or a checkpoint in it (else its newest)")
        if name == "show":
            command.add_argument("--tensors", default="*", help="a glob over the tensors to list")
        if name == "export":
            command.add_argument("--to", type=folder, required=True, help="the folder to write into")
            command.add_argument("--prefix", default="", help="what names in the files begin with, such as model.")
            command.add_argument(
                "--dtype", choices=_DTYPES, help="of floating-point parameters (default: each one's own)"
            )
        command.set_defaults(action=action)


def run(args: argparse.Namespace) -> int:
    try:
        return args.action(args)
    except (CheckpointError, FileNotFoundError) as error:
        raise WrongArguments(str(error)) from None


def _list(args: argparse.Namespace) -> int:
    found = checkpoint.complete(args.path)
    if not found:
        raise FileNotFoundError(f"no complete checkpoint in {args.path}")
    rows = []
    for path in found:
        with open_checkpoint(path) as saved:
            held = saved.manifest
        mesh = ", ".join(f"{axis}={ranks}" for axis, ranks in held.mesh.items())
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        rows.append((path.name, size(sum(held.files.values())), str(len(held.tensors)), mesh, held.shardlib, written))
    print(table(("checkpoint", "bytes", "tensors", "saved by", "shardlib", "written"), rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    with open_checkpoint(checkpoint.checkpoint_at(args.path)) as saved:
        held = saved.manifest
    shown = {name: entry for name, entry in sorted(held.tensors.items()) if matches(name, args.tensors)}
    print(f"{saved.folder}: step {held.step}, seed {held.seed}, format {held.format}, shardlib {held.shardlib}")
    print(f"saved by {', '.join(f'{axis}={ranks}' for axis, ranks in held.mesh.items())}")
    if held.scale:
        print(f"loss scale {held.scale['value']:g}")
    print(*(f"notes: {name}" for name in held.notes), sep="\n")
    rows = [
        (name, entry.dtype, "×".join(map(str, entry.shape)) or "scalar", str(len(entry.chunks)), size(_bytes(entry)))
        for name, entry in shown.items()
    ]
    print(table(("tensor", "dtype", "shape", "chunks", "bytes"), rows, right=2))
    print(f"\n{len(shown)} tensors, {_summary(shown)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    with open_checkpoint(checkpoint.checkpoint_at(args.path)) as saved:
        damages = saved.damages()
    if damages:
        print(f"{saved.folder} is damaged:", *(f"  - {damage}" for damage in damages), sep="\n")
        return 1
    print(f"{saved.folder}: {size(sum(saved.manifest.files.values()))}, every byte as it was written")
    return 0


def _export(args: argparse.Namespace) -> int:
    found = checkpoint.checkpoint_at(args.path)
    left_out = convert(found, args.to, args.prefix, args.dtype and getattr(torch, args.dtype))
    print(f"{args.to}: the parameters of {found}")
    print(
        *(f"not written, since it is no parameter: {name}" for name in left_out), sep="\n", end="\n" if left_out else ""
    )
    return 0


def _bytes(entry: Entry) -> int:
    return sum(entry.box(chunk).numel for chunk in entry.chunks) * entry.torch_dtype.itemsize


def _summary(tensors: Mapping[str, Entry]) -> str:
    elements = sum(_bytes(entry) // entry.torch_dtype.itemsize for entry in tensors.values())
    return f"{count(elements)} elements, {size(sum(map(_bytes, tensors.values())))}"
