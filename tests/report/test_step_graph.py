"""The picture of a step's graph."""

import pytest
from helpers.models import share, tiny_gpt, token_batches

import shardlib as sl
from shardlib.report.graph import draw_graph


def test_a_graph_is_drawn(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    loss_fn, params = tiny_gpt()

    def run(mesh):
        sharded = sl.shard(params, mesh, stage=3)
        state, step = sl.make_train_step(loss_fn, sharded, sl.optim.adamw(1e-3), compile=True)
        with pytest.raises(ValueError, match="no graph yet: take a step"):
            draw_graph(step.graph, tmp_path / "none.png")
        for rows in (4, 8):
            state, _ = step(state, share(token_batches(1, rows)[0], mesh.rank, 2))
            draw_graph(step.graph, tmp_path / str(mesh.rank) / f"{rows}.png")
        return [image.imread(tmp_path / str(mesh.rank) / f"{rows}.png") for rows in (4, 8)]

    for one, two in sl.simulate(run, mesh={"data": 2}):
        assert two.shape[0] == 2 * one.shape[0] and two.shape[1] == one.shape[1]
        blue = (abs(one[..., :3] - [0x00 / 255, 0x72 / 255, 0xB2 / 255]).max(-1) < 0.01).sum()
        assert blue > 1000 and not (tmp_path / "none.png").exists()
