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
    """Parameters, masters and optimizer state of all ranks, as pytrees of whole tensors. Collective."""
    params = state.params
    names = {bucket.name for bucket in params.plan.everywhere.trained}

    def of_shards(node):
        return isinstance(node, dict) and bool(node) and set(node) <= names

    def gathered(node):
        return sl.unshard(sl.Sharded(params.plan, params.mesh, "grad", node)) if of_shards(node) else node

    return sl.unshard(params), optree.tree_map(gathered, (state.opt.masters, state.opt.inner), is_leaf=of_shards)
