"""Frozen leaves: used in the loss, and not trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import IllegalComposition
from shardlib.plan.arguments import GLOB, texts
from shardlib.plan.claims import Claim, LeafInfo, Use
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list


@dataclass(frozen=True, repr=False)
class Freeze(CodedTransform):
    """The transform that `freeze` makes, with the arguments given there."""

    globs: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    @property
    def call(self) -> CodeCall:
        return CodeCall(freeze, {"globs": one_or_list(self.globs), "exclude": one_or_list(self.exclude)})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        for pattern in (*self.globs, *self.exclude):
            if not any(leaf.matches(pattern) for leaf in leaves):
                shown = ", ".join(leaf.path for leaf in leaves[:5])
                raise IllegalComposition(f"freeze({pattern!r}) matches no parameter; paths look like {shown}")
        for leaf in leaves:
            if leaf.matches(self.globs) and not leaf.matches(self.exclude):
                yield Use(leaf.path, trainable=False)


def freeze(globs: str | Sequence[str], *, exclude: str | Sequence[str] = ()) -> Freeze:
    """Do not train the leaves whose paths match. Frozen leaves are sharded, and have no gradient and no optimizer state.

    Args:
        globs: one or several globs over paths, such as ``"blocks/0/*"`` (``*`` crosses ``/``). The last value that
            ``shardlib.from_module(module, frozen=True)`` returns is a list of such globs.
        exclude: globs of leaves that are trained nevertheless: ``freeze("*", exclude="*lora_*")``.

    Raises:
        IllegalComposition: globs that are no texts; when a plan is made, a glob that matches no parameter.

    >>> parallel = sl.chain(sl.zero(1), sl.freeze("base/*"))
    >>> params = {"base": {"w": torch.ones(8, 8)}, "lora": torch.ones(8, 2)}
    >>> sl.make_plan(params, sl.abstract_mesh(data=4), parallel).bytes("grad")
    64
    """
    return Freeze(texts("freeze", "globs", globs, GLOB, 0), texts("freeze", "exclude", exclude, GLOB, 0))
