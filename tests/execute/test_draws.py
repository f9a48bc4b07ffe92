"""Random numbers of recomputed blocks."""

import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.execute.recompute import Draws


def test_a_block_draws_in_backward_what_it_drew_in_forward():
    """With torch's own dropout, after blocks that draw and blocks that do not, over micro-batches."""

    def run(*transforms):
        params = [{"w": torch.eye(16) + number / 16} for number in range(4)]

        def loss_fn(params, x, rng):
            for number, layer in enumerate(params):
                block = sl.block(lambda p, x, number=number: F.dropout(torch.tanh(x @ p["w"]), 0.5 * (number % 2)))
                x = block(layer, x)
            return x.square().mean()

        transform = sl.chain(sl.zero(0), sl.accumulate(2), *transforms)
        state, step = sl.make_train_step(loss_fn, sl.shard(params, sl.make_mesh(), transform), sl.optim.sgd(0.5))
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 16))
        return torch.stack([layer["w"] for layer in sl.unshard(state.params)])

    assert torch.equal(run(sl.remat()), run())


def test_states_are_kept_once_for_blocks_that_draw_nothing():
    kept, draws = [], Draws(torch.device("cpu"))
    noted = draws._noted
    draws._noted = lambda: kept.append(noted()) or kept[-1]
    quiet = [draws.repeated(lambda: 1) for _ in range(3)]
    noisy = [draws.repeated(lambda: torch.rand(3)) for _ in range(2)]
    first = [fn() for fn in (*quiet, *noisy)]
    before = torch.get_rng_state()
    again = [fn() for fn in (*quiet, *noisy)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip(first[3:], again[3:], strict=True))
    assert len({id(states[0][1]) for states in kept}) == 2  # before the first that draws, and after it
