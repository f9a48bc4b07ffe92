"""Small models and data, the same on every rank."""

from itertools import pairwise

import torch
from optree import tree_map

from shardlib.models import gpt

# Sizes that 3 does not divide and 4 only in part, so that shards are padded.
TINY = gpt.GPTConfig(vocab=29, layers=2, width=10, heads=2, sequence=5)
ROWS = 48  # a global batch that 1 to 4 ranks and 4 micro-batches share


def tiny_gpt(dtype=torch.float32, **changes):
    """``(loss_fn, params)``; no leaf starts at 0 or 1, so that none has a vanishing scale."""
    config = gpt.GPTConfig(**{**TINY.__dict__, "dtype": dtype, **changes})
    generator = torch.Generator().manual_seed(3)
    shaken = {}  # tied leaves stay tied

    def shake(leaf):
        if id(leaf) not in shaken:
            shaken[id(leaf)] = leaf, moved(leaf)
        return shaken[id(leaf)][1]

    def moved(leaf):
        return leaf + 0.1 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype)

    return gpt.make_loss(config), tree_map(shake, gpt.init(config))


def shaken(params, by=0.1, seed=1):
    """Parameters none of which is 0 or 1, so that no term of a model can go missing unseen."""
    generator = torch.Generator().manual_seed(seed)
    return tree_map(lambda p: p + by * torch.randn(p.shape, generator=generator, dtype=p.dtype), params)


def token_batches(steps, rows=ROWS, config=TINY):
    """One global batch per step."""
    generator = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(steps):
        drawn = torch.randint(config.vocab, (rows, config.sequence + 1), generator=generator)
        batches.append({"tokens": drawn[:, :-1], "targets": drawn[:, 1:]})
    return batches


def share(batch, index, ranks):
    """The share of a global batch of rank ``index``."""
    return tree_map(lambda leaf: leaf.chunk(ranks)[index], batch)


def mlp(sizes, dtype=torch.float64, seed=0):
    """``(loss_fn, params)``: a list of linear layers, each a unit; batch ``(x, y)``."""
    generator = torch.Generator().manual_seed(seed)

    def layer(into, out):
        weight = torch.randn(out, into, generator=generator, dtype=torch.float64) / into**0.5
        return {
            "weight": weight.to(dtype),
            "bias": torch.randn(out, generator=generator, dtype=torch.float64).to(dtype),
        }

    params = {"layers": [layer(a, b) for a, b in pairwise(sizes)]}
    return mlp_loss, params


def mlp_loss(params, batch):
    x, y = batch
    *first, last = params["layers"]
    for p in first:
        x = torch.tanh(torch.nn.functional.linear(x, p["weight"], p["bias"]))
    return (torch.nn.functional.linear(x, last["weight"], last["bias"]) - y).square().mean()


def regression_batch(rows, into, out, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype) for size in (into, out))
    return x, y


class Linear(torch.autograd.Function):
    """A user's own function, which is handed the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class OwnProduct(torch.autograd.Function):
    """A user's own function ``x @ weight``, which is handed the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.flatten(0, -2).mT @ grad.flatten(0, -2)
