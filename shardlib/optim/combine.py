"""`chain` and `named_chain`: several gradient transformations as one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.errors import IllegalComposition
from shardlib.optim.base import GradientTransformation, Owned, scaled
from shardlib.optim.code import coded
from shardlib.optim.separate import separate_memory
from shardlib.optim.shards import WHOLE, Locality, Shards, widest
from shardlib.tree import Tree, leaves_of

# Checks of the gradient transformations that are passed to other functions.


def require_transformations(what: str, *given: Any) -> None:
    """Refuse arguments of ``what`` that are not gradient transformations.

    Raises:
        TypeError: names the argument, and what to pass instead.
    """
    for tx in given:
        if not isinstance(tx, GradientTransformation):
            raise TypeError(f"{what} takes gradient transformations, such as sl.optim.adamw(3e-4), not {_instead(tx)}")


def _instead(tx: Any) -> str:
    """A description of ``tx``, and what to pass instead."""
    if tx is None:
        return "None; give one"
    if isinstance(tx, (list, tuple)) and any(isinstance(item, GradientTransformation) for item in tx):
        return f"a {type(tx).__name__} of them; give them one by one to sl.optim.chain, or sl.optim.named_chain"
    kind = tx if isinstance(tx, type) else type(tx)
    if issubclass(kind, torch.optim.Optimizer):
        equivalent = f" or sl.optim.{kind.__name__.lower()}(...)" if kind.__name__ in _EQUIVALENT else ""
        holds = "" if tx is kind else ", which holds parameters of its own"
        return (
            f"torch's {kind.__name__}{holds}; give sl.optim.from_torch(torch.optim.{kind.__name__}, lr=...){equivalent}"
        )
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return (
            f"{kind.__name__} of {kind.__module__}, whose arrays are not torch's; sl.optim has optax's by their names, and "
            "GradientTransformation(init, update, locality) takes functions of torch's tensors"
        )
    if callable(tx) and not isinstance(tx, type):
        name = getattr(tx, "__name__", repr(tx))
        return (
            f"the function {name}; call it if it makes one, {name}(...), or give GradientTransformation(init, update)"
        )
    return f"{tx!r}"


# Optimizers of torch that sl.optim has too.
_EQUIVALENT = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor", "Muon")


def require_no_axis(what: str, *inner: GradientTransformation) -> None:
    """Refuse transformations that reduce gradients themselves as arguments of ``what``.

    The train step must know at which steps they do so, which it cannot see inside another transformation.

    Raises:
        TypeError: an argument that is not a gradient transformation.
        IllegalComposition: one that reduces gradients itself.
    """
    require_transformations(what, *inner)
    for tx in inner:
        if tx.owns is not None:
            raise IllegalComposition(
                f"{what} around {tx.owns.name}, which reduces gradients over axis {tx.owns.axis!r} itself; use it alone"
            )


@coded
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations in turn, each to the updates that the previous one returned.

    The state is the tuple of their states. Unlike the transforms of a plan, gradient transformations do not commute.

    Raises:
        TypeError: an argument that is not a gradient transformation.
        ValueError: no transformations; two that reduce gradients themselves; `zero_one_adam` or `lookahead` in any but
            the last position.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.sgd(1.0))
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.3000,  0.4000])
    """
    return OptimizerChain("chain", transformations, tuple, tuple)


@coded
def named_chain(*transformations: tuple[str, GradientTransformation]) -> GradientTransformation:
    """A `chain` of ``(name, transformation)`` whose state is a dictionary by name.

    Checkpoints then store the states by name, so that transformations without a state may be added and removed.

    Raises:
        TypeError: an argument that is not a pair of a name and a gradient transformation.
        ValueError: no transformations, a name twice, or as `chain`.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.named_chain(("clip", sl.optim.clip_by_value(0.7)), ("step", sl.optim.sgd(1.0)))
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.6000,  0.7000])
    """
    for pair in transformations:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"named_chain() takes pairs of a name and a transformation, not {pair!r}")
    names = [name for name, _ in transformations]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(
            f"named_chain() has {', '.join(map(repr, twice))} more than once; name each of them differently"
        )
    return OptimizerChain(
        "named_chain",
        [tx for _, tx in transformations],
        lambda states: dict(zip(names, states, strict=True)),
        lambda state: tuple(state[name] for name in names),
    )


class OptimizerChain(GradientTransformation):
    """The chain of ``transformations``. ``pack`` makes one state of their states, and ``unpack`` is its inverse."""

    transformations: tuple[GradientTransformation, ...]

    def __init__(
        self,
        what: str,
        transformations: Sequence[GradientTransformation],
        pack: Callable[[Iterable[Tree]], Tree],
        unpack: Callable[[Tree], tuple[Tree, ...]],
    ) -> None:
        if not transformations:
            raise ValueError(f"{what}() needs at least one gradient transformation")
        require_transformations(what, *transformations)
        self.transformations, self._pack, self._unpack = tuple(transformations), pack, unpack
        *first, last = transformations
        for tx in first:
            if tx.last is not None:
                raise ValueError(f"{tx.last}: put it last")
        # Clips that come first make no difference between elements, so what follows may run on some parameters at a time.
        clips = tuple(itertools.takewhile(lambda tx: tx.factor is not None, first))
        rest = transformations[len(clips) :]
        beyond = any(tx.locality in (None, Locality.GLOBAL) or tx.rest is not tx.locality for tx in rest)
        self._clips = () if beyond else clips
        locality = widest(*(tx.locality for tx in transformations))
        super().__init__(
            self._init_each,
            self._update_each if locality else lambda u, s, p: self._update_each(u, s, p, shards=WHOLE),
            locality,
            apply=self._apply_each if locality else None,
            owns=self._owner(),
            sends=(lambda shards: added(tx.sends(shards) for tx in self.transformations)) if locality else None,
            last=last.last,
            lead=self._lead_clips if self._clips else None,
            rest=locality and (Locality.GLOBAL if beyond else widest(*(tx.locality for tx in rest))),
            reads_old=last.reads_old and len(rest) == 1 and not beyond,
        )

    def _owner(self) -> Owned | None:
        """The claim of the one that reduces gradients itself."""
        owners = [(index, tx.owns) for index, tx in enumerate(self.transformations) if tx.owns is not None]
        if len(owners) > 1:
            names = " and ".join(owned.name for _, owned in owners)
            raise ValueError(f"{names} in one chain: each reduces gradients itself; keep one")
        if not owners:
            return None
        index, owned = owners[0]
        return replace(owned, unreduced=lambda state: owned.unreduced(self._unpack(state)[index]))

    def _init_each(self, params: Tree, shards: Shards = WHOLE) -> Tree:
        return self._pack([tx.init(params, shards=shards) for tx in self.transformations])

    def _update_each(self, updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        after = []
        for tx, tx_state in zip(self.transformations, self._unpack(state), strict=True):
            updates, tx_state = tx.update(updates, tx_state, params, shards=shards)
            after.append(tx_state)
        return updates, self._pack(after)

    def _lead_clips(self, updates: Tree, scale: torch.Tensor | None, shards: Shards) -> torch.Tensor | None:
        for tx in self._clips:
            scale = _scaled_by(tx, updates, scale, shards)
        return scale

    def _apply_each(
        self,
        params: Tree,
        updates: Tree,
        state: Tree,
        scale: torch.Tensor | None,
        shards: Shards,
        copies: Tree,
        old: tuple[Tree, Tree] | None = None,
    ) -> Tree:
        *first, last = self.transformations
        *states, last_state = self._unpack(state)
        options: dict[str, Any] = {"shards": shards, "copies": copies}
        if old is not None:
            *states, before = self._unpack(old[1])
            given = (params, updates, last_state)
            return self._pack([*states, last.body(*given, scale=scale, **options, old=(old[0], before))])
        after = states[: len(self._clips)]
        for tx, tx_state in zip(first[len(after) :], states[len(after) :], strict=True):
            if tx.factor is not None:
                # One factor for all elements is left to the last transformation, which reads every element anyway.
                scale = _scaled_by(tx, updates, scale, shards)
            else:
                updates, tx_state = tx.update(scaled(updates, scale), tx_state, params, shards=shards)
                written = [*leaves_of(updates), *leaves_of(params)]  # by the last one
                tx_state = separate_memory(tx_state, written)
                scale = None
            after.append(tx_state)
        return self._pack([*after, last.apply(params, updates, last_state, scale=scale, **options)])


def _scaled_by(
    tx: GradientTransformation, updates: Tree, scale: torch.Tensor | None, shards: Shards
) -> torch.Tensor | None:
    """``scale`` times the factor of a transformation that multiplies all elements by one."""
    assert tx.factor is not None
    factor = tx.factor(updates, scale, shards)
    return factor if scale is None else scale * factor


def added(payloads: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several payloads by axis."""
    total: dict[str, int] = {}
    for payload in payloads:
        for axis, sent in payload.items():
            total[axis] = total.get(axis, 0) + sent
    return total
