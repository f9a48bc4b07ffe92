"""`search_plan`: the quickest plan that fits a machine, of all meshes and chains of a space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardlib.errors import BatchError, IllegalComposition, MeshError, listing
from shardlib.execute.batches import as_tensors
from shardlib.execute.losses import require_no_buffers
from shardlib.optim.group_update import check, is_share, is_step
from shardlib.optim.wrapping import require_transformations
from shardlib.plan.machine import Machine, require_machine
from shardlib.search.model import Model
from shardlib.search.searching import Searching
from shardlib.search.space import Choice, Space, choices, meshes
from shardlib.search.value import Search
from shardlib.sharded.shard import outline
from shardlib.tree import Tree

# What a search refuses before it begins: arguments out of range, and a space without a single choice.


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


def search_plan(
    loss_fn: Callable[..., Any],
    params: Tree | Callable[[], Tree],
    machine: Machine,
    batch: Any,
    *,
    optimizer: Any,
    ranks: int,
    rules: Mapping[str, Any] | None = None,
    space: Space | None = None,
    within: float = 0.02,
) -> Search:
    """Search all meshes, stages, slices, pipelines, recompute, precisions and micro-batches for the quickest step that fits.

    Nothing runs. Choices are taken in the order of a bound of their time, which is refined as they come up: by products
    alone; by traces of single blocks; by the virtual clock; at last by the exact plan. The first whose exact plan has come
    up is the result, as all others take longer by what is known of them. What cannot fit by a bound of its memory is
    rejected when it comes up, and no plan is returned that holds more than there is. Recompute and offload, which only take
    time, are tried where a choice does not fit without.

    Args:
        loss_fn: an `sl.sequential` is cut into stages too, with ``params`` a list of trees.
        params: as for `make_plan`.
        machine: what ranks have and do per second.
        batch: of all ranks together, shapes alone, such as tensors on the meta device or arrays.
        optimizer: a gradient transformation.
        ranks: number of ranks, all of which are used.
        rules: of `tensor_slicing`; without them no layer is sliced.
        space: what is tried; by default `Space` with its own values.
        within: a share of time: what may be quicker by no more is left.

    Raises:
        TypeError: an optimizer that is not a gradient transformation, or a machine that is no `shardlib.plan.Machine`;
            a loss that takes buffers.
        ValueError: fewer than one rank, or a share ``within`` that is none.
        BatchError: a batch without rows.
        MeshError: no mesh of the ranks can share the batch.
        IllegalComposition: no precision of the space that the machine has a rate for.

    >>> from shardlib.models import gpt
    >>> config = gpt.GPTConfig(layers=2, width=32, heads=2, sequence=16)
    >>> machine = sl.plan.Machine("8MiB", {"fp32": 1e11}, sl.plan.Link(1e9, 1e-5), ranks_per_host=4, launches=1e5)
    >>> batch = {name: torch.empty(8, 16, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}
    >>> job = dict(optimizer=sl.optim.adamw(1e-3), ranks=4, rules=gpt.slicing_rules(config, blocks=True))
    >>> params = gpt.to_blocks(gpt.init(config, device="meta"))
    >>> found = sl.search_plan(gpt.make_sequential(config), params, machine, batch, **job)
    >>> found.winner.bytes <= machine.memory and found.winner.code.startswith("sl.make_plan(params, sl.abstract_mesh(")
    True
    """
    require_transformations("search_plan", optimizer)
    require_machine("search_plan", machine)
    space = space or Space()
    known = tuple(name for name in space.precisions if name in machine.flops)
    if not known:
        raise IllegalComposition(
            f"the machine has no rate for {', '.join(space.precisions)}, only for {', '.join(machine.flops)}: give "
            "search_plan(space=Space(precisions=...))"
        )
    require_no_buffers(
        loss_fn, "close over them, lambda params, batch: loss_fn(params, buffers, batch)[0], and leave memory for them"
    )
    tree = outline("search_plan", params)
    model = Model(loss_fn, tree, as_tensors(batch, torch.device("cpu")), optimizer, rules)
    require_arguments(ranks, within, model.rows)
    memories = {"host": machine.host_memory, "disk": machine.disk}
    there = frozenset(name for name, held in memories.items() if held is not None)
    known_space, parts = replace(space, precisions=known), {"blocks": model.count, "experts": model.experts}
    tried = list(choices(known_space, ranks, model.rows, **parts, slices=rules is not None, memories=there))
    require_choices(tried, known_space, ranks, model.rows, **parts, slices=rules is not None, memories=memories)
    searching = Searching(model, machine, ranks, tried, within)
    front = list(searching.front())
    return Search(
        tuple(replace(found, rules=rules) for found in front),
        tuple(searching.rejected.values()),
        len(searching.choices) - len(searching.rejected) - len(searching.timed),
        len(searching.timed),
        within,
    )
