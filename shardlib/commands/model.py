"""Arguments for a GPT and its sharding, which the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardlib import schedules
from shardlib.commands.arguments import WrongArguments, natural, positive, share, wrong_arguments
from shardlib.common._compat import cpu_multiplies_bf16
from shardlib.errors import MeshError
from shardlib.mesh.mesh import Mesh, make_mesh
from shardlib.models import gpt
from shardlib.models.gpt import GPTConfig
from shardlib.nn.moe.layer import MoEConfig
from shardlib.nn.moe.routers import top_k
from shardlib.plan.transform import Chain, Transform, chain
from shardlib.transforms import accumulate, offload, pipeline, precision, remat, tensor_slicing, zero

AXES = ("data", "pipe", "model")
_SCHEDULE = "1f1b"
SIZES = {"layers": 2, "width": 256, "heads": 4, "sequence": 128, "vocab": 256, "experts": 0}


def add_sizes(parser: argparse.ArgumentParser, title: str = "model", *, given: bool = False) -> Any:
    """Adds the sizes of a GPT, for `config`, which has no dropout without an argument for it; returns their group. With
    ``given``, sizes that a user leaves out are None, for `take_sizes`, and not those of `SIZES`."""
    model = parser.add_argument_group(title)
    for name, kind, what in (
        ("layers", positive, "blocks of attention and MLP"),
        ("width", positive, "elements of a token's vector"),
        ("heads", positive, "of attention; they divide the width"),
        ("sequence", positive, "tokens of context"),
        ("vocab", positive, "different tokens; 256 is one token per byte"),
        ("experts", natural, "in every other layer, of which a token uses two; 0 for none"),
    ):
        model.add_argument(f"--{name}", type=kind, default=None if given else SIZES[name], help=what)
    parser.set_defaults(dropout=0.0)
    return model


def other_sizes(args: argparse.Namespace, held: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a model that are not the given ones."""
    return {name: held[name] for name in SIZES if getattr(args, name) not in (None, held[name])}


def take_sizes(args: argparse.Namespace, held: Mapping[str, int]) -> None:
    """Takes the sizes that were not given from ``held``."""
    for name in SIZES:
        if getattr(args, name) is None:
            setattr(args, name, held[name])


def as_options(sizes: Mapping[str, int]) -> str:
    """Sizes as a user types them."""
    return " ".join(f"--{name} {number}" for name, number in sizes.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser).add_argument("--dropout", type=share, default=0.0, help="share of activations that are left out")
    add_sharding(parser).add_argument(
        "--schedule",
        default=_SCHEDULE,
        type=_schedule,
        metavar="NAME",
        help=f"schedule of an axis pipe: {', '.join(schedules.NAMES)}, torch's name of a schedule, or a CSV file",
    )


def add_sharding(parser: argparse.ArgumentParser) -> Any:
    """Adds the arguments of `sharding`; returns their group."""
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    sharding.add_argument("--microbatches", type=positive, default=1, help="micro-batches per rank and step")
    sharding.add_argument(
        "--remat",
        nargs="?",
        const="device",
        choices=("device", "host", "auto"),
        help="recompute activations block by block, from inputs on the device or the host; auto: as few blocks as fit",
    )
    sharding.add_argument("--offload", choices=("host", "disk"), help="the memory of masters and optimizer states")
    sharding.add_argument(
        "--offload-params", action="store_true", help="parameters and gradients in the host's memory too"
    )
    sharding.add_argument("--offload-folder", default="states", help="of files on disk")
    sharding.add_argument(
        "--precision", default="auto", choices=("auto", "bf16", "fp16", "fp32"), help="auto: bf16 where it is native"
    )
    return sharding


def _schedule(text: str) -> str:
    name = schedules.named_schedule(text) or (text if Path(text).is_file() else None)
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither one of {', '.join(schedules.NAMES)} nor a file")
    return name


def config(args: argparse.Namespace) -> GPTConfig:
    """The configuration of a GPT."""
    if args.experts == 1:
        raise WrongArguments("--experts 1: a token uses two experts: give 2 or more, or 0 for layers without")
    with wrong_arguments():
        return GPTConfig(
            vocab=args.vocab,
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            sequence=args.sequence,
            dropout=args.dropout,
            moe=gpt.Experts((0, args.experts), MoEConfig(top_k(2, renormalise="chosen"), "gelu_tanh"))
            if args.experts
            else None,
        )


def transform(args: argparse.Namespace, axes: Mapping[str, int]) -> Chain:
    """The transform that the arguments describe, for a mesh of ``axes``.

    Ranks along "data" share the batch, those along "pipe" hold stages, those along "model" hold slices of layers.
    """
    return sharding(args, axes, lambda: gpt.slicing_rules(config(args), blocks="pipe" in axes))


def sharding(args: argparse.Namespace, axes: Mapping[str, int], rules: Callable[[], Mapping[str, Any]]) -> Chain:
    """`transform` for any model, of which ``rules()`` are the rules of slicing."""
    chosen = best_precision() if args.precision == "auto" else args.precision
    return chain(
        zero(args.stage),
        *([tensor_slicing(rules())] if "model" in axes else []),
        *_microbatches(args, axes),
        *([precision(chosen)] if chosen != "fp32" else []),
        *([_remat(args.remat)] if args.remat else []),
        *([_offload(args)] if args.offload or args.offload_params else []),
    )


def _remat(where: str) -> Transform:
    return remat("auto") if where == "auto" else remat(store=where)


def _offload(args: argparse.Namespace) -> Transform:
    """States in the host's memory or on disk, and parameters too if asked for."""
    memory, params = args.offload or "host", "host" if args.offload_params else None
    return offload(memory, params, params, folder=args.offload_folder if memory == "disk" else ())


def _microbatches(args: argparse.Namespace, axes: Mapping[str, int]) -> list[Transform]:
    if "pipe" not in axes and getattr(args, "schedule", _SCHEDULE) != _SCHEDULE:
        raise WrongArguments(
            f"--schedule {args.schedule} is of stages: give the mesh an axis pipe, such as --mesh pipe=2"
        )
    if "pipe" in axes:
        return [pipeline(args.schedule, microbatches=args.microbatches)]
    return [accumulate(args.microbatches)] if args.microbatches > 1 else []


def loss(config: GPTConfig, axes: Mapping[str, int]) -> Callable[..., Any]:
    """The loss function; with an axis "pipe" it consists of blocks."""
    return (gpt.make_sequential if "pipe" in axes else gpt.make_loss)(config)


def init(args: argparse.Namespace, axes: Mapping[str, int], **options: Any) -> Any:
    """The parameters for `loss`."""
    params = gpt.init(config(args), **options)
    return gpt.to_blocks(params) if "pipe" in axes else params


def running_mesh(args: argparse.Namespace) -> Mesh:
    """The mesh of the ranks that run."""
    shape: dict[str, Any] = parse_mesh(args.mesh) if args.mesh else {}
    with wrong_arguments(MeshError):
        return make_mesh(**shape)


def parse_mesh(text: str) -> dict[str, int]:
    """``"data=4,model=2"`` -> ``{"data": 4, "model": 2}``; an axis "data" of size 1 is added if there is none."""
    try:
        named = [(name.strip(), int(size)) for name, size in (axis.split("=") for axis in text.split(","))]
    except ValueError:
        raise WrongArguments(f"--mesh {text!r}: write axes and sizes, such as data=4 or data=4,model=2") from None
    shape = dict(named)
    if len(shape) < len(named):
        twice = sorted({axis for axis, _ in named if sum(axis == other for other, _ in named) > 1})
        raise WrongArguments(f"--mesh {text!r}: axis {', '.join(twice)} stands there twice: give each axis one size")
    unknown = sorted(set(shape) - set(AXES))
    if unknown:
        raise WrongArguments(f"--mesh {text!r}: axis {', '.join(unknown)} is not one of {', '.join(AXES)}")
    return shape if "data" in shape else {"data": 1, **shape}


def best_precision() -> str:
    """ "bf16" if the GPU, or without a GPU the CPU, multiplies it natively; otherwise "fp32"."""
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = cpu_multiplies_bf16()
    return "bf16" if native else "fp32"
