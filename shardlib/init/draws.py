"""Counter-based initialisers: an element depends only on the key and its index in the whole tensor.

Give each parameter a key of its own, by its path: ``init.normal(key.fold_in("head/weight"), (V, W), std=0.02)``. In a
function that is passed to `shardlib.shard`, a rank then draws only its shard of a parameter, provided the parameter is the
unchanged result of an initialiser. Shapes are (out, in, ...) as in torch's layers. Each element is an inverse distribution
function of a uniform number on a grid of 2^-24.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardlib.kernels.counter import signed
from shardlib.mesh.specs import IndexMap
from shardlib.rng import Key, bits_at, require_key


@dataclass(frozen=True)
class Draw:
    """The random elements of one tensor, from which any of them can be drawn.

    Attributes:
        kind, args: the distribution and its parameters.
        seed, first: of the counter: the tensor's first element has number ``first``.
        shape, dtype: of the tensor.
    """

    kind: str
    args: tuple[float, ...]
    seed: int
    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """The elements at the indices ``index`` (int64) of the flattened tensor, on the device of ``index``."""
        u = (bits_at(Key(self.seed), index + self.first).to(torch.float64) + 0.5) * 2.0**-24
        return _KINDS[self.kind](u, *self.args).to(self.dtype)

    def fill(self, out: torch.Tensor, index_map: IndexMap) -> None:
        """Fill ``out``, contiguous, with the elements that ``index_map`` maps."""
        for chunk, chunk_map in index_map.chunks(out):
            chunk.copy_(self.at(chunk_map.flat(len(chunk), chunk.device)))


def uniform(
    key: Key,
    shape: Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw uniformly between ``low`` and ``high``.

    >>> sl.init.uniform(sl.Key(0), (64, 32), -1.0, 1.0).shape
    torch.Size([64, 32])
    """
    return _drawn("uniform", (low, high), key, shape, dtype, device)


def normal(
    key: Key,
    shape: Sequence[int],
    std: float = 1.0,
    mean: float = 0.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw from N(mean, std²), which on this grid ends at 5.5 standard deviations.

    >>> weight = sl.init.normal(sl.Key(0).fold_in("head"), (64, 32), std=0.02)
    >>> torch.equal(weight, sl.init.normal(sl.Key(0).fold_in("head"), (64, 32), std=0.02))
    True
    """
    return _drawn("normal", (mean, std), key, shape, dtype, device)


def truncated_normal(
    key: Key,
    shape: Sequence[int],
    std: float = 1.0,
    mean: float = 0.0,
    low: float = -2.0,
    high: float = 2.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw from N(mean, std²) between ``mean + low·std`` and ``mean + high·std``.

    >>> bool(sl.init.truncated_normal(sl.Key(0), (64, 32), std=0.02).abs().max() <= 0.04)
    True
    """
    return _drawn("truncated_normal", (mean, std, low, high), key, shape, dtype, device)


def xavier_uniform(
    key: Key,
    shape: Sequence[int],
    gain: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw uniformly within ±gain·√(6/(in + out)) (Glorot and Bengio, 2010).

    >>> bool(sl.init.xavier_uniform(sl.Key(0), (64, 32)).abs().max() <= (6 / 96) ** 0.5)
    True
    """
    bound = gain * math.sqrt(6 / sum(_fans(shape)))
    return uniform(key, shape, -bound, bound, dtype=dtype, device=device)


def xavier_normal(
    key: Key,
    shape: Sequence[int],
    gain: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw from N(0, gain²·2/(in + out)) (Glorot and Bengio, 2010).

    >>> sl.init.xavier_normal(sl.Key(0), (64, 32)).shape
    torch.Size([64, 32])
    """
    return normal(key, shape, gain * math.sqrt(2 / sum(_fans(shape))), dtype=dtype, device=device)


def kaiming_uniform(
    key: Key,
    shape: Sequence[int],
    gain: float = math.sqrt(2),
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw uniformly within ±gain·√(3/in); the gain is for ReLU (He et al., arXiv 1502.01852).

    >>> bool(sl.init.kaiming_uniform(sl.Key(0), (64, 32)).abs().max() <= (6 / 32) ** 0.5)
    True
    """
    bound = gain * math.sqrt(3 / _fans(shape)[0])
    return uniform(key, shape, -bound, bound, dtype=dtype, device=device)


def kaiming_normal(
    key: Key,
    shape: Sequence[int],
    gain: float = math.sqrt(2),
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Draw from N(0, gain²/in); the gain is for ReLU (He et al., arXiv 1502.01852).

    >>> sl.init.kaiming_normal(sl.Key(0), (64, 32)).shape
    torch.Size([64, 32])
    """
    return normal(key, shape, gain / math.sqrt(_fans(shape)[0]), dtype=dtype, device=device)


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """The numbers of inputs and of outputs (fan-in and fan-out) of a weight."""
    if len(shape) < 2:
        raise ValueError(f"a tensor of shape {tuple(shape)} has no inputs and outputs; use init.normal or init.uniform")
    out, into, *field = shape
    return into * math.prod(field), out * math.prod(field)


def _truncated(u: torch.Tensor, mean: float, std: float, low: float, high: float) -> torch.Tensor:
    below, above = (0.5 * math.erfc(-bound / math.sqrt(2)) for bound in (low, high))
    return mean + std * torch.special.ndtri(below + (above - below) * u)


_KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "uniform": lambda u, low, high: low + (high - low) * u,
    "normal": lambda u, mean, std: mean + std * torch.special.ndtri(u),
    "truncated_normal": _truncated,
}


def _drawn(
    kind: str,
    args: tuple[float, ...],
    key: Key,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device,
) -> torch.Tensor:
    shape = torch.Size(shape)
    seed, first = require_key(f"init.{kind}", "key", key).stretch(shape.numel())
    return fresh(kind, list(args), signed(seed), first, list(shape), dtype=dtype, device=torch.device(device))


@torch.library.custom_op("shardlib::fresh", mutates_args=())
def fresh(
    kind: str,
    args: Sequence[float],
    seed: int,
    first: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A drawn tensor, as one operation that `shardlib.init.deferred` can recognise in a recording."""
    out = torch.empty(list(shape), dtype=dtype, device=device)
    if not out.is_meta:
        draw = Draw(kind, tuple(args), seed, first, tuple(shape), dtype)
        draw.fill(out, IndexMap.of_whole(draw.shape))
    return out


@fresh.register_fake
def _(kind, args, seed, first, shape, *, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)
