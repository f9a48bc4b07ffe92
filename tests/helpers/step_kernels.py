"""Comparison of the kernels of optimizers' steps with their references.

As a script, `python step_kernels.py adamw`, it holds the Triton kernels to that under Triton's interpreter.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from helpers.kernels import values
from shardlib.kernels import adamw, adamw8, frozen_adam, global_norm, lion

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# Of the state, the gradient and the copy.
DTYPES = [
    (F32, F32, None), (F32, BF16, BF16), (F32, F32, BF16), (F32, BF16, None), (F32, F16, F16), (BF16, BF16, None),
    (F16, F32, None), (BF16, F32, F16),
]  # fmt: skip


@contextlib.contextmanager
def flushed(using: str):
    """The reference as an implementation has it: the CPU's take denormals for zero."""
    torch.set_flush_denormal(using == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def buffer(elements: int, dtype: torch.dtype, seed: int, offset: int, spoiled: bool = False) -> torch.Tensor:
    """Flat, contiguous, ``offset`` elements after an aligned address; ``spoiled``: some of them NaN or infinite."""
    found = values(elements + offset, seed)
    if spoiled:
        for first, special in ((1, math.nan), (16, math.inf), (35, -math.inf)):
            found[offset + first + seed % 7 :: 509] = special
    return found.to(dtype)[offset:]


def same(wanted: torch.Tensor, found: torch.Tensor, using: str) -> None:
    # The interpreter's cast to bf16 truncates, and gets denormals wrong.
    truncates = using == "triton" and found.dtype == BF16
    torch.testing.assert_close(
        found, wanted, rtol=2**-7 if truncates else 0, atol=2**-126 if truncates else 0, equal_nan=True
    )


def hold(using: str, step: Callable[[str], Sequence[torch.Tensor]]) -> None:
    """What ``step(name)`` returns of an implementation is what it returns of the reference, bit by bit."""
    with flushed(using):
        wanted = step("reference")
    for expected, found in zip(wanted, step(using), strict=True):
        same(expected, found, using)


def factor(scale: float | None) -> torch.Tensor | None:
    return None if scale is None else torch.tensor(scale, dtype=F64)


def check_mixed(
    kernel: Callable[..., None],
    old_of: Callable[..., tuple],
    factors: tuple,
    using: str,
    elements: int,
    dtypes: tuple,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
    elsewhere: bool = False,
) -> None:
    """Parameter, moments and copy; ``elsewhere``: in memory of their own."""
    kept, read, narrow = dtypes
    states = len(old_of._fields)
    start = [buffer(elements, kept, seed + k, offset) for k in range(states)]
    if states > 2:
        start[2].abs_()
    before, grad = [tensor.clone() for tensor in start], buffer(elements, read, seed + states, offset, spoiled)

    def step(name):
        old = old_of(*start) if elsewhere and name == using else None
        param, *moments = (buffer(elements, kept, 0, offset).copy_(torch.zeros(()) if old else x) for x in start)
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        kernel(param, grad, *moments, factors, copy=copy, scale=factor(scale), using=name, old=old)
        return [param, *moments] + ([] if copy is None else [copy])

    hold(using, step)
    assert all(map(torch.equal, start, before))


check_adamw = partial(check_mixed, adamw.adamw_, adamw.AdamWOld, adamw.factors_at(3.0, 0.01, **ADAM))
check_lion = partial(check_mixed, lion.lion_, lion.LionOld, lion.factors_at(0.01, b1=0.9, b2=0.99, weight_decay=0.1))


def check_adamw8(
    using: str,
    elements: int,
    dtypes: tuple,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
) -> None:
    """Three steps: parameter, codes, scales and copy."""
    kept, read, narrow = dtypes
    start = buffer(elements, kept, seed, offset)
    mu, nu = (buffer(elements, F32, seed + k, 0) for k in (1, 2))
    coded = [*adamw8.SIGNED.encode(mu), *adamw8.UNSIGNED.encode(nu.abs())]
    grads = [buffer(elements, read, seed + 2 + step, offset, spoiled and step == 2) for step in (1, 2, 3)]

    def steps(name):
        param, states = buffer(elements, kept, 0, offset).copy_(start), [tensor.clone() for tensor in coded]
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        for step, grad in enumerate(grads, 1):
            factors = adamw.factors_at(float(step), 0.01, **ADAM)
            adamw8.adamw8_(param, grad, *states, factors, copy=copy, using=name, scale=factor(scale))
        return [param, *states] + ([] if copy is None else [copy])

    hold(using, steps)


def check_direction(
    using: str,
    elements: int,
    count: float | None,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
) -> None:
    """Adam's direction and both moments."""
    start = [buffer(elements, F32, seed + k, offset, spoiled and k < 2) for k in range(4)]
    start[3].abs_()

    def step(name):
        param, *tensors = (buffer(elements, F32, 0, offset).copy_(tensor) for tensor in start)
        adamw.adam_direction_(param, *tensors, adamw.direction_at(count, **ADAM), using=name, scale=factor(scale))
        return tensors

    hold(using, step)


def check_frozen_adam(
    using: str,
    elements: int,
    narrow: torch.dtype | None,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
) -> None:
    """All steps."""
    start = [buffer(elements, F32, seed + k, offset, spoiled and k != 2) for k in range(5)]
    start[2].abs_()

    def steps(name):
        param, mu, nu, grad, moved = (buffer(elements, F32, 0, offset).copy_(tensor) for tensor in start)
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        own, lr, spread = mu.clone(), torch.tensor(0.01, dtype=F64), torch.tensor(1.3, dtype=F64)
        frozen_adam.frozen_step_(param, mu, nu, lr=lr, eps=1e-8, weight_decay=0.1, copy=copy, using=name)
        sent = grad.clone()
        frozen_adam.local_momentum_(sent, mu, b1=0.9, scale=factor(scale), using=name)
        frozen_adam.local_step_(grad, own, nu, moved, lr=lr, b1=0.9, eps=1e-8, scale=factor(scale), using=name)
        came, before, fresh = param.clone(), grad.clone(), moved.abs()
        frozen_adam.fresh_step_(came, before, nu, fresh, spread=spread, b1=0.9, b2=0.999, eps=1e-8, using=name)
        return [param, mu, own, moved, sent, came, before, fresh] + ([] if copy is None else [copy])

    hold(using, steps)


def check_global_norm(using: str, elements: int, dtype: torch.dtype, seed: int) -> None:
    x = buffer(elements, dtype, seed, 1)
    wanted, found = (global_norm.sum_of_squares(x, using=name) for name in ("reference", using))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "adamw":
        for number, dtypes in enumerate(DTYPES):
            check_adamw("triton", 1500, dtypes, seed=7 + number, scale=None if number % 2 else 0.3)
        check_direction("triton", 1500, 3.0, seed=7)
        check_direction("triton", 1500, None, seed=8, scale=None)
    if sys.argv[1] == "adamw8":
        for number, dtypes in enumerate(DTYPES):
            if dtypes[0] == F32:  # states in bf16 diverge by the interpreter's rounding
                check_adamw8("triton", 1500, dtypes, seed=7 + number, scale=None if number % 2 else 0.3)
        check_adamw8("triton", 1500, DTYPES[0], seed=9, spoiled=True)
    if sys.argv[1] == "global_norm":
        for number, elements in enumerate((0, 1, 4096, 9001)):
            for dtype in (F32, BF16, F16):
                check_global_norm("triton", elements, dtype, seed=number)
    if sys.argv[1] == "frozen_adam":
        for number, narrow in enumerate((None, BF16, F16)):
            check_frozen_adam("triton", 1500, narrow, seed=number, scale=None if number else 0.3)
        check_frozen_adam("triton", 1500, None, seed=9, spoiled=True)
    if sys.argv[1] == "lion":
        for number, dtypes in enumerate(DTYPES):
            check_lion("triton", 1500, dtypes, seed=7 + number, scale=None if number % 2 else 0.3)
        check_lion("triton", 1500, DTYPES[0], seed=9, spoiled=True)
