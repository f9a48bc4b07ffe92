"""Micro-batches through the stages of a schedule."""
