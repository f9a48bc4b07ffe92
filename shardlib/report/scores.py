"""What a mean loss over bytes says in other words."""

import math


def byte_scores(loss: float) -> dict[str, float]:
    """``loss`` in nats per byte, the same in ``bits_per_byte`` (loss/ln 2), and ``perplexity`` (e^loss)."""
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": math.exp(loss)}
