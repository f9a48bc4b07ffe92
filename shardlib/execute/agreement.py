"""Agreement of all ranks on the form of their results, checked by summing a few numbers.

Ranks combine their results position by position, so results of different forms would be combined wrongly or deadlock.
The numbers join a sum that the ranks make anyway, and show every rank whether forms differ; only then do the ranks exchange
the forms themselves.
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
    """The form of one rank's results.

    Attributes:
        form: a description of the form; None on a rank without results, such as one that does not compute the loss.
        faults: errors in this rank's results alone, each with its remedy.
    """

    form: str | None
    faults: tuple[str, ...] = ()

    def numbers(self) -> list[float]:
        """The numbers to sum over ranks: 1 for faults, 1 for results, and two words of the form's hash with their squares."""
        if self.form is None:
            return [float(bool(self.faults)), 0, 0, 0, 0, 0]
        digest = int.from_bytes(hashlib.blake2b(self.form.encode(), digest_size=2 * _WORD // 8).digest(), "big")
        first, second = digest >> _WORD, digest % (1 << _WORD)
        return [float(bool(self.faults)), 1, first, first**2, second, second**2]

    def refuse(self, mesh: Mesh, remedy: str) -> NoReturn:
        """Raise the same error on every rank, with all ranks' faults or forms. Collective: all ranks call it."""
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
    """Whether all ranks have one form and no fault, given the sums of their `Agreement.numbers`.

    n numbers are equal if and only if n times the sum of their squares is the square of their sum.
    """
    faults, ranks, *words = map(int, sums)
    return not faults and all(ranks * words[i + 1] == words[i] ** 2 for i in (0, 2))
