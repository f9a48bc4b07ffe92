"""Some tokens of each sequence, for a layer that does not see the others, and what it makes of them back in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.common._compat import pytree
from shardlib.errors import LossError
from shardlib.execute.handles import Handle
from shardlib.kernels import counter
from shardlib.kernels.subset import put, take
from shardlib.rng import Key


def drawn_tokens(key: Key, rows: int, length: int, count: int, device: torch.device) -> torch.Tensor:
    """``count`` different positions for each of a slot's rows, ascending: int64 (rows, count), every choice as likely.

    A row draws by its index in the global batch, so that it is the same on every mesh.
    """
    seed, first = key.stretch(rows)
    row, position = torch.arange(first, first + rows, device=device), torch.arange(length, device=device)
    bits = counter.random_bits(seed, row[:, None] * length + position)
    ranked = bits * length + position  # no two are equal
    return ranked.topk(count, dim=1, largest=False, sorted=False).indices.sort(dim=1).values


class Subset:
    """Some of the tokens of a layer's inputs.

    Shapes alone say what is per token. A vector of each row, (B, n) of floats, has the shape of values of each token where n
    is the sequence's length, so such a matrix is never cut; what is per token is (B, tokens, 1). Integers and booleans are
    ids, masks, segments and positions.

    Args:
        index: the positions of the tokens, ascending: int64 (B, kept).
        length: the number of tokens of a sequence.
    """

    index: Any

    def __init__(self, index: torch.Tensor, length: int) -> None:
        self.index, self._length = index, length
        self._shape = (len(index), length)

    def of(self, tree: Any, aside: Callable[[Any], bool]) -> Any:
        """The arguments of a layer with these tokens alone: of tensors (B, tokens, …) but floats (B, tokens), and of both
        sides of masks (B or 1, heads or 1, tokens, tokens).

        Args:
            aside: tells what is left as it is: parameters.
        """
        return pytree.tree_map(
            lambda leaf: self._of(leaf) if isinstance(leaf, torch.Tensor) and not aside(leaf) else leaf, tree
        )

    def beside(self, tree: Any, stream: Any, aside: Callable[[Any], bool]) -> list[torch.Tensor]:
        """The floating tensors (B, tokens, …) of a layer's arguments that are not of its residual stream."""
        known = {id(leaf) for leaf in pytree.tree_leaves(stream)}
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if self._per_token(leaf, self._length)]
        return [leaf for leaf in leaves if id(leaf) not in known and not aside(leaf)]

    def vectors(self, tree: Any, aside: Callable[[Any], bool]) -> list[torch.Tensor]:
        """The floating tensors (B, n) of a layer's arguments where n is the sequence's length, which are not cut."""
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not aside(leaf)]
        return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.shape == self._shape]

    def back(self, before: Any, result: Any) -> Any:
        """A layer's result for these tokens, among the others as they were ``before``.

        Raises:
            LossError: the result has other values for each token than what it takes the place of.
        """
        kept = [leaf for leaf in pytree.tree_leaves(before) if self._per_token(leaf, self._length)]
        leaves, shape = pytree.tree_flatten(result)
        places = [number for number, leaf in enumerate(leaves) if self._per_token(leaf, self.index.shape[1])]
        forms = [[leaf.shape[2:] for leaf in each] for each in (kept, [leaves[place] for place in places])]
        if forms[0] != forms[1]:
            raise LossError(
                f"random_ltd: a layer takes {_shown(forms[0])} and returns {_shown(forms[1])}; return what it takes "
                "for each token"
            )
        for place, whole in zip(places, kept, strict=True):
            leaf = leaves[place]
            put_back = put(whole.flatten(2), self.index, leaf.flatten(2).to(whole.dtype))
            leaves[place] = put_back.view(whole.shape)
        return pytree.tree_unflatten(leaves, shape)

    def _of(self, leaf: torch.Tensor) -> torch.Tensor:
        rows, length = len(self.index), self._length
        if leaf.dim() == 4 and leaf.shape[-2:] == (length, length) and leaf.shape[0] in (1, rows):
            lines = self.index[:, None, :, None].expand(-1, leaf.shape[1], -1, length)
            columns = self.index[:, None, None, :].expand(-1, leaf.shape[1], self.index.shape[1], -1)
            return leaf.expand(rows, -1, -1, -1).gather(2, lines).gather(3, columns)
        if leaf.shape[:2] != self._shape or (leaf.dim() == 2 and leaf.is_floating_point()):
            return leaf
        if leaf.is_floating_point():
            return take(leaf.flatten(2), self.index).view(*self.index.shape, *leaf.shape[2:])
        index = self.index.view(*self.index.shape, *[1] * (leaf.dim() - 2)).expand(-1, -1, *leaf.shape[2:])
        return leaf.gather(1, index)

    def _per_token(self, leaf: Any, length: int) -> bool:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Handle):
            return False
        return leaf.is_floating_point() and leaf.dim() > 2 and leaf.shape[:2] == (len(self.index), length)


def _shown(forms: list[torch.Size]) -> str:
    return " and ".join(f"(B, tokens, {', '.join(map(str, form))})" for form in forms) or "nothing"
