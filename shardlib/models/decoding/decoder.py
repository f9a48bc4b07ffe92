"""`Decoder`: a model as a function of new tokens and of what attends to the tokens before them; the settings of
transformers' decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.errors import TreeError, listing
from shardlib.models.decoding.cache import Attend


class Decoder(ABC):
    """A causal language model, as `decode` runs it. Another kind of model is a subclass, and an entry in `kinds`.

    Attributes:
        sequence: the longest context, in tokens.
        vocab: number of tokens that there are.
        products: globs over the paths of weights ``[outputs, inputs]`` that nothing but ``F.linear`` uses, which `quantized`
            may replace.
    """

    sequence: int
    vocab: int
    products: tuple[str, ...] = ()

    def prepared(self, params: Any) -> Any:
        """The model's parameters in the form in which `hidden` and `logits` take them: made once where they stay the same.

        It reads no values: parameters that are gathered from other ranks are gathered where they are used.
        """
        return params

    @abstractmethod
    def hidden(self, params: Any, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The input of the output layer, ``[T, W]``, of new tokens ``[T]`` at ``positions`` ``[T]`` of their sequences.

        Every layer gives its queries, keys and values, ``[T, heads, size]``, to ``attend`` once, layers in order.
        """

    def layers_of_experts(self, params: Any) -> list[Mapping[str, Any]]:
        """The parameters of each layer of experts, in the order in which they run: "experts", as `shardlib.nn.run_experts`
        takes them, beside what `choices` reads. None in a model without them."""
        return []

    def choices(self, layer: Mapping[str, Any], x: torch.Tensor) -> torch.Tensor:
        """What a layer of `layers_of_experts` chooses for inputs ``[T, W]``: rows of its experts' leaves, −1 for none; int64
        ``[T, k]``. Only models with such layers need it: experts in host memory are fetched ahead by it.

        Raises:
            NotImplementedError: the model has layers of experts and does not say what they choose.
        """
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} has layers of experts: define choices(layer, x) -> rows of their leaves, [T, k]"
        )

    @abstractmethod
    def logits(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        """The logits ``[N, V]`` of hidden states ``[N, W]``."""


def require_settings(config: Any, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise a `TreeError` that lists the settings of a configuration that have other values than those ``known``."""
    wrong = [
        f"{name}={getattr(config, name)!r}, and {' or '.join(map(repr, values))} is computed"
        for name, values in known.items()
        if hasattr(config, name) and getattr(config, name) not in values
    ]
    if wrong:
        raise TreeError(
            f"generate cannot run this {type(config).__name__}:\n{listing(wrong)}\nWrite a shardlib.models.decoding.Decoder "
            "for it, and pass that as the model."
        )


# Sliding windows of transformers' decoders: which layers have one, as each architecture computes them.
# Configurations may have settings that their models ignore, so what a setting means is stated by kind of model.


# ``windows(config)``: the sliding window of each layer, None for attention to all tokens.
Windows = Callable[[Any], Sequence[int | None]]


def nowhere(config: Any) -> list[int | None]:
    """No layer has a window, whatever the configuration says."""
    return [None] * config.num_hidden_layers


def everywhere(config: Any) -> list[int | None]:
    """Every layer has the window ``sliding_window``, or none where that is None; ``layer_types`` is not read."""
    return [config.sliding_window] * config.num_hidden_layers


def by_layer(config: Any) -> list[int | None]:
    """The layers have a window that ``layer_types`` calls "sliding_attention". Raises `TreeError`: other kinds of layers than
    that and "full_attention"."""
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = sorted(set(config.layer_types) - set(windows))
    if unknown:
        raise TreeError(f"generate cannot run layers of the types {', '.join(unknown)}; it knows {', '.join(windows)}")
    return [windows[kind] for kind in config.layer_types]
