"""A step's loss and gradients as functions of values, from shards to shards.

No gradient arrives by attribute, dictionary or hook: whole leaves are differentiable functions of shards, so whatever torch
differentiates, maps or traces, it can here, around the loss and inside it.
"""
