"""Saving and restoring a train state, on the same mesh or another."""

from shardlib.checkpoint.by_path import read_leaf, write_leaf
from shardlib.checkpoint.carrying import carry
from shardlib.checkpoint.commit import complete, remove, step_of
from shardlib.checkpoint.dcp import import_dcp
from shardlib.checkpoint.deepspeed import import_deepspeed
from shardlib.checkpoint.manager import Manager
from shardlib.checkpoint.pretrained import from_pretrained, save_pretrained
from shardlib.checkpoint.relayout import relayout_payload
from shardlib.checkpoint.restore import bytes_to_read, checkpoint_at, latest, read_notes, restore
from shardlib.checkpoint.rollback import with_rollback
from shardlib.checkpoint.safetensors import export_safetensors, import_safetensors
from shardlib.checkpoint.save import save

__all__ = [
    "Manager",
    "bytes_to_read",
    "carry",
    "checkpoint_at",
    "complete",
    "export_safetensors",
    "from_pretrained",
    "import_dcp",
    "import_deepspeed",
    "import_safetensors",
    "latest",
    "read_leaf",
    "read_notes",
    "relayout_payload",
    "remove",
    "restore",
    "save",
    "save_pretrained",
    "step_of",
    "with_rollback",
    "write_leaf",
]
