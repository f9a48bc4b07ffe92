"""Operations that are differentiated once, in backward, and refuse every other derivative by their name."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch

from shardlib.common._compat import transformed
from shardlib.errors import LossError


class Once(torch.autograd.Function):
    """An autograd.Function without a second derivative, forward mode or `torch.func`: torch's own errors do not name it.

    Attributes:
        what: the operation, as a user calls it.
        remedy: what has those derivatives.
    """

    what: ClassVar[str]
    remedy: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        backward = cls.backward

        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise cls._refusal()
            return backward(ctx, *gradients)

        cls.backward = staticmethod(once)  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if transformed():
            raise cls._refusal()
        return super().apply(*args)

    @classmethod
    def _refusal(cls) -> LossError:
        return LossError(
            f"{cls.what} is differentiated once, in backward: it has no second derivative, no forward mode and no torch.func. "
            f"{cls.remedy}"
        )
