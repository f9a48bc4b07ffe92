"""Blocks that backward computes again, in a step as a function of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.common.environment import within
from shardlib.execute.activations.checkpointing import checkpointed
from shardlib.execute.activations.draws import Draws
from shardlib.execute.surroundings import Surroundings
from shardlib.nn.blocks import Runner
from shardlib.plan.plan import Plan


def recomputed(plan: Plan) -> Callable[[Surroundings], Runner] | None:
    """How the blocks of a function run, given what is around it; None where none is recomputed."""
    how = plan.step.remat
    if how is None:
        return None

    def runner(surroundings: Surroundings) -> Runner:
        draws = Draws(surroundings.mesh.device)

        def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def surrounded(*args: Any, **kwargs: Any) -> Any:
                # A block within another is recomputed with it.
                with within(blocks=None), surroundings.installed(casts=False):
                    return fn(*args, **kwargs)

            return checkpointed(surrounded, args, kwargs, how, set(), draws, ())  # buffers are refused around here

        return run

    return runner
