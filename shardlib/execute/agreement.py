"""Whether the results of all ranks have one form, told by a few numbers that the ranks sum.

Ranks' results are paired by their places: what differs in form would be paired wrongly, or wait for ever. Summing
numbers tells every rank that something differs, along with what is summed anyhow; only then is it asked what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardlib.collectives import primitives
from shardlib.errors import LossError, listing
from shardlib.mesh.mesh import Mesh

NUMBERS = 6
_WORD = 20  # bits: sums of squares over up to 8,192 ranks are exact in float64


@dataclass(frozen=True)
class Agreement:
    """What one rank tells of its results.

    Attributes:
        form: what they look like; None on a rank that has none, as one without a pipeline's last stage.
        faults: what is wrong with them, whatever the other ranks' are, each with its remedy.
    """

    form: str | None
    faults: tuple[str, ...] = ()

    def numbers(self) -> list[float]:
        """What the ranks sum: whether there are faults, how many have results, and two words of a hash with squares."""
        if self.form is None:
            return [float(bool(self.faults)), 0, 0, 0, 0, 0]
        digest = int.from_bytes(hashlib.blake2b(self.form.encode(), digest_size=2 * _WORD // 8).digest(), "big")
        first, second = digest >> _WORD, digest % (1 << _WORD)
        return [float(bool(self.faults)), 1, first, first**2, second, second**2]

    def refuse(self, mesh: Mesh, remedy: str) -> NoReturn:
        """Raise on every rank alike, with what each says. All ranks call it."""
        everyone = primitives.all_gather_object(mesh, list(mesh.shape), (mesh.rank, self.form, self.faults))
        problems = [f"rank {rank}: {fault}" for rank, _, faults in everyone for fault in faults]
        if not problems:
            forms: dict[str, list[int]] = {}
            for rank, form, _ in everyone:
                if form is not None:
                    forms.setdefault(form, []).append(rank)
            problems = [f"rank {', '.join(map(str, ranks))}: {form}" for form, ranks in forms.items()]
            raise LossError(f"the ranks' results differ in form:\n{listing(problems)}\n{remedy}")
        raise LossError(f"results that cannot be put together:\n{listing(problems)}")


def agree(sums: Sequence[float]) -> bool:
    """Whether, by the sums of all ranks' numbers, there is one form and no fault.

    n numbers are equal where n times the sum of their squares is the square of their sum.
    """
    faults, ranks, *words = map(int, sums)
    return not faults and all(ranks * words[i + 1] == words[i] ** 2 for i in (0, 2))
