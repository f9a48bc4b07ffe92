"""Steps over slow links, between hosts that are network namespaces."""
