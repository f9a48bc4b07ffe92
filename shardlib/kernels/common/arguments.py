"""Checks of the tensors that users pass to kernels: dense, of a supported dtype, on one device.

A kernel reads memory by address, dtype and size, so an argument of another kind would make it read garbage. The messages
name the argument and the remedy, where torch's own would come from the middle of an operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from shardlib.common.tensors import dtype_name

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(
    function: str,
    tensors: Mapping[str, object],
    optional: tuple[str, ...] = (),
    exactly: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Refuses arguments that a kernel cannot read.

    Args:
        function: its name, for messages.
        tensors: argument name -> value.
        optional: names of arguments that may be None.
        exactly: argument name -> the one dtype that is allowed; other arguments may be fp32, bf16, fp16 or float64.

    Raises:
        TypeError: an argument is no dense tensor of an allowed dtype; the message lists all such arguments.
        ValueError: the tensors are on several devices.

    >>> sl.kernels.common.check_tensors("swish", {"x": torch.tensor([1, 2])})
    Traceback (most recent call last):
    TypeError: swish: x is torch.int64; pass floating-point numbers: x.float()
    """
    device = None
    for (
        name,
        value,
    ) in tensors.items():  # plain loops, as torch.compile traces them; this one costs each call of a kernel
        if value is None and name in optional:
            continue
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            break
        if value.dtype not in FLOATS or name in exactly or (device is not None and value.device != device):
            break
        device = value.device
    else:
        return
    reasons, given = [], {}
    for name, value in tensors.items():
        if value is None and name in optional:
            continue
        given[name] = value
        reason = _refusal(name, value, exactly.get(name))
        if reason is not None:
            reasons.append(reason)
    if reasons:
        raise TypeError(f"{function}: {'; '.join(reasons)}")
    one_device(given)


def one_device(tensors: Mapping[str, Any]) -> None:
    """Refuses tensors on several devices: a kernel cannot read another device's addresses.

    Raises:
        ValueError: the tensors are on several devices.
    """
    if len({tensor.device for tensor in tensors.values()}) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{where}: move them to one device")


def check_buffers(
    filled: tuple[str, ...] = (), **tensors: tuple[torch.Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]
) -> None:
    """Refuses buffers that a kernel would read or write wrongly.

    Args:
        filled: names of those that are written in place.
        tensors: argument name -> the tensor, which may be None, its shape and the dtypes that it may have.

    Raises:
        ValueError: another shape, several devices, or one that is ``filled`` and not contiguous.
        TypeError: another dtype.
    """
    given = {name: tensor for name, (tensor, _, _) in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        _, shape, dtypes = tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}, not one of {dtypes}: cast it")
        if name in filled and not tensor.is_contiguous():
            raise ValueError(f"{name} is filled in place, so it must be contiguous")
    one_device(given)


def check_rows(function: str, x: torch.Tensor) -> None:
    """Refuses a tensor without dimensions, which has no rows.

    Raises:
        ValueError: ``x`` has no dimensions.
    """
    if x.dim() == 0:
        raise ValueError(f"{function}: x has no dimensions; pass [..., columns], such as x.reshape(1)")


def _refusal(name: str, value: object, exactly: torch.dtype | None) -> str | None:
    """The reason why a kernel cannot read an argument, with the remedy; None where it can."""
    if not isinstance(value, torch.Tensor):
        remedy = "pass a tensor" if value is None else f"pass a tensor: torch.as_tensor({name})"
        return f"{name} is {'None' if value is None else f'a {type(value).__name__}'}; {remedy}"
    if value.layout is not torch.strided:
        return f"{name} has the layout {value.layout}; pass {name}.to_dense()"
    if exactly is not None:
        wanted = dtype_name(exactly)
        if value.dtype == exactly:
            return None
        return f"{name} is {value.dtype}, not {wanted}; pass {wanted}: {name}.to({exactly})"
    if value.dtype in FLOATS:
        return None
    if value.dtype.is_complex:
        return f"{name} is {value.dtype}; pass real numbers, such as torch.view_as_real({name})"
    return f"{name} is {value.dtype}; pass floating-point numbers: {name}.float()"
