"""Activation recompute per block (arXiv 1604.06174; selective policies as in torch's checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import IllegalComposition
from shardlib.plan.arguments import integer, refused, texts
from shardlib.plan.claims import Claim, LeafInfo, Step
from shardlib.plan.code import CodeCall, CodedTransform, one_or_list
from shardlib.plan.recompute import SMALLEST, Recompute

_POLICIES = ("full", "dots", "auto")


@dataclass(frozen=True, repr=False)
class Remat(CodedTransform):
    """The transform that `remat` makes."""

    how: Recompute

    @property
    def call(self) -> CodeCall:
        how = self.how
        store = one_or_list(how.store) or "device"
        given = {"policy": how.policy, "save": one_or_list(how.save), "store": store}
        return CodeCall(remat, {**given, "smallest": how.smallest, "blocks": how.blocks})

    def claims(self, sizes: Mapping[str, int], leaves: Sequence[LeafInfo]) -> Iterable[Claim]:
        yield Step(remat=self.how)


def remat(
    policy: str | Callable[..., Any] = "full",
    *,
    save: str | Sequence[str] = (),
    store: str | Sequence[str] = "device",
    smallest: int = SMALLEST,
    blocks: int | None = None,
) -> Remat:
    """Recompute the activations of every `shardlib.block` in backward instead of keeping them.

    ===========  ===========================================================================================================
    store        where the inputs of blocks are between forward and backward
    ===========  ===========================================================================================================
    "device"     where they are made
    "host"       in pinned host memory. An input goes down while its block computes, and comes back while the block after it
                 is recomputed. On a mesh of the CPU, nothing is moved
    "sharded"    divided over the axis of `tensor_slicing`, whose ranks hold the same; gathered again to recompute the block:
                 one more all-gather per block (ZeRO-R's partitioned activations, arXiv 1910.02054, section 6.1)
    ===========  ===========================================================================================================

    ``store=("sharded", "host")`` divides them, and keeps the shares in host memory. What requires no gradient (batches,
    masks) stays where it is, and an input that several blocks share is kept once. Checkpoints that a model makes itself
    (transformers' ``gradient_checkpointing_enable``) keep their inputs in the same store.

    Args:
        policy: "full" keeps only a block's inputs; "dots" also keeps the results of matrix products and
            attention; or a policy function ``(context, op, *args, **kwargs) -> CheckpointPolicy`` of
            torch.utils.checkpoint. "auto" lets `make_plan` choose, by ``device_memory``, the fewest blocks to recompute in
            full; train with the ``blocks`` that its plan names.
        save: names (or one name) of values that "full" keeps: see `shardlib.nn.checkpoint_name`. The library's models name
            "attn/out" and "mlp/hidden".
        smallest: bytes below which an input stays as it is.
        blocks: how many blocks of a micro-batch are recomputed, the first ones; with several stages, of each stage. By
            default all. (When backward comes to the first blocks, it has freed what the others kept.)

    Raises:
        IllegalComposition: an unknown policy or store; when a plan is made, "sharded" without slices, and "auto" without
            a budget, or with one that is not enough.
        HandleError: in the first step or trace: "sharded", and ranks hold different inputs of a block; a name that no value
            has.

    >>> params = sl.shard({"w": torch.ones(8, 8)}, sl.make_mesh(), sl.chain(sl.zero(0), sl.remat("dots", store="host")))
    """
    if not callable(policy) and not (isinstance(policy, str) and policy in _POLICIES):
        raise refused("remat", "policy", policy, f"use {', '.join(map(repr, _POLICIES))} or a policy function")
    if blocks is not None:
        blocks = integer("remat", "blocks", blocks, 0, "give a number of blocks, or policy 'auto'")
        if policy == "auto":
            raise refused("remat", "blocks", blocks, "policy 'auto' chooses the number itself; leave one of them out")
    smallest = integer("remat", "smallest", smallest, 0, "give a number of bytes")
    names = tuple(sorted(texts("remat", "save", save, "name of a value", 0)))
    if names and policy != "full":
        raise IllegalComposition(f"remat({policy!r}, save={list(names)}): names are for policy 'full'")
    stores = texts("remat", "store", store, "store")
    if stores != ("device",) and not (set(stores) <= {"sharded", "host"} and len(set(stores)) == len(stores)):
        raise refused("remat", "store", store, "use 'device', 'host', 'sharded' or ('sharded', 'host')")
    return Remat(Recompute(policy, names, "sharded" in stores, "host" in stores, smallest, blocks))
