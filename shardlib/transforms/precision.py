"""Mixed precision: 16-bit parameters and activations, fp32 master weights, scaled losses for fp16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardlib.claims import Claim, LeafInfo, Reduce, Schedule, Use
from shardlib.errors import IllegalComposition

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Precision:
    compute: str
    reduce_dtype: str
    keep: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"precision({self.compute!r}, reduce_dtype={self.reduce_dtype!r})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        dtype = _DTYPES[self.compute]
        for leaf in leaves:
            if leaf.dtype.is_floating_point and not leaf.matches(self.keep):
                yield Use(leaf.path, dtype=dtype, master=torch.float32 if dtype.itemsize < 4 else None)
        yield Reduce("*", dtype=_DTYPES[self.reduce_dtype])
        yield Schedule(cast_batch=dtype, loss_scale="dynamic" if self.compute == "fp16" else None)


def precision(compute: str = "bf16", reduce_dtype: str = "fp32", keep: str | Sequence[str] = ()) -> Precision:
    """Store, gather and compute parameters in ``compute``; update fp32 master weights.

    Floating leaves of the batch are cast too. With "fp16" the loss is scaled dynamically and a step with
    non-finite gradients is skipped.

    Args:
        compute: "bf16", "fp16" or "fp32".
        reduce_dtype: dtype in which 16-bit gradients are summed over ranks and micro-batches.
        keep: globs of parameters that keep their own dtype (norms, say).

    Raises:
        IllegalComposition: an unknown dtype.
    """
    for given in (compute, reduce_dtype):
        if given not in _DTYPES:
            raise IllegalComposition(f"precision dtype {given!r} is not one of {', '.join(map(repr, _DTYPES))}")
    return Precision(compute, reduce_dtype, (keep,) if isinstance(keep, str) else tuple(keep))
