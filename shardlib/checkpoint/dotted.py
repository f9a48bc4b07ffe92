"""Names of parameters in files of others: paths with dots, and all of its names for a tied parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from shardlib.checkpoint.agreement import read_on_all_ranks
from shardlib.checkpoint.fragments import Fragment
from shardlib.checkpoint.reading import BUFFER, TensorsOnDisk
from shardlib.errors import TreeError, listing
from shardlib.mesh.mesh import Mesh
from shardlib.plan.plan import Plan


def dotted(path: str) -> str:
    """A parameter's path as its module names it."""
    return path.replace("/", ".")


def dotted_names(plan: Plan, prefix: str = "", buffers: Iterable[str] = ()) -> dict[str, list[str]]:
    """Path -> the names of each parameter, of other stages too.

    Args:
        prefix: what names begin with.
        buffers: names of further tensors in the same files.

    Raises:
        TreeError: leaves have one name; lists them.
    """
    paths = {placement.path: [placement.path, *placement.aliases] for placement in plan.everywhere.placements}
    check_apart([path for every in paths.values() for path in every], [name.removeprefix(prefix) for name in buffers])
    return {path: [prefix + dotted(each) for each in every] for path, every in paths.items()}


def check_apart(paths: Iterable[str], buffers: Iterable[str] = ()) -> None:
    """Refuse parameters, and buffers, that have one name in files of others. Arguments and errors as of `dotted_names`."""
    leaves: dict[str, list[str]] = {}
    for path in paths:
        leaves.setdefault(dotted(path), []).append(repr(path))
    for name in buffers:
        leaves.setdefault(name, []).append(f"the buffer {name!r}")
    shared = [f"{name}: {' and '.join(every)}" for name, every in leaves.items() if len(every) > 1]
    if shared:
        raise TreeError(
            f"files hold parameters by their paths with dots, in which these have one name:\n{listing(shared)}\nRename all "
            "but one of each"
        )


def check_ties(
    saved: TensorsOnDisk, mesh: Mesh, fragments: Iterable[Fragment], names: Mapping[str, Sequence[str]]
) -> None:
    """Refuse files that have other values for some names of a tied leaf than for others. Every rank must call it.

    Args:
        fragments: the elements that this rank holds; of a tied leaf they are read under each of its names.
        names: a fragment's name -> the names in the files of what may fill it.

    Raises:
        TreeError: values differ; lists the names, on all ranks.
        CheckpointError: a rank cannot read the files; on all ranks.
    """

    def look() -> list[str]:
        return list(dict.fromkeys(line for each in fragments for line in _differing(saved, each, names[each.name])))

    problem, remedy = f"{saved.folder} could not be read to its end", "What was to be filled is unchanged."
    lines = dict.fromkeys(line for each in read_on_all_ranks(mesh, look, problem, remedy) for line in each)
    if lines:
        raise TreeError(
            f"{saved.folder} has different values for leaves that are tied here, and are one parameter:\n"
            f"{listing(sorted(lines))}\nGive both the same values in the files, or shard a tree in which they are not tied "
            "(a tensor for each)."
        )


def _differing(saved: TensorsOnDisk, fragment: Fragment, names: Sequence[str]) -> Iterator[str]:
    """One line for each name whose elements of a fragment are others than those of the first name."""
    first, *others = [name for name in names if name in saved.tensors] or [""]
    if not others or not saved.has(fragment, first):
        return
    for other in others:
        one, two = saved.tensors[first], saved.tensors[other]
        if one.shape != two.shape:
            yield f"{first} and {other} (shapes {list(one.shape)} and {list(two.shape)})"
        elif one != two and not all(
            _same(_read(saved, part, first), _read(saved, part, other))
            for part in fragment.parts(max(1, BUFFER() // 32))
        ):
            yield f"{first} and {other}"


def _read(saved: TensorsOnDisk, fragment: Fragment, name: str) -> torch.Tensor:
    """The elements of a fragment in the widest dtype of their kind."""
    held = torch.zeros(fragment.data.numel(), dtype=saved.tensors[name].torch_dtype)
    saved.fill(fragment._replace(data=held), name)
    if held.is_complex():
        return held.to(torch.complex128)
    return held.double() if held.is_floating_point() else held.long()


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)
