"""`Moved`, which stands for a state that lies elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from shardlib.errors import DonatedStateError, TreeError
from shardlib.optim.moving.skeleton import StateSkeleton


class Parked(NamedTuple):
    """Folders that a state was moved to, and by which move.

    Attributes:
        move: a number that no other move has; the same on all ranks.
    """

    folders: tuple[str | Path, ...]
    move: str


class Moved:
    """A state that lies in host memory or on disk. `to_device` brings it back; until then nothing else can be done with it.

    Attributes:
        skeleton: the state, in which views stand for tensors.
        where: "host memory", or the folders.
    """

    def __init__(self, skeleton: StateSkeleton, where: str, held: dict[str, torch.Tensor] | Parked) -> None:
        self.skeleton, self.where = skeleton, where
        self._held: dict[str, torch.Tensor] | Parked | None = held

    def holding(self) -> dict[str, torch.Tensor] | Parked:
        """What holds the state: path -> bytes of each storage, or files.

        Raises:
            DonatedStateError: another state has taken it over.
        """
        if self._held is None:
            raise DonatedStateError(f"{self.skeleton.what} was moved on from {self.where}; use what that call returned")
        return self._held

    def take(self) -> None:
        """Mark this as used up, because another state has taken over what it held."""
        self._held = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"Moved has no attribute {name!r}")
        self._refuse(name)

    def __reduce__(self) -> NoReturn:
        self._refuse("a copy of it, or a pickle")

    def __getitem__(self, key: Any) -> Any:
        self._refuse(f"[{key!r}]")

    def _refuse(self, use: str) -> NoReturn:
        raise TreeError(
            f"{self.skeleton.what} lies in {self.where}: bring it back with sl.to_device before it is used ({use})"
        )

    def __repr__(self) -> str:
        return f"Moved({self.skeleton.what}, in {self.where})"
