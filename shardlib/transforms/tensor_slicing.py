"""Tensor slicing: layers cut over a mesh axis (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.claims import Claim, LeafInfo, Use
from shardlib.errors import IllegalComposition, listing
from shardlib.specs import P
from shardlib.styles import Style
from shardlib.tree import matches


@dataclass(frozen=True)
class Slicing:
    """One rule's value: a style, and what its sliced dimension is made of.

    Attributes:
        pieces: the dimension is this many pieces that must stay whole (attention heads); 0 for any cut.
    """

    kind: str
    transposed: bool = False
    whole: bool = False
    pieces: int = 0

    @property
    def pads(self) -> bool:
        """Whether slices may be padded where the axis does not divide: no part of the model sees one rank's outputs."""
        return self.kind == "vocab" or (self.kind == "column" and self.whole and not self.pieces)


def column(*, heads: int = 0, transposed: bool = False, gather: bool = False) -> Slicing:
    """A layer whose outputs are shared out, its bias with them.

    Args:
        heads: the outputs are this many heads, which must not be cut.
        transposed: the weight is stored (in, out), as ``x @ weight`` and transformers' Conv1D have it.
        gather: every rank gets all outputs.
    """
    return Slicing("column", transposed, gather, heads)


def row(*, heads: int = 0, transposed: bool = False, split: bool = False) -> Slicing:
    """A layer whose inputs are shared out: the outputs are all-reduced, and the bias, whole, is added once.

    Args:
        heads: the inputs are this many heads, which must not be cut.
        transposed: as for `column`.
        split: the input comes whole, and each rank takes its share.
    """
    return Slicing("row", transposed, split, heads)


# The styles of transformers' base_model_tp_plan have their own names for these.
STYLES: dict[str, Slicing | None] = {
    "column": column(),
    "row": row(),
    "vocab": Slicing("vocab"),
    "shared": Slicing("shared"),
    "replicated": None,
    "colwise": column(),
    "rowwise": row(),
    "colwise_gather_output": column(gather=True),
    "colwise_rep": column(gather=True),
    "rowwise_split_input": row(split=True),
    "embedding_rowwise": Slicing("vocab"),
    "replicated_with_grad_allreduce": Slicing("shared"),
    "replicate": None,
}


@dataclass(frozen=True)
class TensorSlicing:
    rules: tuple[tuple[str, Slicing | None], ...]
    axis: str

    @property
    def name(self) -> str:
        return f"tensor_slicing(axis={self.axis!r})"

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        failures: list[str] = []
        used: set[str] = set()
        for leaf in leaves:
            rules = self._rules_for(leaf, used)
            if len({self._placed(slicing, leaf, sizes) for slicing in rules.values()}) > 1:
                names = " = ".join((leaf.path, *leaf.aliases))
                failures.append(
                    f"{names}: one tied leaf with several styles, by the rules {', '.join(map(repr, rules))}; give all of "
                    "them one style ('vocab' where an embedding also scores)"
                )
                continue
            for slicing in list(rules.values())[:1]:
                placed = self._placed(slicing, leaf, sizes)
                if slicing is None or placed is None:
                    continue
                spec, style = placed
                if self.axis in sizes:
                    failures += _misfits(leaf, slicing, spec, self.axis, sizes)
                yield Use(leaf.path, spec=spec, style=style if sizes.get(self.axis) != 1 else None)
        failures += [f"rule {pattern!r} matches no parameter" for pattern, _ in self.rules if pattern not in used]
        if failures:
            raise IllegalComposition(
                f"{self.name} does not fit the parameters and the mesh:\n{listing(failures)}\nUse a size of axis "
                f"{self.axis!r} that divides heads and widths, or change the rules (they match a parameter's path or its "
                "layer's, such as 'blocks/*/mlp/up')."
            )

    def _rules_for(self, leaf: LeafInfo, used: set[str]) -> dict[str, Slicing | None]:
        """The first rule that matches each path of a (tied) leaf; notes every rule that matches in ``used``."""
        found: dict[str, Slicing | None] = {}
        for path in (leaf.path, *leaf.aliases):
            matching = [(pattern, slicing) for pattern, slicing in self.rules if _matches(path, pattern)]
            used.update(pattern for pattern, _ in matching)
            found.update(matching[:1])
        return found

    def _placed(self, slicing: Slicing | None, leaf: LeafInfo, sizes: Mapping[str, int]) -> tuple[P, Style] | None:
        """The spec and style of one leaf of a layer: its weight, or its bias.

        Where the axis does not divide a vocabulary, or other outputs that every rank gets whole, rows of zeros pad it.
        """
        if slicing is None:
            return None
        style = Style(slicing.kind, self.axis, slicing.transposed, slicing.whole)
        if slicing.kind == "shared":
            return P(), style
        if len(leaf.shape) < 2 and slicing.kind == "row":
            return None
        outputs = 1 if slicing.transposed and len(leaf.shape) > 1 else 0
        dim = 1 - outputs if slicing.kind == "row" else outputs
        padded = slicing.pads and dim == 0 and leaf.shape[:1] != () and leaf.shape[0] % sizes.get(self.axis, 1) > 0
        return P(*([None] * dim), self.axis, padded=padded), style


def _misfits(leaf: LeafInfo, slicing: Slicing, spec: P, axis: str, sizes: Mapping[str, int]) -> list[str]:
    """Why one leaf cannot be sliced over this mesh."""
    found = [f"{leaf.path}: shape {leaf.shape}: {told}" for told in spec.problems(leaf.shape, sizes)]
    if slicing.pieces % sizes[axis]:
        found.append(f"{leaf.path}: {slicing.pieces} heads do not divide over {axis}={sizes[axis]}")
    return found


def tensor_slicing(rules: Mapping[str, str | Slicing], axis: str = "model") -> TensorSlicing:
    """Slice layers over ``axis``. The ranks along it share one batch and one model.

    Args:
        rules: glob -> style, the first match holds. A glob matches a parameter's path ("blocks/0/mlp/up/weight") or
            its layer's ("blocks/*/mlp/up"). transformers' ``config.base_model_tp_plan`` is accepted as it is: in a
            glob with dots these stand for "/", and any prefix may come before it. A style is `column`, `row`, or
            "column", "row", "vocab" (embedding, output layer or both: logits that the model computes itself are
            gathered; `linear_cross_entropy` never gathers them), "shared" (whole, but used on slices: its gradient
            is summed), "replicated".

    A vocabulary ("vocab", or outputs that every rank gets whole: ``column(gather=True)``) may have any size: where the axis
    does not divide it each rank holds as many rows, the last ones rows of zeros besides, which count for nothing and appear
    nowhere: logits, gradients, checkpoints and `unshard` have the true size. All other sizes must divide.

    Raises:
        IllegalComposition: a style that is not supported; while planning, rules that match nothing, and heads or
            widths that do not divide (all of them are listed).
    """
    unknown = [f"{glob}: {style!r}" for glob, style in rules.items() if isinstance(style, str) and style not in STYLES]
    if unknown:
        raise IllegalComposition(
            f"tensor_slicing does not know these styles:\n{listing(unknown)}\nIt knows {', '.join(STYLES)}; leave the "
            "others' layers whole by taking their rules out."
        )
    return TensorSlicing(
        tuple((glob, STYLES[style] if isinstance(style, str) else style) for glob, style in rules.items()), axis
    )


def _matches(path: str, pattern: str) -> bool:
    layer = path.rpartition("/")[0]
    globs = [pattern]
    if "." in pattern:
        pattern = pattern.replace(".", "/")
        globs = [pattern, f"*/{pattern}"]
    return matches(path, globs) or matches(layer, globs)
