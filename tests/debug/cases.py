"""Models and plans in which planted defects are looked for."""

import itertools

import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.models import gpt

SIZES = {"vocab": 29, "layers": 2, "width": 12, "heads": 2, "sequence": 8}
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
    params = {"layers": [{"weight": draw(b, a) / 3, "bias": draw(b)} for a, b in itertools.pairwise(sizes)]}
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
    mesh = {"data": 2, "model": 2}
    return transformer(**changes), (mesh, sl.chain(sl.tensor_slicing(rules()), *others)), CLIPPED, 2


def piped(*others, mesh=None, schedule="1f1b", **changes):
    chain = sl.chain(sl.pipeline(schedule, microbatches=4), *others)
    return transformer(blocks=True, **changes), (mesh or {"pipe": 2, "data": 2}, chain), ADAMW, 2


def lengthened(kind, **changes):
    """Sequences cut over an axis of their own."""
    chain = sl.chain(sl.sequence("seq", kind), sl.zero(1, axis=("data", "seq")))
    return transformer(rows=8, **changes), ({"data": 2, "seq": 2}, chain), ADAMW, 2


def normed():
    """A norm that sliced heads share."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=generator) for name, shape in SHARED.items()}
    chain = sl.chain(sl.tensor_slicing({"up": "column", "norm": "shared", "down": "row"}), sl.zero(1))
    return (heads, params, torch.randn(8, 4, generator=generator)), ({"data": 2, "model": 2}, chain), ADAMW, 1


SHARED = {"up": (8, 4), "norm": (2,), "down": (4, 8)}


def heads(params, x):
    by_head = F.linear(x, params["up"]).unflatten(-1, (-1, 2)) * params["norm"]
    return F.linear(by_head.flatten(-2).tanh(), params["down"]).square().mean()


def routed():
    """A layer of experts, which ranks share."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    params = {"w": draw(5, 5), "router": {"weight": draw(4, 5)}}
    params["experts"] = {"gate": draw(4, 6, 5), "up": draw(4, 6, 5), "down": draw(4, 5, 6)}
    chain = sl.chain(sl.experts("expert"), sl.zero(1, axis=("data", "expert")))
    return (mixture, params, draw(16, 5)), ({"data": 2, "expert": 2}, chain), ADAMW, 1


def mixture(params, batch):
    config = sl.nn.MoEConfig(sl.nn.routers.top_k(2, renormalise="chosen"))
    return sl.nn.moe(params, batch @ params["w"], config)[0].square().mean()


def packed(*others):
    """A mean over targets, of which rows have different numbers."""
    loss_fn, params, batch = transformer()
    targets = batch["targets"].masked_fill(torch.rand(16, 8, generator=torch.Generator().manual_seed(1)) < 0.4, -100)
    batch = batch | {"targets": targets, "segments": torch.zeros_like(targets)}
    return (loss_fn, params, batch), ({"data": 2}, sl.chain(sl.zero(1), sl.accumulate(2))), ADAMW, 1


TWO_LEVELS = sl.chain(sl.zero(3, axis="node"), sl.zero(3, axis="local"), sl.hierarchical("local"))


def data(transform, ranks=2, optimizer=ADAMW, steps=2, **changes):
    return transformer(**changes), ({"data": ranks}, transform), optimizer, steps


CASES = {
    "plain": lambda: data(sl.zero(1), 4, CLIPPED),
    "accumulated": lambda: data(sl.chain(sl.zero(1), sl.accumulate(4))),
    "split": lambda: data(sl.chain(sl.zero(2), sl.accumulate(4))),
    "gathered": lambda: data(sl.zero(3), 4, CLIPPED),
    "copied": lambda: (
        transformer(),
        ({"local": 2, "node": 2}, sl.zero(1, axis="local", replicate="node")),
        CLIPPED,
        2,
    ),
    "two levels": lambda: (transformer(), ({"node": 2, "local": 2}, TWO_LEVELS), ADAMW, 2),
    "dropout": lambda: data(sl.chain(sl.zero(3), sl.accumulate(2), sl.remat()), dropout=0.2),
    "packed": packed,
    "sliced": lambda: sliced(sl.zero(1)),
    "stored": lambda: sliced(sl.zero(1), sl.remat(store="sharded", smallest=1)),
    "shared": normed,
    "scaled": lambda: data(sl.chain(sl.zero(2), sl.precision("fp16")), optimizer=CLIPPED),
    "masters": lambda: data(sl.chain(sl.zero(2), sl.precision("bf16"))),
    "ring": lambda: lengthened("ring"),
    "ulysses": lambda: lengthened("ulysses", heads=4),
    "parts": lambda: (
        transformer(rows=8),
        ({"data": 2, "seq": 2}, sl.chain(sl.sequence("seq"), sl.zero(1))),
        ADAMW,
        1,
    ),
    "ulysses, dropout": lambda: lengthened("ulysses", dropout=0.2),
    "one bit": lambda: data(sl.chain(sl.zero(0), sl.onebit())),
    "low rank": lambda: data(sl.chain(sl.zero(0), sl.powersgd(2))),
    "8 bits": lambda: data(sl.chain(sl.zero(2), sl.quantize(gradients="fp8", block=32))),
    "piped": lambda: piped(sl.zero(1)),
    "piped, oldest first": lambda: piped(sl.zero(1), schedule="looped-bfs"),
    "tied": lambda: piped(sl.zero(1), tie=True),
    "zero bubble": lambda: piped(sl.zero(1), schedule="zb-h1"),
    "lamb": lambda: (matrices(), ({"data": 4}, sl.zero(2)), sl.optim.lamb(1e-2), 2),
    "muon": lambda: (muon_matrices(), ({"data": 2}, sl.zero(2)), sl.optim.muon(1e-2), 2),
    "two axes": lambda: (matrices(), ({"a": 2, "b": 2}, sl.zero(3, axis=("a", "b"))), CLIPPED, 2),
    "tiled": lambda: (matrices(sizes=(8, 16, 8)), ({"data": 2}, sl.chain(sl.zero(3), TILES)), ADAMW, 2),
    "offloaded": lambda: data(sl.chain(sl.zero(2), sl.offload()), optimizer=CLIPPED),
    "experts": routed,
}

TILES = sl.tile("layers/*/weight", 2)


def muon_matrices():
    _loss_fn, _params, batch = matrices(sizes=(8, 12, 8, 4))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(b, a, generator=generator) for a, b in ((8, 12), (12, 8), (8, 4))]
    return bare, weights, batch


def bare(weights, batch):
    x, y = batch
    for weight in weights:
        x = torch.tanh(F.linear(x, weight))
    return (x - y).square().mean()


def found(case):
    """What `bisect` finds in a case."""
    (loss_fn, params, batch), plan, optimizer, steps = CASES[case]()
    return sl.debug.bisect(loss_fn, params, None, plan, batch, optimizer=optimizer, steps=steps)
