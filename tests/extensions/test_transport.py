"""A user's own transport: a slow network, which counts what a rank sends and delivers it late."""

import time

import torch
from helpers.stages import ADAMW, check_like_one_device, plan_of, share, train_stages

import shardlib as sl
from shardlib.mesh.transport import Work


class SlowNetwork:  # stands before an axis' group; what a rank sends arrives one after the other, at 100 MB/s
    def __init__(self, axis, group, latency=1e-4):
        self._group, self.size, self.rank, self._latency = group, group.size, group.rank, latency
        self.bytes, self.exchanges, self._busy_until = 0, 0, 0.0

    def all_reduce(self, tensor):
        return self._send(2 * (self.size - 1) * tensor.nbytes // self.size, self._group.all_reduce(tensor))

    def all_gather(self, out, inp):
        return self._send((self.size - 1) * inp.nbytes, self._group.all_gather(out, inp))

    def reduce_scatter(self, out, inp):
        return self._send((self.size - 1) * inp.nbytes // self.size, self._group.reduce_scatter(out, inp))

    def send(self, tensor, peer, tag):
        return self._send(tensor.nbytes, self._group.send(tensor, peer, tag))

    def __getattr__(self, name):  # the others, as they are: this model needs no more
        return getattr(self._group, name)

    def _send(self, sent, work):
        self.bytes, self.exchanges = self.bytes + sent, self.exchanges + 1
        arrival = self._busy_until = max(self._busy_until, time.perf_counter()) + self._latency + sent / 1e8
        return Work(lambda: (time.sleep(max(0.0, arrival - time.perf_counter())), work.wait()))


def model():
    def layer(params, x, batch):
        return torch.tanh((batch if x is None else x) @ params)

    drawn = torch.randn(2, 4, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return sl.sequential([*[layer] * 3, lambda *args: layer(*args).square().mean()]), [*drawn[0] / 4], [*drawn[1]]


def count(mesh):  # payload: all that the transport counts, but the scalars that the library counts by themselves
    before = {axis: 0 for axis, size in mesh.shape.items() if size > 1}

    def sent():
        now = {axis: mesh.group(axis).bytes - mesh.traffic.scalars.get(axis, 0) for axis in before}
        found = {axis: now[axis] - before[axis] for axis in now}
        before.update(now)
        return found

    return sent


def train(mesh, *args):
    return train_stages(mesh.with_transport(SlowNetwork), *args, count=count)


def test_it_trains_like_one_device_and_counts_what_the_plan_says(tmp_path, pool):
    meshes = {"data": 2, "pipe": 2}, {"data": 2, "pipe": 1}
    check_like_one_device(model, sl.pipeline("1f1b", microbatches=4), tmp_path, pool, meshes=meshes, train=train)


def second_step(mesh, stage):
    (loss_fn, params, batches), slow = model(), mesh.with_transport(lambda *group: SlowNetwork(*group, latency=0.01))
    state, step = sl.make_train_step(loss_fn, sl.shard(params, slow, stage=stage), ADAMW)
    for batch in batches[:2]:
        slow.group("data").exchanges, start = 0, time.perf_counter()
        state, _ = step(state, share(batch, mesh))
    return slow.group("data").exchanges, time.perf_counter() - start


def test_a_step_waits_for_as_many_exchanges_as_the_plan_says():
    for stage in range(4):
        messages = sum(message.times for message in plan_of(model, sl.chain(), ADAMW, stage).messages())
        for exchanges, seconds in sl.simulate(second_step, stage, mesh={"data": 4}):
            assert exchanges == messages + 1 and seconds >= 0.01 * exchanges  # one sums the loss and the norm
