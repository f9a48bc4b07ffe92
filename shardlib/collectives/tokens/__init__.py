"""Exchanges of tokens with experts that are sharded over mesh axes, and the base of new kinds."""

from shardlib.collectives.tokens.all_to_all import Direct, TwoHops
from shardlib.collectives.tokens.base import Payload, PendingRows, TokenExchange, TokenRoute

__all__ = ["Direct", "Payload", "PendingRows", "TokenExchange", "TokenRoute", "TwoHops"]
