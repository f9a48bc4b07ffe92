"""Mixture of experts: `moe`, a layer, over routers (`routers/`) that hand out a `Routing`."""
