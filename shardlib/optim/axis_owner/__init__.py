"""Optimizers that sum gradients over an axis themselves, in few bits."""
