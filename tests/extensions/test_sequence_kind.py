"""A user's own sequence kind: positions are dealt out one by one, so that causal work is even, and all keys are gathered."""

import pytest
import torch
import torch.nn.functional as F
from helpers.stages import ADAMW, check_like_one_device, plan_of

import shardlib as sl
from shardlib.errors import IllegalComposition, SpecError


class Striped(sl.collectives.sequence.SequenceKind):
    """Rank r of P holds positions r, r + P, r + 2P, … (the parts of arXiv 2311.09431)."""

    name = "striped"

    def chunks(self, rank, size, length):
        self.step(length, size, size)  # refuses a length that does not divide
        return [(position, 1) for position in range(rank, length, size)]

    def attention(self, q, k, v, how, attend, mesh):
        size, part = mesh.shape[self.axis], torch.arange(q.shape[2]) * mesh.shape[self.axis]
        k, v = (sl.collectives.all_gather(x, self.axis, dim=2, mesh=mesh) for x in (k, v))
        mine, all_keys = part + mesh.coords[self.axis], torch.cat([part + rank for rank in range(size)])
        seen = mine[:, None] >= all_keys if how.causal else None
        return F.scaled_dot_product_attention(q, k, v, seen, scale=how.scale, enable_gqa=k.shape[1] != q.shape[1])


CONFIG = sl.models.gpt.GPTConfig(vocab=19, layers=2, width=12, heads=3, sequence=8, dtype=torch.float64)


def model():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(CONFIG.vocab, (4, CONFIG.sequence + 1), generator=generator) for _ in range(4)]
    batches = [{"tokens": row[:, :-1], "targets": row[:, 1:]} for row in rows]
    return sl.models.gpt.make_loss(CONFIG), sl.models.gpt.init(CONFIG), batches


TRANSFORM = sl.sequence("seq", kind=Striped)
MESHES = {"seq": 4}, {"seq": 2}


def test_it_trains_like_one_device_and_sends_what_the_plan_says(tmp_path, pool):
    check_like_one_device(model, TRANSFORM, tmp_path, pool, meshes=MESHES, axis="seq")
    plan = plan_of(model, TRANSFORM, ADAMW, 2, MESHES[0], "seq")
    assert f"sequence('seq', kind={__name__}.Striped): sequence=striped over axis 'seq'" in str(plan)


def test_what_does_not_fit_is_refused_by_name():
    loss_fn, params, batches = model()
    with pytest.raises(SpecError, match=r"length 8 does not divide over axis 'seq' of size 3 .*kind='striped'"):
        sl.make_plan(params, sl.abstract_mesh(seq=3), TRANSFORM, loss_fn=loss_fn, batch=batches[0])
    slices = sl.tensor_slicing({"blocks/*/mlp/up": "column", "blocks/*/mlp/down": "row"}, axis="seq")
    with pytest.raises(IllegalComposition, match=r"sequence\('seq', kind=.*Striped\) cuts sequences, and tensor_sl"):
        sl.make_plan(params, sl.abstract_mesh(seq=2), sl.chain(sl.sequence("seq", Striped), slices))
