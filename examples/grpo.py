"""Group relative policy optimisation (arXiv 2402.03300, section 4.1) of a causal language model of transformers:

    torchrun --nproc-per-node=2 examples/grpo.py MODEL prompts.jsonl --out tuned

MODEL is a folder, and each line of the file has a prompt. The policy writes the answers between its own steps, from the same
shards; `reward` says how good they are.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

import shardlib as sl

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("model")
parser.add_argument("prompts", type=Path)
parser.add_argument("--out", default="tuned")
parser.add_argument("--beta", type=float, default=0.04, help="how strongly the reference holds")
parser.add_argument("--clip", type=float, default=0.2, help="of the ratio of probabilities")
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--prompts-per-step", type=int, default=8, help="over all ranks")
parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
parser.add_argument("--updates", type=int, default=2, help="steps of the optimizer on the same answers")
parser.add_argument("--max-new", type=int, default=64)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()


def reward(prompt: str, answer: str) -> float:
    """The share of an answer that is digits; put yours here."""
    return sum(map(str.isdigit, answer)) / max(1, len(answer))


mesh = sl.make_mesh()
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
with torch.device("meta"):  # of which generate reads the configuration
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(args.model))
apply, params = sl.checkpoint.from_pretrained(args.model, mesh, stage=2)  # whole parameters, for generating
_, reference = sl.checkpoint.from_pretrained(args.model, mesh, stage=3)  # stays as it is


def log_probabilities(params, batch):
    """Of each token of the answers; 0 elsewhere."""
    logits = apply(params, input_ids=batch["tokens"], use_cache=False).logits.float()
    return -F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")


def loss_fn(params, batch):
    """The mean over answers of the mean over their tokens."""
    there = (batch["targets"] >= 0).float()
    now = log_probabilities(params, batch)
    ratio = (now - batch["before"]).exp()
    bound = ratio.clamp(1 - args.clip, 1 + args.clip)
    gain = torch.minimum(ratio * batch["advantage"][:, None], bound * batch["advantage"][:, None])
    with torch.no_grad():
        theirs = log_probabilities(reference, batch)
    apart = (theirs - now).exp() - (theirs - now) - 1  # of the reference, equation 4
    losses = ((args.beta * apart - gain) * there).sum(1) / there.sum(1).clamp(min=1)
    return sl.Mean(losses.sum(), len(losses))


def answered(state, step):
    """This rank's answers to a step's prompts, and the mean reward of all of them."""
    first = step * args.prompts_per_step
    asked = [prompts[(first + n) % len(prompts)] for n in range(args.prompts_per_step) for _ in range(args.group)]
    tokens = [tokenizer(prompt)["input_ids"] for prompt in asked]
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answers = sl.generate(model, state, tokens, args.max_new, stop=stop, seed=step)  # all, on every rank
    texts = [tokenizer.decode(answer.tolist(), skip_special_tokens=True) for answer in answers]
    rewards = torch.tensor([reward(prompt, text) for prompt, text in zip(asked, texts)]).view(-1, args.group)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    documents = [[*prompt, *answer.tolist()] for prompt, answer in zip(tokens, answers)]
    trained = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(tokens, answers)]
    rows = sl.data.packed(documents, max(map(len, documents)), trained=trained, together=False)
    own = torch.arange(len(rows)).tensor_split(mesh.size)[mesh.rank]
    batch = {name: rows.rows_at(own.numpy())[name] for name in ("tokens", "targets")}
    return batch | {"advantage": advantage.flatten()[own]}, float(rewards.mean())


prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), sl.optim.adamw(args.lr))
state, train_step = sl.make_train_step(loss_fn, params, tx)
scored = sl.make_eval_step(log_probabilities, state.params)
for step in range(args.steps):
    batch, mean = answered(state, step)
    batch["before"] = scored(state, batch)
    for _ in range(args.updates):
        state, metrics = train_step(state, batch)
    if mesh.rank == 0:
        print(f"step {step + 1}: reward {mean:.3f}, loss {float(metrics['loss']):.4f}", flush=True)
sl.checkpoint.save_pretrained(args.out, state, args.model)
