"""Statistical tests of random bits: each returns p-values, uniform on [0, 1] if the bits are fair and independent.

``draws`` are 24-bit integers as int64, (keys, numbers): a row is what one key draws at following indices. Statistics and
their distributions: NIST SP 800-22 (monobit, runs, serial), Marsaglia and Tsang, "Some difficult-to-pass tests of
randomness", 2002 (birthday spacings), and textbooks.
"""

from __future__ import annotations

import math

import torch

BITS = 24


def alike(draws: torch.Tensor) -> dict[str, float]:
    """P-values for the independence of keys, from pairs of rows."""
    keys, count = draws.shape
    pairs = torch.triu_indices(keys, keys, 1)
    rows = (draws - draws.double().mean(1, keepdim=True)) / draws.double().std(1, keepdim=True)
    found = (rows @ rows.T)[*pairs] / math.sqrt(count)  # normal
    signs = (_bits(draws) * 2 - 1).float()
    agreeing = torch.stack([(signs[:, :, bit] @ signs[:, :, bit].T)[*pairs] for bit in range(BITS)]).double()
    same = sum(int((draws[a] == draws[b]).sum()) for a, b in pairs.T.tolist())
    # Values that two keys have in common, wherever these are: of all collisions, those that are not within one key.
    held = _collisions(draws.flatten()) - sum(_collisions(row) for row in draws)
    expected = pairs.shape[1] * count / 2**BITS
    distances = [_kolmogorov(draws[a], draws[b]) for a, b in pairs.T.tolist()]
    return {
        "correlation": _chi_square(float(found.square().sum()), len(found)),
        "largest correlation": _of_many(math.erfc(float(found.abs().max()) / math.sqrt(2)), len(found)),
        "equal bits": _chi_square(float(agreeing.square().sum()) / count, agreeing.numel()),
        "equal pairs": _poisson(same, expected),
        "values in common": _poisson(held, expected * count),
        "farthest distributions": _of_many(min(1 - below for below in distances), len(distances)),
        "nearest distributions": _of_many(min(distances), len(distances)),
        **{f"{name} over keys": p for name, p in stream(draws.T.flatten()).items()},
        "means over keys": _chi_square(_squares(draws.T), count),
    }


def stream(draws: torch.Tensor) -> dict[str, float]:
    """P-values for the randomness of one sequence of numbers."""
    bits = _bits(draws).flatten()
    ones, share = bits.sum(), float(bits.double().mean())
    runs = 1 + int((bits.diff() != 0).sum())
    expected = 2 * len(bits) * share * (1 - share)
    patterns = [_patterns(bits, length) for length in (1, 2, 3)]
    size = len(draws) // 512 * 512
    chunks = draws.flatten()[:size].view(-1, 512)
    spacings = chunks.sort(dim=1).values.diff(dim=1).sort(dim=1).values
    octets = torch.cat([draws >> shift & 255 for shift in (0, 8, 16)]).flatten().bincount(minlength=256).double()
    return {
        "monobit": _two_sided((2 * int(ones) - len(bits)) / math.sqrt(len(bits))),
        "runs": _two_sided((runs - expected) / (2 * math.sqrt(len(bits)) * share * (1 - share))),
        "serial": _chi_square(patterns[2] - patterns[1], 4),
        "serial again": _chi_square(patterns[2] - 2 * patterns[1] + patterns[0], 2),
        "bytes": _chi_square(float(((octets - octets.mean()) ** 2 / octets.mean()).sum()), 255),
        "birthday spacings": _poisson(int((spacings.diff(dim=1) == 0).sum()), len(chunks) * 512**3 / (4 * 2**BITS)),
    }


def _bits(draws: torch.Tensor) -> torch.Tensor:
    """(..., 24), the upper first."""
    return draws[..., None] >> torch.arange(BITS - 1, -1, -1) & 1


def _patterns(bits: torch.Tensor, length: int) -> float:
    """NIST's ψ² of all overlapping patterns of this length, the sequence taken for a circle."""
    number = sum(bits.roll(-at) << at for at in range(length))
    counts = number.bincount(minlength=2**length).double()
    return float(counts.square().sum()) * 2**length / len(bits) - len(bits)


def _squares(draws: torch.Tensor) -> float:
    """Sum over rows of the squared, normalised mean of a row."""
    spread = math.sqrt((2.0 ** (2 * BITS) - 1) / 12 / draws.shape[1])
    return float(((draws.double().mean(1) - (2**BITS - 1) / 2) / spread).square().sum())


def _collisions(values: torch.Tensor) -> int:
    counts = values.unique(return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _kolmogorov(a: torch.Tensor, b: torch.Tensor) -> float:
    """The probability of a smaller distance between two empirical distributions, by the limit law."""
    where = torch.cat([a, b]).sort().values
    shares = [torch.searchsorted(x.sort().values, where, right=True) for x in (a, b)]
    x = float((shares[0] - shares[1]).abs().max()) / math.sqrt(2 * len(a))
    if not x:
        return 0.0
    terms = [math.exp(-((2 * k - 1) ** 2) * math.pi**2 / (8 * x * x)) for k in range(1, 20)]
    return math.sqrt(2 * math.pi) / x * sum(terms)


def _two_sided(z: float) -> float:
    return math.erfc(abs(z) / math.sqrt(2))


def _chi_square(found: float, degrees: int) -> float:
    """Two-sided: too even is not random either."""
    half = torch.tensor([degrees / 2, max(found, 0.0) / 2], dtype=torch.float64)
    return 2 * float(min(torch.special.gammainc(*half), torch.special.gammaincc(*half)))


def _poisson(found: int, mean: float) -> float:
    at_most = torch.special.gammaincc(*torch.tensor([found + 1, mean], dtype=torch.float64))
    at_least = 1 - torch.special.gammaincc(*torch.tensor([max(found, 1e-300), mean], dtype=torch.float64))
    return min(1.0, 2 * float(min(at_most, at_least)))


def _of_many(smallest: float, count: int) -> float:
    """The p-value of the smallest of several p-values."""
    return -math.expm1(count * math.log1p(-min(smallest, 1 - 1e-16)))
