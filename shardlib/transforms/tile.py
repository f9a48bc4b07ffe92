"""Tiles: large layers run as a sequence of parts, so that neither a gathered weight nor an activation is ever whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import IllegalComposition, listing
from shardlib.plan.arguments import GLOB, choice, integer, texts
from shardlib.plan.claims import Claim, LeafInfo, ModuleTiles, Use
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list
from shardlib.transforms.tensor_slicing import matches_nothing, matches_rule
from shardlib.tree import matches

_ALONG = ("outputs", "tokens")


@dataclass(frozen=True, repr=False)
class Tile(CodedTransform):
    """The transform that `tile` makes, with the arguments given there."""

    globs: tuple[str, ...]
    n: int
    along: str

    @property
    def call(self) -> CodeCall:
        return CodeCall(tile, {**vars(self), "globs": one_or_list(self.globs)})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        match = _matches_weight if self.along == "outputs" else _module_of
        paths = [path for leaf in leaves for path in (leaf.path, *leaf.aliases)]
        unmatched = [glob for glob in self.globs if not any(match(leaf, glob) for leaf in leaves)]
        if unmatched:
            misfits = [matches_nothing(glob, paths) for glob in unmatched]
            what = "weight of two dimensions or more" if self.along == "outputs" else "module"
            lines = [f"{misfit.text.replace('parameter', what)}; {misfit.remedy}" for misfit in misfits]
            raise IllegalComposition(f"{self.name} does not fit the parameters:\n{listing(lines)}")
        for leaf in leaves:
            yield from self._claims_on(leaf)

    def _claims_on(self, leaf: LeafInfo) -> Iterator[Claim]:
        if self.along == "outputs":
            if any(_matches_weight(leaf, glob) for glob in self.globs):
                yield Use(leaf.path, tiles=self.n)
            return
        modules = [module for glob in self.globs if (module := _module_of(leaf, glob)) is not None]
        if modules:
            yield Use(leaf.path, tokens=ModuleTiles(min(modules, key=len), self.n))


def _matches_weight(leaf: LeafInfo, glob: str) -> bool:
    return len(leaf.shape) > 1 and any(matches_rule(path, glob) for path in (leaf.path, *leaf.aliases))


def _module_of(leaf: LeafInfo, glob: str) -> str | None:
    """The outermost module that holds the leaf and whose path matches."""
    parts = leaf.path.split("/")
    paths = ["/".join(parts[:length]) for length in range(1, len(parts))]
    return next((path for path in paths if matches(path, glob.replace(".", "/"))), None)


def tile(globs: str | Sequence[str], n: int, *, along: str = "outputs") -> Tile:
    """Run layers as ``n`` tiles, one after the other.

    =========  ==================================================================================================
    along      what is never whole
    =========  ==================================================================================================
    outputs    the gathered weight (stage 3): each tile of its rows is gathered, used and released, in forward and in
               backward, and its gradient is reduced, before the tile after it is used (ZeRO-Infinity's memory-centric
               tiling, arXiv 2104.07857, section 5.1.3). For weights that the loss uses by ``F.linear``, ``x @ weight``,
               ``torch.addmm``, ``F.embedding`` or `linear_cross_entropy` (whose logits then exist for one tile of
               words at a time)
    tokens     the activations inside a module of `from_module`: it runs on one tile of the tokens (dimension 1 of its
               input) after the other, and backward computes them again. `shardlib.nn.tiled` does so for any function
    =========  ==================================================================================================

    State, optimizer and checkpoints do not know of tiles.

    Args:
        globs: of weights or their layers ("blocks/*/mlp/up"); with ``along="tokens"`` of modules ("*.mlp", "*/mlp").
        n: number of tiles.
        along: "outputs" or "tokens".

    Raises:
        IllegalComposition: fewer than 2 tiles, or another ``along``; when a plan is made, globs that match nothing, and
            weights whose rows do not divide by n times the number of ranks that hold shares of it.

    >>> params = {"mlp": {"up": torch.ones(64, 8), "down": torch.ones(8, 64)}}
    >>> plan = sl.make_plan(params, sl.abstract_mesh(data=4), sl.chain(sl.zero(3), sl.tile("*/up", 4)))
    >>> len(plan.gathers)  # four tiles, and the rest of the unit, in forward and backward
    10
    """
    globs, n = texts("tile", "globs", globs, GLOB), integer("tile", "n", n, 2, "give at least {} tiles")
    return Tile(globs, n, choice("tile", "along", along, _ALONG))
