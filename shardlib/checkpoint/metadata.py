"""The ``.metadata`` file of `torch.distributed.checkpoint`, by which plain torch reads a checkpoint."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardlib._compat import StorageInfo
from shardlib.checkpoint.manifest import Manifest

NAME = ".metadata"


def dumps(manifest: Manifest) -> bytes:
    """The bytes of a ``.metadata`` file that lists the chunks of a manifest."""
    tensors, places = {}, {}
    for name, entry in manifest.tensors.items():
        chunks = []
        for index, chunk in enumerate(entry.chunks):
            first = torch.Size(chunk.first)
            chunks.append(ChunkStorageMetadata(first, torch.Size(chunk.sizes)))
            places[MetadataIndex(name, first, index)] = StorageInfo(chunk.file, chunk.offset, chunk.length)
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=entry.torch_dtype), torch.Size(entry.shape), chunks
        )
    return pickle.dumps(Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=places))
