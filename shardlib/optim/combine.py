"""`chain`: several gradient transformations as one."""

from __future__ import annotations

from dataclasses import replace

from shardlib.optim.base import GradientTransformation, Locality, scaled
from shardlib.optim.shards import WHOLE, Shards
from shardlib.tree import Tree


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations in turn, each to the updates the one before it returned.

    The state is a tuple of their states. Unlike transforms of the plan, these do not commute.

    Raises:
        ValueError: no transformations; two that reduce gradients themselves; `zero_one_adam`, and not last.
    """
    if not transformations:
        raise ValueError("chain() needs at least one gradient transformation")
    *first, last = transformations

    def init(params: Tree, shards: Shards = WHOLE) -> Tree:
        return tuple(tx.init(params, shards=shards) for tx in transformations)

    def update(updates, state, params, *, shards):
        new_state = []
        for tx, tx_state in zip(transformations, state, strict=True):
            updates, tx_state = tx.update(updates, tx_state, params, shards=shards)
            new_state.append(tx_state)
        return updates, tuple(new_state)

    def apply(params, updates, state, scale, shards, copies):
        new_state = []
        for tx, tx_state in zip(first, state, strict=False):
            if tx.factor is not None:
                # One number for all elements: left to the last transformation, which reads every element anyway.
                factor = tx.factor(updates, scale, shards)
                scale = factor if scale is None else scale * factor
            else:
                updates, tx_state = tx.update(scaled(updates, scale), tx_state, params, shards=shards)
                scale = None
            new_state.append(tx_state)
        new_state.append(last.apply(params, updates, state[-1], scale=scale, shards=shards, copies=copies))
        return tuple(new_state)

    owners = [(place, tx.owns) for place, tx in enumerate(transformations) if tx.owns is not None]
    if len(owners) > 1:
        names = " and ".join(owned.name for _, owned in owners)
        raise ValueError(f"{names} in one chain: each reduces gradients itself; keep one")
    owns = None
    if owners:
        place, owned = owners[0]
        if owned.last and place + 1 < len(transformations):
            raise ValueError(
                f"{owned.name} brings ranks together that went apart, and what follows it in the chain would change by how "
                "much: put it last"
            )
        owns = replace(owned, unreduced=lambda state: owned.unreduced(state[place]))

    localities = {tx.locality for tx in transformations}
    if None in localities:
        return GradientTransformation(init, lambda u, s, p: update(u, s, p, shards=WHOLE))
    # What any of them needs when its state is made; all are given the same shards later.
    locality = next(kind for kind in (Locality.LEAF, Locality.GLOBAL, Locality.ELEMENTWISE) if kind in localities)
    return GradientTransformation(init, update, locality, apply=apply, owns=owns)
