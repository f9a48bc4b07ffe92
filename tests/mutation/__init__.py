"""The suite itself is measured: defects are planted one at a time in a copy of the package, and its tests must notice."""
