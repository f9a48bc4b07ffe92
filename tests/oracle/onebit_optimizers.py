"""1-bit Adam, 1-bit LAMB, 0/1 Adam and LAMB, step by step, every rank in a loop, from the papers.

(arXiv 2102.02888, 2104.06069, 2202.06009, 1904.00962.) Imports nothing from shardlib. Parameters are lists of flat leaves.
Each optimizer is a generator: ``grads(rank, step, leaves)`` gives that rank's gradients at these parameters; after every step
it yields what all ranks hold, ``{name: [rank][leaf]}``.
"""

import math

import torch

from oracle.few_bits import FewBits


class Means:
    """The mean over ranks in one bit.

    Args:
        groups: leaves that are one buffer, as lists of their numbers.
        form: "leaf", or a block size.
        owners: into how many chunks, each exchanged by itself, every leaf is cut (padded to equal chunks).
    """

    def __init__(self, ranks, leaves, groups, form="leaf", owners=1):
        self.ranks, self.groups, self.form, self.owners = ranks, groups, form, owners
        self.sizes = [leaf.numel() for leaf in leaves]
        self.chunks = [math.ceil(size / owners) for size in self.sizes]
        self.reset()

    def reset(self):
        self.sums = {}
        for number, group in enumerate(self.groups):
            for owner in range(self.owners):
                filled, position = [], 0
                for leaf in group:
                    rest = max(self.sizes[leaf] - owner * self.chunks[leaf], 0)
                    filled.append((position, position + min(rest, self.chunks[leaf])))
                    position += self.chunks[leaf]
                self.sums[number, owner] = FewBits(
                    self.ranks, position, filled, self.form, scattered=False, mean=True, dtype=torch.float64
                )

    def __call__(self, buffers):
        """[rank][leaf] -> the same for every rank: [leaf]."""
        if self.ranks == 1:
            return [leaf.clone() for leaf in buffers[0]]
        found = [torch.zeros(chunk * self.owners, dtype=torch.float64) for chunk in self.chunks]
        for (number, owner), means in self.sums.items():
            sent = []
            for leaves in buffers:
                parts = []
                for leaf in self.groups[number]:
                    padded = torch.zeros_like(found[leaf])
                    padded[: self.sizes[leaf]] = leaves[leaf]
                    parts.append(padded.view(self.owners, -1)[owner])
                sent.append(torch.cat(parts))
            result = means(sent)[0]
            for leaf in self.groups[number]:
                part, result = result.split([self.chunks[leaf], len(result) - self.chunks[leaf]])
                found[leaf].view(self.owners, -1)[owner] = part
        return [leaf[:size] for leaf, size in zip(found, self.sizes)]


def average(grads):
    return [sum(leaves) / len(grads) for leaves in zip(*grads)]


def copies(leaves, ranks):
    return [[leaf.clone() for leaf in leaves] for _ in range(ranks)]


def onebit_adam(params, grads, ranks, means, lr, freeze, b1=0.9, b2=0.999, eps=1e-8, decay=0.0, *, steps):
    """``freeze(step, v, v_before)``: whether the variance is frozen after this step; v before: after each step."""
    p, numbers = copies(params, ranks), range(len(params))
    m = [torch.zeros_like(leaf) for leaf in params]
    v = [torch.zeros_like(leaf) for leaf in params]
    frozen, history = False, []
    for step in range(steps):
        g = [grads(rank, step, p[rank]) for rank in range(ranks)]
        if not frozen:
            mean = average(g)
            m = [b1 * m[i] + (1 - b1) * mean[i] for i in numbers]
            v = [b2 * v[i] + (1 - b2) * mean[i] ** 2 for i in numbers]
            history.append(sum(leaf.abs().sum().item() for leaf in v))
            frozen = freeze(step + 1, history)
        else:
            own = [[b1 * m[i] + (1 - b1) * g[rank][i] for i in numbers] for rank in range(ranks)]
            m = [torch.where(v[i] == 0, 0, leaf) for i, leaf in enumerate(means(own))]
        for rank in range(ranks):
            for i in numbers:
                p[rank][i] = p[rank][i] - lr(step) * (m[i] / (v[i].sqrt() + eps) + decay * p[rank][i])
        yield {"params": copies(p[0], ranks), "mu": copies(m, ranks), "nu": copies(v, ranks)}


def lamb(params, grads, ranks, lr, b1=0.9, b2=0.999, eps=1e-6, decay=0.0, bounds=(0.01, 10.0), *, steps):
    p = [leaf.clone() for leaf in params]
    m = [torch.zeros_like(leaf) for leaf in params]
    v = [torch.zeros_like(leaf) for leaf in params]
    for step in range(steps):
        g = average([grads(rank, step, p) for rank in range(ranks)])
        for i in range(len(p)):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            u = (m[i] / (1 - b1 ** (step + 1))) / ((v[i] / (1 - b2 ** (step + 1))).sqrt() + eps) + decay * p[i]
            p[i] = p[i] - lr(step) * trust(p[i], u, bounds) * u
        yield {"params": copies(p, ranks), "mu": copies(m, ranks), "nu": copies(v, ranks)}


def trust(p, u, bounds):
    lengths = p.norm().item(), u.norm().item()
    return min(max(lengths[0] / lengths[1], bounds[0]), bounds[1]) if all(lengths) else 1.0


def onebit_lamb(
    params, grads, ranks, means, lr, freeze_step, b1=0.9, b2=0.999, eps=1e-6, decay=0.0, *, steps,
    bounds=(0.01, 10.0), coeff_beta=0.9, factors=(0.5, 4.0), threshold=0.1,
):  # fmt: skip
    numbers = range(len(params))
    p = [leaf.clone() for leaf in params]
    m = [torch.zeros_like(leaf) for leaf in params]
    v = [torch.zeros_like(leaf) for leaf in params]
    fresh = [torch.zeros_like(leaf) for leaf in params]
    coeff, spread, factor = [0.0 for _ in params], [1.0 for _ in params], [1.0 for _ in params]
    for step in range(steps):
        g = [grads(rank, step, p) for rank in range(ranks)]
        if step < freeze_step:
            mean = average(g)
            for i in numbers:
                m[i] = b1 * m[i] + (1 - b1) * mean[i]
                v[i] = b2 * v[i] + (1 - b2) * mean[i] ** 2
                u = m[i] / (v[i].sqrt() + eps) + decay * p[i]
                c = trust(p[i], u, bounds)
                if c != 1:
                    coeff[i] = coeff_beta * coeff[i] + (1 - coeff_beta) * c
                p[i] = p[i] - lr(step) * c * u
            if step == freeze_step - 1:
                fresh = [leaf.clone() for leaf in v]
                sizes = [leaf.norm().item() / math.sqrt(leaf.numel()) for leaf in m]
                spread = [sum(sizes) / len(sizes) / size for size in sizes]
        else:
            before = m
            own = [[(b1 * m[i] + (1 - b1) * g[rank][i]) * spread[i] for i in numbers] for rank in range(ranks)]
            m = [torch.where(v[i] == 0, 0, leaf / spread[i]) for i, leaf in enumerate(means(own))]
            for i in numbers:
                guess = (m[i] - b1 * before[i]) / (1 - b1)
                fresh[i] = b2 * fresh[i] + (1 - b2) * guess**2
                f = max(((v[i].sqrt() + eps) / (fresh[i].sqrt() + eps)).tolist())
                plain = m[i] / (v[i].sqrt() + eps)
                u = plain + decay * p[i]
                if decay:
                    part = min(1.0, plain.norm().item() / u.norm().item())
                    f = f * part + 1 - part
                f = min(max(f, factors[0]), factors[1])
                factor[i] = min(max(f, factor[i] * (1 - threshold)), factor[i] * (1 + threshold))
                p[i] = p[i] - lr(step) * coeff[i] * factor[i] * u
        yield {
            "params": copies(p, ranks),
            "mu": copies(m, ranks),
            "nu": copies(v, ranks),
            "fresh": copies(fresh, ranks),
        }


def zero_one_adam(
    params, grads, ranks, means, lr, freeze_step, b1=0.9, b2=0.999, eps=1e-8, decay=0.0, *, steps,
    kappa=16, doubling=32678, longest=16,
):  # fmt: skip
    """Also yields ``sent``: "full", "1 bit" or "nothing"."""
    numbers = range(len(params))
    p, m = copies(params, ranks), copies([torch.zeros_like(leaf) for leaf in params], ranks)
    v = [torch.zeros_like(leaf) for leaf in params]
    buffer = copies([torch.zeros_like(leaf) for leaf in params], ranks)
    gamma, decayed = 0.0, [torch.zeros_like(leaf) for leaf in params]
    variance_interval, taken, local_interval, local = 1, 0, 1, 0
    for step in range(1, steps + 1):
        g = [grads(rank, step - 1, p[rank]) for rank in range(ranks)]
        rate = lr(step - 1)
        if step <= freeze_step + 1:
            if step % variance_interval == 0:
                mean, sent = average(g), "full"
                v = [b2 * v[i] + (1 - b2) * mean[i] ** 2 for i in numbers]
                taken += 1
                if taken == kappa:
                    taken, variance_interval = 0, 2 * variance_interval
            else:
                mean, sent = means(g), "1 bit"
            for rank in range(ranks):
                for i in numbers:
                    m[rank][i] = torch.where(v[i] == 0, 0, b1 * m[rank][i] + (1 - b1) * mean[i])
                    p[rank][i] = p[rank][i] - rate * (m[rank][i] / (v[i].sqrt() + eps) + decay * p[rank][i])
            if step == freeze_step + 1:
                means.reset()
        else:
            sent = "nothing"
            gamma += rate
            for rank in range(ranks):
                for i in numbers:
                    m[rank][i] = torch.where(v[i] == 0, 0, b1 * m[rank][i] + (1 - b1) * g[rank][i])
                    move = rate * m[rank][i] / (v[i].sqrt() + eps)
                    p[rank][i] = p[rank][i] - move
                    buffer[rank][i] = buffer[rank][i] - move
            if step % local_interval == 0 and gamma > 0:
                sent = "1 bit"
                for rank in range(ranks):
                    for i in numbers:
                        p[rank][i] = p[rank][i] - buffer[rank][i]
                        buffer[rank][i] = buffer[rank][i] * (v[i].sqrt() + eps)
                decayed = [gamma * decay * p[0][i] for i in numbers]
                mean = [torch.where(v[i] == 0, 0, leaf) for i, leaf in enumerate(means(buffer))]
                for rank in range(ranks):
                    for i in numbers:
                        m[rank][i] = -mean[i] / gamma
                        p[rank][i] = p[rank][i] + mean[i] / (v[i].sqrt() + eps) - decayed[i]
                        buffer[rank][i] = torch.zeros_like(buffer[rank][i])
                gamma = 0.0
            local += 1
            if local == doubling:
                local, local_interval = 0, min(longest, 2 * local_interval)
        yield {"params": [list(q) for q in p], "mu": [list(q) for q in m], "nu": copies(v, ranks), "sent": sent}
