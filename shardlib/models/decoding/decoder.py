"""`Decoder`: a model as a function of new tokens and of what attends to the tokens before them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from shardlib.kernels.decoder_attention import Seats
from shardlib.sparse import Layout


class Attend(Protocol):
    """Attention of new tokens to themselves and to all tokens before them, of their own sequence; see `Cache.attend`."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        layout: Layout | None = None,
    ) -> torch.Tensor: ...

    def seated(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, Seats] | None:
        """The keys and values of a layer's cache, ``[rows, kv_heads, room, size]``, and where the sequences stand in it.

        For layers that store and attend themselves (`shardlib.kernels.decoder_attention`), in steps of one new token of each
        sequence; None in other steps.
        """


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
        raise NotImplementedError(
            f"{type(self).__name__} has layers of experts and does not say which they choose, by which experts in host "
            "memory are fetched ahead: define choices(layer, x) -> rows of the experts' leaves, [T, k]"
        )

    @abstractmethod
    def logits(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        """The logits ``[N, V]`` of hidden states ``[N, W]``."""
