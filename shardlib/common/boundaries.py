"""Boundaries that `torch.func`, forward mode and `torch.compile` do not cross, and refusals that name them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from shardlib.common._compat import outside_of_graphs, transformed
from shardlib.errors import HandleError, LossError

F = TypeVar("F", bound=Callable[..., Any])


class DifferentiatedOnce(torch.autograd.Function):
    """A Function without forward mode, whose ``backward``, if it has one, applies another, which has none.

    torch's own errors would name neither the operation nor a remedy.

    Attributes:
        what: the operation, as a user calls it.
        remedy: what has the derivatives that it lacks.
    """

    what: ClassVar[str]
    remedy: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()

        def refuse(ctx: Any, *_: Any) -> NoReturn:
            raise LossError(
                f"{cls.what} is differentiated once, in backward: it has no second derivative and no forward mode. "
                f"{cls.remedy}"
            )

        inherited = cls.backward is torch.autograd.Function.backward
        for name in ("backward", "jvp") if inherited else ("jvp",):
            setattr(cls, name, staticmethod(refuse))


def untransformed(what: str, around: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """A decorator of a function that takes a whole step, and that no transform of torch may contain.

    It communicates, and computes gradients itself. So torch.func and forward mode would see a constant in its result, and a
    compiler would trace the library.

    Args:
        what: the function, as a user calls it.
        around: what is called in its place inside torch.func and forward mode, if it has a form that these can differentiate.

    Raises:
        HandleError: in a call inside a transform.
    """

    def decorated(fn: F) -> F:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                refuse_compiled(f"{what} is inside of a compiled function")
            if not transformed():
                return fn(*args, **kwargs)
            if around is not None:
                return around(*args, **kwargs)
            raise HandleError(
                f"torch.func, or forward mode, around {what}, to which its result is a constant. Take sl.value_and_grad, or "
                "an eval step of one batch"
            )

        return call  # type: ignore[return-value]

    return decorated


@outside_of_graphs
def refuse_compiled(what: str) -> NoReturn:
    """Raise where torch.compile traces the library. Call it while `torch.compiler.is_dynamo_compiling`."""
    raise HandleError(
        f"{what}, and torch.compile would trace shardlib itself. Compile the functions of blocks: "
        "sl.block(torch.compile(fn))"
    )
