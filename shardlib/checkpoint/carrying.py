"""A state's optimizer, masters, residuals and counters under another plan or optimizer, without files.

Fragments are found by name, as in a checkpoint, on the rank that holds them: a leaf's range on a rank depends on the mesh and
the stage, not on the bucket that it is in. What lies on other ranks is left to checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardlib.checkpoint.common import common_leaves
from shardlib.checkpoint.fragments import BUFFERS, MASTERS, PARAMS, Fragment, needed_fragments, source_of, whole
from shardlib.checkpoint.packed import Parts, fillable, outlined, with_numbers_of
from shardlib.checkpoint.residuals import kept_fragments
from shardlib.collectives import primitives
from shardlib.errors import IllegalComposition, TreeError, listing
from shardlib.optim.train_state import TrainState, rescaled
from shardlib.tree import matches

_REMEDY = (
    "save it (sl.checkpoint.save) and restore it into the new state (sl.checkpoint.restore), which reads any layout"
)


def carry(old: TrainState, fresh: TrainState, anew: Sequence[str], *, donate: bool) -> TrainState:
    """``fresh``, filled in place with all of ``old`` but its parameters and buffers. Collective.

    Masters follow the parameters of ``fresh``.

    Args:
        anew: globs over names of tensors that stay as ``fresh`` has them.
        donate: whether ``old`` is used up.

    Raises:
        TreeError: tensors that one state has and the other has not, in other shapes or on other ranks; lists all of them. Or
            another mesh.
        IllegalComposition: states on disk, or in 8 bits.
    """
    mesh = fresh.params.mesh
    if old.params.mesh.shape != mesh.shape:
        raise TreeError(f"state= is of {old.params.mesh}, and the parameters are on {mesh}: {_REMEDY}")
    old = old.settled()
    given, parts = outlined(old), fillable(fresh)
    if given.packed or parts.packed:
        raise IllegalComposition(f"state= of states on disk, or in few bits, cannot be carried over: {_REMEDY}")
    held: dict[str, list[Fragment]] = {}
    for fragment in _fragments(given):
        held.setdefault(fragment.name, []).append(fragment)
    copies, found, wanted = [], {}, set[str]()
    for fragment in _fragments(parts):
        if fragment.name.startswith(PARAMS) or matches(fragment.name, anew):
            continue
        source = source_of(fragment.name, held)
        wanted.add(source)
        pieces, problem = _pieces(fragment, held.get(source, []))
        copies += pieces
        if problem:
            found[fragment.name] = f"{fragment.name}: {problem}"
    # Masters may be left behind: their values are those of the parameters that are given.
    left = {name for name in held if name not in wanted and not name.startswith((PARAMS, MASTERS))}
    ranks = primitives.all_gather_object(mesh, list(mesh.shape), (found, left))
    problems = {name: line for of_rank, _ in ranks for name, line in of_rank.items()}
    # Ranks of a pipeline hold parts of the state.
    problems |= {name: f"{name}: in the old state alone" for name in sorted(set.intersection(*(of for _, of in ranks)))}
    lines = [line for name, line in problems.items() if not matches(name, anew)]
    if lines:
        raise TreeError(
            f"the old state does not fit the new train step:\n{listing(lines)}\nName in anew= what is to begin anew or to be "
            f"left behind (anew=['opt/inner/*'] for all of the optimizer's); or, if it is on other ranks, {_REMEDY}"
        )
    with torch.no_grad():
        for into, values in copies:
            into.copy_(values)
    return _with(old, fresh, parts, donate)


def _with(old: TrainState, fresh: TrainState, parts: Parts, donate: bool) -> TrainState:
    scale = fresh.scale.resumed(old.scale) if fresh.scale and old.scale else fresh.scale
    factor = (scale.value if scale else 1.0) / (old.scale.value if old.scale else 1.0)
    comm = fresh.comm if factor == 1 else rescaled(fresh.params.plan, fresh.comm, factor)
    opt, buffers = with_numbers_of(parts, fresh)
    made = TrainState(old.step, fresh.params, opt, comm, buffers, scale, old.rng)
    made = made.settled()  # masters follow the parameters where these are others than the old state's
    if donate:
        old.take("make_train_step", "the state that it returned, or pass donate=False to keep this one")
    return made


def _fragments(parts: Parts) -> Iterator[Fragment]:
    """All that this rank holds but the model's buffers, as views."""
    yield from needed_fragments(parts)
    yield from kept_fragments(parts)
    for name, leaf in common_leaves(parts._replace(buffers=None)):
        if not name.startswith(BUFFERS):
            yield whole(leaf, name)


def _pieces(into: Fragment, held: Sequence[Fragment]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], str]:
    """The views to copy so that ``into`` is what ``held`` has of its tensor; and what is wrong, or ""."""
    if not held:
        return [], "in the new state alone"
    if held[0].window != into.window:
        return [], f"{_shape(held[0])} in the old state, {_shape(into)} in the new one"
    pieces, missing = [], into.data.numel()
    for each in held:
        start, stop = max(into.start, each.start), min(into.stop, each.stop)
        if start < stop:
            ours, theirs = (one.part(start - one.start, stop - one.start).data for one in (into, each))
            pieces.append((ours, theirs))
            missing -= stop - start
    return (pieces, "") if missing <= 0 else ([], "on other ranks in the old state")


def _shape(fragment: Fragment) -> str:
    window = fragment.window
    return (
        f"{tuple(window.shape)}" if window.shape == window.sizes else f"{tuple(window.sizes)} of {tuple(window.shape)}"
    )
