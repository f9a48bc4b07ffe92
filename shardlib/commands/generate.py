"""Continue prompts with a trained model, on every rank that torchrun started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardlib import checkpoint, optim
from shardlib.commands import model
from shardlib.commands.arguments import WrongArguments
from shardlib.common.optional import require
from shardlib.errors import CheckpointError, IllegalComposition, TreeError
from shardlib.generating import generate
from shardlib.mesh.mesh import Mesh
from shardlib.models import gpt, huggingface
from shardlib.models.decoding import experts_on_host, quantized
from shardlib.plan.transform import Transform, chain
from shardlib.sharding import shard
from shardlib.train import make_train_step
from shardlib.transforms import experts, offload, tensor_slicing, zero


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        help="the folder of shardlib train, or a model of transformers: config.json, safetensors files, and a tokenizer if "
        "there is one",
    )
    parser.add_argument("--prompt", action="append", default=[], help="text; may be given several times")
    parser.add_argument("--tokens", action="append", default=[], type=_numbers, help="a prompt as numbers: 1,2,3")
    parser.add_argument("--max-new", type=int, default=100, help="the most new tokens of each prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely tokens")
    parser.add_argument("--top-k", type=int, help="draw among so many tokens, the most likely ones")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among as few tokens as have this probability")
    parser.add_argument("--stop", type=int, action="append", default=[], help="a token that ends a text")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--bits", type=int, choices=(8, 4), help="weights in so many bits")
    parser.add_argument(
        "--experts-on-device",
        type=int,
        metavar="N",
        help="experts in host memory, and room for N of each layer on the device; how many came is written to stderr",
    )
    parser.add_argument("--mesh", help="axes and sizes, such as data=2,model=2; by default every rank on axis data")
    model.add_sizes(parser, "model, of checkpoints that do not say their sizes (such as a script's)", given=True)


def run(args: argparse.Namespace) -> int:
    if not args.prompt and not args.tokens:
        raise WrongArguments("give a --prompt, or --tokens")
    mesh = model.running_mesh(args)
    try:
        kind, params, encode, decode = _opened(args, mesh)
        if args.bits:
            params = quantized(kind, params, args.bits)
        if args.experts_on_device is not None:
            params, kept = experts_on_host(kind, params, args.experts_on_device)
        prompts = [*map(encode, args.prompt), *args.tokens]
        options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
        texts = generate(kind, params, prompts, args.max_new, stop=args.stop, **options)
    except (CheckpointError, IllegalComposition, TreeError, FileNotFoundError, ValueError) as error:
        raise WrongArguments(str(error)) from None
    for prompt, new in zip(prompts, texts) if mesh.rank == 0 else ():
        print(decode([*prompt, *new.tolist()]))
    if mesh.rank == 0 and args.experts_on_device is not None:
        print(f"experts: {kept.tally}", file=sys.stderr)
    return 0


# The model, its parameters, and functions from text to tokens and from tokens to what is printed.
Opened = tuple[Any, Any, Callable[[str], list[int]], Callable[[list[int]], str]]


def _opened(args: argparse.Namespace, mesh: Mesh) -> Opened:
    """The model in a folder; sizes that are not the model's are refused."""
    files = ("config.json", checkpoint.pretrained.ADAPTER)
    if not args.folder.exists() or any((args.folder / name).exists() for name in files):
        if given := [f"--{name}" for name in model.SIZES if getattr(args, name) is not None]:
            raise WrongArguments(f"{args.folder}/config.json has the sizes: leave out {', '.join(given)}")
        return _of_transformers(args, mesh)
    held = checkpoint.read_notes(args.folder).get("model")
    if held and (other := model.other_sizes(args, held)):
        raise WrongArguments(
            f"{args.folder} holds a model of {model.as_options(other)}: leave out --{', --'.join(other)}"
        )
    model.take_sizes(args, held or model.SIZES)
    return _of_training(args, mesh)


def _of_training(args: argparse.Namespace, mesh: Mesh) -> Opened:
    """A byte-level GPT; its optimizer's states are left out."""
    config = model.config(args)
    rules = gpt.slicing_rules(config) if "model" in mesh.shape else None
    params = shard(lambda: gpt.init(config), mesh, _plan(args, mesh, rules))
    state, _ = make_train_step(gpt.make_loss(config), params, optim.sgd(0.0))
    state = checkpoint.restore(checkpoint.checkpoint_at(args.folder), state, partial=["opt/*"])
    # Beyond the bytes tokens have no text.
    written = (lambda tokens: _text(bytes(tokens))) if config.vocab <= 256 else _as_numbers
    return config, state.params, lambda text: list(text.encode()), written


def _of_transformers(args: argparse.Namespace, mesh: Mesh) -> Opened:
    transformers = require("transformers", "shardlib generate", "transformers", "hf")
    checkpoint.pretrained.require_model(args.folder)
    with torch.device("meta"):
        kind = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(args.folder))
    rules = huggingface.slicing_rules(kind) if "model" in mesh.shape else None
    _, params = checkpoint.from_pretrained(args.folder, mesh, _plan(args, mesh, rules))
    if not any((args.folder / name).exists() for name in checkpoint.pretrained.TOKENIZERS):
        return kind, params, _without_tokenizer, _as_numbers
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    return kind, params, tokenizer.encode, tokenizer.decode


def _plan(args: argparse.Namespace, mesh: Mesh, rules: Mapping[str, Any] | None) -> Transform:
    """Parameters whole on each rank, but for slices by ``rules`` and experts along an axis of theirs."""
    sliced = [] if rules is None else [tensor_slicing(rules)]
    dealt = [experts()] if "expert" in mesh.shape else []
    below = [] if args.experts_on_device is None else [offload(params="host")]
    return chain(zero(0), *sliced, *dealt, *below)


def _without_tokenizer(text: str) -> list[int]:
    raise ValueError(f"--prompt {text!r}: the folder has no tokenizer; give --tokens 1,2,3")


def _text(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def _as_numbers(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,3") from None
