"""The ``.metadata`` file of `torch.distributed.checkpoint`, by which plain torch reads a checkpoint."""

from __future__ import annotations

import pickle

import torch

from shardlib.checkpoint.manifest import Manifest
from shardlib.common._compat import storage_info

NAME = ".metadata"


def dumps(manifest: Manifest) -> bytes:
    """The bytes of a ``.metadata`` file that lists the chunks of a manifest."""
    import torch.distributed.checkpoint.metadata as dcp  # a third of a second to import

    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    places = {}
    for name, entry in manifest.tensors.items():
        chunks = []
        for index, chunk in enumerate(entry.chunks):
            first = torch.Size(chunk.first)
            chunks.append(dcp.ChunkStorageMetadata(first, torch.Size(chunk.sizes)))
            places[dcp.MetadataIndex(name, first, index)] = storage_info(chunk.file, chunk.offset, chunk.length)
        properties = dcp.TensorProperties(dtype=entry.torch_dtype)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return pickle.dumps(dcp.Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=places))
