"""Buffers: tensors that a loss function takes and returns changed, such as BatchNorm's running statistics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import optree
import torch

from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.errors import TreeError
from shardlib.mesh.mesh import Mesh
from shardlib.mesh.transport.activity import naming
from shardlib.plan.plan import Plan
from shardlib.sharded.checksum import checksums
from shardlib.tree import Tree, flatten, matches, path_name, tree_map, unflatten

KINDS = ("averaged", "rank-local", "equal")
EVERY = 16  # steps between two comparisons of buffers that are to be equal: they are read for it
# Statistics of a batch: BatchNorm's and those of modules like it, and how often experts were chosen.
_STATISTICS = re.compile(r"(.*[./])?(running_mean|running_var|experts[./]counts)")


class BufferKinds:
    """What buffers are to the ranks that share a batch: "averaged" after each step, "rank-local", or "equal".

    By default the running statistics of BatchNorm and the counts of experts are averaged, other floating and complex buffers
    equal, and the rest rank-local. Buffers that are to be equal are compared in the first step and every 16th.

    Args:
        kinds: glob over paths -> kind, of which the first match counts.

    Raises:
        ValueError: an unknown kind.
    """

    def __init__(self, kinds: Mapping[str, str] | None) -> None:
        self._kinds = dict(kinds or {})
        if wrong := {glob: kind for glob, kind in self._kinds.items() if kind not in KINDS}:
            raise ValueError(f"buffer_kinds: {wrong} is none of {', '.join(map(repr, KINDS))}")
        self._calls = 0

    def require_known(self, buffers: Tree) -> None:
        """Refuse a glob that matches no buffer; one that is None yet has a path too.

        Raises:
            TreeError: names the globs and the buffers.
        """
        paths = [path_name(path) for path in optree.tree_flatten_with_path(buffers, none_is_leaf=True)[0]]
        if missed := [glob for glob in self._kinds if not any(matches(path, glob) for path in paths)]:
            raise TreeError(
                f"buffer_kinds: {', '.join(map(repr, missed))} matches no buffer; their paths are {', '.join(paths)}"
            )

    def of(self, path: str, leaf: torch.Tensor) -> str:
        """The kind of a buffer.

        Raises:
            TreeError: integers that are to be averaged.
        """
        has_mean = leaf.is_floating_point() or leaf.is_complex()
        for glob, kind in self._kinds.items():
            if matches(path, glob):
                if kind == "averaged" and not has_mean:
                    raise TreeError(
                        f"buffer_kinds: {glob!r} averages buffer {path}, of {leaf.dtype}; put {path!r}: 'rank-local' before"
                    )
                return kind
        if not has_mean:
            return "rank-local"
        return "averaged" if _STATISTICS.fullmatch(path) else "equal"

    def after_step(self, buffers: Tree, plan: Plan, mesh: Mesh) -> Tree:
        """Buffers after a step, detached, on every rank as their kinds say. Collective over the batch axes.

        Raises:
            RankMismatch: ranks have different ones, of those that are to be equal.
        """
        if plan.batch_ranks == 1:
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, buffers)
        paths, leaves, treedef = flatten(buffers)
        kinds = [self.of(*each) if isinstance(each[1], torch.Tensor) else "" for each in zip(paths, leaves)]
        if "equal" in kinds and self._calls % EVERY == 0:
            alike = {path: leaf for path, leaf, kind in zip(paths, leaves, kinds) if kind == "equal"}
            _require_equal({path or "the buffer": leaf.detach() for path, leaf in alike.items()}, plan, mesh)
        self._calls += 1
        chosen = [leaf.detach() for leaf, kind in zip(leaves, kinds) if kind == "averaged"]
        means = iter(_averaged(chosen, plan, mesh))
        return unflatten(
            treedef,
            [
                next(means) if kind == "averaged" else leaf.detach() if kind else leaf
                for leaf, kind in zip(leaves, kinds)
            ],
        )


@naming("the comparison of buffers")
def _require_equal(buffers: dict[str, torch.Tensor], plan: Plan, mesh: Mesh) -> None:
    primitives.require_equal(
        mesh,
        "buffers after a step",
        checksums(buffers),
        "Give its path in make_train_step(buffer_kinds={...}) as 'averaged' or 'rank-local', or gather in the loss "
        "what all ranks need.",
        plan.batch_axes,
    )


@naming("the loss's buffers")
def _averaged(leaves: list[torch.Tensor], plan: Plan, mesh: Mesh) -> list[torch.Tensor]:
    """The means over the batch axes, in one all-reduce per dtype and axis."""
    means: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        numbers = [number for number, leaf in enumerate(leaves) if leaf.dtype == dtype]
        total = torch.cat([leaves[number].reshape(-1) for number in numbers]).div_(plan.batch_ranks)
        reals = torch.view_as_real(total) if dtype.is_complex else total
        sum_over(mesh, plan.batch_axes, reals, scalars=False)
        parts = total.split([leaves[number].numel() for number in numbers])
        means |= {number: part.view(leaves[number].shape) for number, part in zip(numbers, parts)}
    return [means[number] for number in range(len(leaves))]


def buffer_sizes(buffers: Tree, kinds: BufferKinds) -> tuple[tuple[torch.dtype, int, bool], ...]:
    """The dtypes of the buffers, each with its number of elements, and whether they are averaged."""
    sizes: dict[tuple[Any, bool], int] = {}
    for path, leaf in zip(*flatten(buffers)[:2], strict=True):
        if isinstance(leaf, torch.Tensor):
            group = leaf.dtype, kinds.of(path, leaf) == "averaged"
            sizes[group] = sizes.get(group, 0) + leaf.numel()
    return tuple((dtype, count, averaged) for (dtype, averaged), count in sizes.items())
