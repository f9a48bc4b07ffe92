"""The records that a plan consists of: the parameters' pytree, traces, how a step runs, what an optimizer needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardlib.collectives.sequence.base import SequenceKind
from shardlib.collectives.tokens import TokenExchange
from shardlib.collectives.tree_sum import most_held, most_nodes
from shardlib.plan.drops import DropPlan, LayerDrop, TokenDrop, drop_plan, layers_of_both
from shardlib.plan.loss_scale import LossScale
from shardlib.plan.recompute import Recompute
from shardlib.rng import Key
from shardlib.tree import TreeDef


@dataclass(frozen=True)
class Shape:
    """The shape of the parameters' pytree.

    Attributes:
        treedef: the structure of the pytree.
        paths: the path of every leaf, tied leaves included.
        owners: for each path the index of the leaf's placement.
    """

    treedef: TreeDef
    paths: tuple[str, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """What one micro-batch does in one stage.

    Attributes:
        touches: units in the order they are gathered, in forward and in backward; None where nobody has seen it, and the
            least is taken: all once in forward, and but for the first in backward.
        reduced: trained units in the order in which their gradients are complete; none where nobody has seen it.
        activations: axis -> payload bytes of the collectives inside the loss.
        live: peak bytes while the micro-batch is computed, gradients of parameters left out.
        peak: the same with gradients of parameters as they come; in one stage the peak of all of a step's micro-batches.
        kept: bytes held from the micro-batch's forward to its backward, the incoming carry included if it stays.
        between: bytes held from the first half of a backward that is split to the second.
        forward: bytes of the carry that is sent to the next stage.
        backward: bytes of the gradient that comes back for that carry.
        down: bytes copied to host memory.
        up: bytes copied from host memory.
        host: bytes held in host memory from the micro-batch's forward to its backward.
        summands: bytes of host memory in which further summands of gradients arrive, beside the sums; of all of a step's
            micro-batches.
        blocks: how many blocks run, those within blocks not counted, which could be recomputed.
        flops: floating-point operations of matrix products: of forward; of backward, with what it recomputes.
        launches: operators that compute, whatever their size: of forward; of backward, with what it recomputes.
        streamed: bytes that operators without such operations read and write: of forward; of backward, with what it
            recomputes.
        collectives: axis -> number of the collectives inside the loss.
        live_in: the phase that ``live`` is reached in, such as "backward of block 3".
        peak_in: the phase that ``peak`` is reached in.
        again: buckets that are reduced once more: a function with a backward of its own was given some of their leaves, whose
            gradients come when the others are on their way.
        assumptions: what the trace takes for granted, a sentence each.
    """

    touches: tuple[tuple[str, ...], tuple[str, ...]] | None
    activations: Mapping[str, int]
    live: int = 0
    peak: int = 0
    kept: int = 0
    between: int = 0
    forward: int = 0
    backward: int = 0
    down: int = 0
    up: int = 0
    host: int = 0
    summands: int = 0
    blocks: int = 0
    flops: tuple[int, int] = (0, 0)
    launches: tuple[int, int] = (0, 0)
    streamed: tuple[int, int] = (0, 0)
    collectives: Mapping[str, int] = field(default_factory=dict)
    live_in: str = ""
    peak_in: str = ""
    again: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """How the step is scheduled, with every choice made. For the fields see `shardlib.plan.claims.Step`.

    Attributes:
        total_microbatches: number of micro-batches of all ranks, which are summed in one binary tree; None where sums have no
            order.
        module_tiles: path of a module's parameters -> number of tiles of tokens in which the module runs.
    """

    microbatches: int
    sync: str
    remat: Recompute | None
    prefetch: bool
    loss_scale: LossScale | None
    cast_batch: torch.dtype | None
    sequence: SequenceKind | None
    total_microbatches: int | None = None
    module_tiles: Mapping[str, int] = field(default_factory=dict)
    update: str = "exact"
    tokens: TokenExchange | None = None
    layer_drop: LayerDrop | None = None
    token_drop: TokenDrop | None = None
    autocast: torch.dtype | None = None
    keep: str | int | None = None

    @property
    def has_drops(self) -> bool:
        """Whether steps leave out parts of layers."""
        return bool(self.layers)

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers that steps may leave out, or tokens of them."""
        return layers_of_both(self.layer_drop, self.token_drop)

    def drops(self, step: int | None, key: Key | None) -> DropPlan | None:
        """What layers do in a micro-batch of a step, by the step's key at its slot; None where nothing is ever left out, or
        without a step: all of them see all."""
        if not self.has_drops or step is None or key is None:
            return None
        return drop_plan(self.layer_drop, self.token_drop, step, key)

    @property
    def ahead(self) -> bool:
        """Whether updates run beside a step's computation, into memory of their own."""
        return self.update != "exact"

    @property
    def tree(self) -> bool:
        """Whether micro-batches are summed in one binary tree."""
        return self.total_microbatches is not None

    @property
    def nodes(self) -> int:
        """The largest number of nodes of the tree that a rank's micro-batches make up, each of which it sends."""
        return 1 if self.total_microbatches is None else most_nodes(self.total_microbatches, self.microbatches)

    @property
    def partial_sums(self) -> int:
        """The largest number of sums over micro-batches that a rank holds of one gradient."""
        return 1 if self.total_microbatches is None else most_held(self.total_microbatches, self.microbatches)


@dataclass(frozen=True)
class OptimizerNeeds:
    """What an optimizer needs on the ranks at one coordinate along the stages' axis.

    Attributes:
        bytes: memory -> bytes that its state takes, master weights included.
        states: memory -> bytes of master weights and state alone, without what stands beside them (slots, copies, windows).
        staged: bytes of host memory through which new parameters pass on their way to where they are stored.
        payload: axis -> payload bytes that one rank sends in the update.
    """

    bytes: Mapping[str, int]
    states: Mapping[str, int]
    staged: int
    payload: Mapping[str, int]
