"""Experts in host memory, of which the device has room for a few of each layer."""

from shardlib.models.decoding.residence.verb import ExpertsOnHost, experts_on_host

__all__ = ["ExpertsOnHost", "experts_on_host"]
