"""Exchanges of tokens with experts that are dealt out over mesh axes: one file per kind, and the base of new kinds."""

from shardlib.collectives.tokens.base import Coming, TokenExchange, Way
from shardlib.collectives.tokens.direct import Direct
from shardlib.collectives.tokens.payload import Payload
from shardlib.collectives.tokens.two_hops import TwoHops

__all__ = ["Coming", "Direct", "Payload", "TokenExchange", "TwoHops", "Way"]
