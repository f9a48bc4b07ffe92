"""Progressive layer drop: a step trains without some of the layers, more of them as training goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.plan.arguments import number, refused
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list
from shardlib.plan.drops import LayerDrop
from shardlib.plan.layers import globs_in_order, layers_of


@dataclass(frozen=True, repr=False)
class ProgressiveLayerDrop(CodedTransform):
    """The transform that `progressive_layer_drop` makes, with the arguments given there."""

    theta: float
    gamma: float
    layers: tuple[str, ...]

    @property
    def call(self) -> CodeCall:
        given = {"theta": self.theta, "gamma": self.gamma, "layers": one_or_list(self.layers)}
        return CodeCall(progressive_layer_drop, given)

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        layers = layers_of("progressive_layer_drop", leaves, self.layers)
        yield Step(layer_drop=LayerDrop(self.theta, self.gamma, layers))


def progressive_layer_drop(
    theta: float = 0.5, gamma: float = 0.001, *, layers: str | Sequence[str] = ()
) -> ProgressiveLayerDrop:
    """Leave out layers of the model, at random, in each training step (arXiv 2010.13369).

    At step t layer l of L is kept with probability p = 1 − (l/L)·(1 − θ(t)), where θ(t) = (1 − θ̄)·exp(−γt) + θ̄: at step 0
    all are, and late in training 1 − (1 − θ̄)(L + 1)/2L of them on average (three quarters of many, with θ̄ = 0.5). What a
    layer that was kept adds to the residual stream is divided by p. A layer that is left out hands the stream on. Evaluation
    and generation use all layers, as they are.

    One draw per layer and step, by the state's key and step: equal on every mesh, for all micro-batches and in recompute, and
    after a restart. A layer that is left out is not gathered or computed, and its gradient, which is zero, is not sent. The
    optimizer still updates it (momentum, weight decay).

    Layers are blocks (`sl.block`, `sl.sequential`), one each, whose parameters are elements of a list. Blocks of the
    library's models divide each of their branches by p: x + attention(norm(x))/p. Of other blocks the step takes
    x + (block(x) − x)/p; with a parameter ``gate`` a block does it itself (`sl.nn.Gate`). The residual stream x is a block's
    first floating argument by position beside its parameters; others of its form are passed by keyword. A layer must be the
    identity but for what it adds to the stream: pre-norm, not post-norm.

    Args:
        theta: θ̄, the limit of the last layer's probability; in (0, 1].
        gamma: γ, per step, at least 0; the paper takes 100 over the number of steps.
        layers: globs of the layers' paths, such as "blocks/*"; several in the order in which their layers run,
            ``["encoder/*", "decoder/*"]``. By default the elements of the one list that are like others of it.

    Raises:
        IllegalComposition: an argument out of range; when a plan is made, no such layers, layers of several lists without
            ``layers``, or layers all of whose parameters are tied to others (ALBERT).
        LossError: from the train step, where a layer runs as no block of its own, layers run in another order, or one returns
            another form than its stream's or is given two arguments that may be it.

    >>> params = {"blocks": [{"w": torch.eye(4)} for _ in range(4)]}
    >>> plan = sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(3), sl.progressive_layer_drop(gamma=0.01)))
    >>> [round(p, 3) for p in plan.step.layer_drop.keep(10_000).values()]
    [0.875, 0.75, 0.625, 0.5]
    """
    theta = number("progressive_layer_drop", "theta", theta, 0.0, 1.0, "use a number above 0 and up to 1")
    if theta == 0.0:
        raise refused("progressive_layer_drop", "theta", theta, "the last layer must be kept at times: use more than 0")
    gamma = number("progressive_layer_drop", "gamma", gamma, 0.0, 1e3)
    return ProgressiveLayerDrop(theta, gamma, globs_in_order("progressive_layer_drop", layers))
