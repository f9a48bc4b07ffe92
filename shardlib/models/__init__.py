"""Models as pure functions: a parameter pytree from ``init`` and functions of it, with no parallel code."""
