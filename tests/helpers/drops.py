"""Training under plans that leave out parts of layers, and loops on one device that leave out the same by hand."""

import math

import torch

import shardlib as sl
from helpers.measure import SCALARS, count_payload
from shardlib.execute.token_subset import drawn_tokens
from shardlib.models import bert, gpt

GPT = gpt.GPTConfig(vocab=32, layers=4, width=16, heads=2, sequence=8, dtype=torch.float64)
BERT = bert.BERTConfig(vocab=32, layers=4, width=16, heads=2, sequence=8, dtype=torch.float64, pre_norm=True)
SEED, RATE, STEPS = 7, 0.1, 5
SLICES = sl.tensor_slicing(gpt.slicing_rules(GPT), axis="model")


def tokens(rows=8):
    drawn = torch.randint(32, (rows, 9), generator=torch.Generator().manual_seed(1))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def share(mesh, batch):
    """This rank's rows."""
    ranks, at = mesh.shape.get("data", 1), mesh.coords.get("data", 0)
    return {name: value.chunk(ranks)[at] for name, value in batch.items()}


def trained(mesh, transform, loss_fn, params, batch, first=0, steps=STEPS):
    """Losses, gradient norms, tokens that layers saw and parameters from step ``first`` on; bytes that each step sends."""
    state, train_step = sl.make_train_step(loss_fn, sl.shard(params, mesh, transform), sl.optim.sgd(RATE), rng=SEED)
    state.step, sent = first, count_payload(mesh, SCALARS + 1)  # and the tokens that layers saw
    numbers, counted = [], []
    sent()
    for _ in range(steps):
        state, metrics = train_step(state, share(mesh, batch))
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"]), metrics["layer_tokens"]))
        counted.append(sent())
    numbers = torch.tensor(numbers, dtype=torch.float64)
    return numbers[:, :2], sl.unshard(state.params), counted, numbers[:, 2].tolist()


def looped(loss_of, params, batch, first=0, steps=STEPS):
    """`trained` on one device by autograd; ``loss_of(params, batch, step)`` leaves out parts of layers itself."""
    leaves, shape = torch.utils._pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    numbers = []
    for step in range(first, first + steps):
        loss = loss_of(torch.utils._pytree.tree_unflatten(leaves, shape), batch, step)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        grads = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves)]
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        leaves = [(leaf - RATE * grad).detach().requires_grad_() for leaf, grad in zip(leaves, grads)]
        numbers.append((loss.item(), norm))
    after = torch.utils._pytree.tree_unflatten([leaf.detach() for leaf in leaves], shape)
    return torch.tensor(numbers, dtype=torch.float64), after


def kept_at(step, drop):
    """Per layer: whether it runs, the probability of that, and None: all tokens."""
    kept = drop.kept(step, sl.Key(SEED).fold_in(step))
    return [(kept[path], p, None) for path, p in drop.keep(step).items()]


def visits_at(step, pace, drop=None, rows=8, length=8):
    """Per layer: whether it runs, the probability of that, and the positions of the tokens it sees, of which the two in the
    middle draw as many as the pace says."""
    draws, count = sl.Key(SEED).fold_in(step).fold_in("random_ltd"), pace(step)
    kept = [(True, 1.0, None)] * 4 if drop is None else kept_at(step, drop)
    index = [None] * 4
    if count < length:
        index[1:3] = [drawn_tokens(draws.fold_in(n), rows, length, count, torch.device("cpu")) for n in (1, 2)]
    return [(runs, p, seen) for (runs, p, _), seen in zip(kept, index, strict=True)]


def layer_tokens(visits, rows=8, length=8):
    """Tokens that layers see, by a count."""
    return sum(rows * (length if index is None else index.shape[1]) for runs, _, index in visits if runs)


def through(x, visit, layer, *others):
    """The stream behind ``layer(x, p, *others)``, at a visit as in `kept_at`, or with the positions of tokens as its last."""
    runs, keep, index = visit
    if not runs:
        return x
    if index is None:
        return layer(x, keep, *others)
    rows = torch.arange(len(x))[:, None]
    others = [None if other is None else other[rows, index] for other in others]
    return x.index_put((rows, index), layer(x[rows, index], keep, *others))


def gpt_loss(params, batch, visits):
    """The loss of `GPT`. Documents of ``batch["segments"]`` see only themselves."""
    places = params["embed"]["positions"][: batch["tokens"].shape[1]]
    x = params["embed"]["tokens"][batch["tokens"]] + places
    for p, visit in zip(params["blocks"], visits, strict=True):

        def layer(x, keep, segments, p=p):
            sees = torch.ones(x.shape[1], x.shape[1]).tril().bool()
            sees = sees if segments is None else sees & (segments[:, None, :, None] == segments[:, None, None, :])
            x = x + attend(p["attn"], norm(p["ln1"], x, 1e-5), sees) / keep
            h = torch.nn.functional.gelu(linear(p["mlp"]["up"], norm(p["ln2"], x, 1e-5)), approximate="tanh")
            return x + linear(p["mlp"]["down"], h) / keep

        x = through(x, visit, layer, batch.get("segments"))
    logits = norm(params["head"]["norm"], x, 1e-5) @ params["head"]["weight"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def bert_loss(params, batch, visits):
    """The loss of `BERT`. Nothing sees what ``batch["mask"]`` leaves out."""
    embed, head = params["embed"], params["head"]
    x = norm(embed["norm"], embed["tokens"][batch["tokens"]] + embed["positions"] + embed["segments"][0], 1e-12)
    for p, visit in zip(params["blocks"], visits, strict=True):

        def layer(x, keep, mask, p=p):
            sees = torch.ones(1, 1, 1, 1).bool() if mask is None else mask[:, None, None, :]
            x = x + attend(p["attn"], norm(p["ln1"], x, 1e-12), sees) / keep
            h = torch.nn.functional.gelu(linear(p["mlp"]["up"], norm(p["ln2"], x, 1e-12)))
            return x + linear(p["mlp"]["down"], h) / keep

        x = through(x, visit, layer, batch.get("mask"))
    x = norm(head["norm"], torch.nn.functional.gelu(linear(head["dense"], norm(head["last"], x, 1e-12))), 1e-12)
    return torch.nn.functional.cross_entropy((x @ head["weight"].T).flatten(0, 1), batch["targets"].flatten())


def norm(p, x, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], p["weight"], p["bias"], eps)


def linear(p, x):
    return x @ p["weight"].T + p["bias"]


def attend(p, x, sees):
    rows, length, width = x.shape
    q, k, v = linear(p["qkv"], x).view(rows, length, 2, 3, width // 2).permute(3, 0, 2, 1, 4)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(width // 2)).masked_fill(~sees, -math.inf)
    return linear(p["out"], (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))


def in_list(params):
    """The parameters of `gpt.to_blocks` as they were."""
    return {"embed": params[0], "blocks": params[1:-1], "head": params[-1]}
