"""Gradient transformations of some of the parameters, chosen by their paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from shardlib.errors import IllegalComposition, listing
from shardlib.optim.base import GradientTransformation, scaled, write_copies
from shardlib.optim.code import coded
from shardlib.optim.combine import added, require_no_axis
from shardlib.optim.shards import WHOLE, Selection, Shards, widest
from shardlib.plan.claims import LeafInfo
from shardlib.tree import Tree, globs_of, leaves_of

Labels = Mapping[str, str] | Callable[[str, tuple[int, ...]], str]


@dataclass(frozen=True)
class Matching:
    """The choice of parameters with a path that matches ``globs`` and none that matches ``exclude``; of all others, if not
    ``taken``."""

    globs: tuple[str, ...]
    exclude: tuple[str, ...]
    taken: bool = True

    def __call__(self, info: LeafInfo) -> bool:
        return (info.matches(self.globs) and not info.matches(self.exclude)) == self.taken


@dataclass(frozen=True)
class Labelled:
    """The choice of parameters with ``label``: by the first glob that one of their paths matches, or by a function."""

    labels: tuple[tuple[str, str], ...] | Callable[[str, tuple[int, ...]], str]
    label: str | None

    def __call__(self, info: LeafInfo) -> bool:
        return self.label_of(info) == self.label

    def label_of(self, info: LeafInfo) -> str | None:
        if not isinstance(self.labels, tuple):
            return self.labels(info.path, info.shape)
        return next((label for pattern, label in self.labels if info.matches(pattern)), None)


@coded
def masked(
    inner: GradientTransformation, globs: str | tuple[str, ...], *, exclude: str | tuple[str, ...] = ()
) -> GradientTransformation:
    """``inner`` for the parameters whose path matches; updates of other parameters pass through unchanged.

    ``inner`` does not see other parameters: its norms exclude them, and its state has none of them. As optax.masked, with
    globs for the mask.

    Args:
        globs: one or several patterns over paths such as ``"blocks/0/*"`` (``*`` crosses ``/``).
        exclude: patterns of parameters to leave out even if ``globs`` match them.

    Raises:
        IllegalComposition: when the state is made, a pattern that matches no trained parameter; or an ``inner`` that reduces
            gradients itself.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.masked(sl.optim.clip_by_value(0.7), "*", exclude="w")
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([ 0.6000, -0.8000])
    """
    require_no_axis("masked", inner)
    choice = Matching(globs_of(globs), globs_of(exclude))
    others = Matching(choice.globs, choice.exclude, taken=False)

    def init(params: Tree, shards: Shards = WHOLE) -> Tree:
        _require_matches("masked", (*choice.globs, *choice.exclude), shards.about(params))
        some = shards.select(choice, params)
        return inner.init(some.take(params), shards=some.shards)

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards = WHOLE) -> tuple[Tree, Tree]:
        some = shards.select(choice, updates)
        inner_updates, state = inner.update(some.take(updates), state, _taken(some, params), shards=some.shards)
        return some.put(updates, inner_updates), state

    def apply(
        params: Tree, updates: Tree, state: Tree, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> Tree:
        some, rest = shards.select(choice, updates), shards.select(others, updates)
        for p, u in zip(leaves_of(rest.take(params)), leaves_of(scaled(rest.take(updates), scale)), strict=True):
            p.add_(u)  # computed in the wider dtype and rounded once, as in every update
        write_copies(rest.take(copies), rest.take(params))
        taken = (some.take(params), some.take(updates), state)
        return inner.apply(*taken, scale=scale, shards=some.shards, copies=some.take(copies))

    def sends(shards: Shards) -> Mapping[str, int]:
        return inner.sends(shards.select(choice, {}).shards)

    return GradientTransformation(init, update, inner.locality, apply=apply, sends=sends, last=inner.last)


@coded
def partition(transforms: Mapping[str, GradientTransformation], labels: Labels) -> GradientTransformation:
    """Update each parameter by the transformation that its label names; as optax.partition.

    The state is a dictionary by label. Every transformation sees only its own parameters: a clip among them uses the norm of
    these alone.

    Args:
        transforms: label -> transformation.
        labels: glob over paths -> label, of which the first match counts (a last ``"*"`` takes the rest); or ``labels(path,
            shape) -> label``, which gets a tied leaf's first path.

    Raises:
        IllegalComposition: when the state is made, a parameter without a label, or a glob or its label without a parameter;
            or a transformation that reduces gradients itself.
        ValueError: a label without a transformation.

    >>> p, g = {"w": torch.ones(1), "bias": torch.ones(1)}, {"w": torch.full((1,), 0.5), "bias": torch.full((1,), 0.5)}
    >>> tx = sl.optim.partition({"all": sl.optim.sgd(1.0), "less": sl.optim.sgd(0.1)}, {"bias": "less", "*": "all"})
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"], updates["bias"]
    (tensor([-0.5000]), tensor([-0.0500]))
    """
    require_no_axis("partition", *transforms.values())
    table = tuple(labels.items()) if isinstance(labels, Mapping) else labels
    choices = {label: Labelled(table, label) for label in transforms}
    if isinstance(labels, Mapping):
        _require_transforms(set(labels.values()), transforms)

    def init(params: Tree, shards: Shards = WHOLE) -> Tree:
        infos = shards.about(params)
        label_of = {info.path: Labelled(table, None).label_of(info) for info in infos}
        if without := [path for path, label in label_of.items() if label is None]:
            raise IllegalComposition(
                f"partition: no label for {len(without)} parameters:\n{listing(without)}\nAdd a glob for them, or a last '*'"
            )
        _require_transforms({label for label in label_of.values() if label is not None}, transforms)
        if isinstance(labels, Mapping):
            _require_matches("partition", tuple(labels), infos)
        unused = [label for label in transforms if label not in label_of.values()]
        if unused and isinstance(
            labels, Mapping
        ):  # a function of any model may have labels that this one does not need
            raise IllegalComposition(
                f"partition: no parameter gets label {', '.join(map(repr, unused))}; the first glob that matches counts. "
                "Leave the transformation out, or put its globs first"
            )
        chosen = {label: shards.select(choice, params) for label, choice in choices.items()}
        return {
            label: tx.init(chosen[label].take(params), shards=chosen[label].shards) for label, tx in transforms.items()
        }

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards = WHOLE) -> tuple[Tree, Tree]:
        result, after = updates, {}
        for label, tx in transforms.items():
            some = shards.select(choices[label], updates)
            part, after[label] = tx.update(some.take(updates), state[label], _taken(some, params), shards=some.shards)
            result = some.put(result, part)
        return result, after

    def apply(
        params: Tree, updates: Tree, state: Tree, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> Tree:
        after = {}
        for label, tx in transforms.items():
            some = shards.select(choices[label], updates)
            taken = (some.take(params), some.take(updates), state[label])
            after[label] = tx.apply(*taken, scale=scale, shards=some.shards, copies=some.take(copies))
        return after

    def sends(shards: Shards) -> Mapping[str, int]:
        return added(tx.sends(shards.select(choices[label], {}).shards) for label, tx in transforms.items())

    locality = widest(*(tx.locality for tx in transforms.values()))
    last = next((tx.last for tx in transforms.values() if tx.last), None)
    return GradientTransformation(init, update, locality, apply=apply, sends=sends, last=last)


def _taken(some: Selection, params: Tree) -> Tree:
    return None if params is None else some.take(params)


def _require_matches(what: str, globs: tuple[str, ...], infos: list[LeafInfo]) -> None:
    if missed := [pattern for pattern in globs if not any(info.matches(pattern) for info in infos)]:
        shown = ", ".join(info.path for info in infos[:5])
        raise IllegalComposition(
            f"{what}: {', '.join(map(repr, missed))} matches no trained parameter; paths look like {shown}"
        )


def _require_transforms(labels: set[str], transforms: Mapping[str, GradientTransformation]) -> None:
    if unknown := sorted(labels - transforms.keys()):
        raise ValueError(
            f"partition: no transformation for label {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(map(repr, transforms))}"
        )
