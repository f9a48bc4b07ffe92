"""Transformations around other transformations."""
