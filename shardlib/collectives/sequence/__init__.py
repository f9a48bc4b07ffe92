"""How positions of a sequence that is cut over an axis meet: one file per kind."""
