"""Frozen linear layers whose weights are stored in 4 or 8 bits, and used in the dtype of what they multiply (QLoRA, arXiv
2305.14314, sections 2 and 3).

Of a block of 64 consecutive elements with the largest magnitude a:

- "nf4": each element / a as the nearest of 16 values, the quantiles of a normal distribution (appendix E), two to a byte, the
  first in the upper half, and a in fp32: 4.5 bits an element.
- "nf4-double": the same with a in 8 bits (section 3, double quantization): of 256 consecutive a less the mean of all, with
  the largest magnitude b, each / b as the nearest of 256 values, denser towards 0; b and the mean in fp32: 4.13 bits.
- "int8": round(127 · element / a), and a in fp32: 8.5 bits an element.

The first two are bitsandbytes' formats, without and with its ``compress_statistics``.

A layer's weight is one leaf of bytes, values first. So a plan splits, gathers and saves the bytes as they are; the weight
itself exists while its layer multiplies by it, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardlib.common._compat import no_torch_function
from shardlib.errors import TreeError
from shardlib.tree import matches

FORMS = ("nf4", "nf4-double", "int8")
BLOCK = 64  # elements with one scale, as in bitsandbytes
SCALES = 256  # scales with one of theirs
# Quantiles of N(0, 1) between 0.9677083 and its mirror, eight above zero and seven below it, divided by the largest.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _dynamic_values() -> list[float]:
    """The 256 values of scales: 0, 1, and of each of seven powers of ten, to both sides, twice as many as of the one below,
    in the middle of equal parts (Dettmers et al., arXiv 2110.02861, section 2.1)."""
    magnitudes = [
        10.0 ** (power - 6) * (0.1 + 0.9 * (number + 0.5) / 2**power)
        for power in range(7)
        for number in range(2**power)
    ]
    return sorted([0.0, 1.0, *magnitudes, *(-each for each in magnitudes)])


DYNAMIC = tuple(_dynamic_values())


def encode(weight: torch.Tensor, form: str) -> torch.Tensor:
    """The bytes of a weight, uint8 (n,)."""
    blocks = F.pad(weight.detach().float().reshape(-1), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = (blocks / torch.where(scales == 0, 1.0, scales)[:, None]).reshape(-1)[: weight.numel()]
    if form == "int8":
        values = (shares * 127).round().to(torch.int8).view(torch.uint8)
    else:
        points = torch.tensor(NF4, device=weight.device)
        nearest = torch.bucketize(shares, (points[1:] + points[:-1]) / 2).to(torch.uint8)
        upper, lower = F.pad(nearest, (0, len(nearest) % 2), value=NF4.index(0.0)).view(-1, 2).unbind(1)
        values = upper << 4 | lower
    return torch.cat([values, _encoded_scales(scales) if form == "nf4-double" else scales.view(torch.uint8)])


def _encoded_scales(scales: torch.Tensor) -> torch.Tensor:
    mean = scales.mean()
    groups = F.pad(scales - mean, (0, -len(scales) % SCALES)).view(-1, SCALES)
    largest = groups.abs().amax(1)
    shares = (groups / torch.where(largest == 0, 1.0, largest)[:, None]).reshape(-1)[: len(scales)]
    points = torch.tensor(DYNAMIC, device=scales.device)
    nearest = torch.bucketize(shares, (points[1:] + points[:-1]) / 2).to(torch.uint8)
    return torch.cat([nearest, torch.cat([largest, mean[None]]).view(torch.uint8)])


def _decoded_scales(packed: torch.Tensor, count: int) -> torch.Tensor:
    *largest, mean = packed[count:].clone().view(torch.float32).split([-(-count // SCALES), 1])
    shares = torch.tensor(DYNAMIC, device=packed.device)[packed[:count].int()]
    return (F.pad(shares, (0, -count % SCALES)).view(-1, SCALES) * largest[0][:, None]).view(-1)[:count] + mean


def decode(packed: torch.Tensor, form: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The weight of its bytes."""
    count = torch.Size(shape).numel()
    stored = count if form == "int8" else -(-count // 2)
    rest = packed[stored:].clone()  # bytes that are gathered may begin anywhere
    scales = _decoded_scales(rest, -(-count // BLOCK)) if form == "nf4-double" else rest.view(torch.float32)
    if form == "int8":
        shares = packed[:stored].view(torch.int8).float() / 127
    else:
        halves = torch.stack([packed[:stored] >> 4, packed[:stored] & 15], 1).view(-1)[:count]
        shares = torch.tensor(NF4, device=packed.device)[halves.int()]
    blocks = F.pad(shares, (0, -count % BLOCK)).view(-1, BLOCK) * scales[:, None]
    return blocks.view(-1)[:count].view(shape).to(dtype)


def bytes_of(count: int, form: str) -> int:
    """The bytes of so many elements."""
    values, scales = count if form == "int8" else -(-count // 2), -(-count // BLOCK)
    return values + (scales + 4 * (-(-scales // SCALES) + 1) if form == "nf4-double" else 4 * scales)


class _Decoded(torch.Tensor):
    """A weight that was made of its bytes. Writes to it, as of an adapter that is merged, would be lost, and are refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if isinstance(args[0], cls) and (in_place or name in _IN_PLACE or func == _ASSIGNED):
            raise TreeError(
                "a weight in few bits is written to (by an adapter that is merged, or that starts from its values), and "
                "would stay as it is: put the adapter on the model with its weights in floats, "
                "peft.PeftModel.from_pretrained(model, adapter)"
            )
        with no_torch_function():
            return func(*args, **(kwargs or {}))


_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_ASSIGNED = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class QuantizedLinear(nn.Linear):
    """A frozen linear layer, of which ``packed`` are the bytes of the weight.

    Args:
        origin: the weight's name in the model that it was made for, under which files have its values.
    """

    def __init__(self, layer: nn.Linear, form: str, origin: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.form, self.origin = form, origin
        on_meta = layer.weight.is_meta
        packed = (
            torch.empty(bytes_of(layer.weight.numel(), form), dtype=torch.uint8, device="meta")
            if on_meta
            else encode(layer.weight, form)
        )
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.train(layer.training)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight in fp32, made anew: adapters look at a layer's weight where they are added."""
        made = decode(self.packed, self.form, self.shape, torch.float32)
        return made.as_subclass(_Decoded) if type(made) is torch.Tensor else made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _QuantizedProduct.apply(x, self.packed.view(-1), self.form, self.shape)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def reset_parameters(self) -> None:
        """Zeros: values are read or encoded, never drawn."""
        nn.init.zeros_(self.packed)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form!r}"


class _QuantizedProduct(torch.autograd.Function):
    """x·Wᵀ of a weight's bytes, which alone are kept for backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, packed: torch.Tensor, form: str, shape: tuple[int, int]) -> torch.Tensor:
        return F.linear(x, decode(packed, form, shape, x.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        _, packed, ctx.form, ctx.shape = inputs
        ctx.save_for_backward(packed)
        ctx.save_for_forward(packed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grad @ decode(packed, ctx.form, ctx.shape, grad.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        (packed,) = ctx.saved_tensors
        return F.linear(tangent, decode(packed, ctx.form, ctx.shape, tangent.dtype))


def with_quantized_linears(module: Any, form: str = "nf4", *, whole: str | tuple[str, ...] = "*lm_head") -> Any:
    """Makes the linear layers of a module frozen ones in 4 or 8 bits, for adapters beside them (QLoRA). The module is changed
    in place and returned; all its other parameters are frozen too.

    A plan holds, splits and gathers the bytes: of a weight [n, m] 0.5 + 1/16 bytes an element for "nf4", 0.5 + 1/64 for
    "nf4-double", 1 + 1/16 for "int8". In `shardlib.checkpoint.from_pretrained` each rank reads one weight at a time, encodes
    it and keeps its share.

    Args:
        form: "nf4", "nf4-double" (scales in 8 bits), or "int8".
        whole: globs over names of layers that stay as they are, such as the output layer.

    Raises:
        TreeError: the module has no such layer, or a weight that other layers share; an unknown form.

    >>> layer = sl.models.with_quantized_linears(torch.nn.Sequential(torch.nn.Linear(64, 64)), "nf4")
    >>> layer[0].packed.numel(), layer(torch.zeros(1, 64)).shape
    (2304, torch.Size([1, 64]))
    """
    if form not in FORMS:
        raise TreeError(f"with_quantized_linears: form={form!r} is unknown: use one of {', '.join(map(repr, FORMS))}")
    tied: dict[int, int] = {}
    for _, leaf in module.named_parameters(remove_duplicate=False):
        tied[id(leaf)] = tied.get(id(leaf), 0) + 1
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and name and not matches(name, whole)
    }
    if shared := [name for name, layer in layers.items() if tied[id(layer.weight)] > 1]:
        raise TreeError(
            f"with_quantized_linears: {', '.join(shared)} share their weights with other layers: name them in whole="
        )
    if not layers:
        raise TreeError(
            f"with_quantized_linears: {type(module).__name__} has no linear layers but those of whole={whole!r}"
        )
    module.requires_grad_(False)
    for name, layer in layers.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, QuantizedLinear(layer, form, f"{name}.weight"))
    return module


def quantized_leaves(
    module: nn.Module,
) -> Mapping[str, tuple[str, tuple[int, int], Callable[[torch.Tensor], torch.Tensor]]]:
    """Name of each leaf of bytes -> the weight's name in files, its shape, and what encodes it."""

    def encoder(form: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: encode(weight, form)

    return {
        f"{name}.packed": (layer.origin, layer.shape, encoder(layer.form))
        for name, layer in module.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
