"""Plain torch reads what is saved: `torch.load` an item, `torch.distributed.checkpoint.load` a checkpoint."""

import io
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.models import TINY, share, tiny_gpt, token_batches
from helpers.saved import tensors

import shardlib as sl
from shardlib.checkpoint.writing import ALIGNMENT, bytes_of, frame
from shardlib.execute.batches import batch_index
from shardlib.models import gpt
from shardlib.tree import flatten

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("sizes", [(), (1,), (3,), (2, 5), (4, 1, 3), (0, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_item_is_what_torch_load_reads(dtype, sizes):
    numel = torch.Size(sizes).numel()
    elements = (torch.arange(numel) * 7 % 5).to(dtype)
    for offset in (0, 1, 63, 1000):
        head, tail = frame(dtype, sizes, offset)
        assert (offset + len(head)) % ALIGNMENT == 0
        item = head + bytes(bytes_of(elements)) + tail
        found = torch.load(io.BytesIO(item), weights_only=True)
        assert found.dtype == dtype and found.shape == sizes and found.is_contiguous()
        assert bytes(bytes_of(found.reshape(-1))) == bytes(bytes_of(elements))
        assert zipfile.ZipFile(io.BytesIO(item)).namelist()[-1] == "item/data/0"


PLANS = {
    "stage 3, padded": ({"data": 3}, lambda: sl.zero(3)),
    "slices, hybrid": ({"node": 2, "data": 1, "model": 2}, lambda: sl.chain(sl.zero(1, replicate="node"), SLICED)),
    "stages, 16 bits": (
        {"data": 2, "pipe": 2},
        lambda: sl.chain(sl.zero(2), sl.pipeline("1f1b", 2), sl.precision("bf16")),
    ),
    "1 bit": ({"data": 4}, lambda: sl.chain(sl.zero(0), sl.onebit())),
}
SLICED = sl.tensor_slicing(gpt.slicing_rules(TINY, blocks=True))


@pytest.mark.parametrize("name", PLANS)
def test_plain_torch_reads_a_checkpoint(tmp_path, name):
    mesh, transform = PLANS[name]
    _, params = tiny_gpt()
    batch = token_batches(1)[0]

    def run(mesh):
        made = sl.shard(gpt.to_blocks(params), mesh, transform())
        state, step = sl.make_train_step(gpt.make_sequential(TINY), made, sl.optim.adamw(1e-2))
        plan = state.params.plan
        for _ in range(2):
            state, _ = step(state, share(batch, batch_index(plan, mesh), plan.batch_ranks))
        return sl.checkpoint.save(tmp_path, state), sl.unshard(state.params)

    folder, final = sl.simulate(run, mesh=mesh)[0]
    mine = tensors(folder)
    plain = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    dcp.load(plain, checkpoint_id=folder)
    assert {name.partition("/")[0] for name in plain} >= {"params", "opt"}
    assert all(torch.equal(plain[name], tensor) for name, tensor in mine.items())
    paths, leaves, _ = flatten(final)
    for path, leaf in zip(paths, leaves, strict=True):
        if f"params/{path}" in plain:  # a tied leaf is saved by its first path
            assert torch.equal(plain[f"params/{path}"], leaf)
    assert sum(f"params/{path}" in plain for path in paths) >= len(paths) - 1
