"""Random layer-wise token dropping: the middle layers see some of the tokens, more of them as training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import IllegalComposition
from shardlib.plan.arguments import integer
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list
from shardlib.plan.drops import TokenDrop, tokens_at
from shardlib.plan.layers import globs_in_order, layers_of
from shardlib.plan.transform import Resolved


@dataclass(frozen=True, repr=False)
class RandomLTD(CodedTransform):
    """The transform that `random_ltd` makes, with the arguments given there."""

    kept: int | Callable[[int], int]
    ends: int
    layers: tuple[str, ...]

    @property
    def call(self) -> CodeCall:
        return CodeCall(random_ltd, {"kept": self.kept, "ends": self.ends, "layers": one_or_list(self.layers)})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        layers = layers_of("random_ltd", leaves, self.layers)
        if len(layers) <= 2 * self.ends:
            raise IllegalComposition(
                f"{self.name} leaves the first and the last {self.ends} of {len(layers)} layers as they are, so it leaves "
                "out no tokens; give fewer ends="
            )
        yield Step(token_drop=TokenDrop(self.kept, self.ends, layers))

    def check(self, resolved: Resolved) -> None:
        sequence = resolved.step.sequence
        if sequence and resolved.sizes[sequence.axis] > 1:
            raise IllegalComposition(
                f"{self.name} draws tokens of whole sequences, which sequence({sequence.axis!r}) cuts; take one of the two "
                "out of the plan"
            )


def random_ltd(kept: int | Callable[[int], int], *, ends: int = 1, layers: str | Sequence[str] = ()) -> RandomLTD:
    """Leave out tokens of the middle layers, at random, in each training step (random-LTD, arXiv 2211.11586).

    Every middle layer draws, for each sequence of the batch, ``kept(step)`` of its tokens without replacement, runs on these
    in their order, and puts them back among the others, which pass it by. The first and the last layers see all tokens;
    evaluation and generation too. A causal mask of the kept tokens stays causal; positions, segments and masks among a
    layer's inputs are those of the kept tokens.

    Draws depend on the state's key, the step, the layer and the sequence's index in the global batch: they are equal on every
    mesh, in recompute and after a restart. Activations, FLOPs and what slices send shrink with the tokens;
    `sl.make_plan` with ``step=`` counts them. A step's ``metrics["layer_tokens"]`` are the tokens that its layers saw;
    `sl.data.layer_tokens` is the same for any step, so that a learning rate may follow it (`sl.optim.token_schedule`).

    Layers are blocks (`sl.block`, `sl.sequential`), one each, with a residual stream (B, tokens, width), whose parameters are
    elements of a list. The stream is the first floating argument by position beside them; others of its form are passed by
    keyword. Of their other inputs every tensor (B, tokens, ...) is cut to the kept tokens, and masks (B, heads, tokens,
    tokens) on both sides. A matrix of floats is not: its rows are vectors of the sequences, and values of tokens are
    (B, tokens, 1). Another sequence that may be as long, an encoder's, is (B, 1, tokens, width). A block that makes
    positions itself must take ``gate`` (`sl.nn.Gate`) and use ``gate.tokens``, as those of transformers' decoders here do.

    Args:
        kept: the number of kept tokens, or a function of the step: `sl.data.linear_pace(128, 512, steps=10_000, multiple=16)`
            is DeepSpeed's schedule. Sequences that are not longer are not changed.
        ends: how many layers at either end see all tokens.
        layers: globs of all layers' paths, such as "blocks/*"; several in the order in which their layers run,
            ``["encoder/*", "decoder/*"]``. By default the elements of the one list that are like others of it.

    Raises:
        IllegalComposition: an argument out of range; when a plan is made, no middle layers, layers of several lists without
            ``layers``, layers all of whose parameters are tied to others (ALBERT), or `sequence` in the same plan; from the
            train step, a schedule that gives no number of tokens at its step.
        LossError: from the train step, where a layer runs as no block of its own, layers run in another order, or one returns
            another form than its stream's or is given two arguments that may be it.

    >>> params = {"blocks": [{"w": torch.eye(4)} for _ in range(4)]}
    >>> ltd = sl.random_ltd(sl.data.linear_pace(16, 64, steps=6, multiple=8))
    >>> drop = sl.make_plan(params, sl.abstract_mesh(data=2), sl.chain(sl.zero(1), ltd)).step.token_drop
    >>> drop.middle, [drop.layer_tokens(step, rows=1, length=64) for step in (0, 3, 6)]
    (('blocks/1', 'blocks/2'), [160, 208, 256])
    """
    if isinstance(kept, type) or not callable(kept):
        remedy = "give a number of tokens of at least {}, or a function of the step, such as sl.data.linear_pace makes"
        kept = integer("random_ltd", "kept", kept, remedy=remedy)
    else:
        tokens_at(kept, 0)
    ends = integer("random_ltd", "ends", ends, 0)
    return RandomLTD(kept, ends, globs_in_order("random_ltd", layers))
