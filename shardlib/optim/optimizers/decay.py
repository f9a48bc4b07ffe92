"""Weight decay as a separate transformation, which can be masked."""

from __future__ import annotations

from shardlib.optim.base import GradientTransformation, empty_init
from shardlib.optim.locality import Locality
from shardlib.optim.ranges import check, is_size
from shardlib.optim.shards import Shards
from shardlib.tree import Tree, tree_map


def add_decayed_weights(weight_decay: float) -> GradientTransformation:
    """Add ``weight_decay·p`` to the updates; as optax.add_decayed_weights.

    Raises:
        ValueError: ``weight_decay`` is negative.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.chain(sl.optim.add_decayed_weights(0.1), sl.optim.sgd(1.0))
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.9000,  0.4000])
    """
    check("add_decayed_weights", "a decay is at least 0", weight_decay=(weight_decay, is_size(weight_decay)))

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError("add_decayed_weights needs the parameters: update(updates, state, params)")
        return tree_map(lambda u, p: u + weight_decay * p.to(u.dtype), updates, params), state

    return GradientTransformation(empty_init, update, Locality.ELEMENTWISE)
