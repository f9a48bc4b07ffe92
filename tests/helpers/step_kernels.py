"""Comparison of the kernels of optimizers' steps with their references.

As a script, `python step_kernels.py adamw`, it holds the Triton kernels to that under Triton's interpreter.
"""

import contextlib
import math
import sys

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


def check_adamw(
    using: str,
    elements: int,
    dtypes: tuple,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
    elsewhere: bool = False,
) -> None:
    """Parameter, moments and copy against the reference, bit by bit; ``elsewhere``: in memory of their own."""
    kept, read, narrow = dtypes
    start = [buffer(elements, kept, seed + k, offset) for k in range(3)]
    start[2].abs_()
    before, grad = [tensor.clone() for tensor in start], buffer(elements, read, seed + 3, offset, spoiled)
    results = []
    for name in ("reference", using):
        old = adamw.AdamWOld(*start) if elsewhere and name == using else None
        param, mu, nu = (buffer(elements, kept, 0, offset).copy_(torch.zeros(()) if old else x) for x in start)
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        with flushed(using) if name == "reference" else contextlib.nullcontext():
            adamw.adamw_(
                param, grad, mu, nu, adamw.factors_at(3.0, 0.01, **ADAM), copy=copy, using=name, old=old,
                scale=None if scale is None else torch.tensor(scale, dtype=F64),
            )  # fmt: skip
        results.append([param, mu, nu] + ([] if copy is None else [copy]))
    for wanted, found in zip(*results):
        same(wanted, found, using)
    assert all(map(torch.equal, start, before))


def check_adamw8(
    using: str,
    elements: int,
    dtypes: tuple,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
) -> None:
    """Three steps: parameter, codes, scales and copy against the reference, bit by bit."""
    kept, read, narrow = dtypes
    start = buffer(elements, kept, seed, offset)
    mu, nu = (buffer(elements, F32, seed + k, 0) for k in (1, 2))
    coded = [*adamw8.SIGNED.encode(mu), *adamw8.UNSIGNED.encode(nu.abs())]
    results = []
    for name in ("reference", using):
        param, states = buffer(elements, kept, 0, offset).copy_(start), [tensor.clone() for tensor in coded]
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        with flushed(using) if name == "reference" else contextlib.nullcontext():
            for step in range(1, 4):
                adamw8.adamw8_(
                    param, buffer(elements, read, seed + 2 + step, offset, spoiled and step == 2), *states,
                    adamw.factors_at(float(step), 0.01, **ADAM), copy=copy, using=name,
                    scale=None if scale is None else torch.tensor(scale, dtype=F64),
                )  # fmt: skip
        results.append([param, *states] + ([] if copy is None else [copy]))
    for wanted, found in zip(*results):
        same(wanted, found, using)


def check_direction(
    using: str,
    elements: int,
    count: float | None,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
) -> None:
    """Adam's direction and both moments against the reference, bit by bit."""
    start = [buffer(elements, F32, seed + k, offset, spoiled and k < 2) for k in range(4)]
    start[3].abs_()
    results = []
    for name in ("reference", using):
        param, grad, mu, nu = (buffer(elements, F32, 0, offset).copy_(tensor) for tensor in start)
        with flushed(using) if name == "reference" else contextlib.nullcontext():
            adamw.adam_direction_(
                param, grad, mu, nu, adamw.direction_at(count, **ADAM), using=name,
                scale=None if scale is None else torch.tensor(scale, dtype=F64),
            )  # fmt: skip
        results.append([grad, mu, nu])
    for wanted, found in zip(*results):
        same(wanted, found, using)


def check_lion(
    using: str,
    elements: int,
    dtypes: tuple,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
    elsewhere: bool = False,
) -> None:
    """Parameter, momentum and copy against the reference, bit by bit; ``elsewhere``: in memory of their own."""
    kept, read, narrow = dtypes
    start = [buffer(elements, kept, seed + k, offset) for k in range(2)]
    before, grad = [tensor.clone() for tensor in start], buffer(elements, read, seed + 2, offset, spoiled)
    results = []
    for name in ("reference", using):
        old = lion.LionOld(*start) if elsewhere and name == using else None
        param, mu = (buffer(elements, kept, 0, offset).copy_(torch.zeros(()) if old else x) for x in start)
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        with flushed(using) if name == "reference" else contextlib.nullcontext():
            lion.lion_(
                param, grad, mu, lion.factors_at(0.01, b1=0.9, b2=0.99, weight_decay=0.1), copy=copy, old=old,
                scale=None if scale is None else torch.tensor(scale, dtype=F64), using=name,
            )  # fmt: skip
        results.append([param, mu] + ([] if copy is None else [copy]))
    for wanted, found in zip(*results):
        same(wanted, found, using)
    assert all(map(torch.equal, start, before))


def check_frozen_adam(
    using: str,
    elements: int,
    narrow: torch.dtype | None,
    seed: int,
    offset: int = 0,
    scale: float | None = 0.3,
    spoiled: bool = False,
) -> None:
    """Checks all steps against the reference, bit by bit."""
    start = [buffer(elements, F32, seed + k, offset, spoiled and k != 2) for k in range(5)]
    start[2].abs_()
    results = []
    for name in ("reference", using):
        param, mu, nu, grad, moved = (buffer(elements, F32, 0, offset).copy_(tensor) for tensor in start)
        copy = None if narrow is None else buffer(elements, narrow, 0, offset)
        own, lr = mu.clone(), torch.tensor(0.01, dtype=F64)
        factor = None if scale is None else torch.tensor(scale, dtype=F64)
        with flushed(using) if name == "reference" else contextlib.nullcontext():
            frozen_adam.frozen_step_(param, mu, nu, lr=lr, eps=1e-8, weight_decay=0.1, copy=copy, using=name)
            sent = grad.clone()
            frozen_adam.local_momentum_(sent, mu, b1=0.9, scale=factor, using=name)
            frozen_adam.local_step_(grad, own, nu, moved, lr=lr, b1=0.9, eps=1e-8, scale=factor, using=name)
            came, before, fresh = param.clone(), grad.clone(), moved.abs()
            spread = torch.tensor(1.3, dtype=F64)
            frozen_adam.fresh_step_(came, before, nu, fresh, spread=spread, b1=0.9, b2=0.999, eps=1e-8, using=name)
        results.append([param, mu, own, moved, sent, came, before, fresh] + ([] if copy is None else [copy]))
    for wanted, found in zip(*results):
        same(wanted, found, using)


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
