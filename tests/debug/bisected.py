"""Models and plans in which planted defects are looked for; `python -m debug.bisected CASE` prints what is found."""

import json
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.models import gpt

SIZES = dict(vocab=29, layers=2, width=12, heads=2, sequence=8)
CLIPPED = sl.optim.chain(sl.optim.clip_by_global_norm(0.05), sl.optim.adamw(1e-2))
ADAMW = sl.optim.adamw(1e-2)


def transformer(rows=16, blocks=False, dtype=torch.float32, **changes):
    """Loss, parameters and a global batch of a GPT, none of whose leaves is 0 or 1."""
    config = gpt.GPTConfig(**{**SIZES, "dtype": dtype, **changes})
    generator = torch.Generator().manual_seed(0)
    made = {}

    def shaken(leaf):
        if id(leaf) not in made:
            made[id(leaf)] = leaf, leaf + 0.1 * torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        return made[id(leaf)][1]

    params = torch.utils._pytree.tree_map(shaken, gpt.init(config))
    drawn = torch.randint(config.vocab, (rows, config.sequence + 1), generator=generator)
    batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}
    loss_fn = gpt.make_sequential(config) if blocks else gpt.make_loss(config)
    return loss_fn, gpt.to_blocks(params) if blocks else params, batch


def matrices(rows=16, sizes=(7, 9, 5)):
    """Loss, parameters and a batch of a perceptron, whose sizes no number of ranks divides."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    params = {"layers": [{"weight": draw(b, a) / 3, "bias": draw(b)} for a, b in zip(sizes, sizes[1:])]}
    return perceptron, params, (draw(rows, sizes[0]), draw(rows, sizes[-1]))


def perceptron(params, batch):
    x, y = batch
    *first, last = params["layers"]
    for layer in first:
        x = sl.block(hidden)(layer, x)
    return (F.linear(x, last["weight"], last["bias"]) - y).square().mean()


def hidden(layer, x):
    return torch.tanh(F.linear(x, layer["weight"], layer["bias"]))


def rules(blocks=False):
    return gpt.slicing_rules(gpt.GPTConfig(**SIZES), blocks=blocks)


def sliced(*others, **changes):
    mesh = dict(data=2, model=2)
    return transformer(**changes), (mesh, sl.chain(sl.tensor_slicing(rules()), *others)), CLIPPED, 2


def piped(*others, mesh=None, schedule="1f1b", **changes):
    chain = sl.chain(sl.pipeline(schedule, microbatches=4), *others)
    return transformer(blocks=True, **changes), (mesh or dict(pipe=2, data=2), chain), ADAMW, 2


CASES = {
    "plain": lambda: (transformer(), (dict(data=4), sl.zero(1)), CLIPPED, 2),
    "accumulated": lambda: (transformer(), (dict(data=2), sl.chain(sl.zero(1), sl.accumulate(4))), ADAMW, 2),
    "split": lambda: (transformer(), (dict(data=2), sl.chain(sl.zero(2), sl.accumulate(4))), ADAMW, 2),
    "gathered": lambda: (transformer(), (dict(data=4), sl.zero(3)), CLIPPED, 2),
    "hybrid": lambda: (transformer(), (dict(local=2, node=2), sl.zero(3, axis="local", replicate="node")), CLIPPED, 2),
    "dropout": lambda: (
        transformer(dropout=0.2),
        (dict(data=2), sl.chain(sl.zero(3), sl.accumulate(2), sl.remat())),
        ADAMW,
        2,
    ),
    "sliced": lambda: sliced(sl.zero(1)),
    "piped": piped,
}


def found(case):
    (loss_fn, params, batch), plan, optimizer, steps = CASES[case]()
    return sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=optimizer, steps=steps)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        result = found(case)
        print(json.dumps([case, result.verdict, result.finding and asdict(result.finding)]))
        print(result, file=sys.stderr)
