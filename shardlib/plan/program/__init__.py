"""A step of one rank as an ordered list of operations, each of which states once what it sends and what time it takes."""
