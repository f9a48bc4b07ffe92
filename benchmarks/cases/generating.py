"""`sl.generate` against transformers' ``generate``: seconds per token, dense and with experts, and weights of fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Row, Setting
from benchmarks.harness.timing import Times, interleave, one_thread, processor
from shardlib.models.decoding import quantized

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
                trees = {"": params}
                if kind == "dense":
                    trees |= {f", {bits} bits": quantized(model, params, bits) for bits in (8, 4)}
                for batch in _BATCHES:
                    name = f"{kind}, {str(dtype).removeprefix('torch.')}, batch {batch}"
                    prompts = torch.randint(64, (batch, prompt), generator=torch.Generator().manual_seed(0))
                    calls = {f"{_THEIRS}, {name}": _theirs(model, prompts, new)}
                    calls |= {
                        f"{_OURS}, {name}{bits}": _ours(model, tree, prompts, new) for bits, tree in trees.items()
                    }
                    taken = interleave(calls, setting.rounds, warm=1, stopwatch=processor)
                    times |= {called: [seconds / new for seconds in each] for called, each in taken.items()}
                    rows.append(tables.row(times, f"{_OURS}, {name}", f"{_THEIRS}, {name}", _TARGET, against=_THEIRS))
                    rows += [
                        tables.row(
                            times, f"{_OURS}, {name}{bits}", f"{_OURS}, {name}", against="the same, whole weights"
                        )
                        for bits in trees
                        if bits
                    ]
    about = (
        f"Seconds per token of a batch: {new} new tokens, the most likely ones, after prompts of {prompt}, whose "
        f"time is among them; one thread, processor time, {setting.rounds} rounds in which all take turns. Llama and Mixtral "
        "of transformers, 4 layers of width 512, vocabulary 8,192; transformers' own settings, with its dynamic cache."
    )
    return tables.compared("Generating", about, rows, times)


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


CASE = Case("generating", "sl.generate against transformers' generate", {CPU: 5}, measure)
