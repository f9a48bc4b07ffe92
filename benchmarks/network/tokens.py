"""Tokens on their way to experts and back over slow links, one rank on each of two hosts of a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

import shardlib as sl
from benchmarks.harness import tables
from benchmarks.harness.case import CPU, Case, Result, Row, Setting
from benchmarks.harness.timing import interleave
from benchmarks.network.namespaces import NoNetwork, network
from benchmarks.network.transfers import transfers
from shardlib.collectives.tokens import Direct

_EXPERTS, _ROWS, _WIDTH, _SMALL = 16, 4096, 512, 64
_PROBE = 4 << 20  # bytes of a raw transfer
_RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
_PLAIN, _TORCH = "fp32", "torch's all-to-all, fp32"
_WAYS = {
    _PLAIN: Direct("expert"),
    "int8 to the experts": Direct("expert", codec="int8"),
    "fp8 to the experts": Direct("expert", codec="fp8"),
    "int8 to the experts and back": Direct("expert", codec="int8", back_codec="int8"),
}
_ABOUT = (
    "{rows} rows of {width} fp32 elements on each rank, for {experts} experts that compute nothing: to the experts and back, "
    "forward and backward, sizes included. A rank in each of two network namespaces, one thread each, joined by a veth pair "
    "whose two ends are shaped by tbf to {rate}; raw gloo transfers reached {reached:.0f} Mbit/s. “Wire” is the payload of "
    "rank 0 at that rate: {payload}. torch's all-to-all brings no order into the rows that arrive. {rounds} rounds."
)


def measure(rate: str, setting: Setting) -> Result:
    """Each way against the wire, and against fp32."""
    title = f"Tokens over a link of {_RATES[rate]}"
    try:
        with network(2) as hosts:
            hosts.limit(rate)
            answer = json.loads(hosts.run(__name__, str(setting.rounds), *["small"] * setting.small, timeout=600))
    except NoNetwork as error:
        rows = [Row(name, _PLAIN, None, None, None) for name in _WAYS]
        return tables.compared(title, f"Not measured: {error}.", rows, {})
    times, sent, speed = answer["times"], answer["payload"], answer["rate"]
    rows = []
    for name in _WAYS:
        wire = [sent[name] / speed] * len(times[name])
        rows.append(tables.paired(name, times[name], "wire", wire, None))
        if name != _PLAIN:
            rows.append(tables.row(times, name, _PLAIN))
    rows.append(tables.row(times, _PLAIN, _TORCH))
    about = _ABOUT.format(
        rows=answer["rows"],
        width=_WIDTH,
        experts=_EXPERTS,
        rate=_RATES[rate],
        reached=speed * 8 / 1e6,
        payload=", ".join(f"{name} {number / 1e6:.2f} MB" for name, number in sent.items()),
        rounds=setting.rounds,
    )
    return tables.compared(title, about, rows, times)


def _rank(rounds: int, small: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh, rows = sl.make_mesh(expert=2), _SMALL if small else _ROWS
    seconds = transfers(_PROBE >> 6 if small else _PROBE, 3)
    generator = torch.Generator().manual_seed(0)
    tables_of = [
        torch.randint(_EXPERTS, (rows,), generator=generator).bincount(minlength=_EXPERTS) for _ in range(mesh.size)
    ]
    counts = tables_of[mesh.rank]
    x = torch.randn(rows, _WIDTH, generator=generator).requires_grad_()
    seed = torch.ones(rows, _WIDTH)

    def there_and_back(exchange: Direct) -> None:
        coming, way = exchange.send(mesh, x, counts)
        exchange.back(mesh, coming.wait(), way).wait().backward(seed)
        x.grad = None

    calls: dict[str, Callable[[int], Any]] = {
        name: lambda _, exchange=exchange: there_and_back(exchange) for name, exchange in _WAYS.items()
    }
    calls[_TORCH] = lambda _: _by_torch(x, counts, seed)
    times = interleave(calls, rounds, warm=1, barrier=dist.barrier)
    payload = {}
    for name, exchange in _WAYS.items():
        sent = exchange.payload(mesh.shape, mesh.coords, torch.stack(tables_of), _WIDTH, x.dtype)
        payload[name] = sent.forward["expert"] + sent.backward["expert"]
    rate = (_PROBE >> 6 if small else _PROBE) * len(seconds) / sum(seconds)
    return {"rows": rows, "rate": rate, "payload": payload, "times": times}


def _by_torch(x: torch.Tensor, counts: torch.Tensor, seed: torch.Tensor) -> None:
    """The same with torch's collectives alone, which leave rows in the order of arrival."""
    sent = counts.view(2, -1).sum(1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    splits = received.tolist(), sent.tolist()
    here = all_to_all_single_autograd(x, *splits, dist.group.WORLD)
    wait_tensor(all_to_all_single_autograd(here, *splits[::-1], dist.group.WORLD)).backward(seed)
    wait_tensor(x.grad)
    x.grad = None


CASES = tuple(
    Case(f"tokens_{rate}", f"tokens to experts over one link of {name}; needs root", {CPU: 7}, partial(measure, rate))
    for rate, name in _RATES.items()
)

if __name__ == "__main__":
    print(json.dumps(_rank(int(sys.argv[1]), "small" in sys.argv)))
