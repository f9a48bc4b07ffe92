"""`shardlib finetune`: equal to a plain loop over transformers' model, from files to files."""

import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.languages import save_model
from helpers.shown_pages import Page

import shardlib as sl
from shardlib.commands import __main__ as cli
from shardlib.commands.arguments import WrongArguments
from shardlib.commands.lines import records_of
from shardlib.models import huggingface

transformers.logging.set_verbosity_error()
SUMS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
    for a, b in itertools.product(range(6), range(7))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models, a tokenizer and examples."""
    made = tmp_path_factory.mktemp("finetune")
    save_model(made / "llama")
    save_model(made / "bert", masked=True)
    (made / "sums.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
    return made


def finetuned(folder, out, *options, model="llama"):
    given = [
        "--data",
        folder / "sums.jsonl",
        "--out",
        out,
        "--precision",
        "fp32",
        "--length",
        64,
        "--batch",
        4,
        *options,
    ]
    cli.main(["finetune", str(folder / model), *map(str, given)])
    return out


def losses_in(folder):
    with (folder / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def plain(model, batches, steps, rate):
    """The losses of a loop of plain PyTorch, which runs one example after the other."""
    trained = [leaf for leaf in model.parameters() if leaf.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0, weight_decay=0.0)
    losses = []
    for step, batch in zip(range(steps), batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        examples = range(int(batch["segments"].max()) + 1)
        masks = [batch["segments"][row] == example for row in range(len(batch["segments"])) for example in examples]
        rows = [row for row in range(len(batch["segments"])) for _ in examples]
        alone = [
            (batch["tokens"][row][mask], batch["targets"][row][mask]) for row, mask in zip(rows, masks) if mask.any()
        ]
        total = sum(
            F.cross_entropy(model(tokens[None]).logits[0], targets, reduction="sum") for tokens, targets in alone
        )
        loss = total / (batch["targets"] >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_records_are_counted_by_their_lines_and_damaged_ones_refused(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"text": "a"}\n  \n\n{"text": "b"}\n{"text": "\xff"}\n')
    records = records_of(file)
    assert [next(records), next(records)] == [(f"{file}, line {n}", {"text": t}) for n, t in ((1, "a"), (4, "b"))]
    with pytest.raises(WrongArguments, match="line 5 is no JSON"):
        next(records)


def test_a_run_is_watched_and_reported(folder, tmp_path, capsys):
    page = tmp_path / "run.html"
    finetuned(folder, tmp_path, "--steps", 3, "--watch", "--metrics", "csv", "jsonl", "--report", page, "--price", 2)
    out = capsys.readouterr().out
    assert re.search(r"step 3/3  loss .* tokens/s  0:00 left  lr \S+", out) and f"report: {page}" in out
    assert {"seconds of a step", "A step", "nats per target"} <= set(Page(page.read_text()).texts)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("packing", [True, False])
def test_a_whole_model_is_trained_as_by_a_plain_loop(folder, tmp_path, packing, capsys):
    options = ["--lr", 1e-2, "--validation", 0, "--warmup", 0.2, *(["--pack"] if packing else ["--steps", 12])]
    finetuned(folder, tmp_path, *options)
    assert re.search(r"to train on: 42 examples of \d+ tokens, \d+ of them targets", capsys.readouterr().out)
    losses = losses_in(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    found = sl.data.examples(SUMS, tokenizer, 64)
    rows = sl.data.packed(found.tokens, 64, trained=found.trained, together=packing)
    steps = math.ceil(len(rows) / 4) if packing else 12
    assert len(losses) == steps > 2
    rate = sl.optim.warmup_cosine_decay_schedule(0.0, 1e-2, math.ceil(0.2 * steps), steps, 1e-3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    expected = plain(theirs, sl.data.loader(rows, sl.make_mesh(), 4), steps, rate)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert losses[-1] < losses[0]
    # Adam divides by roots of small second moments, which makes more of how sums are rounded than losses show.
    for (name, mine), (_, its) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4, msg=name)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == tokenizer.chat_template


def test_adapters_on_two_ranks_of_which_none_holds_the_base(folder, tmp_path):
    """Their file is what peft loads, and gives the best loss that was printed."""
    given = ["--data", folder / "sums.jsonl", "--precision", "fp32", "--length", 64, "--batch", 4, "--lora", 4]
    given += ["--lr", 1e-2, "--validation", folder / "sums.jsonl", "--evaluate-every", 3, "--save-every", 3]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(out, *options):
        words = [*command, "-m", "shardlib.commands", "finetune", folder / "llama", *given, "--out", out, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            list(map(str, words)), env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = run(tmp_path / "whole", "--steps", 9)
    assert "Plan on data=2" in out
    losses = [float(loss) for loss in re.findall(r"validation loss (\d\.\d+)", out)]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "whole" / "adapter").eval()
    found = sl.data.examples(SUMS, transformers.AutoTokenizer.from_pretrained(folder / "llama"), 64)
    rows = sl.data.packed(found.tokens, 64, trained=found.trained, together=False)
    batch = next(iter(sl.data.loader(rows, sl.make_mesh(), len(rows), shuffle=False)))
    with torch.no_grad():
        logits = tuned(batch["tokens"], position_ids=batch["positions"]).logits
    assert F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).item() == pytest.approx(
        min(losses), abs=2e-4
    )


def test_masked_tokens_are_filled_in(folder, tmp_path, capsys):
    finetuned(folder, tmp_path, "--masked", "--steps", 6, "--lr", 1e-2, "--validation", 0.2, model="bert")
    assert re.search(r"step 6: validation loss \d\.\d+", capsys.readouterr().out)
    assert transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model")


def test_a_run_that_was_cut_goes_on(folder, tmp_path):
    """With the next examples, and the schedule's next rates."""
    options = ["--lr", 1e-2, "--validation", 0, "--steps", 6, "--save-every", 2]
    finetuned(folder, tmp_path / "whole", *options)
    real, stops = sl.checkpoint.Manager.step, iter([False] * 3 + [True])

    def step(self, state, **given):
        real(self, state, **given)
        self.wait()
        if next(stops, False):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sl.checkpoint.Manager, "step", step)
        finetuned(folder, tmp_path / "cut", *options)
    assert len(losses_in(tmp_path / "cut")) < 6
    finetuned(folder, tmp_path / "cut", *options)
    mine, its = (losses_in(tmp_path / name) for name in ("cut", "whole"))
    assert len(mine) == 6 and mine == its
    (folder / "others.jsonl").write_text("\n".join(map(json.dumps, SUMS[:9])))
    with pytest.raises(SystemExit, match="step-00000006 is of a run on other examples"):
        finetuned(folder, tmp_path / "cut", *options, "--data", folder / "others.jsonl")
    finetuned(folder, tmp_path / "cut", *options, "--fresh", "--steps", 2)
    assert sl.checkpoint.step_of(sl.checkpoint.latest(tmp_path / "cut")) == 2


def test_patience_ends_a_run_and_the_best_model_is_kept(folder, tmp_path, capsys):
    options = ["--lr", 1e-9, "--steps", 40, "--evaluate-every", 1, "--patience", 2, "--validation", 0.1]
    # The rate is too small for any gain beyond rounding.
    finetuned(folder, tmp_path, *options)
    out = capsys.readouterr().out
    assert re.search(r"step \d+: no gain in 2 evaluations, the best loss is \d\.\d{4}", out)
    assert (tmp_path / "model" / "model.safetensors").exists()


WRONG = {
    "a share that leaves nothing": (
        ["--validation", "0.99"],
        r"--validation 0.99 of 42 examples leaves none to train on",
    ),
    "a device that is too small": (["--device-memory", "1MiB"], "does not fit"),
    "masked examples in one row": (["--masked", "--pack"], "--pack: masked tokens see all others of their row"),
    "a frozen base without adapters": (["--base", "nf4"], "--base nf4 freezes the layers: give --lora"),
    "no records": (["--data", "{folder}/empty.jsonl"], "has no records"),
    "no JSON": (["--data", "{folder}/broken.jsonl"], "line 2 is no JSON"),
    "other fields": (["--data", "{folder}/other.jsonl", "--validation", "0"], "record 0: it has question, answer"),
    "a scale without adapters": (["--lora-alpha", "4"], "--lora-alpha scales adapters: give --lora"),
    "patience without evaluations": (["--patience", "2", "--validation", "0"], "--patience counts evaluations"),
    "an unknown option": (["--config", "{folder}/unknown.toml"], "unrecognized arguments: --rank=8"),
    "an option's value": (["--config", "{folder}/value.toml"], "argument --lora"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(folder, tmp_path, what, capsys):
    (folder / "empty.jsonl").write_text("\n")
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"text"\n')
    (folder / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "unknown.toml").write_text("rank = 8\n")
    (folder / "value.toml").write_text('lora = "many"\n')
    options, message = WRONG[what]
    with pytest.raises(SystemExit) as refusal:
        finetuned(
            folder,
            tmp_path,
            *(option.format(folder=folder) for option in options),
            model="bert" if "masked" in what else "llama",
        )
    assert re.search(message, f"{refusal.value} {capsys.readouterr().err}")


def test_options_of_a_file_give_way_to_those_of_the_command(folder, tmp_path, capsys):
    (folder / "run.toml").write_text("lora = 4\nsteps = 9\nvalidation = 0\nlr = 1e-2\npack = true\n")
    finetuned(folder, tmp_path, "--config", folder / "run.toml", "--steps", 1)
    assert "step 1/1" in capsys.readouterr().out
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_as_many_lines_as_promised(folder):
    """LoRA in Python."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    lora = peft.LoraConfig(r=4, target_modules="all-linear")

    def change(model):
        return peft.get_peft_model(model, lora)

    apply, params, _ = sl.checkpoint.from_pretrained(
        folder / "llama", sl.make_mesh(), stage=3, frozen=True, change=change
    )
    found = sl.data.examples(SUMS, tokenizer, 64)
    rows = sl.data.packed(found.tokens, 64, trained=found.trained)
    state, step = sl.make_train_step(huggingface.causal_loss(apply), params, sl.optim.adamw(1e-2))
    losses = []
    for batch in itertools.islice(sl.data.loader(rows, state, 2, epochs=20), 12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    sl.checkpoint.save_pretrained(folder / "adapter", state, folder / "llama", change=change)
    assert losses[-1] < losses[0]
    assert peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "llama"), folder / "adapter"
    )
