"""One file per optimizer, and per transformation of gradients."""
