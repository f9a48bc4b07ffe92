"""One expert per token."""

from __future__ import annotations

from shardlib.nn.moe.routers.top_k import TopK
from shardlib.nn.moe.routing import Capacity


def switch(capacity: Capacity | None = None, *, sampled: bool = False) -> TopK:
    """A router that sends each token to its best expert, weighted by that expert's probability (arXiv 2101.03961).

    The weight is not renormalised: it would be 1, and the router would have no gradient. The load loss counts first choices.

    Args:
        capacity: drops assignments; None keeps all. DeepSpeed's top-1 gate has ``Capacity(1.0, priority="random")``.
        sampled: whether Gumbel noise is added to logits where experts are chosen, in training.

    >>> routing = sl.nn.routers.switch(sl.nn.routers.Capacity(1.0, minimum=1))(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    >>> routing.weights.tolist(), float(routing.aux["dropped"])
    ([[0.7310...], [0.0]], 0.5)
    """
    return TopK(k=1, sampled=sampled, capacity=capacity, load="first")
