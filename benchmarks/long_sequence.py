"""`python -m benchmarks.long_sequence`: the longest sequence that trains within a budget, by what is tiled, as a table.

It runs on the test device (tests/helpers/rig), whose memory has a budget. The model mixes tokens by running means instead of
attention, which on that device would hold scores of all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import shardlib as sl
from tests.helpers import rig

BUDGET = 24_000_000  # bytes
LAYERS, WIDTH, VOCABULARY = 2, 64, 2048
TILE, STEP = 256, 256  # tokens of a tile, and tokens by which lengths differ

Params = dict[str, Any]


def init() -> Params:
    draw = torch.Generator().manual_seed(0)

    def weight(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=draw) * into**-0.5

    def block() -> Params:
        mix = {"value": weight(WIDTH, WIDTH), "out": weight(WIDTH, WIDTH)}
        return {"mix": mix, "mlp": {"up": weight(4 * WIDTH, WIDTH), "down": weight(WIDTH, 4 * WIDTH)}}

    ends = {"tokens": weight(VOCABULARY, WIDTH), "words": weight(VOCABULARY, WIDTH)}
    return {"ends": ends, "blocks": [block() for _ in range(LAYERS)]}


def make_loss(tiled: bool) -> Callable[[Params, torch.Tensor], torch.Tensor]:
    """The mean cross entropy of the next token, with MLPs and logits in tiles or whole."""

    def in_tiles(fn: Callable[..., Any], *x: torch.Tensor) -> Any:
        return sl.nn.tiled(fn, x, max(1, x[0].shape[1] // TILE) if tiled else 1)

    @sl.block
    def block(params: Params, x: torch.Tensor) -> torch.Tensor:
        values = F.linear(F.layer_norm(x, [WIDTH]), params["mix"]["value"])
        places = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        x = x + F.linear(values.cumsum(1) / places, params["mix"]["out"])
        mlp = params["mlp"]
        return x + in_tiles(lambda x: F.linear(F.gelu(F.linear(F.layer_norm(x, [WIDTH]), mlp["up"])), mlp["down"]), x)

    def loss_fn(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens[:, :-1], params["ends"]["tokens"])
        for each in params["blocks"]:
            x = block(each, x)

        def total(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            scores = F.linear(x, params["ends"]["words"]).flatten(0, 1)
            return F.cross_entropy(scores, targets.flatten(), reduction="sum")

        return in_tiles(total, x, tokens[:, 1:]) / x.shape[1]

    return loss_fn


def fits(length: int, tiled: bool, *transforms: Any) -> bool:
    """Whether two steps at this length stay within the budget."""
    mesh = sl.make_mesh(data=1, device="rig")
    try:
        with rig.limits(budget=BUDGET):
            parallel = sl.chain(sl.zero(0), *transforms)
            state, step = sl.make_train_step(make_loss(tiled), sl.shard(init(), mesh, parallel), sl.optim.adamw(1e-3))
            tokens = torch.randint(VOCABULARY, (1, length + 1)).to(mesh.device)
            for _ in range(2):
                state, _ = step(state, tokens)
            torch.accelerator.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True


def longest(tiled: bool, *transforms: Any) -> int:
    """The longest sequence that fits, in tokens."""
    most = STEP
    while fits(2 * most, tiled, *transforms):
        most *= 2
    beyond = 2 * most
    while beyond - most > STEP:
        middle = (most + beyond) // 2 // STEP * STEP
        most, beyond = (middle, beyond) if fits(middle, tiled, *transforms) else (most, middle)
    return most


def main() -> None:
    rig.start()
    variants = {
        "nothing": (False,),
        "blocks recomputed": (False, sl.remat()),
        "MLPs and logits in tiles": (True,),
        "both": (True, sl.remat()),
    }
    print(f"| {BUDGET // 10**6} MB | tokens | times |\n|---|---|---|")
    first = None
    for name, variant in variants.items():
        tokens = longest(*variant)
        first = first or tokens
        print(f"| {name} | {tokens:,} | {tokens / first:.1f} |", flush=True)


if __name__ == "__main__":
    main()
