"""Loops of other libraries around the library's step; each file imports its library."""
