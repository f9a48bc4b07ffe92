"""What the kernels' functions check first of what a user gives them: tensors, of a served dtype, on one device.

Kernels read addresses by dtype and size, so what is neither must not reach one; and a message here names the argument and
what to do, where torch's would come from the middle of an operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(
    function: str,
    tensors: Mapping[str, object],
    optional: tuple[str, ...] = (),
    exactly: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """
    Args:
        tensors: by the argument's name.
        optional: names of those that may be None.
        exactly: the dtype of those that are no floating-point numbers; the others are in one of `FLOATS`.

    Raises:
        TypeError: what is no dense tensor of these dtypes; tells of all of them.
        ValueError: tensors on several devices.
    """
    wrong, there = [], {}
    for name, value in tensors.items():  # loops, which torch.compile follows
        if value is None and name in optional:
            continue
        there[name] = value
        reason = _wrong(name, value, exactly.get(name))
        if reason is not None:
            wrong.append(reason)
    if wrong:
        raise TypeError(f"{function}: {'; '.join(wrong)}")
    one_device(there)


def one_device(tensors: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: tensors on several devices; addresses mean nothing on another.
    """
    if len({tensor.device for tensor in tensors.values()}) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{where}: move them to one device")


def check_rows(function: str, x: torch.Tensor) -> None:
    """
    Raises:
        ValueError: a tensor without dimensions, which has no rows.
    """
    if x.dim() == 0:
        raise ValueError(f"{function}: x has no dimensions; pass [..., columns], such as x.reshape(1)")


def _wrong(name: str, value: object, exactly: torch.dtype | None) -> str | None:
    """What is wrong with an argument, and the remedy."""
    if not isinstance(value, torch.Tensor):
        remedy = "pass a tensor" if value is None else f"pass a tensor: torch.as_tensor({name})"
        return f"{name} is {'None' if value is None else f'a {type(value).__name__}'}; {remedy}"
    if value.layout is not torch.strided:
        return f"{name} has the layout {value.layout}; pass {name}.to_dense()"
    if exactly is not None:
        wanted = str(exactly).removeprefix("torch.")
        if value.dtype == exactly:
            return None
        return f"{name} is {value.dtype}, not {wanted}; pass {wanted}: {name}.to({exactly})"
    if value.dtype in FLOATS:
        return None
    if value.dtype.is_complex:
        return f"{name} is {value.dtype}; pass real numbers, such as torch.view_as_real({name})"
    return f"{name} is {value.dtype}; pass floating-point numbers: {name}.float()"
