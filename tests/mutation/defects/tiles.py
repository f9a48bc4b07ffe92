"""Defects of leaves, functions and modules in tiles."""

from ..planting import Defect

_TILE = "tests/transforms/test_tile.py"
_TOKENS = "tests/transforms/test_tile_tokens.py"

DEFECTS = (
    Defect(
        "tiles of another order",
        "order",
        "execute/gradients.py",
        "the gradients of a leaf's tiles are joined from the last to the first",
        "[leaf.cut.index(bucket)]",
        "[-1 - leaf.cut.index(bucket)]",
        (f"{_TILE}::test_each_layer_in_tiles",),
    ),
    Defect(
        "gradients of tiles that pile up",
        "bytes",
        "execute/gradients.py",
        "a tile's gradient is still there while the next one's is computed",
        "while self._flying and (tiles or self._to_free",
        "while self._flying and (False or self._to_free",
        (f"{_TILE}::test_what_is_gathered_at_a_time_is_two_tiles",),
    ),
    Defect(
        "no tiles of what is not split",
        "bytes",
        "plan/tiles.py",
        "a leaf that comes whole from another memory comes in one piece",
        ' or resolved.location("param").memory != "device"',
        "",
        (f"{_TILE}::test_what_comes_from_another_memory_comes_in_tiles",),
    ),
    Defect(
        "rows of an owner taken for rows of a tile",
        "offset",
        "execute/tiles.py",
        "tiles are looked up and multiplied as if each were a run of the leaf's rows",
        "return x.unflatten(-1, self._index).select(-2, number)",
        "return x.unflatten(-1, (self._index[1], self._index[0], self._index[2])).select(-3, number)",
        (f"{_TILE}::test_each_layer_in_tiles",),
    ),
    Defect(
        "the home of a tile released",
        "bytes",
        "execute/gathering.py",
        "the rest of a block is gathered again after each layer in tiles",
        "self._keep({unit.name, upcoming, unit.home})",
        "self._keep({unit.name, upcoming})",
        (f"{_TILE}::test_each_tile_is_gathered_once_each_way_and_their_unit_stays",),
    ),
    Defect(
        "a masked target of another tile",
        "mask",
        "execute/tiles.py",
        "every tile of words adds the score of a word of its own",
        "[..., 0].masked_fill(~here, 0)",
        "[..., 0]",
        (f"{_TILE}::test_each_layer_in_tiles",),
    ),
    Defect(
        "gradients of one tile of tokens",
        "offset",
        "nn/tiles.py",
        "the gradient of every tile of an input is written to the place of the first",
        "self.view(self._gradient, number)",
        "self.view(self._gradient, 0)",
        (f"{_TOKENS}::test_values_and_gradients_are_those_of_the_whole",),
    ),
    Defect(
        "a tile's gradient outside of the graph",
        "accumulation",
        "nn/tiles.py",
        "second derivatives through tiles lose what each tile's gradient depends on",
        ".copy_(grad)",
        ".copy_(grad.detach())",
        ("tests/test_derivatives.py::test_two_derivatives_and_forward_mode[tiles]",),
    ),
    Defect(
        "each tile's mask is the first one's",
        "key",
        "nn/tiled.py",
        "dropout draws the positions of the first tile in every tile",
        "return positions[self._start : self._stop], length",
        "return positions[: self._stop - self._start], length",
        (f"{_TOKENS}::test_dropout_draws_the_mask_of_the_whole",),
    ),
    Defect(
        "everything of a tile kept",
        "bytes",
        "nn/tiled.py",
        "what lies between inputs and outputs of a tile is kept for backward",
        "checkpoint(run, *taken, use_reentrant=False) if recomputes else run(*taken)",
        "run(*taken)",
        (f"{_TOKENS}::test_what_lies_between_exists_for_one_tile",),
    ),
)
