"""A small model with a layer of four experts, in float64."""

import torch

import shardlib as sl


def loss_fn(params, batch):
    config = sl.nn.MoEConfig(sl.nn.routers.top_k(2, renormalise="chosen"))
    return sl.nn.moe(params, batch @ params["w"], config)[0].square().mean()


def model():
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (4, 6, 5), "up": (4, 6, 5), "down": (4, 5, 6)}
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    params = {"w": normal(5, 5), "router": {"weight": normal(4, 5)}}
    params["experts"] = {name: normal(*shape) for name, shape in shapes.items()}
    return loss_fn, params, [normal(8, 5) for _ in range(4)]
