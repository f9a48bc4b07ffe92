"""Sums in few bits, step by step, every rank in a loop: 1 bit (arXiv 2102.02888) and integers (arXiv 2306.10209).

Imports nothing from shardlib. Buffers are flat; ``filled`` tells where leaves lie in them, and what lies between is zero.
"""

import math

import torch


def one_bit(spans):
    """c -> (±1, s) for each element, one s = ‖c‖ / √d per span; (0, 0) elsewhere."""

    def quantise(c):
        q, scales = torch.zeros_like(c), torch.zeros_like(c)
        for start, stop in spans:
            part = c[start:stop]
            if len(part):
                scales[start:stop] = (part.double().square().sum() / len(part)).sqrt().to(c.dtype)
                q[start:stop] = torch.where(part >= 0, 1.0, -1.0)
        return q, scales

    return quantise


def in_blocks(block, largest, length, rounded=torch.round):
    """c -> (q, s), one s = max|c| / largest per block; q is rounded, to even if to integers."""

    def quantise(c):
        q, scales = torch.zeros_like(c), torch.zeros_like(c)
        for start in range(0, length, block):
            part = c[start : start + block]
            s = part.abs().max() / largest
            if s > 0:
                q[start : start + block] = rounded((part / s).clamp(-largest, largest))
                scales[start : start + block] = s
        return q, scales

    return quantise


def e4m3(c):
    return c.to(torch.float8_e4m3fn).to(c.dtype)


class FewBits:
    """The ranks' errors, and the two exchanges over them.

    Args:
        ranks, elements: of the buffers.
        filled: (start, stop) of each leaf.
        form: "leaf", or a block size (1 bit); or (block, largest) for integers; (block, "fp8").
        scattered: whether rank r wants the r-th part of the sum alone; rows are then padded one by one.
        mean: whether the result is the mean; else the sum.
    """

    def __init__(self, ranks, elements, filled, form, *, scattered, mean, dtype=torch.float32):
        self.ranks, self.elements, self.form, self.scattered, self.mean = ranks, elements, form, scattered, mean
        grain = 8 if form == "leaf" else form if isinstance(form, int) else form[0]
        self.row = math.ceil(elements / (ranks * grain)) * grain
        length = ranks * self.row
        self.position = torch.arange(elements)
        if scattered:
            self.position = self.position // (elements // ranks) * self.row + self.position % (elements // ranks)
        self.spans = [(int(self.position[a]), int(self.position[a]) + b - a) for a, b in filled if a < b]
        self.mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in self.spans:
            self.mask[start:stop] = True
        self.sent = [torch.zeros(length, dtype=dtype) for _ in range(ranks)]
        self.rows = [torch.zeros(self.row, dtype=dtype) for _ in range(ranks)]

    def _quantise(self, c, first):
        """A buffer's part from ``first`` on."""
        stop = first + len(c)
        if self.form == "leaf":
            cut = [(max(a, first) - first, min(b, stop) - first) for a, b in self.spans]
            if self.scattered:  # a scale for each leaf's part of each row: spans never cross rows
                cut = [span for span in cut if span[0] < span[1]]
            return one_bit([span for span in cut if span[0] < span[1]])(c)
        if isinstance(self.form, int):
            blocks = [(at, at + self.form) for at in range(0, len(c), self.form)]
            return one_bit(blocks)(c)
        block, largest = self.form
        how = (448, len(c), e4m3) if largest == "fp8" else (largest, len(c))
        return in_blocks(block, *how)(c)

    def __call__(self, xs):
        """The result of each rank."""
        messages = []
        for rank, x in enumerate(xs):
            c = torch.zeros_like(self.sent[rank])
            c[self.position] = x
            c = c + self.sent[rank]
            q, s = self._quantise(c, 0)
            self.sent[rank] = torch.where(self.mask, c - q * s, 0)
            messages.append((q, s))
        rows = [self._add(messages, position) for position in range(self.ranks)]
        if self.scattered:
            width = self.elements // self.ranks
            masks = self.mask.view(self.ranks, -1)
            return [torch.where(mask, row, 0)[:width] for row, mask in zip(rows, masks, strict=True)]
        parts = []
        for position, row in enumerate(rows):
            c = row + self.rows[position]
            q, s = self._quantise(c, position * self.row)
            mask = self.mask[position * self.row : (position + 1) * self.row]
            self.rows[position] = torch.where(mask, c - q * s, 0)
            parts.append(torch.where(mask, q * s, 0))
        whole = torch.cat(parts)[: self.elements]
        return [whole.clone() for _ in range(self.ranks)]

    def _add(self, messages, position):
        """One row of the sum. In a block that has padding too, padding's signs are added up with the others."""
        row = slice(position * self.row, (position + 1) * self.row)
        total = torch.zeros(self.row, dtype=messages[0][0].dtype)
        for q, s in messages:
            if isinstance(self.form, tuple):
                total += q[row] * (s[row] / self.ranks if self.mean else s[row])
            else:
                total += q[row] * (s[row] if self.mean else s[row] * self.ranks)
        return total if isinstance(self.form, tuple) else total / self.ranks
