"""Direct preference optimisation (arXiv 2305.18290, equation 7) of a causal language model of transformers:

    torchrun --nproc-per-node=2 examples/dpo.py MODEL pairs.jsonl --out tuned

MODEL is a folder, and each line of the file has a prompt, what was chosen, and what was rejected.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

import shardlib as sl

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("model")
parser.add_argument("pairs", type=Path)
parser.add_argument("--out", default="tuned")
parser.add_argument("--beta", type=float, default=0.1, help="how strongly the reference holds")
parser.add_argument("--lr", type=float, default=5e-6)
parser.add_argument("--batch", type=int, default=8, help="pairs per step, over all ranks")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=512)
args = parser.parse_args()

mesh = sl.make_mesh()
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
apply, params = sl.checkpoint.from_pretrained(args.model, mesh, stage=3)
_, reference = sl.checkpoint.from_pretrained(args.model, mesh, stage=3)  # stays as it is


def rows_of(key):
    """Each pair's tokens and targets, the answer's alone."""
    found = sl.data.examples(
        [{"prompt": pair["prompt"], "completion": pair[key]} for pair in pairs], tokenizer, args.length
    )
    assert len(found) == len(pairs), f"{found}: give a larger --length"
    rows = sl.data.packed(found.tokens, args.length, trained=found.trained, together=False)
    return rows.rows_at(torch.arange(len(rows)).numpy())


def log_probabilities(params, batch):
    """Of the chosen answers and of the rejected ones, (pairs, 2)."""
    logits = apply(params, input_ids=batch["tokens"].flatten(0, 1), use_cache=False).logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), batch["targets"].flatten(0, 1), reduction="none")
    return -losses.sum(1).view(-1, 2)


def loss_fn(params, batch):
    """The loss, and the share of pairs in which the chosen answer has gained more than the rejected one."""
    with torch.no_grad():
        before = log_probabilities(reference, batch)
    chosen, rejected = (log_probabilities(params, batch) - before).unbind(1)
    losses = -F.logsigmoid(args.beta * (chosen - rejected))
    return sl.Mean(losses.sum(), len(losses)), {"accuracy": sl.Mean((chosen > rejected).float().sum(), len(losses))}


pairs = [json.loads(line) for line in args.pairs.read_text().splitlines()]
sides = [rows_of(key) for key in ("chosen", "rejected")]
used = max(int((side["segments"] >= 0).any(0).sum()) for side in sides)
dataset = {name: torch.stack([side[name][:, :used] for side in sides], 1) for name in ("tokens", "targets")}
held_out = {name: rows[:: max(2, len(pairs) // 64)] for name, rows in dataset.items()}
kept = torch.arange(len(pairs)) % max(2, len(pairs) // 64) != 0
state, train_step = sl.make_train_step(loss_fn, params, sl.optim.adamw(args.lr))
evaluate = sl.make_eval_step(lambda params, batch: loss_fn(params, batch)[1], state.params)
batches = sl.data.loader({name: rows[kept] for name, rows in dataset.items()}, state, args.batch)
for batch in itertools.islice(batches, args.steps):
    state, metrics = train_step(state, batch)
    if mesh.rank == 0 and state.step % 10 == 0:
        print(f"step {state.step}: loss {float(metrics['loss']):.4f}, accuracy {float(metrics['aux']['accuracy']):.2f}")
accuracy = evaluate.over(state, sl.data.loader(held_out, state, args.batch, epochs=1, shuffle=False))["accuracy"]
if mesh.rank == 0:
    print(f"held out: accuracy {float(accuracy):.2f}")
sl.checkpoint.save_pretrained(args.out, state, args.model)
