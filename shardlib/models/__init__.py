"""Models as pure functions: a parameter pytree from ``init`` and functions of it, with no parallel code."""

from shardlib.models import bert, decoding, gpt, huggingface, long, students, transformer_layer
from shardlib.models.experts import upcycle
from shardlib.models.from_module import from_module, state_dict

__all__ = [
    "bert",
    "decoding",
    "from_module",
    "gpt",
    "huggingface",
    "long",
    "state_dict",
    "students",
    "transformer_layer",
    "upcycle",
]
