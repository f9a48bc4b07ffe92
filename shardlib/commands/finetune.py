"""Fine-tune a language model of transformers on examples, whole or by adapters, on every rank that torchrun started."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardlib import checkpoint, data, optim
from shardlib.checkpoint import pretrained
from shardlib.commands import model, outputs
from shardlib.commands.arguments import (
    PLANNED,
    WrongArguments,
    above_zero,
    folder,
    natural,
    positive,
    share,
    size,
    wrong_arguments,
)
from shardlib.commands.lines import records_of
from shardlib.common.optional import require
from shardlib.errors import CheckpointError, TreeError
from shardlib.evaluate import make_eval_step
from shardlib.mesh.mesh import Mesh
from shardlib.models import huggingface
from shardlib.models.from_module import from_module
from shardlib.models.quantized_linears import FORMS, with_quantized_linears
from shardlib.optim.train_state import TrainState
from shardlib.plan.plan import Plan
from shardlib.plan.transform import Transform, chain
from shardlib.planning import make_plan
from shardlib.report.log import Log
from shardlib.rng import Key
from shardlib.train import make_train_step
from shardlib.transforms import freeze

# Peak learning rates where none is given: of adapters, of whole models.
_RATES = {True: 2e-4, False: 2e-5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="the folder of a model of transformers, with its tokenizer")
    parser.add_argument(
        "--data", type=Path, help=".jsonl file: text, or prompt and completion, or messages in each line"
    )
    parser.add_argument(
        "--config", type=Path, help="TOML file of these options, such as lora = 8; those given here win"
    )
    parser.add_argument("--out", type=folder, default=Path("runs/finetune"), help="folder for what the command writes")
    parser.add_argument("--mesh", help="axes and sizes, such as data=2,model=2; by default every rank on axis data")
    parser.add_argument(
        "--lora", type=positive, metavar="RANK", help="train adapters of all linear layers, of this rank"
    )
    parser.add_argument("--lora-alpha", type=above_zero, help="their scale times the rank; by default twice the rank")
    parser.add_argument("--base", choices=FORMS, help="the base's linear layers in 4 or 8 bits, beside --lora")
    parser.add_argument("--masked", action="store_true", help="the model fills in masked tokens, as BERT does")
    parser.add_argument("--length", type=positive, default=512, help="most tokens of an example")
    parser.add_argument(
        "--pack", action="store_true", help="put several examples into a row, which do not see each other"
    )
    parser.add_argument("--batch", type=positive, default=8, help="rows per step, over all ranks")
    parser.add_argument("--epochs", type=positive, default=1, help="how often each example is seen")
    parser.add_argument("--steps", type=positive, help="steps of the whole run, in place of epochs")
    parser.add_argument("--lr", type=above_zero, help="peak learning rate; by default 2e-4 of adapters, 2e-5 of models")
    parser.add_argument("--warmup", type=share, default=0.03, help="share of the steps in which it rises")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="AdamW's")
    parser.add_argument("--clip", type=above_zero, default=1.0, help="largest gradient norm")
    parser.add_argument(
        "--seed", type=int, default=0, help="of adapters' initial values, the examples' order and dropout"
    )
    parser.add_argument(
        "--validation", default="0.05", help="a .jsonl file, or the share of the examples that is set aside"
    )
    parser.add_argument("--evaluate-every", type=positive, default=100, help="steps between evaluations")
    parser.add_argument(
        "--patience", type=natural, default=0, help="end after so many evaluations without gain; 0: never"
    )
    parser.add_argument("--save-every", type=positive, default=100, help="steps between checkpoints")
    parser.add_argument("--fresh", action="store_true", help="do not resume from a checkpoint")
    parser.add_argument(
        "--device-memory", type=size, metavar="SIZE", help="of each rank; a plan that needs more is refused"
    )
    outputs.add_arguments(parser)
    model.add_sharding(parser)
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.config is not None:
        args = _configured(args)
    if args.data is None:
        raise WrongArguments("give --data, a .jsonl file")
    if args.base and not args.lora:
        raise WrongArguments(
            f"--base {args.base} freezes the layers: give --lora, the rank of the adapters beside them"
        )
    if args.lora_alpha and not args.lora:
        raise WrongArguments("--lora-alpha scales adapters: give --lora, their rank")
    outputs.require_outputs(args)
    mesh = model.running_mesh(args)
    if "pipe" in mesh.shape:
        raise WrongArguments("--mesh: a model of transformers is not cut into stages: give axes data and model alone")
    say: Callable[[str], None] = print if mesh.rank == 0 else lambda text: None
    with wrong_arguments(*PLANNED, FileNotFoundError, CheckpointError, OSError):
        job = _FineTuning(args, mesh)
        say(str(job.plan))
        for name, found in (("train on", job.examples), ("validate on", job.validation)):
            say(f"to {name}: {found or 'nothing'}")
        if args.patience and job.validation is None:
            raise WrongArguments("--patience counts evaluations, and nothing is set aside for them: give --validation")
        job.load()
    shown = outputs.Outputs(
        args, mesh, job.plan, job.rate(), args.batch * args.length,
        title=f"{args.model.name}, {job.steps:,} steps on {mesh!r}", unit="nats per target",
    )  # fmt: skip
    state, best = _train(args, mesh, job, shown, say)
    if best is None:
        job.save(state)
    shown.close(job.step, state, lambda: next(iter(job.batches(state))), say)
    say(f"{'adapter' if args.lora else 'model'}: {job.written}")
    return 0


def _configured(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the options of the TOML file, which those of the command line follow and replace."""
    with wrong_arguments(OSError, tomllib.TOMLDecodeError):
        options = tomllib.loads(args.config.read_text(encoding="utf-8"))
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, (dict, list)) or option == "--config":
            raise WrongArguments(f"{args.config}: {name} is no option with one value: see shardlib finetune --help")
        if value is not False:
            words.append(option if value is True else f"{option}={value}")
    return args.parser.parse_args([*words, *args.words[1:]])


class _FineTuning:
    """What is trained, on what, by which plan.

    Attributes:
        examples, validation: what is trained and validated on; None for no validation.
        identity: what tells the rows that are trained on from others.
        plan: of a training step.
        steps: of the whole run.
        written: the folder of the result.
        params: once they are loaded.
    """

    def __init__(self, args: argparse.Namespace, mesh: Mesh) -> None:
        transformers = require("transformers", "shardlib finetune", "transformers", "hf")
        self._args, self._mesh = args, mesh
        self.written = args.out / ("adapter" if args.lora else "model")
        pretrained.require_model(args.model)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        self._kind = transformers.AutoModelForMaskedLM if args.masked else transformers.AutoModelForCausalLM
        self.examples, self.validation = self._examples()
        module, _ = pretrained.changed(pretrained.meta_model(args.model, self._kind), self._changed, args.seed)
        if args.pack:
            _require_packing(module, args.masked)
        rows = self._dataset(self.examples)
        self._rows, self.identity = rows, rows.identity
        self.steps = args.steps or math.ceil(len(rows) * args.epochs / args.batch)
        self.optimizer = optim.chain(
            optim.clip_by_global_norm(args.clip), optim.adamw(self.rate(), weight_decay=args.weight_decay)
        )
        apply, init, frozen = from_module(module, frozen=True)
        rules = lambda: huggingface.slicing_rules(module)  # noqa: E731
        self._transform = model.sharding(args, mesh.shape, rules)
        shown: Transform = chain(self._transform, freeze(frozen)) if frozen else self._transform
        batch = next(iter(data.loader(rows, mesh, args.batch, seed=args.seed)))
        limit = {} if args.device_memory is None else {"device_memory": args.device_memory}
        self.plan: Plan = make_plan(
            init, mesh, shown, loss_fn=self._loss(apply), batch=batch, optimizer=self.optimizer, **limit
        )

    def load(self) -> None:
        """Read the model's files into shards, and make the steps."""
        torch.manual_seed(self._args.seed)
        apply, self.params, _ = checkpoint.from_pretrained(
            self._args.model, self._mesh, self._transform, kind=self._kind, frozen=True, change=self._changed
        )
        loss = self._loss(apply)
        self.state, self.step = make_train_step(loss, self.params, self.optimizer, rng=self._args.seed)
        scored = (lambda params, batch: loss(params, batch, rng=Key(0))) if self._args.masked else loss
        self._evaluate = make_eval_step(lambda params, batch: {"loss": scored(params, batch)}, self.params)

    def batches(self, state: TrainState) -> data.Loader:
        """The batches to train on."""
        return data.loader(self._rows, state, self._args.batch, seed=self._args.seed, map=self._trimmed)

    def validate(self, state: TrainState) -> float:
        """The mean loss over the examples that are set aside, nats per target."""
        rows = self._dataset(self.validation)
        batches = data.loader(rows, state, self._args.batch, epochs=1, shuffle=False, map=self._trimmed)
        return float(self._evaluate.over(state, batches)["loss"])

    def save(self, state: TrainState) -> None:
        """Write the model or its adapters."""
        checkpoint.save_pretrained(self.written, state, self._args.model, kind=self._kind, change=self._changed)

    def rate(self) -> optim.Schedule:
        """The learning rate of each step."""
        peak = self._args.lr or _RATES[self._args.lora is not None]
        warmup = min(math.ceil(self._args.warmup * self.steps), self.steps - 1)
        return optim.warmup_cosine_decay_schedule(0.0, peak, warmup, self.steps, 0.1 * peak)

    def _changed(self, module: Any) -> Any:
        """The model as it is trained: without logits of all tokens at once where that can be, and with adapters."""
        if not self._args.masked:
            with contextlib.suppress(TreeError):  # then it has logits
                module = huggingface.with_tiled_loss(module)
        if self._args.lora is None:
            return module
        peft = require("peft", "--lora", "peft", "hf")
        if self._args.base:
            module = with_quantized_linears(module, self._args.base, whole=_heads(module))
        alpha = self._args.lora_alpha or 2 * self._args.lora
        task = None if self._args.masked else "CAUSAL_LM"
        config = peft.LoraConfig(r=self._args.lora, lora_alpha=alpha, target_modules="all-linear", task_type=task)
        return peft.get_peft_model(module, config)

    def _loss(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        if not self._args.masked:
            return huggingface.causal_loss(apply)
        tokenizer = self._tokenizer
        if tokenizer.mask_token_id is None:
            raise WrongArguments(f"--masked: the tokenizer of {self._args.model} has no token for masked ones")
        return huggingface.masked_loss(apply, tokenizer.mask_token_id, len(tokenizer), tokenizer.all_special_ids)

    def _examples(self) -> tuple[data.Examples, data.Examples | None]:
        """What is trained on, and what is set aside for validation."""
        read = partial(data.examples, tokenizer=self._tokenizer, length=self._args.length)
        records, given = _records(self._args.data), self._args.validation
        if given.endswith(".jsonl") or Path(given).is_file():
            return read(records), read(_records(Path(given)))
        try:
            part = share(given)
        except argparse.ArgumentTypeError as error:
            raise WrongArguments(f"--validation: {error}, and no .jsonl file") from None
        count = math.ceil(part * len(records))
        if count >= len(records):
            raise WrongArguments(f"--validation {given} of {len(records)} examples leaves none to train on: use less")
        # Spread over the file, which may be sorted.
        aside = {round((index + 0.5) * len(records) / count) for index in range(count)}
        left = [record for number, record in enumerate(records) if number not in aside]
        return read(left), read([records[number] for number in sorted(aside)]) if aside else None

    def _dataset(self, found: data.Examples | None) -> Any:
        assert found is not None
        pad = self._tokenizer.pad_token_id or 0
        length = max(map(len, found.tokens)) if not self._args.pack else self._args.length
        return data.packed(found.tokens, length, pad=pad, trained=found.trained, together=self._args.pack)

    def _trimmed(self, batch: Mapping[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """A batch without columns that are padding in all rows, but for a multiple of 8."""
        used = int((batch["segments"] >= 0).any(0).sum())
        return {name: values[:, : -(-used // 8) * 8] for name, values in batch.items()}


def _heads(module: Any) -> tuple[str, ...]:
    """The names of the layer that scores words, and of what is in it."""
    head = module.get_output_embeddings()
    names = [name for name, layer in module.named_modules() if layer is head]
    return tuple(glob for name in names for glob in (name, f"{name}.*"))


def _records(path: Path) -> Sequence[Mapping[str, Any]]:
    records = [record for _, record in records_of(path)]
    if not records:
        raise WrongArguments(f"{path} has no records: give one a line")
    return records


def _require_packing(module: Any, masked: bool) -> None:
    """Refuse to pack for a model that would mix the examples of a row."""
    if masked or not huggingface.keeps_apart(module):
        kind = "masked tokens see" if masked else f"{module.config.model_type} is not known not to let tokens see"
        raise WrongArguments(f"--pack: {kind} all others of their row, so that examples would be mixed: leave it out")


@dataclass
class _Best:
    """The best evaluation so far, and how many came after it."""

    loss: float = math.inf
    since: int = 0


def _train(
    args: argparse.Namespace, mesh: Mesh, job: _FineTuning, shown: outputs.Outputs, say: Callable[[str], None]
) -> tuple[TrainState, float | None]:
    """Train to the last step or until patience ends; the best state by validation is written as it is found. Returns the last
    state, and the best loss, None without validation."""
    state, best, batches = job.state, _Best(), job.batches(job.state)
    manager = checkpoint.Manager(args.out, keep=1, every=args.save_every, interrupt=True)
    latest = manager.latest()
    if latest is not None and args.fresh:  # of an earlier run, which would be the newest for a later one
        for earlier in checkpoint.complete(args.out) if mesh.rank == 0 else ():
            checkpoint.remove(earlier)
    elif latest is not None:
        with wrong_arguments(CheckpointError, TreeError):
            held = checkpoint.read_notes(latest)
            if held.get("data") != job.identity:
                raise WrongArguments(
                    f"{latest} is of a run on other examples, or of another --length or --pack: give another --out, or "
                    "--fresh to start anew in its place"
                )
            state = manager.restore(state)
        batches.load_state_dict(held)
        best = _Best(held["best"] if held["best"] is not None else math.inf, held["since"])
        say(f"resuming from {latest}")
    first = state.step
    progress = shown.progress(job.steps, first)

    def notes() -> dict[str, Any]:
        return {
            **batches.state_dict(),
            "data": job.identity,
            "best": None if best.loss == math.inf else best.loss,
            "since": best.since,
        }

    with Log(progress, *shown.writers(first)) as log, manager:
        for batch in itertools.islice(batches, max(job.steps - first, 0)):
            state, metrics = job.step(state, batch)
            log.write(state.step, metrics)
            log.write(state.step, shown.rates(state))
            if job.validation is not None and (state.step % args.evaluate_every == 0 or state.step == job.steps):
                loss = job.validate(state)
                log.write(state.step, {"validation": {"loss": loss}})
                progress.note(f"step {state.step}: validation loss {loss:.4f}")
                if loss < best.loss:
                    best.loss, best.since = loss, 0
                    job.save(state)
                else:
                    best.since += 1
            manager.step(state, notes=notes())
            if args.patience and best.since >= args.patience:
                progress.note(
                    f"step {state.step}: no gain in {best.since} evaluations, the best loss is {best.loss:.4f}"
                )
                break
    return state, None if job.validation is None else best.loss
