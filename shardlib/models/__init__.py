"""Models as pure functions: a parameter pytree from ``init`` and functions of it, with no parallel code."""

from shardlib.models import bert, decoding, gpt, huggingface, long, students, transformer_layer
from shardlib.models.experts import upcycle
from shardlib.models.from_module import from_module, state_dict
from shardlib.models.quantized_linears import QuantizedLinear, with_quantized_linears

__all__ = [
    "QuantizedLinear",
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
    "with_quantized_linears",
]
