"""`carry`: a state's optimizer, masters, residuals and counters under another plan or optimizer, without files.

Tensors are found by name, as in a checkpoint, on the rank that holds them: a leaf's range on a rank depends on the mesh and
the stage, not on the bucket that it is in. What lies on other ranks is left to checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardlib.checkpoint.common import common_leaves
from shardlib.checkpoint.fragments import MASTERS, PARAMS, Fragment, needed_fragments, source_of
from shardlib.checkpoint.packed import CheckpointTrees, fillable, outlined, with_numbers_of
from shardlib.checkpoint.residuals import kept_fragments
from shardlib.checkpoint.save import require_state
from shardlib.collectives import primitives
from shardlib.errors import IllegalComposition, TreeError, listing
from shardlib.optim.train_state import TrainState, rescaled
from shardlib.tree import matches

_REMEDY = (
    "save it (sl.checkpoint.save) and restore it into the new state (sl.checkpoint.restore), which reads any layout"
)
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
    given, parts = outlined(settled), fillable(fresh)
    if given.packed or parts.packed:
        raise IllegalComposition(f"carry: states on disk, or in few bits, cannot be carried over: {_REMEDY}")
    _copy(_matched(given, parts, anew))
    scale = fresh.scale.resumed(settled.scale) if fresh.scale and settled.scale else fresh.scale
    factor = (scale.value if scale else 1.0) / (settled.scale.value if settled.scale else 1.0)
    comm = fresh.comm if factor == 1 else rescaled(fresh.params.plan, fresh.comm, factor)
    opt, buffers = with_numbers_of(parts, fresh)
    params = fresh.params.lent() if fresh.params.shares(settled.params) else fresh.params
    made = TrainState(
        settled.step, params, opt, comm, buffers, scale, settled.rng
    ).settled()  # masters follow parameters
    if donate:
        state.take("carry", "the state that it returned, or pass donate=False to keep this one")
    return made


def _matched(given: CheckpointTrees, parts: CheckpointTrees, anew: Sequence[str]) -> _Copies:
    """What is to be copied: tensors of ``parts``, and those of ``given`` of the same names. Collective."""
    held: dict[str, list[Fragment]] = {}
    for fragment in _fragments(given):
        held.setdefault(fragment.name, []).append(fragment)
    wholes = dict(common_leaves(given))
    copies: _Copies = []
    found: dict[str, str] = {}
    wanted = set[str]()
    for fragment in _fragments(parts):
        if not fragment.name.startswith(PARAMS):
            source = source_of(fragment.name, held)
            wanted.add(source)
            pieces, problem = _pieces(fragment, held.get(source, []))
            _note(fragment.name, pieces, problem, anew, copies, found)
    for name, leaf in common_leaves(parts):
        wanted.add(name)
        there = wholes.get(name)
        problem = "in the new state alone" if there is None else ""
        if there is not None and there.shape != leaf.shape:
            problem = _other_shapes(tuple(there.shape), tuple(leaf.shape))
        _note(name, [] if there is None else [(leaf, there)], problem, anew, copies, found)
    # Masters may be left behind: their values are those of the parameters that are given.
    left = {name for name in (*held, *wholes) if name not in wanted and not name.startswith((PARAMS, MASTERS))}
    mesh = parts.params.mesh
    ranks = primitives.all_gather_object(mesh, list(mesh.shape), (found, left))
    problems = {name: line for of_rank, _ in ranks for name, line in of_rank.items()}
    for name in sorted(
        set.intersection(*(of_rank for _, of_rank in ranks))
    ):  # a pipeline's ranks have parts of the state
        problems[name] = f"{name}: in the old state alone"
    if lines := [line for name, line in problems.items() if not matches(name, anew)]:
        raise TreeError(
            f"carry: the old state does not fit the new train step:\n{listing(lines)}\nName in anew= what is to begin anew "
            f"or to be left behind (anew=['opt/inner/*'] for all of the optimizer's); or, if it is on other ranks, {_REMEDY}"
        )
    return copies


def _note(
    name: str, pieces: _Copies, problem: str, anew: Sequence[str], copies: _Copies, found: dict[str, str]
) -> None:
    if problem:
        found[name] = f"{name}: {problem}"
    elif not matches(name, anew):
        copies += pieces


@torch.no_grad()
def _copy(copies: _Copies) -> None:
    for into, values in copies:
        into.copy_(values)


def _fragments(parts: CheckpointTrees) -> Iterator[Fragment]:
    """What is sharded, as views."""
    yield from needed_fragments(parts)
    yield from kept_fragments(parts)


def _pieces(into: Fragment, held: Sequence[Fragment]) -> tuple[_Copies, str]:
    """The views to copy so that ``into`` is what ``held`` has of its tensor; and what is wrong, or ""."""
    if not held:
        return [], "in the new state alone"
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
    window = fragment.window
    return (
        f"{tuple(window.shape)}" if window.shape == window.sizes else f"{tuple(window.sizes)} of {tuple(window.shape)}"
    )
