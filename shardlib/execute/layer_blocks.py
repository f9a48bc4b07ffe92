"""The layers among a function's blocks: which one each block is, and whether all of the plan's have run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardlib.errors import LossError
from shardlib.plan.plan import Plan
from shardlib.tree import leaves_of


class LayerBlocks:
    """The layers among the blocks of one stage, in one micro-batch.

    Args:
        plan: of the stage.
    """

    def __init__(self, plan: Plan) -> None:
        layers = plan.step.layers
        self._paths = [
            next((layer for layer in layers if path.startswith(f"{layer}/")), "") for path in plan.shape.paths
        ]
        self._orders = _orders_here(plan, self._paths)
        self.forget()

    def forget(self) -> None:
        """Let go of the micro-batch's leaves."""
        self._layer_of: dict[int, str] = {}  # identity of a leaf that stands for a parameter -> layer
        self._leaves: list[Any] = []  # these leaves: identities are of what is alive
        self._seen: dict[str, None] = {}  # the layers that were blocks, in the order in which they ran
        # The layer of the block that runs; "" where that is none; None outside of blocks.
        self._inside: str | None = None

    def know(self, leaves: list[Any]) -> None:
        """Know the leaves that stand for the parameters of the micro-batch, in the order of the pytree."""
        self.forget()
        self._leaves = leaves
        for layer, leaf in zip(self._paths, leaves, strict=True):
            if leaf is not None:  # a leaf that several layers share tells nothing
                shared = self._layer_of.get(id(leaf), layer) != layer
                self._layer_of[id(leaf)] = "" if shared else layer

    def is_param(self, leaf: Any) -> bool:
        """Whether a leaf stands for a parameter."""
        return id(leaf) in self._layer_of

    @contextmanager
    def entered(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
        """The context of a block that is in no other one. Yields the layer that it is, or "".

        Raises:
            LossError: a block with parameters of several layers.
        """
        layers = self._among(args, kwargs)
        if len(layers) > 1:
            raise LossError(
                f"{name_of(fn)} is a block of {len(layers)} layers, {', '.join(layers)}. Make each an sl.block with "
                "its own parameters, or name as layers what one block is: layers=[...]"
            )
        self._inside = layer = next(iter(layers), "")
        if layer:
            self._seen[layer] = None
        try:
            yield layer
        finally:
            self._inside = None

    def require_no_layer(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a block within a block that is another layer: it could not be left out. A recomputation is not asked.

        Raises:
            LossError: see above.
        """
        if self._inside is None:
            return
        if others := [layer for layer in self._among(args, kwargs) if layer != self._inside]:
            around = f"the layer {self._inside}" if self._inside else "a block that is no layer"
            raise LossError(
                f"{name_of(fn)}, the layer {', '.join(others)}, runs within {around} and cannot be left out. Call it "
                "outside of other blocks"
            )

    def require_all(self) -> None:
        """Refuse a function in which a layer of this stage was no block, or layers ran in another order than the plan's.

        Raises:
            LossError: see above; names the layers.
        """
        for order in self._orders:
            missing = [layer for layer in order if layer not in self._seen]
            if missing:
                raise LossError(f"the plan leaves out parts of layers, and {_no_blocks(missing, order)}")
            ran = [layer for layer in self._seen if layer in order]
            if ran != order:
                raise LossError(
                    f"the plan's layers are {', '.join(order)}, and ran in another order. Name them in that order, "
                    f"layers={ran}"
                )

    def _among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, None]:
        """The layers whose parameters are among these arguments."""
        layers = dict.fromkeys(self._layer_of.get(id(leaf), "") for leaf in leaves_of((args, kwargs)))
        layers.pop("", None)
        return layers


def name_of(fn: Callable[..., Any]) -> str:
    """A block's name, for messages."""
    return str(getattr(inspect.unwrap(fn), "__qualname__", fn))


def _orders_here(plan: Plan, layers: list[str]) -> list[list[str]]:
    """The stage's layers, of each transform that leaves out parts of them, in their order.

    Args:
        layers: of each leaf of the pytree, "" for none. What several share says nothing about where they run.
    """
    here = {path for bucket in plan.buckets for path in bucket.paths}
    holders: dict[str, set[str]] = {}
    for layer, leaf in zip(layers, plan.leaves, strict=True):
        holders.setdefault(leaf.path, set()).add(layer)
    held = {layer for path, (layer, *others) in holders.items() if path in here and not others}
    drops = (drop for drop in (plan.step.layer_drop, plan.step.token_drop) if drop is not None)
    return [[layer for layer in drop.layers if layer in held] for drop in drops]


def _no_blocks(missing: list[str], layers: list[str]) -> str:
    """Words for layers that did not run as blocks, of those of a stage."""
    remedy = (
        "mark the layers' function with sl.block, called with a layer's parameters, or use sl.sequential([...]); for "
        "transformers' decoders sl.from_module(model, blocks=sl.models.huggingface.decoder_blocks(model))"
    )
    if len(missing) == len(layers):
        return f"none of them ({layers[0]} … {layers[-1]}) ran as a block: {remedy}"
    others = [layer for layer in layers if layer not in missing]
    return (
        f"these did not run as blocks: {', '.join(missing)}. Either {remedy}; or name those that did: layers={others}"
    )
