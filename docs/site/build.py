"""The documentation site: `python docs/site/build.py` writes build/docs/html.

Pages are those of docs/, the notebooks with their outputs, and what is made here: the reference of every public name, which
transforms compose, all messages, and the measurements. Sources are laid into build/docs/source, where links between the
folders of the repository become links between pages.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import composition
import measurements
import messages
import reference
import tutorials

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Where the repository's files are in the site: the first that fits, from its root.
PLACES: list[tuple[str, Callable[[re.Match[str]], str]]] = [
    (r"docs/index\.md", lambda found: "guides.md"),
    (r"docs/(.+)", lambda found: found[1]),
    (r"benchmarks/results/(\w[\w-]*)\.(?:md|csv|png)", lambda found: f"measurements/{found[1]}.md"),
    (r"(notebooks/.+|examples/.+)", lambda found: found[1]),
    (r"README\.md", lambda found: "index.md"),
]


def placed(link: str, page: Path, place: str) -> str:
    """A relative link of a page of the repository, as a link of the page at ``place`` in the site."""
    target, hash, anchor = link.partition("#")
    if re.match(r"\w+:", link) or not target:
        return link
    path = (page.parent / target).resolve().relative_to(ROOT).as_posix()
    for pattern, put in PLACES:
        if found := re.fullmatch(pattern, path):
            return "../" * place.count("/") + put(found) + hash + anchor
    raise ValueError(f"{page}: {link} leads to {path}, which has no place in the site")


def relinked(text: str, page: Path, place: str) -> str:
    return re.sub(r"(?<=\]\()([^)\s]+)(?=\))", lambda found: placed(found[1], page, place), text)


def slug(title: str) -> str:
    """The anchor of a heading, from the one that Jupyter gives it."""
    return re.sub(r"[^\w\- ]", "", title.replace("-", " ").lower()).replace(" ", "-")


def stage(source: Path) -> None:
    """All pages under ``source``."""
    for path in sorted((ROOT / "docs").iterdir()):
        if path.suffix == ".md" and path.name != "index.md":
            (source / path.name).write_text(relinked(path.read_text(), path, path.name))
        elif path.suffix in (".png", ".svg", ".txt"):
            shutil.copy(path, source)
    shutil.copytree(ROOT / "examples", source / "examples")  # to download
    (source / "notebooks").mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        place = f"notebooks/{path.name}"
        text = re.sub(r"\]\(#([^)]+)\)", lambda found: f"](#{slug(found[1])})", path.read_text())
        (source / place).write_text(relinked(text, path, place))
    readme = (ROOT / "README.md").read_text()
    for path in sorted((HERE / "pages").glob("*.md")):
        text = re.sub(r"^<!-- README: (.+) -->$", lambda found: section(readme, found[1]), path.read_text(), flags=re.M)
        (source / path.name).write_text(relinked(text, ROOT / "README.md", path.name))
    (source / "guides.md").write_text(
        guides((ROOT / "docs" / "index.md").read_text(), (source / "index.md").read_text())
    )
    (source / "tutorials.md").write_text(tutorials.page(sorted((source / "notebooks").glob("*.ipynb"))))
    (source / "composition.md").write_text(composition.page())
    (source / "messages.md").write_text(messages.page())
    reference.write(source / "reference")
    measurements.write(source / "measurements")


def guides(index: str, elsewhere: str) -> str:
    """The guides: what docs/index.md lists, and in the sidebar the pages that the front page does not."""
    text = index.split("## Notebooks")[0].replace("# Pages", "# Guides", 1)
    text = re.sub(r"\n## Begin\n.*?(?=\n## )", "", text, flags=re.S)
    text = re.sub(r"(?s)\n\n.*?(?=\n## )", "\n\nA page for each task. The tests run their code.\n", text, count=1)
    others = "\n".join(
        name for name in re.findall(r"\]\((\w+)\.md\)", text) if not re.search(rf"^{name}$", elsewhere, re.M)
    )
    return f"{text}\n```{{toctree}}\n:hidden:\n{others}\n```\n"


def section(readme: str, title: str) -> str:
    """A section of the README, or what stands under its title, without the heading."""
    parts = dict(re.findall(r"^#+ (.+?)\n(.*?)(?=^## |\Z)", readme, re.M | re.S))
    return parts[title].strip()


def main() -> int:
    from sphinx.cmd.build import build_main  # which only the site needs

    parser = argparse.ArgumentParser(prog="docs/site/build.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="the folder that is made anew")
    out = parser.parse_args().out
    source = out / "source"
    shutil.rmtree(out, ignore_errors=True)
    source.mkdir(parents=True)
    stage(source)
    options = [
        "-c",
        str(HERE),
        "-b",
        "html",
        "-d",
        str(out / "doctrees"),
        "--fail-on-warning",
        "--keep-going",
        "-q",
        "-j",
        "2",
    ]
    return build_main([*options, str(source), str(out / "html")])


if __name__ == "__main__":
    sys.exit(main())
