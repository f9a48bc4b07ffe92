"""Tensor slicing: layers are cut into slices over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from shardlib.collectives.styles import Column, Row, Shared, Style, Vocab
from shardlib.errors import IllegalComposition, listing
from shardlib.mesh.specs import P
from shardlib.plan.arguments import axis_of, flag, integer, refused
from shardlib.plan.claims import Claim, LeafInfo, Use
from shardlib.plan.code import CodeCall, CodedTransform
from shardlib.plan.transform import Resolved
from shardlib.tree import matches


def column(*, heads: int = 0, transposed: bool = False, gather: bool = False, experts: bool = False) -> Style:
    """The style of a layer whose outputs, and with them its bias, are divided over the ranks.

    Args:
        heads: number of heads that the outputs consist of, if heads must not be cut.
        transposed: whether the weight is stored as (in, out), as for ``x @ weight`` and transformers' Conv1D.
        gather: whether outputs are gathered, so that every rank gets all of them.
        experts: whether leaves hold the layers of experts, along dimension 0, every one of which is cut (`shardlib.nn.moe`).

    >>> rules = {"*/attn/qkv": sl.column(heads=2), "*/up": sl.column()}
    >>> params = {"block": {"up": {"weight": torch.ones(32, 8)}, "attn": {"qkv": {"weight": torch.ones(24, 8)}}}}
    >>> sl.make_plan(params, sl.abstract_mesh(data=1, model=2), sl.tensor_slicing(rules)).bytes("param")
    896
    """
    return Column(*_of_layer("column", heads, transposed, experts), flag("column", "gather", gather))


def row(*, heads: int = 0, transposed: bool = False, split: bool = False, experts: bool = False) -> Style:
    """The style of a layer whose inputs are divided over the ranks. Outputs are all-reduced; the whole bias is added once.

    Args:
        heads: number of heads that the inputs consist of, if heads must not be cut.
        transposed: as for `column`.
        split: whether the input arrives whole, so that each rank takes its share of it.
        experts: as for `column`.

    >>> rules = {"*/attn/out": sl.row(heads=2)}
    >>> params = {"block": {"attn": {"out": {"weight": torch.ones(8, 8)}}}}
    >>> sl.make_plan(params, sl.abstract_mesh(data=1, model=2), sl.tensor_slicing(rules)).bytes("param")
    128
    """
    return Row(*_of_layer("row", heads, transposed, experts), flag("row", "split", split))


def _of_layer(function: str, heads: Any, transposed: Any, experts: Any) -> tuple[int, bool, bool]:
    """The arguments that `column` and `row` share."""
    heads = integer(function, "heads", heads, 0, "give the number of heads, 0 for none")
    return heads, flag(function, "transposed", transposed), flag(function, "experts", experts)


# Name -> style. The last seven names are those of transformers' base_model_tp_plan.
STYLES: dict[str, Style | None] = {
    "column": column(),
    "row": row(),
    "vocab": Vocab(),
    "shared": Shared(),
    "replicated": None,
    "colwise": column(),
    "rowwise": row(),
    "colwise_gather_output": column(gather=True),
    "colwise_rep": column(gather=True),
    "rowwise_split_input": row(split=True),
    "embedding_rowwise": Vocab(),
    "replicated_with_grad_allreduce": Shared(),
    "replicate": None,
}


@dataclass(frozen=True, repr=False)
class TensorSlicing(CodedTransform):
    """The transform that `tensor_slicing` makes, with the arguments given there."""

    rules: tuple[tuple[str, Style | None], ...]
    axis: str

    @property
    def call(self) -> CodeCall:
        rules = {glob: next((name for name, s in STYLES.items() if s == style), style) for glob, style in self.rules}
        return CodeCall(tensor_slicing, {"rules": rules, "axis": self.axis})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        uses, misfits = self._read(sizes, leaves)
        if misfits:
            ways = sizes.get(self.axis, 1)
            fitting = (
                size
                for size in range(ways // 2, 1, -1)
                if ways % size == 0 and not self._read({**sizes, self.axis: size}, leaves)[1]
            )
            mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            lines = [f"{misfit.text}; {misfit.remedy}" for misfit in misfits]
            advice = [f"With {self.axis}={size} all rules fit." for size in fitting][:1]
            if any(misfit.pattern for misfit in misfits):
                advice.append(
                    "After a layer that stays whole use sl.row(split=True) for sl.row(), or leave that whole too."
                )
            advice.append(
                "(A rule matches a parameter's path or its layer's, as 'blocks/*/mlp/up'; the first that matches holds.)"
            )
            raise IllegalComposition(
                f"{self.name} does not fit the parameters and the mesh ({mesh}):\n{listing(lines)}\n{' '.join(advice)}"
            )
        return uses

    def check(self, resolved: Resolved) -> None:
        sequence = resolved.step.sequence
        if sequence is None or not sequence.gathers_for_slices or sequence.axis != self.axis:
            return
        cut = [path for path, use in resolved.uses.items() if use.style and use.style.experts]
        if cut:
            raise IllegalComposition(
                f"{self.name} cuts experts over axis {self.axis!r}, along which sequence(kind={sequence.name!r}) cuts "
                f"sequences:\n{listing(cut)}\nDeal experts out by experts(axis=...), or use another kind on another axis."
            )

    def _read(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> tuple[list[Claim], list[Misfit]]:
        """The claims of the rules, and the rules that do not fit."""
        uses: list[Claim] = []
        misfits: list[Misfit] = []
        held: dict[str, list[str]] = {pattern: [] for pattern, _ in self.rules}
        before: dict[str, tuple[str, str]] = {}
        for leaf in leaves:
            rules = self._rules_for(leaf, held, before)
            if len({self._placed(style, leaf, sizes) for style in rules.values()}) > 1:
                of = (
                    f"{' = '.join((leaf.path, *leaf.aliases))}: one tied leaf of shape {leaf.shape} with several styles"
                )
                remedy = "give all of them one style ('vocab' where an embedding also scores)"
                misfits.append(Misfit(f"{of}, by the rules {', '.join(map(repr, rules))}", remedy))
                continue
            for pattern, given in list(rules.items())[:1]:
                if placed := self._placed(given, leaf, sizes):
                    spec, style = placed
                    if self.axis in sizes:
                        misfits += misfits_of(leaf, pattern, style, spec, self.axis, sizes)
                    uses.append(Use(leaf.path, spec=spec, style=style if sizes.get(self.axis) != 1 else None))
        paths = [path for leaf in leaves for path in (leaf.path, *leaf.aliases)]
        for pattern, _ in self.rules:
            if pattern in before:
                first, path = before[pattern]
                why = f"rule {pattern!r} never holds: {first!r} matches {path} too, and comes before it"
                misfits.append(Misfit(why, f"put it before {first!r}, or take it out"))
            elif not held[pattern] and not any(matches_rule(path, pattern) for path in paths):
                misfits.append(matches_nothing(pattern, paths))
        return uses, with_remedies(misfits, held)

    def _rules_for(
        self, leaf: LeafInfo, held: dict[str, list[str]], before: dict[str, tuple[str, str]]
    ) -> dict[str, Style | None]:
        """Glob -> style of the first rule that matches each path of a (tied) leaf.

        Adds the path to that rule's entry in ``held``. For a later rule that matches too, has another style and has held
        for no path, ``before`` gets the first rule's glob and the path.
        """
        first_rules: dict[str, Style | None] = {}
        for path in (leaf.path, *leaf.aliases):
            matching = [(pattern, style) for pattern, style in self.rules if matches_rule(path, pattern)]
            first_rules.update(matching[:1])
            for pattern, _ in matching[:1]:
                held[pattern].append(path)
                before.pop(pattern, None)
            for pattern, style in matching[1:]:
                if not held[pattern] and style != matching[0][1]:
                    before.setdefault(pattern, (matching[0][0], path))
        return first_rules

    def _placed(self, style: Style | None, leaf: LeafInfo, sizes: Mapping[str, int]) -> tuple[P, Style] | None:
        """The spec and style of a layer's weight or bias; None for a leaf that stays whole."""
        if style is None:
            return None
        style = replace(style, axis=self.axis)
        spec = style.spec(leaf.shape, sizes.get(self.axis, 1))
        return None if spec is None else (spec, style)


def tensor_slicing(rules: Mapping[str, str | Style], axis: str = "model") -> TensorSlicing:
    """Slice layers over ``axis``. The ranks along the axis share one batch and one model.

    Args:
        rules: glob -> style; the first match holds. A glob matches a parameter's path ("blocks/0/mlp/up/weight") or
            its layer's ("blocks/*/mlp/up"). transformers' ``config.base_model_tp_plan`` is accepted unchanged: dots in a
            glob stand for "/", and any prefix may come before such a glob. A style is `column`, `row`, or
            "column", "row", "vocab" (embedding, output layer or both: logits that the model computes itself are
            gathered; `linear_cross_entropy` never gathers them), "shared" (whole, but used on slices: its gradient
            is summed), "replicated", or a user's own `shardlib.collectives.styles.Style`.
        axis: mesh axis over which layers are sliced.

    A vocabulary ("vocab", or outputs that every rank gathers: ``column(gather=True)``) may have any size. If the axis does
    not divide it, slices are padded with rows of zeros to equal sizes. Padding affects no result: logits, gradients,
    checkpoints and `unshard` have the true size. All other sizes must be divisible.

    Raises:
        IllegalComposition: a style that is not supported; when a plan is made, rules that match nothing, and heads or
            widths that are not divisible (all of them are listed).

    >>> parallel = sl.tensor_slicing({"*/up": "column", "*/down": "row"})
    >>> params = {"mlp": {"up": {"weight": torch.ones(32, 8)}, "down": {"weight": torch.ones(8, 32)}}}
    >>> sl.make_plan(params, sl.abstract_mesh(data=1, model=4), parallel).bytes("param")
    512
    """
    if not isinstance(rules, Mapping) or not all(isinstance(glob, str) for glob in rules):
        raise refused("tensor_slicing", "rules", rules, "give a dictionary of glob -> style")
    unknown = [
        f"{glob}: {style!r}"
        + "".join(f"; replace it with {near!r}" for near in get_close_matches(str(style), STYLES, 1, 0.8))
        for glob, style in rules.items()
        if not isinstance(style, Style) and not (isinstance(style, str) and style in STYLES)
    ]
    if unknown:
        raise IllegalComposition(
            f"tensor_slicing(rules=) does not know these styles:\n{listing(unknown)}\nIt knows {', '.join(STYLES)}; "
            "take out their rules, and those of layers that take slices from them."
        )
    styles = {str(glob): style if isinstance(style, Style) else STYLES[style] for glob, style in rules.items()}
    return TensorSlicing(tuple(styles.items()), axis_of("tensor_slicing", "axis", axis))


def matches_rule(path: str, pattern: str) -> bool:
    """Whether a rule's glob matches a parameter's path, or its layer's."""
    layer = path.rpartition("/")[0]
    globs = [pattern]
    if "." in pattern:
        pattern = pattern.replace(".", "/")
        globs = [pattern, f"*/{pattern}"]
    return matches(path, globs) or matches(layer, globs)


# Misfits: the rules of a tensor slicing that do not fit the parameters or the mesh, with remedies.


@dataclass(frozen=True)
class Misfit:
    """One failure of a rule.

    Attributes:
        text: the failure, with the leaf's path and shape, and the rule.
        remedy: the remedy; "" if it is to leave the leaf whole, which `with_remedies` spells out.
        pattern: the rule's glob, or "".
        path: the path of the leaf to leave whole, or "".
    """

    text: str
    remedy: str = ""
    pattern: str = ""
    path: str = ""


def misfits_of(
    leaf: LeafInfo, pattern: str, style: Style, spec: P, axis: str, sizes: Mapping[str, int]
) -> list[Misfit]:
    """The reasons for which a rule cannot slice a leaf over this mesh."""
    reasons, remedy = [], ""
    if not leaf.dtype.is_floating_point:
        reasons.append(f"{leaf.dtype} is no layer's weight or bias")
    elif spec.axes and not leaf.shape:
        reasons.append("a single number has no dimension to slice")
    elif spec.axes:
        reasons += spec.problems(leaf.shape, sizes)
        if misfit := style.misfit(leaf.shape, sizes[axis]):
            reasons.append(misfit[0])
            remedy = misfit[1]
    shape, rule = f"{leaf.path}: shape {leaf.shape}", f"by rule {pattern!r}: {style.rule}"
    return [Misfit(f"{shape}: {reason}, {rule}", remedy, pattern, leaf.path) for reason in reasons]


def matches_nothing(pattern: str, paths: Sequence[str]) -> Misfit:
    """A rule that matches no parameter; the remedy is the most similar glob that does."""
    text = f"rule {pattern!r} matches no parameter"
    anywhere = f"*/{pattern}"
    if any(matches_rule(path, anywhere) for path in paths):
        return Misfit(text, f"replace it with {anywhere!r}")
    layers = sorted({_glob(path.rpartition("/")[0] or path) for path in paths})
    names = [f"*/{layer.rpartition('/')[2]}" for layer in layers if "/" in layer]
    near = get_close_matches(pattern.replace(".", "/"), [*layers, *names, *map(_glob, paths)], 1)
    return Misfit(text, f"replace it with {near[0]!r}, or take it out" if near else "take it out")


def with_remedies(misfits: Sequence[Misfit], held: Mapping[str, Sequence[str]]) -> list[Misfit]:
    """The misfits, with the missing remedies: replace the rule, or put a rule before it if it suits other leaves.

    Args:
        held: glob of a rule -> the paths for which it is the first match.
    """
    failing: dict[str, set[str]] = {}
    for misfit in misfits:
        failing.setdefault(misfit.pattern, set()).add(misfit.path)

    def remedy(misfit: Misfit) -> str:
        fine = [path for path in held[misfit.pattern] if path not in failing[misfit.pattern]]
        layers = {path.rpartition("/")[0] for path in failing[misfit.pattern]}
        if all(path.rpartition("/")[0] in layers for path in fine):  # only biases fit, and they belong to their weights
            return "replace it with 'replicated'"
        glob = _glob(misfit.path)
        return f"put {(glob if all(_glob(path) != glob for path in fine) else misfit.path)!r}: 'replicated' before it"

    return [misfit if misfit.remedy else replace(misfit, remedy=remedy(misfit)) for misfit in misfits]


def _glob(path: str) -> str:
    """A glob for the same leaf of all layers of a list: numbers in the path become ``*``."""
    return re.sub(r"(^|/)\d+(?=/|$)", r"\1*", path)
