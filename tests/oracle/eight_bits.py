"""AdamW with moments in 8 bits (arXiv 2110.02861), step by step, every owner of a shard in a loop, by tables.

Imports nothing from shardlib. Parameters are lists of flat fp32 leaves, groups of which are one buffer. The step's operations
are in the order in which the kernel's description has them, so that results can be compared bit for bit.
"""

import math

import torch

BLOCK, SMALL = 256, 4096


class Table:
    """``numbers``: the magnitudes that have codes, ascending; ``borders``: the least part that gets each but the first."""

    def __init__(self, numbers, borders):
        self.numbers, self.borders = numbers, borders

    def rounded(self, x):
        """A buffer after it was coded in 8 bits and decoded."""
        left = torch.empty_like(x)
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            largest = block.abs().max()
            if largest > 0:
                parts = block.abs() * (1 / largest)
                nearest = self.numbers[torch.bucketize(parts, self.borders, right=True)]
                block = torch.copysign(nearest * largest, block)
            left[start : start + BLOCK] = block
        return left


def cut(leaf, owner, owners):
    chunk = math.ceil(len(leaf) / owners)
    padded = torch.zeros(chunk * owners)
    padded[: len(leaf)] = leaf
    return padded.view(owners, chunk)[owner]


def joined(parts, leaves, owners):
    """Buffers by owner, which the leaves' chunks follow one another in, as whole leaves."""
    sizes = [math.ceil(len(leaf) / owners) for leaf in leaves]
    by_leaf = zip(*(part.split(sizes) for part in parts))
    return [torch.cat(chunks)[: len(leaf)] for chunks, leaf in zip(by_leaf, leaves)]


def adamw(leaves, groups, grads, steps, owners, signed, unsigned, lr, b1, b2, eps, decay):
    """After every step ``{"params", "mu", "nu"}``, lists of whole leaves; ``grads(step)`` gives the mean over ranks."""
    now = {
        "params": list(leaves),
        "mu": [torch.zeros_like(x) for x in leaves],
        "nu": [torch.zeros_like(x) for x in leaves],
    }
    for step in range(1, steps + 1):
        gradients = grads(step - 1)
        size, root = lr / (1 - b1**step), 1 / math.sqrt(1 - b2**step)
        after = {name: list(tree) for name, tree in now.items()}
        for group in groups:
            found = {name: [] for name in now}
            for owner in range(owners):
                p, m, v, g = (
                    torch.cat([cut(tree[leaf], owner, owners) for leaf in group])
                    for tree in (now["params"], now["mu"], now["nu"], gradients)
                )
                m, v = m * b1 + g * (1 - b1), v * b2 + g * g * (1 - b2)
                p = p * (1 - lr * decay) - m * size / (v.double().sqrt().float() * root + eps)
                if len(p) >= SMALL:
                    m, v = signed.rounded(m), unsigned.rounded(v)
                for name, buffer in zip(("params", "mu", "nu"), (p, m, v)):
                    found[name].append(buffer)
            for name, parts in found.items():
                for leaf, whole in zip(group, joined(parts, [leaves[leaf] for leaf in group], owners)):
                    after[name][leaf] = whole
        now = after
        yield now
