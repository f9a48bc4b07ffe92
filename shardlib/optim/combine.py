"""`chain` and `named_chain`: several gradient transformations as one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shardlib.optim.base import GradientTransformation, scaled
from shardlib.optim.separate import apart
from shardlib.optim.shards import WHOLE, Locality, Shards, widest
from shardlib.optim.wrapping import require_transformations
from shardlib.tree import Tree, leaves_of


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
    return _in_turn("chain", transformations, tuple, tuple)


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
    return _in_turn(
        "named_chain",
        [tx for _, tx in transformations],
        lambda states: dict(zip(names, states, strict=True)),
        lambda state: tuple(state[name] for name in names),
    )


def _in_turn(
    what: str,
    transformations: Sequence[GradientTransformation],
    pack: Callable[[Iterable[Tree]], Tree],
    unpack: Callable[[Tree], tuple[Tree, ...]],
) -> GradientTransformation:
    """The chain of ``transformations``. ``pack`` makes one state of their states, and ``unpack`` is its inverse."""
    if not transformations:
        raise ValueError(f"{what}() needs at least one gradient transformation")
    require_transformations(what, *transformations)
    *first, last = transformations
    for tx in first:
        if tx.last is not None:
            raise ValueError(f"{tx.last}: put it last")

    def init(params: Tree, shards: Shards = WHOLE) -> Tree:
        return pack([tx.init(params, shards=shards) for tx in transformations])

    def update(updates, state, params, *, shards):
        new_state = []
        for tx, tx_state in zip(transformations, unpack(state), strict=True):
            updates, tx_state = tx.update(updates, tx_state, params, shards=shards)
            new_state.append(tx_state)
        return updates, pack(new_state)

    # Clips that come first make no difference between elements, so what follows may run on some parameters at a time.
    factors = list(itertools.takewhile(lambda tx: tx.factor is not None, first))
    rest = transformations[len(factors) :]
    beyond = any(tx.locality in (None, Locality.GLOBAL) or tx.rest is not tx.locality for tx in rest)
    if beyond:
        factors = []

    def lead(updates, scale, shards):
        for tx in factors:
            assert tx.factor is not None
            factor = tx.factor(updates, scale, shards)
            scale = factor if scale is None else scale * factor
        return scale

    def apply(params, updates, state, scale, shards, copies, old=None):
        if old is not None:
            before = unpack(old[1])
            after = last.body(
                params,
                updates,
                unpack(state)[-1],
                scale=scale,
                shards=shards,
                copies=copies,
                old=(old[0], before[-1]),
            )
            return pack([*before[:-1], after])
        states, new_state = unpack(state), list(unpack(state)[: len(factors)])
        for tx, tx_state in zip(first[len(factors) :], states[len(factors) :], strict=False):
            if tx.factor is not None:
                # One factor for all elements is left to the last transformation, which reads every element anyway.
                factor = tx.factor(updates, scale, shards)
                scale = factor if scale is None else scale * factor
            else:
                updates, tx_state = tx.update(scaled(updates, scale), tx_state, params, shards=shards)
                tx_state = apart(tx_state, [*leaves_of(updates), *leaves_of(params)])  # which the last one writes to
                scale = None
            new_state.append(tx_state)
        new_state.append(last.apply(params, updates, states[-1], scale=scale, shards=shards, copies=copies))
        return pack(new_state)

    owners = [(index, tx.owns) for index, tx in enumerate(transformations) if tx.owns is not None]
    if len(owners) > 1:
        names = " and ".join(owned.name for _, owned in owners)
        raise ValueError(f"{names} in one chain: each reduces gradients itself; keep one")
    owns = None
    if owners:
        index, owned = owners[0]
        owns = replace(owned, unreduced=lambda state: owned.unreduced(unpack(state)[index]))

    locality = widest(*(tx.locality for tx in transformations))
    if locality is None:
        return GradientTransformation(init, lambda u, s, p: update(u, s, p, shards=WHOLE), last=last.last)

    def sends(shards: Shards) -> Mapping[str, int]:
        return added(tx.sends(shards) for tx in transformations)

    return GradientTransformation(
        init,
        update,
        locality,
        apply=apply,
        owns=owns,
        sends=sends,
        last=last.last,
        lead=lead if factors else None,
        rest=Locality.GLOBAL if beyond else widest(*(tx.locality for tx in rest)),
        reads_old=last.reads_old and len(rest) == 1 and not beyond,
    )


def added(payloads: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several payloads by axis."""
    total: dict[str, int] = {}
    for payload in payloads:
        for axis, sent in payload.items():
            total[axis] = total.get(axis, 0) + sent
    return total
