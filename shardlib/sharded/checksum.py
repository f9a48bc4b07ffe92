"""Checksums of tensors, by which ranks compare copies.

The sum over 32-bit words x_i of x_i·w_i modulo 2^64, with random weights w_i (multilinear hashing; Carter and Wegman, 1981,
section 2; Lemire and Kaser, arXiv 1202.4961). Two different tensors have the same sum with a probability below 2^-32. Since
every position has its own weight, the sum depends on the order of the words, and sees signs that are flipped in pairs, which
a plain sum does not. Integer sums are exact in any order.
"""

from __future__ import annotations

import hashlib
from functools import cache
from numbers import Number

import numpy as np
import torch

from shardlib.common.tensors import dtype_name, raw_bytes
from shardlib.rng import Key
from shardlib.tree import Tree, flatten

_WORDS = 1 << 12  # words of a row: each has a weight, and each row a sum
_BYTES = 4 * _WORDS
_ROWS = {"cpu": 16}  # rows at a time, so that products stay in the cache
_ROWS_ELSEWHERE = 1 << 10


def checksum(value: torch.Tensor) -> str:
    """A checksum of a tensor's bits in row-major order, with its dtype and shape; in one pass and with small temporaries."""
    flat = raw_bytes(value.resolve_conj().resolve_neg().contiguous())
    if flat.storage_offset() % 4:  # torch cannot view it as words
        flat = flat.clone()
    whole = flat.numel() // _BYTES * _BYTES
    sums = [_row_sums(flat[:whole].view(torch.int32).view(-1, _WORDS))]
    if whole < flat.numel():
        rest = flat.new_zeros(_BYTES)
        rest[: flat.numel() - whole] = flat[whole:]
        sums.append(_row_sums(rest.view(torch.int32).view(1, _WORDS)))
    kind = _kind(value)
    digest = hashlib.blake2b(kind.encode(), digest_size=8)
    digest.update(torch.cat(sums).cpu().numpy().tobytes())
    return f"checksum {digest.hexdigest()} ({kind})"


def checksums(tree: Tree, bits: bool = True) -> dict[str, str]:
    """Path -> text by which a leaf is compared: a tensor's checksum (without ``bits`` its dtype and shape), a number's value.

    Leaves of other kinds are left out.
    """
    texts: dict[str, str] = {}
    paths, leaves, _ = flatten(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(np.ascontiguousarray(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            texts[path] = checksum(leaf) if bits else _kind(leaf)
        elif isinstance(leaf, (Number, str, Key)):
            texts[path] = repr(leaf)
    return texts


def _kind(value: torch.Tensor) -> str:
    return f"{dtype_name(value.dtype)} {list(value.shape)}"


def _row_sums(words: torch.Tensor) -> torch.Tensor:
    """The weighted sum modulo 2^64 of each row of ``[rows, _WORDS]`` int32, as int64 ``[rows]``."""
    rows = min(len(words), _ROWS.get(words.device.type, _ROWS_ELSEWHERE))
    weights = _weights(words.device)
    products = torch.empty((rows, _WORDS), dtype=torch.int64, device=words.device)
    sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), rows or 1):
        some = words[start : start + rows]
        torch.sum(torch.mul(some, weights, out=products[: len(some)]), 1, out=sums[start : start + rows])
    return sums


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """The weights, int64 ``[_WORDS]``, equal on every rank and in every version of torch."""
    drawn = hashlib.shake_128(b"shardlib checksum").digest(8 * _WORDS)
    return torch.frombuffer(bytearray(drawn), dtype=torch.int64).to(device)
