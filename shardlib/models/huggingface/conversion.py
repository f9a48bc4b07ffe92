"""The tensors of transformers' files as those of its models, and back.

A model may hold tensors otherwise than its files: Mixtral has a layer's experts in two leaves, and writes three tensors for
each expert. transformers has a list of renamings and operations for each kind of model (``transformers.conversion_mapping``).
Here its own code runs on tensors without values that know which boxes of other tensors they are made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from shardlib.common._compat import no_torch_function
from shardlib.common.optional import require
from shardlib.errors import TreeError, listing
from shardlib.mesh.specs import Window

Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


def of_model(module: Any, files: Described) -> dict[str, OriginTensor]:
    """The tensors of a model, by their names in its state dict, as made of those in files.

    Tensors in the files that the model has no place for are among them, by their names in the files; those that the model
    says it does not need are not. Raises `TreeError`: ``module`` is no model of transformers; the files' tensors do not fit
    together; transformers changes some in another way than by joining and cutting; `MissingPackage`: transformers is not
    installed, or is older than its conversions."""
    loading, known = _loading(module), module.state_dict()
    mapping = _required("transformers.conversion_mapping").get_model_conversion_mapping(module)
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, OriginTensor] = {}
    groups: dict[str, Any] = {}
    for name in sorted(files, key=loading.dot_natural_key):
        prefixed = {"base_model_prefix": module.base_model_prefix, "meta_state_dict": known}
        theirs, pattern = loading.rename_source_key(name, renamings, converters, **prefixed)
        if theirs not in known and name in known:  # the file has the model's own names
            theirs, pattern = loading.rename_source_key(name, [], [], **prefixed)
        tensor = OriginTensor.whole(name, *files[name])
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


def of_files(module: Any, leaves: Described) -> dict[str, OriginTensor]:
    """The tensors that transformers' ``save_pretrained`` would write for a model, by their names in the files, as made of the
    model's. Raises `TreeError`: as `of_model`; leaves that are not the model's. ``leaves``: those of the model's state
    dict."""
    loading, known = _loading(module), module.state_dict()
    differing = [f"{name}: the module has none" for name in leaves if name not in known]
    differing += [f"{name}: not given" for name in known if name not in leaves]
    if differing:
        raise TreeError(
            f"these are not the tensors of {type(module).__name__}:\n{listing(differing)}\nPass the module of "
            "sl.from_module, its parameters not in blocks, and buffers= as with buffers=True"
        )
    given = {name: OriginTensor.whole(name, *described) for name, described in leaves.items()}
    return _converted(type(module).__name__, list(leaves), partial(loading.revert_weight_conversion, module, given))


def _loading(module: Any) -> ModuleType:
    """transformers' functions that read and write files, for a model of transformers."""
    loading = _required("transformers.core_model_loading")
    if not hasattr(module, "base_model_prefix"):
        kind = type(module).__name__
        raise TreeError(f"{kind} is no model of transformers, whose files alone have another layout; leave out module=")
    return loading


def _required(name: str) -> ModuleType:
    return require(name, "the layout of transformers' files", "transformers", "hf")


def _converted(what: str, names: list[str], convert: Callable[[], Mapping[str, Any]]) -> dict[str, OriginTensor]:
    """What transformers' conversion returns, a list of one tensor as the tensor."""
    try:
        made = convert()
    except (RuntimeError, ValueError) as error:
        raise TreeError(
            f"transformers cannot make {what} of these tensors ({error}):\n{listing(names)}\nThe files lack some, or are of "
            "another model"
        ) from error
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Origin(NamedTuple):
    """A box of a tensor, and the box of another tensor that holds the same elements in the same order.

    Attributes:
        box: the box of the tensor.
        name: the other tensor's name.
        held: its box.
        dims: for each dimension of ``box`` the one of ``held`` in which it lies; None for one of size 1 that ``held`` lacks.
    """

    box: Window
    name: str
    held: Window
    dims: tuple[int | None, ...]

    def within(self, box: Window) -> Origin | None:
        """The part of it that lies in a box of the tensor, or None."""
        shared = self.box.overlap(box)
        if shared is None:
            return None
        first, sizes = list(self.held.first), list(self.held.sizes)
        for dim, held in enumerate(self.dims):
            if held is not None:
                first[held] += shared.first[dim] - self.box.first[dim]
                sizes[held] = shared.sizes[dim]
        return self._replace(box=shared, held=Window(self.held.shape, tuple(first), tuple(sizes)))

    def inverse(self, name: str) -> Origin:
        """The same of the other tensor, whose elements ``name`` holds."""
        dims = (self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.held.shape)))
        return Origin(self.held, name, self.box, tuple(dims))


class OriginTensor(torch.Tensor):
    """A tensor without values, made of other tensors by joining and cutting them. Raises `TreeError`: from any function that
    makes tensors in another way.

    Attributes:
        origins: boxes that together are the tensor, and where their elements come from.
    """

    origins: tuple[Origin, ...]

    @staticmethod
    def make(like: torch.Tensor, origins: Iterable[Origin]) -> OriginTensor:
        """A tensor of the dtype and shape of ``like``."""
        made = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(OriginTensor)
        made.origins = tuple(origins)
        return made

    @staticmethod
    def whole(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> OriginTensor:
        """A tensor that is the one of this name."""
        window = Window.whole(shape)
        like = torch.empty(shape, dtype=dtype, device="meta")
        return OriginTensor.make(like, [Origin(window, name, window, tuple(range(len(shape))))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func.__name__)
        with no_torch_function():
            result = (rule or func)(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        if rule is None and any(isinstance(each, torch.Tensor) for each in made):
            raise TreeError(
                f"transformers changes these tensors by {func.__name__}, and only joined and cut ones are read box by box. "
                "Load the model by its own from_pretrained, then sl.from_module"
            )
        return result


def _cat(tensors: Sequence[OriginTensor], dim: int = 0) -> OriginTensor:
    made = torch.cat(tensors, dim)  # type: ignore[arg-type]
    dim, starts = dim % made.dim(), [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.shape[dim])
    return OriginTensor.make(
        made, (_moved(o, made, dim, start) for t, start in zip(tensors, starts) for o in t.origins)
    )


def _moved(origin: Origin, made: torch.Tensor, dim: int, start: int) -> Origin:
    first = list(origin.box.first)
    first[dim] += start
    return origin._replace(box=Window(tuple(made.shape), tuple(first), origin.box.sizes))


def _stack(tensors: Sequence[OriginTensor], dim: int = 0) -> OriginTensor:
    dim %= tensors[0].dim() + 1
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(tensor: OriginTensor, dim: int) -> OriginTensor:
    def wider(origin: Origin) -> Origin:
        shape, first, sizes = ((*part[:dim], one, *part[dim:]) for part, one in zip(origin.box, (1, 0, 1), strict=True))
        return origin._replace(box=Window(shape, first, sizes), dims=(*origin.dims[:dim], None, *origin.dims[dim:]))

    return OriginTensor.make(tensor.unsqueeze(dim), map(wider, tensor.origins))


def _squeeze(tensor: OriginTensor, dim: int) -> OriginTensor:
    dim %= tensor.dim()
    if tensor.shape[dim] != 1:
        return tensor

    def narrower(origin: Origin) -> Origin:
        shape, first, sizes = ((*part[:dim], *part[dim + 1 :]) for part in origin.box)
        return origin._replace(box=Window(shape, first, sizes), dims=(*origin.dims[:dim], *origin.dims[dim + 1 :]))

    return OriginTensor.make(tensor.squeeze(dim), map(narrower, tensor.origins))


def _split(tensor: OriginTensor, sizes: int | list[int], dim: int = 0) -> tuple[OriginTensor, ...]:
    return _cuts(tensor, torch.split(tensor, sizes, dim), dim)


def _chunk(tensor: OriginTensor, chunks: int, dim: int = 0) -> tuple[OriginTensor, ...]:
    return _cuts(tensor, torch.chunk(tensor, chunks, dim), dim)


def _unbind(tensor: OriginTensor, dim: int = 0) -> tuple[OriginTensor, ...]:
    return tuple(_squeeze(cut, dim) for cut in _split(tensor, 1, dim))


def _cuts(tensor: OriginTensor, made: Sequence[torch.Tensor], dim: int) -> tuple[OriginTensor, ...]:
    """The tensors of ``made`` with their origins, into which ``tensor`` is cut along ``dim``."""
    found, start, dim = [], 0, dim % tensor.dim()
    for cut in made:
        first = tuple(start if each == dim else 0 for each in range(tensor.dim()))
        box = Window(tuple(tensor.shape), first, tuple(cut.shape))
        parts = (part for origin in tensor.origins if (part := origin.within(box)))
        found.append(OriginTensor.make(cut, [_moved(part, cut, dim, -start) for part in parts]))
        start += cut.shape[dim]
    return tuple(found)


# By name, as a function of torch and the method have the same.
_RULES: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "squeeze": _squeeze,
    "split": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "contiguous": lambda tensor: tensor,
}
