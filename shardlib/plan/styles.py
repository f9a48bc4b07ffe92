"""Styles: how a parameter that is sliced over a mesh axis is consumed by the layer it belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """How the slices of one leaf work together along ``axis`` (Megatron-LM, arXiv 1909.08053).

    ======  =====================================================================================
    kind    what a rank does
    ======  =====================================================================================
    column  computes its share of the outputs from the whole input
    row     computes a partial sum of all outputs from its share of the inputs; then all-reduced
    vocab   holds its share of the vocabulary: looks up its own rows, or scores its own words
    shared  holds all of a leaf that is used on slices, so its gradient is summed over the axis
    ======  =====================================================================================

    Attributes:
        transposed: the weight is stored (in, out), as ``x @ weight`` has it, not (out, in) as ``F.linear``.
        whole: the input (row) comes whole and is split, or the output (column) is gathered.
    """

    kind: str
    axis: str
    transposed: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return self.kind + ("ᵀ" if self.transposed else "") + (" (whole)" if self.whole else "")

    @property
    def sums(self) -> bool:
        """Whether each rank's gradient is a partial sum over the axis."""
        return self.kind == "shared"


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

    def __str__(self) -> str:
        if self.kind not in ("column", "row"):
            return repr(self.kind)
        whole = "gather" if self.kind == "column" else "split"
        options = [f"heads={self.pieces}"] if self.pieces else []
        options += ["transposed=True"] * self.transposed + [f"{whole}=True"] * self.whole
        return f"sl.{self.kind}({', '.join(options)})"
