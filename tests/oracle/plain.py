"""ZeRO a second time, deliberately plain: a list of ranks, and each collective as a loop over it.

Follows arXiv 1910.02054, section 5, for AdamW with clipping. Ranks stand on a grid: `ways` of them split the
state among themselves, `copies` such groups repeat it (hybrid sharding). Imports nothing from shardlib.
"""

import math

import optree
import torch


class Cluster:
    """All ranks' memories; ``sent`` is the number of elements one rank sends in all."""

    def __init__(self, ways, copies=1):
        self.ways, self.copies = ways, copies
        self.ranks = ways * copies
        self.sent = 0

    def _group(self, rank):
        """The ranks that together hold one copy of the state."""
        first = rank // self.ways * self.ways
        return range(first, first + self.ways)

    def _twins(self, rank):
        """The ranks that hold the same shard in the other copies."""
        return range(rank % self.ways, self.ranks, self.ways)

    def cut(self, whole, rank):
        """This rank's chunk of a flattened tensor, padded with zeros at the end."""
        chunk = math.ceil(whole.numel() / self.ways)
        padded = torch.zeros(chunk * self.ways, dtype=whole.dtype)
        padded[: whole.numel()] = whole.reshape(-1)
        position = rank % self.ways
        return padded[position * chunk : (position + 1) * chunk].clone()

    def all_gather(self, shards, shape):
        """Shards per rank -> whole tensor per rank."""
        self.sent += shards[0].numel() * (self.ways - 1)
        wholes = []
        for rank in range(self.ranks):
            flat = torch.cat([shards[peer] for peer in self._group(rank)])
            wholes.append(flat[: math.prod(shape)].reshape(shape))
        return wholes

    def reduce_scatter(self, wholes):
        """Whole tensor per rank -> each rank's chunk of the sum over its group."""
        cut = [[self.cut(wholes[peer], rank) for peer in self._group(rank)] for rank in range(self.ranks)]
        self.sent += cut[0][0].numel() * (self.ways - 1)
        return [sum(parts) for parts in cut]

    def sum_copies(self, tensors):
        """Sum over the copies; what a ring all-reduce sends is 2·(n−1)/n of the tensor."""
        self.sent += 2 * tensors[0].numel() * (self.copies - 1) // self.copies
        return [sum(tensors[twin] for twin in self._twins(rank)) for rank in range(self.ranks)]


def train(
    loss_fn, params, batches, *, stage, ways, copies=1, microbatches=1,
    lr=1e-3, eps=1e-5, weight_decay=0.01, b1=0.9, b2=0.999, max_norm=None,
):  # fmt: skip
    """Losses, final parameters (of every rank) and elements sent per step, by explicit collectives."""
    cluster = Cluster(ways, copies)
    ranks = range(cluster.ranks)
    leaves, structure = optree.tree_flatten(params)
    names = list(dict.fromkeys(id(leaf) for leaf in leaves))  # tied leaves are one
    slots = [names.index(id(leaf)) for leaf in leaves]
    start = {id(leaf): leaf for leaf in leaves}
    shapes = [start[name].shape for name in names]

    # Kept between steps: parameters, whole or (stage 3) a chunk; moments, from stage 1 of a chunk.
    stored = [[start[n].clone() if stage < 3 else cluster.cut(start[n], r) for n in names] for r in ranks]
    owned = [[start[n].reshape(-1).clone() if stage == 0 else cluster.cut(start[n], r) for n in names] for r in ranks]
    mean = [[torch.zeros_like(t) for t in mine] for mine in owned]
    square = [[torch.zeros_like(t) for t in mine] for mine in owned]

    losses = []
    for step, batch in enumerate(batches, start=1):
        cluster.sent = 0
        total, sums = 0.0, [None] * len(names)
        for micro in range(microbatches):
            wholes = [[p.reshape(s) for p, s in zip(mine, shapes)] for mine in stored] if stage < 3 else None
            if stage == 3:
                gathered = [cluster.all_gather([stored[r][i] for r in ranks], shapes[i]) for i in range(len(names))]
                wholes = [[gathered[i][r] for i in range(len(names))] for r in ranks]
                cluster.sent += sum(stored[0][i].numel() for i in range(len(names))) * (ways - 1)  # again, for backward
            grads = []
            for r in ranks:
                inputs = [w.detach().clone().requires_grad_() for w in wholes[r]]
                part = optree.tree_map(lambda t, r=r, m=micro: t.chunk(cluster.ranks)[r].chunk(microbatches)[m], batch)
                loss = loss_fn(optree.tree_unflatten(structure, [inputs[s] for s in slots]), part)
                loss = loss / (cluster.ranks * microbatches)
                found = torch.autograd.grad(loss, inputs, allow_unused=True)
                grads.append([torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs)])
                total += loss.item()
            for i in range(len(names)):
                part = [grads[r][i] for r in ranks]
                if stage >= 2:  # reduced at once, into chunks
                    part = cluster.reduce_scatter(part)
                sums[i] = part if sums[i] is None else [a + b for a, b in zip(sums[i], part)]
        for i in range(len(names)):
            if stage < 2:  # reduced once, after the last micro-batch
                sums[i] = cluster.reduce_scatter(sums[i])
            sums[i] = cluster.sum_copies(sums[i])
            if stage == 0:
                sums[i] = [whole.reshape(-1) for whole in cluster.all_gather(sums[i], shapes[i])]

        group = [0] if stage == 0 else range(ways)  # one copy of every element
        norm = math.sqrt(sum(float(sums[i][r].square().sum()) for i in range(len(names)) for r in group))
        scale = min(1.0, max_norm / norm) if max_norm is not None and norm else 1.0
        for i in range(len(names)):
            for r in ranks:
                g, m, v, p = sums[i][r] * scale, mean[r][i], square[r][i], owned[r][i]
                m.copy_(b1 * m + (1 - b1) * g)
                v.copy_(b2 * v + (1 - b2) * g * g)
                direction = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
                p.copy_(p - lr * weight_decay * p - lr * direction)
            if stage in (1, 2):
                for r, whole in enumerate(cluster.all_gather([owned[r][i] for r in ranks], shapes[i])):
                    stored[r][i] = whole
            else:
                for r in ranks:
                    stored[r][i] = owned[r][i].clone()
        losses.append(total)

    results = []
    for r in ranks:
        wholes = [
            torch.cat([stored[p][i] for p in cluster._group(r)])[: shapes[i].numel()] if stage == 3 else stored[r][i]
            for i in range(len(names))
        ]
        results.append(optree.tree_unflatten(structure, [wholes[s].reshape(shapes[s]) for s in slots]))
    return losses, results, cluster.sent
