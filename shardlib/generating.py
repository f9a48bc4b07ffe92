"""`generate`: new tokens after prompts, by a model on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from shardlib.collectives import primitives
from shardlib.collectives.primitives import sum_over
from shardlib.errors import IllegalComposition, NonFiniteError
from shardlib.execute.agreement import taken_together
from shardlib.execute.context import LocalRunner
from shardlib.execute.stages.pipe import runner_of
from shardlib.mesh.mesh import rank_of
from shardlib.models.decoding import Decoder, Sampling, decode, decoder_of
from shardlib.models.decoding.loop import Run
from shardlib.sharded.given import Local, given_params
from shardlib.sharded.params_on_disk import Reads
from shardlib.sharded.tree import Sharded
from shardlib.tree import leaves_of


def generate(
    model: Any,
    params: Any,
    prompts: Iterable[Sequence[int] | torch.Tensor],
    max_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: Collection[int] = (),
    seed: int = 0,
) -> list[torch.Tensor]:
    """Draw tokens after each of several prompts.

    A prompt gets the same tokens alone and among others, and on every mesh, up to rounding of the logits: prompts are not
    padded, and a draw depends on ``seed``, the prompt's index and the new token's alone. Ranks along the plan's batch axes
    divide the prompts; every rank gets all results. Under `shardlib.experts` tokens travel to the ranks of their experts.
    Where parameters are gathered (ZeRO stage 3, or offloaded ones) each token takes a gather of all of them: for speed take
    a stage that keeps them whole.

    The context is the model's longest, the last tokens; where it moves, everything in it is computed anew for each token.

    Args:
        model: a `shardlib.models.gpt.GPTConfig`, a causal language model of transformers (GPT-2, Llama, Mistral, Mixtral,
            Qwen2, Qwen3, Qwen3-MoE), of which only the configuration is read, or a `shardlib.models.decoding.Decoder` of
            your own.
        params: the model's parameters, a plain tree (of `shardlib.from_module` for transformers' models), `Sharded`, or a
            `TrainState`; or what `shardlib.models.decoding` makes of these, by `quantized` or `experts_on_host`.
        prompts: the tokens of each prompt, at least one; lists or tensors of one dimension. The same on every rank.
        max_new: the most new tokens of each prompt.
        temperature: divides the logits; at 0 the most likely token is taken.
        top_k: only so many tokens, the most likely ones, can be drawn; None for all.
        top_p: only the most likely tokens can be drawn, as few as have this probability together.
        stop: tokens that end a text.
        seed: of the draws.

    Returns:
        the new tokens of each prompt, int64 ``[n]`` on the CPU, n at most ``max_new``. A token of ``stop`` is the last one.

    Raises:
        ValueError: a prompt without tokens, or of others than the model's; options out of range.
        TreeError: a model that is not supported; gradients or a module in the place of parameters.
        NonFiniteError: logits that are NaN or infinite; the prompts after which they came are listed.
        RankMismatch: ranks were given different prompts or options.
        IllegalComposition: a plan with several stages, with padded exchanges of experts, or one that cuts sequences.

    >>> config = sl.models.gpt.GPTConfig(vocab=32, layers=1, width=16, heads=2)
    >>> params = sl.models.gpt.init(config)
    >>> texts = sl.generate(config, params, [[1, 2, 3], [4]], 5, temperature=0.8, seed=1)
    >>> [len(text) for text in texts]
    [5, 5]
    >>> bool((sl.generate(config, params, [[1, 2, 3]], 5, temperature=0.8, seed=1)[0] == texts[0]).all())
    True
    """
    if not isinstance(max_new, int) or max_new < 0:
        raise ValueError(f"generate: max_new={max_new!r}, but it must be a whole number of at least 0")
    sampling, decoder = Sampling(temperature, top_k, top_p, seed), decoder_of(model)
    texts = [_tokens(prompt, f"prompt {index}", decoder.vocab) for index, prompt in enumerate(prompts)]
    ends = frozenset(_tokens([*stop], "stop", decoder.vocab) if stop else ())
    current = given_params("generate", params)
    if isinstance(current, (Sharded, Local)):
        new = _on_mesh(decoder, current, texts, max_new, sampling, ends)
    else:
        devices = (leaf.device for leaf in leaves_of(current) if isinstance(leaf, torch.Tensor))
        device, ready = next(devices, torch.device("cpu")), decoder.prepared(current)
        new = decode(decoder, lambda step: step(ready), texts, range(len(texts)), max_new, sampling, ends, device)
    if bad := [f"prompt {number}" for number, tokens in enumerate(new) if None in tokens]:
        raise NonFiniteError(
            f"generate: the logits after {', '.join(bad)} are not finite; look for NaN in the parameters"
        )
    return [torch.tensor(tokens, dtype=torch.int64) for tokens in new]


def _on_mesh(
    decoder: Decoder,
    params: Sharded | Local,
    prompts: Sequence[list[int]],
    max_new: int,
    sampling: Sampling,
    stop: Collection[int],
) -> list[list[int | None]]:
    """The new tokens of all prompts, on every rank."""
    plan, mesh = params.plan, params.mesh
    _refuse(plan)
    given = {"prompts": list(prompts), "max_new": max_new, "sampling": sampling, "stop": sorted(stop)}
    primitives.require_equal(mesh, "calls of generate", given, "Pass every rank the same prompts and options.")
    shape = {axis: mesh.shape[axis] for axis in plan.batch_axes}
    index, count = rank_of(shape, {axis: mesh.coords[axis] for axis in shape}), plan.batch_ranks
    numbers = range(len(prompts) * index // count, len(prompts) * (index + 1) // count)
    together = taken_together(plan)
    evaluate, reads = _run_of(params)

    def run(step: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return evaluate(lambda tree: step(decoder.prepared(tree)))

    def more(unfinished: bool) -> bool:
        ranks = torch.tensor([float(unfinished)], device=mesh.device)
        sum_over(mesh, together, ranks)
        return bool(ranks.item())

    own = [prompts[number] for number in numbers]
    new = decode(decoder, run, own, numbers, max_new, sampling, stop, mesh.device, more)
    if reads is not None:
        reads.require(tuple(mesh.shape))
    return [tokens for share in primitives.all_gather_object(mesh, plan.batch_axes, new) for tokens in share]


def _run_of(params: Sharded | Local) -> tuple[Run, Reads | None]:
    """What runs a step, and the reads of parameters that may be on disk."""
    if isinstance(params, Local):
        return LocalRunner(params).evaluate, None
    # The runner is called for each token: the order in which parameters are used, traced in the first step, holds for all.
    runner = runner_of(lambda tree, step: step(tree), params.plan, params.mesh, trained=False)
    return partial(runner.evaluate, params), Reads(params.mesh, params.on_disk)


def _refuse(plan: Any) -> None:
    if plan.stages.axes:
        raise IllegalComposition(
            "generate runs one token at a time, without stages of a pipeline: gather the parameters by sl.unshard, put the "
            "library's GPT together by models.gpt.from_blocks, and shard them without sl.pipeline"
        )
    if plan.step.sequence:
        raise IllegalComposition("generate runs one token at a time, which sequence(...) cannot cut: leave it out")
    if plan.step.tokens and plan.step.tokens.padded:
        raise IllegalComposition("generate drops no tokens to pad for: shard by a plan with experts(padded=False)")


def _tokens(given: Sequence[int] | torch.Tensor, name: str, vocab: int) -> list[int]:
    try:
        tokens = torch.as_tensor(given)
        what = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
    except (TypeError, ValueError, RuntimeError):
        tokens, what = torch.empty(0), repr(given)
    whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if tokens.dim() != 1 or not len(tokens) or not whole:
        raise ValueError(f"generate: {name} is {what}, and not a list of integers, tokens, at least one")
    if unknown := [token for token in tokens.tolist() if not 0 <= token < vocab]:
        raise ValueError(f"generate: {name} has the token {unknown[0]}, and the model {vocab} tokens, from 0 on")
    return tokens.tolist()
