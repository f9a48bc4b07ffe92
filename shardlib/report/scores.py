"""A mean loss over bytes in other units."""

import math
import sys

_LARGEST = math.log(sys.float_info.max)


def byte_scores(loss: float) -> dict[str, float]:
    """``loss`` in nats per byte, ``bits_per_byte`` (loss/ln 2) and ``perplexity`` (e^loss)."""
    perplexity = math.exp(loss) if loss < _LARGEST else math.inf  # math.exp raises on overflow
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": perplexity}
