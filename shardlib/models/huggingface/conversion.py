"""The tensors of transformers' files as those of its models, and back.

A model may hold tensors otherwise than its files: Mixtral has a layer's experts in two leaves, and writes three tensors for
each expert. transformers has a list of renamings and operations for each kind of model (``transformers.conversion_mapping``).
Here its own code runs on `Followed` tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import torch

from shardlib.common.optional import require
from shardlib.errors import TreeError, listing
from shardlib.models.huggingface.followed import Followed

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
