"""Sparse upcycling of transformers' decoders: Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import torch

from shardlib import init
from shardlib.common.optional import require
from shardlib.errors import TreeError, listing
from shardlib.models.decoding.cache import Windows, by_layer, everywhere, nowhere
from shardlib.models.huggingface.followed import Followed
from shardlib.models.upcycle import copies
from shardlib.rng import Key, require_key

# A dense model's kind -> the kind with experts, what the latter's configuration calls things, and the former's windows.
_KINDS: dict[str, tuple[str, dict[str, str], dict[str, Any], Windows]] = {
    "llama": ("mixtral", {"number": "num_local_experts"}, {}, nowhere),
    "mistral": ("mixtral", {"number": "num_local_experts"}, {}, everywhere),
    "qwen3": (
        "qwen3_moe",
        {"number": "num_experts", "hidden": "moe_intermediate_size"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        by_layer,
    ),
}
# Settings that the new kind has of its own, or does not read.
_OF_THE_KIND = ("model_type", "architectures", "layer_types", "max_window_layers", "use_sliding_window")
_MLP = re.compile(r"(.*\.mlp\.)(gate|up|down)_proj\.weight$")


def upcycle(model: Any, experts: int, key: Key, *, per_token: int = 2, noise: float = 0.0, std: float = 0.02) -> Any:
    """A transformers model with experts, made of a dense one: each expert is a copy of the layer's MLP.

    The routers of these models renormalise the weights of a token's choices, so without ``noise`` the new model computes what
    the dense one did. A ``LlamaForCausalLM`` or ``MistralForCausalLM`` becomes a ``MixtralForCausalLM``, a
    ``Qwen3ForCausalLM`` a ``Qwen3MoeForCausalLM``, for `from_module`, `with_experts` and ``save_pretrained``.

    Args:
        experts: of each layer.
        key: by which routers, from N(0, std²), and noise are drawn.
        per_token: how many experts each token uses.
        noise: as in `shardlib.models.upcycle`.

    Raises:
        TreeError: a model of another kind, or one with biases or with sliding windows in some layers only, which the new
            kind does not have.
        ValueError: more experts per token than there are.
        TypeError: a ``key`` that is no key.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from shardlib.models import huggingface
    >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    >>> type(huggingface.upcycle(LlamaForCausalLM(LlamaConfig(**sizes)), 4, sl.Key(0))).__name__
    'MixtralForCausalLM'
    """
    require_key("upcycle", "key", key)
    dense = getattr(getattr(model, "config", None), "model_type", None)
    if dense not in _KINDS or not hasattr(model, "lm_head"):
        raise TreeError(
            f"upcycle takes transformers' causal language models of the kinds {', '.join(_KINDS)}, and got "
            f"{type(model).__name__} (model_type={dense!r})"
        )
    if not 1 <= per_token <= experts:
        raise ValueError(
            f"upcycle(experts={experts}, per_token={per_token}): a token uses at least one, and at most all"
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, names, fixed, windows = _KINDS[dense]
    own = {name: value for name, value in model.config.to_dict().items() if name not in _OF_THE_KIND}
    window = _window(windows(model.config))
    own |= {"sliding_window": window, "use_sliding_window": window is not None}
    sizes = {names["number"]: experts, "num_experts_per_tok": per_token}
    if "hidden" in names:
        sizes[names["hidden"]] = model.config.intermediate_size
    config = AutoConfig.for_model(kind, **own | fixed | sizes)
    state = _state(model.state_dict(), experts, key, noise, std)
    like = next(model.parameters())
    made = AutoModelForCausalLM.from_config(config, dtype=like.dtype).to(like.device)
    missing, unexpected = made.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise TreeError(
            f"upcycle: {type(made).__name__} has no {', '.join(unexpected) or 'other leaves'}"
            f"{', and needs ' + ', '.join(missing) if missing else ''}; make the dense model without biases"
        )
    return made


def _window(windows: Sequence[int | None]) -> int | None:
    """The window of all layers."""
    if len(set(windows)) > 1:
        raise TreeError(
            f"upcycle: layers have the sliding windows {', '.join(map(str, windows))}, and a kind with experts has one for "
            "all; make a dense model whose layers all have the same, or none"
        )
    return windows[0]


def _state(dense: dict[str, torch.Tensor], experts: int, key: Key, noise: float, std: float) -> dict[str, torch.Tensor]:
    """The state dict of the model with experts."""
    state, by_layer = {}, dict[str, dict[str, torch.Tensor]]()
    for name, leaf in dense.items():
        found = _MLP.match(name)
        if found is None:
            state[name] = leaf
        else:
            by_layer.setdefault(found[1], {})[found[2]] = leaf
    for prefix, mlp in by_layer.items():
        own = key.fold_in(prefix)
        copied = {name: copies(leaf, experts, own.fold_in(name), noise) for name, leaf in mlp.items()}
        like = mlp["up"]
        router = init.normal(own, (experts, like.shape[1]), std, dtype=like.dtype, device=like.device)
        state[f"{prefix}gate.weight"] = router
        state[f"{prefix}experts.gate_up_proj"] = torch.cat([copied["gate"], copied["up"]], 1)
        state[f"{prefix}experts.down_proj"] = copied["down"]
    return state


# The tensors of transformers' files as those of its models, and back.
# A model may hold tensors otherwise than its files: Mixtral has a layer's experts in two leaves, and writes three tensors
# for each expert. transformers has a list of renamings and operations for each kind of model
# (``transformers.conversion_mapping``). Here its own code runs on `Followed` tensors.


Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


def of_model(module: Any, files: Described) -> dict[str, Followed]:
    """The tensors of a model, by their names in its state dict, as made of those in files.

    Tensors in the files that the model has no place for are among them, by their names in the files; those that the model
    says it does not need are not.

    Raises:
        TreeError: ``module`` is no model of transformers; the files' tensors do not fit together; transformers changes some
            in another way than by joining and cutting.
        MissingPackage: transformers is not installed, or is older than its conversions.
    """
    loading, known = _loading(module), module.state_dict()
    mapping = _required("transformers.conversion_mapping").get_model_conversion_mapping(module)
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Followed] = {}
    groups: dict[str, Any] = {}
    for name in sorted(files, key=loading.dot_natural_key):
        prefixed = {"base_model_prefix": module.base_model_prefix, "meta_state_dict": known}
        theirs, pattern = loading.rename_source_key(name, renamings, converters, **prefixed)
        if theirs not in known and name in known:  # the file has the model's own names
            theirs, pattern = loading.rename_source_key(name, [], [], **prefixed)
        tensor = Followed.whole(name, *files[name])
        if theirs not in known:
            if not any(re.search(each, theirs) for each in ignored):
                found[name] = tensor
        elif pattern is None:
            found[theirs] = tensor
        else:
            group = groups.setdefault(theirs, deepcopy(of_pattern[pattern]))
            group.add_tensor(theirs, name, pattern, tensor)
    for theirs, converter in groups.items():
        convert = partial(converter.convert, theirs, model=module, config=module.config)
        found |= _converted(theirs, sorted(converter.layer_targets[theirs]), convert)
    return found


def not_in_files(module: Any) -> set[str]:
    """The names of a model's tensors that its files may lack, such as sinusoids: initialising it gives their values."""
    never = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    return never | {name for name in module.state_dict() if any(re.search(each, name) for each in patterns)}


def of_files(module: Any, leaves: Described) -> dict[str, Followed]:
    """The tensors that transformers' ``save_pretrained`` would write for a model, by their names in the files, as made of
    the model's.

    Args:
        leaves: those of the model's state dict.

    Raises:
        TreeError: as `of_model`; leaves that are not the model's.
    """
    loading, known = _loading(module), module.state_dict()
    differing = [f"{name}: the module has none" for name in leaves if name not in known]
    differing += [f"{name}: not given" for name in known if name not in leaves]
    if differing:
        raise TreeError(
            f"these are not the tensors of {type(module).__name__}:\n{listing(differing)}\nPass the module that "
            "sl.from_module(module) was given, parameters that are not in blocks, and buffers= as "
            "sl.from_module(module, buffers=True) or from_pretrained(folder, mesh, buffers=True) returns them"
        )
    given = {name: Followed.whole(name, *described) for name, described in leaves.items()}
    return _converted(type(module).__name__, list(leaves), partial(loading.revert_weight_conversion, module, given))


def _loading(module: Any) -> ModuleType:
    """transformers' functions that read and write files, for a model of transformers."""
    loading = _required("transformers.core_model_loading")
    if not hasattr(module, "base_model_prefix"):
        raise TreeError(
            f"{type(module).__name__} is no model of transformers, whose files have a layout of their own; leave out module="
        )
    return loading


def _required(name: str) -> ModuleType:
    return require(name, "the layout of transformers' files", "transformers", "hf")


def _converted(what: str, names: list[str], convert: Callable[[], Mapping[str, Any]]) -> dict[str, Followed]:
    """What transformers' conversion returns, a list of one tensor as the tensor."""
    try:
        made = convert()
    except (RuntimeError, ValueError) as error:
        raise TreeError(
            f"transformers cannot make {what} of these tensors ({error}):\n{listing(names)}\nThe files lack some of them, or "
            "are of another model"
        ) from error
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
