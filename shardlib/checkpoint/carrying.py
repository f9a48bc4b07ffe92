"""`carry`: a state's optimizer, masters, residuals and counters under another plan or optimizer, without files.

Tensors are found by name, as in a checkpoint, on the rank that holds them: a leaf's range on a rank depends on the mesh and
the stage, not on the bucket that it is in. What lies on other ranks is left to checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardlib.checkpoint.fragments import MASTERS, PARAMS, Fragment, needed_fragments, source_of
from shardlib.checkpoint.replicated import replicated_leaves
from shardlib.checkpoint.residuals import kept_fragments
from shardlib.checkpoint.restore import filled, unmatched
from shardlib.checkpoint.save import require_state
from shardlib.checkpoint.trees import CheckpointTrees, fillable, trees_of
from shardlib.errors import IllegalComposition, TreeError, listing
from shardlib.optim.train_state import TrainState
from shardlib.tree import matches

_REMEDY = "save it and restore it into the new state, which reads any layout"
_LACKING = "in the new state alone"
_Copies = list[tuple[torch.Tensor, torch.Tensor]]


def carry(state: TrainState, fresh: TrainState, *, anew: Sequence[str] = (), donate: bool = True) -> TrainState:
    """Go on from ``state`` in the layout of ``fresh``, which another train step on the same mesh was made with. Collective.

    The parameters are those of ``fresh``; all else is that of ``state``: step, key, loss scale, buffers, the optimizer's
    state and the residuals of compressed exchanges. fp32 masters are too, where the parameters are what they round to. So
    the number of micro-batches, the optimizer, and what is frozen may change in mid-run::

        fresh, train_step = sl.make_train_step(loss_fn, state.params, tx)
        state = sl.checkpoint.carry(state, fresh)

    Args:
        fresh: from `make_train_step`; its memory is reused.
        anew: globs over names of tensors (``"opt/*/head"``; see ``shardlib checkpoint show``) that begin anew: they stay as
            ``fresh`` has them, or are left behind where it has none.
        donate: whether ``state`` is used up.

    Raises:
        TypeError: one of the two is no state.
        TreeError: tensors that one state has and the other has not, in other shapes or on other ranks; lists all of them. Or
            another mesh.
        IllegalComposition: states on disk, or in 8 bits.

    >>> loss_fn = lambda params, batch: (batch @ params["w"]).square().mean()
    >>> state, train_step = sl.make_train_step(loss_fn, {"w": torch.ones(4, 4)}, sl.optim.adamw(1e-3))
    >>> state, metrics = train_step(state, torch.ones(2, 4))
    >>> fresh, train_step = sl.make_train_step(loss_fn, state.params, sl.optim.adamw(1e-4))
    >>> sl.checkpoint.carry(state, fresh).step
    1
    """
    mesh, settled = require_state("carry", fresh).params.mesh, require_state("carry", state).settled()
    if settled.params.mesh.shape != mesh.shape:
        raise TreeError(f"carry: the state is on {settled.params.mesh}, and the new one on {mesh}: {_REMEDY}")
    given, trees = trees_of(settled), fillable(fresh)
    if given.packed or trees.packed:
        raise IllegalComposition(f"carry: states on disk, or in few bits, cannot be carried over: {_REMEDY}")
    with torch.no_grad():
        for into, values in _matched(given, trees, anew):
            into.copy_(values)
    params = fresh.params.lent() if fresh.params.shares(settled.params) else fresh.params
    made = filled(trees, fresh, settled.step, settled.scale, settled.rng, params)
    made = made.settled()  # masters follow parameters
    if donate:
        state.take("carry", "the state that it returned, or pass donate=False to keep this one")
    return made


def _matched(given: CheckpointTrees, trees: CheckpointTrees, anew: Sequence[str]) -> _Copies:
    """What is to be copied: tensors of ``trees``, and those of ``given`` of the same names. Collective."""
    held: dict[str, list[Fragment]] = {}
    for fragment in _sharded(given):
        held.setdefault(fragment.name, []).append(fragment)
    wholes = dict(replicated_leaves(given))
    copies, problems, wanted = _Copies(), dict[str, str](), set[str]()

    def note(name: str, source: str, pieces: _Copies, problem: str) -> None:
        wanted.add(source)
        if problem:
            problems[name] = f"{name}: {problem}"
        elif not matches(name, anew):
            copies.extend(pieces)

    for fragment in _sharded(trees):
        if not fragment.name.startswith(PARAMS):
            source = source_of(fragment.name, held)
            note(fragment.name, source, *_pieces(fragment, held.get(source, [])))
    for name, leaf in replicated_leaves(trees):
        there = wholes.get(name)
        if there is None:
            note(name, name, [], _LACKING)
        else:
            alike = there.shape == leaf.shape
            note(name, name, [(leaf, there)], "" if alike else _other_shapes(tuple(there.shape), tuple(leaf.shape)))
    # Masters may be left behind: their values are those of the parameters that are given.
    left = {name for name in (*held, *wholes) if name not in wanted and not name.startswith((PARAMS, MASTERS))}
    found = unmatched(trees.params.mesh, problems, left, "in the old state alone")
    if lines := [line for name, line in found.items() if not matches(name, anew)]:
        raise TreeError(
            f"carry: the old state does not fit the new train step:\n{listing(lines)}\nName in anew= what begins anew or is "
            f"left behind (['opt/inner/*']: the optimizer's); of what is on other ranks, {_REMEDY}"
        )
    return copies


def _sharded(trees: CheckpointTrees) -> Iterator[Fragment]:
    """What is sharded, as views."""
    yield from needed_fragments(trees)
    yield from kept_fragments(trees)


def _pieces(into: Fragment, held: Sequence[Fragment]) -> tuple[_Copies, str]:
    """The views to copy so that ``into`` is what ``held`` has of its tensor; and what is wrong, or ""."""
    if not held:
        return [], _LACKING
    if held[0].window != into.window:
        return [], _other_shapes(_shape(held[0]), _shape(into))
    pieces, missing = [], into.data.numel()
    for each in held:
        start, stop = max(into.start, each.start), min(into.stop, each.stop)
        if start < stop:
            ours, theirs = (one.part(start - one.start, stop - one.start).data for one in (into, each))
            pieces.append((ours, theirs))
            missing -= stop - start
    return (pieces, "") if missing <= 0 else ([], "on other ranks in the old state")


def _other_shapes(old: object, new: object) -> str:
    return f"{old} in the old state, {new} in the new one"


def _shape(fragment: Fragment) -> str:
    shape, _, sizes = fragment.window
    return f"{shape}" if shape == sizes else f"{sizes} of {shape}"
