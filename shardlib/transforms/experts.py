"""Expert parallelism: experts are dealt out over a mesh axis, and tokens travel to them (GShard, arXiv 2006.16668)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.collectives.codecs import packing_of
from shardlib.collectives.codecs.base import Packing
from shardlib.collectives.tokens import Direct, TokenExchange, TwoHops
from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.specs import P
from shardlib.plan.arguments import GLOB, axes_of, flag, integer, refused, texts
from shardlib.plan.claims import Claim, LeafInfo, Step, Use
from shardlib.plan.code import CodeCall, CodedTransform, code_of, one_or_list
from shardlib.plan.conditions import require_no_float64
from shardlib.plan.transform import Resolved

RULES = ("experts/*", "*/experts/*")
REPLICAS = ("router/replicas", "*/router/replicas")
_NUMBERED = re.compile(r"(?:.*/)?experts/\d+(?=/|$)")  # one of a list under a key "experts"


@dataclass(frozen=True, repr=False)
class ExpertParallel(CodedTransform):
    """The transform that `experts` makes, with the arguments given there."""

    axes: tuple[str, ...]
    rules: tuple[str, ...]
    codec: str | Packing | None
    back_codec: str | Packing | None
    padded: bool
    kind: Callable[..., TokenExchange] | None
    spare: int

    @property
    def call(self) -> CodeCall:
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        rules = self.rules if self.rules == RULES else one_or_list(self.rules)
        options = {"codec": self.codec, "back_codec": self.back_codec, "padded": self.padded, "kind": self.kind}
        return CodeCall(experts, {"axis": axis, "rules": rules, **options, "spare": self.spare})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        dealt = [leaf for leaf in leaves if leaf.matches(self.rules)]
        self._check(sizes, leaves, dealt)
        for leaf in dealt:
            yield Use(leaf.path, spec=P(self.axes if len(self.axes) > 1 else self.axes[0]), varying=self.axes)
        if (exchange := self._exchange(sizes)) is not None:
            yield Step(tokens=exchange)

    def check(self, resolved: Resolved) -> None:
        dealt = [leaf for leaf in resolved.leaves if leaf.matches(self.rules)]
        for name, codec in {"codec": self.codec, "back_codec": self.back_codec}.items():
            if (packing := packing_of(codec)) is not None:
                require_no_float64(resolved, packing, f"leave {name}= out", dealt)

    def _exchange(self, sizes: Mapping[str, int]) -> TokenExchange | None:
        """How tokens travel along the axes on which there are several ranks."""
        axes = [axis for axis in self.axes if sizes.get(axis, 1) > 1]
        return self.exchange_over(axes if self.kind is None else self.axes) if axes else None

    def exchange_over(self, axes: Sequence[str]) -> TokenExchange:
        """The exchange of tokens along these axes. A kind of a user's own is given the options that are not the default."""
        kind = (Direct, TwoHops)[len(axes) - 1] if self.kind is None else self.kind
        options: dict[str, Any] = {"codec": self.codec, "back_codec": self.back_codec}
        options |= {"padded": self.padded or None, "spare": self.spare or None}
        return kind(*axes, **{name: value for name, value in options.items() if value is not None})

    def _check(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo], dealt: Sequence[LeafInfo]) -> None:
        """Refuse rules that match nothing, and numbers of experts that the axes do not divide."""
        idle = [rule for rule in self.rules if self.rules != RULES and not any(leaf.matches(rule) for leaf in leaves)]
        if idle or not dealt:
            shown = ", ".join(leaf.path for leaf in leaves[:5])
            raise IllegalComposition(
                f"{self.name}: {', '.join(map(repr, idle or self.rules))} match no parameter; paths look like {shown}"
            )
        if lists := _lists(dealt):
            raise IllegalComposition(
                f"{self.name} deals out dimension 0, and in lists each expert has leaves of its own:\n{listing(lists)}\n"
                "Stack each leaf of the experts in one, (experts, ...): torch.stack, or sl.models.huggingface."
            )
        if self.spare and not any(leaf.matches(REPLICAS) for leaf in leaves):
            raise IllegalComposition(
                f"{self.name}: no layer has replicas, which say what is in spare slots; give layers seats and replicas "
                "(init_moe(seats=True, replicas=True)), or leave spare out"
            )
        ways = math.prod(sizes.get(axis, 1) for axis in self.axes)
        unfit = [leaf for leaf in dealt if not leaf.shape or leaf.shape[0] % ways]
        if unfit:
            number = math.gcd(*(leaf.shape[0] if leaf.shape else 1 for leaf in dealt))
            fitting = [str(size) for size in range(1, number + 1) if number % size == 0]
            over = " × ".join(f"{axis}={sizes[axis]}" for axis in self.axes if axis in sizes)
            raise IllegalComposition(
                f"{self.name} deals out dimension 0 over {over}, which does not divide\n"
                f"{listing([f'{leaf.path}: shape {leaf.shape}' for leaf in unfit])}\n"
                f"All divide over {', '.join(fitting)} ranks; a layer that is left out of the rules is whole on every rank."
            )


def _lists(dealt: Sequence[LeafInfo]) -> list[str]:
    """Lists of experts, no element of which has a leaf with a dimension of experts and a matrix."""
    most: dict[str, int] = {}
    for leaf in dealt:
        if element := _NUMBERED.match(leaf.path):
            most[element[0]] = max(most.get(element[0], 0), len(leaf.shape))
    return sorted({element.rpartition("/")[0] for element, dims in most.items() if dims < 3})


def experts(
    axis: str | Sequence[str] = "expert",
    rules: str | Sequence[str] = RULES,
    *,
    codec: str | Packing | None = None,
    back_codec: str | Packing | None = None,
    padded: bool = False,
    kind: Callable[..., TokenExchange] | None = None,
    spare: int = 0,
) -> ExpertParallel:
    """Deal out experts over ``axis``, which also divides the batch: tokens travel to their experts and back.

    A rank has as many experts as any other, and the experts' gradients are complete there. All other leaves are whole along
    the axis, and their gradients are summed over it; ``zero(stage, axis=("data", "expert"))`` splits them over it too, and
    experts over "data" alone. `tensor_slicing` may cut each expert: ``column(experts=True)``, ``row(experts=True)``.

    Layers are `shardlib.nn.moe`, or call `shardlib.nn.run_experts`. Nothing that ranks send one another depends on how tokens
    are routed, but for the number of rows; a rank without tokens, or whose experts get none, takes part. The loss of a layer
    that drops nothing is that of one device for the joined batch; a capacity is of the tokens that a rank has.

    Args:
        axis: a mesh axis; or two, the one between nodes first: tokens then travel in two hops, so that a rank sends larger
            messages to fewer ranks of other nodes (`shardlib.collectives.tokens.TwoHops`).
        rules: one or several globs of leaves with the experts along dimension 0: all leaves of a layer's experts. By default
            what lies under a key "experts".
        codec: how rows are encoded on the way to experts, and the gradients of results: "int8", "int4", "fp8" or a packing.
            DeepSeek-V3 sends fp8 (arXiv 2412.19437, section 3.3.3).
        back_codec: the same on the way back, for results and the gradients of rows.
        padded: whether the rows of every expert are padded to its capacity, as in DeepSpeed. All sizes are then known before
            a step, and no host waits for them; routers must have a capacity, and ranks equally many tokens. Otherwise ranks
            send the rows that there are, and how many beforehand.
        kind: how tokens travel: a subclass of `shardlib.collectives.tokens.TokenExchange`, or a function that makes such a
            value. It is called with the axes, and with those of the other options that are given. None is ``Direct`` on one
            axis and ``TwoHops`` on two.
        spare: slots of a rank for second copies of other ranks' experts, in each layer with replicas
            (``init_moe(replicas=True)``). Which experts have copies may change between steps (`shardlib.relayout`). A layer
            fetches their weights where it begins, and its backward sends their gradients to the experts' own ranks, so the
            state is the same without them.

    Raises:
        IllegalComposition: no axis, more than two, or one twice; rules that are no globs; a kind that makes no
            exchange over the axes; ``spare`` and ``padded`` together; when a plan is made, globs that match no parameter,
            lists of experts that are not stacked, numbers of experts that do not divide over the axis, ``spare`` where no
            layer has replicas, and experts in float64, which no codec holds.
        SpecError: an unknown codec.

    >>> params = {"router": {"weight": torch.ones(8, 16)}, "experts": {"up": torch.ones(8, 32, 16)}}
    >>> plan = sl.make_plan(params, sl.abstract_mesh(data=2, expert=4), sl.chain(sl.experts(), sl.zero(3)))
    >>> plan.placement_of["experts/up"].compute.spec, plan.placement_of["experts/up"].param.spec
    (P('expert'), P(('expert', 'data')))
    """
    axes = axes_of("experts", axis, most=2)
    if not (kind is None or callable(kind)):
        raise refused("experts", "kind", kind, "give a subclass of shardlib.collectives.tokens.TokenExchange, or None")
    rules, padded = texts("experts", "rules", rules, GLOB), flag("experts", "padded", padded)
    spare = integer("experts", "spare", spare, 0, "use a number of slots, {} or more")
    if spare and padded:
        raise IllegalComposition(
            "experts(padded=True, spare=...): padded rows have fixed sizes, which replicas change; leave one of the two out"
        )
    made = ExpertParallel(axes, rules, codec, back_codec, padded, kind, spare)
    try:
        exchange = made.exchange_over(axes)  # refuses unknown codecs
    except TypeError as error:
        raise IllegalComposition(f"experts(kind={code_of(kind)}) takes no such axes or options: {error}") from error
    if not isinstance(exchange, TokenExchange) or exchange.axes != axes:
        raise IllegalComposition(
            f"experts(kind={code_of(kind)}) makes {exchange!r} of {axes}, which is no "
            "shardlib.collectives.tokens.TokenExchange over these axes, as a subclass makes"
        )
    return made
