"""The arguments that describe a GPT and how it is sharded, shared by the commands."""

from __future__ import annotations

import argparse

import torch

from shardlib._compat import cpu_multiplies_bf16
from shardlib.claims import Chain, chain
from shardlib.models.gpt import GPTConfig
from shardlib.transforms import accumulate, precision, remat, zero


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--width", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--sequence", type=int, default=128, help="tokens of context")
    model.add_argument("--vocab", type=int, default=256, help="256 is one token per byte")
    model.add_argument("--dropout", type=float, default=0.0)
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    sharding.add_argument("--microbatches", type=int, default=1, help="micro-batches per rank and step")
    sharding.add_argument("--remat", action="store_true", help="recompute activations block by block")
    sharding.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp16", "fp32"))


def config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(
        vocab=args.vocab,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        sequence=args.sequence,
        dropout=args.dropout,
    )


def transform(args: argparse.Namespace) -> Chain:
    chosen = best_precision() if args.precision == "auto" else args.precision
    return chain(
        zero(args.stage),
        *([accumulate(args.microbatches)] if args.microbatches > 1 else []),
        *([precision(chosen)] if chosen != "fp32" else []),
        *([remat()] if args.remat else []),
    )


def best_precision() -> str:
    """bf16 where the GPU, or without one the CPU, multiplies it natively; else fp32."""
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = cpu_multiplies_bf16()
    return "bf16" if native else "fp32"
