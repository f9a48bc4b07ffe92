"""Profiles of steps that leave out layers or tokens: what is counted is what was timed."""

import pytest
import torch

import shardlib as sl

LAYERS, WIDTH, LENGTH, ROWS = 6, 8, 12, 2
EVERY = ROWS * LENGTH


def by_the_key(p, x, rng, layer):
    """A loss that draws its layers itself."""
    for number, each in enumerate(p["layers"]):
        if rng.fold_in(number).seed % 2:
            x = layer(each, x)
    return x


def all_layers(p, x, rng, layer):
    for each in p["layers"]:
        x = layer(each, x)
    return x


CASES = {
    "layers": (all_layers, lambda: [sl.progressive_layer_drop(0.05, 1e3)]),
    "tokens": (all_layers, lambda: [sl.random_ltd(lambda step: 1 + step % 11)]),
    "the loss's own draws": (by_the_key, lambda: []),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_of_the_timed_step(case):
    through, transforms = CASES[case]

    def run(mesh):
        seen, ran = [0], []

        @sl.block
        def layer(p, x):
            seen[0] += x.shape[0] * x.shape[1]
            return x + torch.tanh(x @ p["w"])

        def loss_fn(p, x, rng):
            seen[0] = 0
            return through(p, x @ p["first"], rng, layer).square().mean()

        w = 0.1 * torch.eye(WIDTH)
        params = {"first": w, "layers": [{"w": w.clone()} for _ in range(LAYERS)]}
        made = sl.shard(params, mesh, sl.chain(sl.zero(1), *transforms()))
        state, train_step = sl.make_train_step(loss_fn, made, sl.optim.sgd(0.1))

        def noted(state, batch):
            result = train_step(state, batch)
            ran.append((result[0].step, seen[0]))
            return result

        state, _ = train_step(state, torch.ones(ROWS, LENGTH, WIDTH))  # of all layers
        for _ in range(4):
            ran.clear()
            found = sl.profile(noted, state, torch.ones(ROWS, LENGTH, WIDTH), steps=3, warm=1)
            state = found.state
            timed = 1 + found.recording.median
            number, tokens = ran[timed]
            # The layers' products, and the first one, whose input has no gradient.
            assert found.flops["forward"] == 2 * WIDTH**2 * (tokens + EVERY)
            assert found.flops["backward"] == 2 * WIDTH**2 * (2 * tokens + EVERY)
            assert {seen for _, seen in ran[4:]} == {tokens}  # memory's step too
            assert [step for step, _ in ran] == [*range(ran[0][0], ran[0][0] + 4), number, number]
            assert state.step == ran[0][0] + 5
        return len({seen for _, seen in ran}) > 1, found.recording.median

    (differ, one), (_, other) = sl.simulate(run, mesh={"data": 2})
    assert differ and one == other
