"""What a search refuses before it begins: arguments out of range, and a space without a single choice."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.errors import BatchError, MeshError, listing
from shardlib.optim.ranges import check, is_share, is_step
from shardlib.search.space import Choice, Space, meshes


def require_arguments(ranks: object, within: object, rows: int) -> None:
    """Refuse numbers out of range.

    Raises:
        ValueError: names them all.
        BatchError: a batch without rows.
    """
    check(
        "search_plan",
        "ranks are an integer of at least 1, and within is a share of time, at least 0 and below 1",
        ranks=(ranks, is_step(ranks)),
        within=(within, is_share(within)),
    )
    if rows < 1:
        raise BatchError("search_plan: the batch has 0 rows: give the batch of all ranks together, of one row at least")


def require_choices(
    tried: list[Choice],
    space: Space,
    ranks: int,
    rows: int,
    *,
    blocks: int,
    slices: bool,
    experts: int,
    memories: Mapping[str, int | None],
) -> None:
    """Refuse a space in which there is nothing to choose from.

    Args:
        tried: what there is.

    Raises:
        MeshError: there is none; says why.
    """
    if tried:
        return
    found = list(meshes(space, ranks, blocks, slices, experts))
    shares = sorted({mesh.get("data", 1) * mesh.get("expert", 1) for mesh in found})
    if not found:
        reasons = [f"Space(largest={dict(space.largest or {})}) leaves no mesh of {ranks} ranks: let an axis be larger"]
    elif all(rows % share for share in shares):
        over = " or ".join(map(str, shares))
        fitting = max(1, round(rows / shares[0])) * shares[0]
        reasons = [f"{rows} rows do not divide over {over} ranks: give a batch of {fitting} rows, say"]
        stages = "a loss that is no sl.sequential is not cut into" if blocks == 1 else f"{blocks} blocks make no"
        reasons += [f"{stages} {ranks} stages: use another number of ranks"]
        reasons += [] if slices else ["without rules= no layer is sliced"]
    else:
        missing = [name for name, held in memories.items() if held is None]
        machine = f" (the machine has no {' and no '.join(missing)})" if missing else ""
        reasons = [
            f"no mesh of {ranks} ranks goes with Space(offloads={space.offloads}{machine}, sequences={space.sequences}, "
            f"codecs={space.codecs}): put None among them"
        ]
    raise MeshError(f"search_plan has no choice for {ranks} ranks and {rows} rows:\n{listing(reasons)}")
