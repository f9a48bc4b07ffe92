"""The list of notebooks, by what each says of itself in its first cell."""

import json
from pathlib import Path


def page(notebooks: list[Path]) -> str:
    rows, names = [], []
    for path in notebooks:
        title, what, *_ = (
            "".join(json.loads(path.read_text())["cells"][0]["source"]).replace("](../", "](").split("\n\n")
        )
        rows += [f"## [{title.strip('# ')}](notebooks/{path.name})", "", what, ""]
        names.append(f"notebooks/{path.stem}")
    toctree = "\n".join(names)
    return (
        "# Tutorials\n\nNotebooks of `notebooks/`, with the outputs of their last run; the tests run them. Several ranks are "
        "inside of each, so that no GPU or cluster is needed.\n\n"
        + "\n".join(rows)
        + f"\n```{{toctree}}\n:hidden:\n{toctree}\n```\n"
    )
