"""Training on one device: torch's autograd and torch's optimizer on the whole batch."""

import optree
import torch


def train(loss_fn, params, batches, *, lr=1e-3, eps=1e-5, weight_decay=0.01, max_norm=None, frozen=()):
    """Losses, gradient norms and final parameters of AdamW on ``batches``; tied leaves are trained once.

    Clips by max_norm / norm: torch's clip_grad_norm_ adds 1e-6 to the norm, which float64 would show.
    """
    paths, leaves, structure = optree.tree_flatten_with_path(params)
    copies = {}
    mine = [copies.setdefault(id(leaf), leaf.detach().clone()) for leaf in leaves]
    trained = [
        leaf.requires_grad_()
        for leaf in copies.values()
        if leaf.is_floating_point() and not any(leaf is m and p in frozen for p, m in zip(paths, mine))
    ]
    optimizer = torch.optim.AdamW(trained, lr=lr, eps=eps, weight_decay=weight_decay, foreach=False, fused=False)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(optree.tree_unflatten(structure, mine), batch)
        loss.backward()
        for leaf in trained:  # an unused parameter's gradient is zero, not absent: its moments and decay go on
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        norm = torch.nn.utils.get_total_norm([leaf.grad for leaf in trained]) if trained else torch.zeros(())
        if max_norm is not None and norm > max_norm:
            for leaf in trained:
                leaf.grad.mul_(max_norm / norm)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, optree.tree_unflatten(structure, [leaf.detach() for leaf in mine])
