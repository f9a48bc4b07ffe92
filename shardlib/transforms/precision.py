"""Mixed precision: 16-bit parameters and activations, fp32 master weights, scaled losses for fp16, products in 8 bits."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardlib.errors import IllegalComposition, listing
from shardlib.plan.arguments import GLOB, choice, flag, number, refused, texts
from shardlib.plan.claims import Claim, LeafInfo, Reduce, Step, Use
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.transform import Resolved

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SCALED = "fp8"  # bf16, with products in 8 bits
_SCALES = sys.float_info.min, sys.float_info.max


@dataclass(frozen=True, repr=False)
class Precision(CodedTransform):
    """The transform that `precision` makes, with the arguments given there."""

    compute: str
    reduce_dtype: str
    keep: tuple[str, ...]
    leaves: tuple[tuple[str, str], ...]
    master: bool
    loss_scale: LossScale | None
    autocast: bool
    scaled: bool

    @property
    def call(self) -> CodeCall:
        scale: LossScale | float | None = self.loss_scale
        if self.loss_scale == LossScale():
            scale = None
        elif self.loss_scale and self.loss_scale == LossScale.static(self.loss_scale.value):
            scale = self.loss_scale.value
        leaves = dict(self.leaves) or None
        given = {
            **vars(self),
            "compute": _SCALED if self.scaled else self.compute,
            "keep": one_or_list(self.keep),
            "leaves": leaves,
            "loss_scale": scale,
        }
        return CodeCall(precision, given)

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        used: set[str] = set()
        for leaf in leaves:
            if leaf.dtype.is_floating_point and not leaf.matches(self.keep):
                matching = [(glob, name) for glob, name in self.leaves if leaf.matches(glob)]
                used.update(glob for glob, _ in matching)
                if self.autocast and not matching and len(leaf.shape) < 2:
                    continue  # autocast casts the factors of products, and norms' weights are used as they are
                dtype = _DTYPES[matching[0][1] if matching else self.compute]
                scaled = self.scaled and not matching and len(leaf.shape) == 2
                master = torch.float32 if dtype.itemsize < 4 and self.master else None
                yield Use(leaf.path, dtype=dtype, master=master, scaled=scaled or None)
        unused = [f"{glob!r}: {name!r}" for glob, name in self.leaves if glob not in used]
        if unused:
            raise IllegalComposition(
                f"{self.name}: these globs of leaves= match no parameter:\n{listing(unused)}\nA glob matches a floating "
                "parameter's path, such as 'blocks/*/ln1/*'."
            )
        yield Reduce("*", dtype=_DTYPES[self.reduce_dtype])
        dtype = _DTYPES[self.compute]
        yield Step(autocast=dtype) if self.autocast else Step(cast_batch=dtype)
        yield Step(loss_scale=self.loss_scale)

    def check(self, resolved: Resolved) -> None:
        both = [path for path, use in resolved.uses.items() if use.scaled and use.tiles]
        if both:
            raise IllegalComposition(
                f"{self.name}: products in 8 bits have one scale for a weight, which tile() gathers part by part:\n"
                f"{listing(both)}\nGive them another precision, leaves={{glob: 'bf16'}}"
            )


def precision(
    compute: str = "bf16",
    reduce_dtype: str = "fp32",
    keep: str | Sequence[str] = (),
    *,
    leaves: Mapping[str, str] | None = None,
    master: bool = True,
    loss_scale: LossScale | float | None = None,
    autocast: bool = False,
) -> Precision:
    """Store, gather and compute parameters in ``compute``; update fp32 master weights.

    Floating leaves of the batch are cast to ``compute`` as well. With "fp16" the loss is scaled, and a step with non-finite
    gradients is skipped.

    With ``autocast`` the function runs under ``torch.autocast``, which casts the operands of each operation by torch's own
    list, and the batch keeps its dtypes. Parameters with two dimensions and more, the factors of products, are stored and
    gathered in ``compute``; the others (norms' weights, biases) keep their own dtype.

    With "fp8" parameters and activations are as with "bf16", and matrix products by parameters of two dimensions
    (``F.linear``, ``x @ weight``, ``torch.addmm``) are in 8 bits: values and weights in e4m3, gradients in e5m2, each factor
    scaled by its largest magnitude, sums in fp32 (see `shardlib.nn.scaled_matmul`; arXiv 2209.05433).
    ``leaves={"*head*": "bf16"}`` leaves products out. Scales are those of what a rank multiplies: its rows, and
    its slice of a weight. What fused operations and torch's own layers
    (``F.multi_head_attention_forward``) multiply inside of themselves stays in bf16.

    Args:
        compute: "bf16", "fp16", "fp32" or "fp8".
        reduce_dtype: dtype in which 16-bit gradients are summed over ranks and micro-batches.
        keep: globs of parameters that keep their own dtype (norms, for example).
        leaves: glob -> dtype, for parameters with another dtype than ``compute``; the first match holds.
        master: whether 16-bit parameters have fp32 master weights. Without them updates are rounded into the parameters;
            see `optim.stochastic_rounding`.
        loss_scale: a `LossScale`, or a number for a static scale; with fp16 the dynamic ``LossScale()`` by default.
        autocast: whether torch's autocast chooses the dtype of each operation. With ``keep="*"`` it is that of one device,
            bit by bit; gathers are then in the parameters' own dtype.

    Raises:
        IllegalComposition: an unknown dtype, a loss scale without fp16, or autocast to fp32 or fp8; when a plan is made,
            globs of ``leaves`` that match no parameter, or tiles of a weight whose products are in 8 bits.

    >>> parallel = sl.chain(sl.zero(1), sl.precision("bf16"))
    >>> sl.make_plan({"w": torch.ones(256, 256)}, sl.abstract_mesh(data=4), parallel).bytes("param")
    131072
    """
    leaves = {} if leaves is None else leaves
    if not isinstance(leaves, Mapping) or not all(isinstance(glob, str) for glob in leaves):
        raise refused("precision", "leaves", leaves, "give a dictionary of glob -> dtype")
    compute = choice("precision", "compute", compute, (*_DTYPES, _SCALED))
    reduce_dtype = choice("precision", "reduce_dtype", reduce_dtype, _DTYPES)
    if flag("precision", "autocast", autocast) and compute in ("fp32", _SCALED):
        raise IllegalComposition(
            f"precision({compute!r}, autocast=True): autocast casts to 16 bits; use 'bf16' or 'fp16'"
        )
    scaled_products = compute == _SCALED
    compute = "bf16" if scaled_products else compute
    wrong = {glob: dtype for glob, dtype in leaves.items() if not (isinstance(dtype, str) and dtype in _DTYPES)}
    if wrong:
        raise refused("precision", "leaves", wrong, f"use {', '.join(map(repr, _DTYPES))}")
    chosen = tuple((str(glob), str(dtype)) for glob, dtype in leaves.items())
    scaled = "fp16" in (compute, *(name for _, name in chosen))
    if loss_scale is not None and not scaled:
        raise IllegalComposition(
            f"precision({compute!r}, loss_scale={loss_scale}): only gradients in fp16 need a scale"
        )
    if not (loss_scale is None or isinstance(loss_scale, LossScale)):
        loss_scale = LossScale.static(
            number("precision", "loss_scale", loss_scale, *_SCALES, "use a number above 0, or a LossScale")
        )
    scale = (loss_scale or LossScale()) if scaled else None
    keep, master = texts("precision", "keep", keep, GLOB, 0), flag("precision", "master", master)
    return Precision(compute, reduce_dtype, keep, chosen, master, scale, autocast, scaled_products)
