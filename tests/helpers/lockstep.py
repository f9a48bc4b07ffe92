"""Functions of tensors on ranks, which all ranks call alike, and their definitions on one device over all ranks' tensors.

A transform of torch that all ranks apply at once, to functions that meet in collectives, is that of one function of all
ranks' tensors, with every rank's cotangents and tangents: `TRANSFORMS` has the same formulas for both.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.func import jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl


@dataclass(frozen=True)
class Lockstep:
    """A case.

    Attributes:
        mesh: the sizes of its axes.
        shape: of each rank's input.
        on_rank: ``on_rank(mesh, x)``.
        define: from the list of all ranks' inputs to that of their outputs.
        refused: the transforms that are refused, with this ``message``.
    """

    mesh: dict[str, int]
    shape: tuple[int, ...]
    on_rank: Callable
    define: Callable
    refused: tuple[str, ...] = ()
    message: str = ""


def pull(fn, x, cotangent):
    return vjp(fn, x)[1](cotangent)[0]


def push(fn, x, tangent):
    return jvp(fn, (x,), (tangent,))[1]


def graph(fn, *inputs):
    """What a graph of ``fn`` computes that was traced without values."""
    return make_fx(fn, tracing_mode="fake")(*map(torch.zeros_like, inputs))(*inputs)


def basis(like):
    return torch.eye(like.numel(), dtype=like.dtype).view(-1, *like.shape)


# Of a function, its input, a batch of inputs, a tangent and a cotangent. On one device ranks are the first dimension, and
# ``all_ranks`` gives every rank the same cotangent or tangent; batches are dimension ``dim``.
TRANSFORMS = {
    "value": lambda f, x, xs, t, c, all_ranks, dim: f(x),
    "grad": lambda f, x, xs, t, c, all_ranks, dim: pull(f, x, all_ranks(c)),
    "grad of grad": lambda f, x, xs, t, c, all_ranks, dim: pull(lambda x: pull(f, x, all_ranks(c)), x, all_ranks(t)),
    "vmap": lambda f, x, xs, t, c, all_ranks, dim: vmap(f, dim, dim)(xs),
    "vmap of grad": lambda f, x, xs, t, c, all_ranks, dim: vmap(lambda x: pull(f, x, all_ranks(c)), dim, dim)(xs),
    "grad of vmap": lambda f, x, xs, t, c, all_ranks, dim: pull(
        vmap(f, dim, dim), xs, all_ranks(c.expand(xs.shape[dim], *c.shape))
    ),
    "vmap of vmap": lambda f, x, xs, t, c, all_ranks, dim: vmap(vmap(f, dim, dim), dim + 1, dim)(
        torch.stack([xs, xs.sin()], dim + 1)
    ),
    "jacrev": lambda f, x, xs, t, c, all_ranks, dim: vmap(lambda e: pull(f, x, all_ranks(e)), 0, dim)(basis(c)),
    "jvp": lambda f, x, xs, t, c, all_ranks, dim: push(f, x, all_ranks(t)),
    "vmap of jvp": lambda f, x, xs, t, c, all_ranks, dim: vmap(lambda x: push(f, x, all_ranks(t)), dim, dim)(xs),
    "jvp of grad": lambda f, x, xs, t, c, all_ranks, dim: push(lambda x: pull(f, x, all_ranks(c)), x, all_ranks(t)),
    "hessian": lambda f, x, xs, t, c, all_ranks, dim: vmap(
        lambda e: push(lambda x: pull(f, x, all_ranks(c)), x, all_ranks(e)), 0, dim
    )(basis(t)),
    "graph of grad": lambda f, x, xs, t, c, all_ranks, dim: graph(lambda x, c: pull(f, x, all_ranks(c)), x, c),
    "graph of vmap of grad": lambda f, x, xs, t, c, all_ranks, dim: graph(
        lambda xs, c: vmap(lambda x: pull(f, x, all_ranks(c)), dim, dim)(xs), xs, c
    ),
    "graph of jvp of grad": lambda f, x, xs, t, c, all_ranks, dim: graph(
        lambda x, t, c: push(lambda x: pull(f, x, all_ranks(c)), x, all_ranks(t)), x, t, c
    ),
}


def drawn(case, rank, *more):
    """A rank's input (a batch of inputs, for a size), alike in every call."""
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randn((*more, *case.shape), generator=generator, dtype=torch.float64)


def weighed(y):
    """A cotangent that differs between elements."""
    return torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)


def on_ranks(case, names):
    """Each rank's results, by transform."""

    def run(mesh):
        fn = lambda x: case.on_rank(mesh, x.sin()).cos()  # noqa: E731
        x, xs = drawn(case, mesh.rank), drawn(case, mesh.rank, 3)
        t, c = weighed(x), weighed(fn(x))
        return {name: TRANSFORMS[name](fn, x, xs, t, c, lambda each: each, 0) for name in names}

    results = []
    # Forward mode belongs to the process: simulated ranks share a level that is open around them.
    jvp(lambda x: (results.extend(sl.simulate(run, mesh=case.mesh)), x)[1], (torch.zeros(()),), (torch.zeros(()),))
    return results


def on_one_device(case, names):
    """All ranks' results, by transform; ranks are the first dimension."""
    number = torch.Size(case.mesh.values()).numel()

    def fn(x):
        return torch.stack(case.define(list(x.sin()))).cos()

    x = torch.stack([drawn(case, rank) for rank in range(number)])
    xs = torch.stack([drawn(case, rank, 3) for rank in range(number)])
    t, c = weighed(x[0]), weighed(fn(x)[0])
    found = {}
    for name in names:
        transform = TRANSFORMS[name.removeprefix("graph of ")]  # whether or not a function is traced it is the same
        found[name] = transform(fn, x, xs, t, c, lambda e: e.expand(number, *e.shape), 1)
    return found
