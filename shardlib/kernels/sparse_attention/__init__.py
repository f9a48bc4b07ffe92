"""Attention over the blocks of a layout."""
