"""`sl.generate` against transformers' ``generate``: seconds per token, dense and with experts; and weights of fewer bits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Row, Setting
from benchmarks.harness.timing import Times, interleave, one_thread, processor
from shardlib.data.bytes import batch_at, load_bytes, split, windows
from shardlib.models import gpt
from shardlib.models.decoding import quantized
from shardlib.tree import leaves_of

_OURS, _THEIRS = "sl.generate", "transformers"
_TARGET = 1 / 1.5
_SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_PROMPT, _NEW = 32, 64
_BATCHES = (1, 16)
_STEPS, _SEQUENCE = 300, 256  # of training


def measure(setting: Setting) -> Result:
    """Each model in each dtype and batch; the most likely tokens, so that both draw the same."""
    prompt, new = (4, 3) if setting.small else (_PROMPT, _NEW)
    times: Times = {}
    rows: list[Row] = []
    with one_thread():
        for kind, make in (("dense", _dense), ("8 experts, 2 a token", _with_experts)):
            for dtype in (torch.float32, torch.bfloat16):
                model = make(_SIZES | _SMALL if setting.small else _SIZES).to(dtype).eval()
                _, params = sl.from_module(model)
                small = {f", {bits} bits": quantized(model, params, bits) for bits in (8, 4)}
                for batch in _BATCHES:
                    # Prompts of one token: the time of a new token alone.
                    for length, trees in ((prompt, {"": params} | small), (1, {"": params})):
                        name = f"{kind}, {str(dtype).removeprefix('torch.')}, batch {batch}, prompts of {length}"
                        prompts = torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(0))
                        calls = {f"{_THEIRS}, {name}": _theirs(model, prompts, new)}
                        calls |= {
                            f"{_OURS}, {name}{bits}": _ours(model, tree, prompts, new) for bits, tree in trees.items()
                        }
                        taken = interleave(calls, setting.rounds, warm=1, stopwatch=processor)
                        times |= {called: [seconds / new for seconds in each] for called, each in taken.items()}
                        whole = f"{_OURS}, {name}"
                        rows.append(tables.row(times, whole, f"{_THEIRS}, {name}", _TARGET, against=_THEIRS))
                        rows += [
                            tables.row(times, f"{whole}{bits}", whole, against="the same, whole weights")
                            for bits in trees
                            if bits
                        ]
    about = (
        f"Seconds per token of a batch, which is a token's latency: {new} new tokens, the most likely ones, with the time of "
        f"the prompts among them; one thread, processor time, {setting.rounds} rounds in which all take turns. Llama and "
        "Mixtral of transformers, 4 layers of width 512, vocabulary 8,192; transformers' own settings and dynamic cache."
    )
    return tables.compared("Generating", about, rows, times)


def perplexity(setting: Setting) -> Result:
    """Quantised weights of models that were trained on Python's library, on bytes of it that were held out."""
    steps, sequence, limit = (2, 16, 1) if setting.small else (_STEPS, _SEQUENCE, 8)
    training, held_out = split(load_bytes())
    router = sl.nn.routers.top_k(2, renormalise="chosen")
    cells, times = [], {}
    with one_thread():
        for kind, experts in (
            ("dense", None),
            ("8 experts, 2 a token", gpt.Experts((8,), sl.nn.MoEConfig(router), hidden=256)),
        ):
            width = 32 if setting.small else 256
            config = gpt.GPTConfig(vocab=256, layers=2, width=width, heads=4, sequence=sequence, moe=experts)
            state, step = sl.make_train_step(gpt.make_loss(config), gpt.init(config), sl.optim.adamw(1e-3))
            for number in range(steps):
                state, _ = step(state, batch_at(training, 8, sequence, seed=0, step=number))
            params = sl.unshard(state.params)
            trees = {"fp32": params} | {f"{bits} bits": quantized(config, params, bits) for bits in (8, 4)}
            whole = _perplexity(config, params, held_out, limit)
            for bits, tree in trees.items():
                found = _perplexity(config, tree, held_out, limit)
                size = sum(leaf.nbytes for leaf in leaves_of(tree))
                cells.append([kind, bits, f"{size:,}", f"{found:.4f}", f"{found / whole:.5f}"])
    about = (
        f"The library's GPT of 2 layers of width 256 over bytes, trained for {steps} steps of 8 × {sequence} bytes of "
        "Python's library, on windows that were held out. Bytes are those of all parameters, embeddings among them."
    )
    columns = ("model", "weights", "bytes", "perplexity of a byte", "against fp32")
    return tables.listed("Perplexity with weights of fewer bits", about, columns, cells, times)


def _perplexity(config: gpt.GPTConfig, params: Any, data: np.ndarray, limit: int) -> float:
    losses = []
    with torch.no_grad():
        for batch in windows(data, 8, config.sequence, limit=limit):
            x = gpt.hidden(config, params, batch["tokens"])
            scores = F.linear(x, params["head"]["weight"])
            losses.append(F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten()).item())
    return math.exp(statistics.mean(losses))


def _dense(sizes: dict[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=4 * sizes["hidden_size"]))


def _with_experts(sizes: dict[str, int]) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**sizes, intermediate_size=2 * sizes["hidden_size"], num_local_experts=8, num_experts_per_tok=2)
    )


def _ours(model: Any, params: Any, prompts: torch.Tensor, new: int) -> Callable[[int], Any]:
    return lambda _: sl.generate(model, params, prompts, new, temperature=0)


def _theirs(model: Any, prompts: torch.Tensor, new: int) -> Callable[[int], Any]:
    mask = torch.ones_like(prompts)
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return lambda _: model.generate(prompts, attention_mask=mask, **options)


CASES = (
    Case("generating", "sl.generate against transformers' generate", {CPU: 5}, measure),
    Case("perplexity", "what weights of fewer bits cost in perplexity", {CPU: 1}, perplexity),
)
