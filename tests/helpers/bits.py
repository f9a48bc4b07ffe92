"""The whole training state as one SHA-256, the same for every layout of the same bits."""

import hashlib

import optree
import torch

import shardlib as sl


def digest(tree):
    """The SHA-256 of the paths and bytes of a pytree's tensors and numbers."""
    found = hashlib.sha256()
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        tensor = torch.as_tensor(leaf).detach().contiguous()
        found.update(repr((path, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def whole(state):
    """Parameters, masters and optimizer state of all ranks, as pytrees of whole tensors. Collective.

    A part of the state that is of some leaves only has zeros for the others; one that cuts buckets is left out.
    """
    params = state.params
    names = {bucket.name for bucket in params.plan.everywhere.trained}

    def of_shards(node):
        return isinstance(node, dict) and any(name.split("[")[0] in names for name in node)

    def gathered(node):
        if not of_shards(node):
            return node
        if not set(node) <= names:
            return None
        dtype = next(iter(node.values())).dtype
        buffers = {b.name: node.get(b.name, torch.zeros(b.owned, dtype=dtype)) for b in params.plan.trained}
        return sl.unshard(sl.Sharded(params.plan, params.mesh, "grad", buffers))

    return sl.unshard(params), optree.tree_map(gathered, (state.opt.masters, state.opt.inner), is_leaf=of_shards)
