"""Sums and gathers in few bits: one file per codec."""
