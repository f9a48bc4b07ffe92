"""The documentation site: it builds without warnings, and a browser finds nothing wrong with any page."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import dead_links, searched, seen
from test_examples import public

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(monkeypatch):
    """The site's modules by name."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    return importlib.import_module


def built(folder):
    """The pages, as `make docs` builds them."""
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.mark.timeout(900)
def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path):
    pages = built(tmp_path)
    assert len(list(pages.rglob("*.html"))) > 80
    assert dead_links(pages) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_browser_finds_nothing_wrong(tmp_path):
    pages = built(tmp_path)
    assert seen(pages) == []
    assert any("make_plan" in title for title in searched(pages, "make_plan"))


@pytest.mark.nightly
def test_what_is_wrong_with_pages_is_found(tmp_path):
    """One page with every fault that the checks are for."""
    (tmp_path / "page.html").write_text(
        "<title>wrong</title><a href='gone.html'>1</a><a href='#nowhere'>2</a><img src='gone.png'>"
        "<script>console.error('said'); undefined.thrown</script>"
        "<script src='http://localhost:9/elsewhere.js'></script><div style='width: 2000px'>wide</div>"
    )
    (tmp_path / "favicon.ico").touch()
    files, shown = "\n".join(dead_links(tmp_path)), "\n".join(seen(tmp_path))
    for fault in ("gone.html", "#nowhere", "gone.png", "loads http://localhost:9/elsewhere.js"):
        assert fault in files
    for fault in (
        "said",
        "thrown",
        "gone.png does not load",
        "asks http://localhost:9",
        "window of 390",
        "window of 1280",
    ):
        assert fault in shown


def test_links_of_the_repository_have_places_in_the_site(site):
    build = site("build")
    page, place = ROOT / "docs" / "plans.md", "plans.md"
    assert build.placed("sharding.md#x", page, place) == "sharding.md#x"
    assert build.placed("../benchmarks/results/cpu.md", page, place) == "measurements/cpu.md"
    notebook = ROOT / "notebooks" / "01_shard_and_train.ipynb"
    assert build.placed("../docs/offload.md", notebook, "notebooks/01_shard_and_train.ipynb") == "../offload.md"
    assert build.placed("https://example.org/a.md", page, place) == "https://example.org/a.md"
    with pytest.raises(ValueError, match=r"Makefile, which has no place in the site"):
        build.placed("../Makefile", page, place)


def test_pairs_are_asked_of_the_planner(site):
    composition = site("composition")
    accumulate, pipeline, tile, *_ = (
        next(choice for choice in composition.CHOICES if name in choice.code) for name in ("accum", "pipe", "tile")
    )
    assert "both claim" in composition.refusal(0, accumulate, pipeline)
    assert composition.refusal(3, accumulate, tile) is None


def test_every_public_name_is_in_the_reference(site):
    """What the examples' test holds public, and the exceptions."""
    reference = site("reference")

    wanted = {name.replace("sl.", "shardlib.", 1) for name, value in public().items() if reference.is_documented(value)}
    listed = {f"{room}.{name}" for room in reference.ROOMS for name in reference.names(room)}
    assert len(wanted) > 250
    assert wanted <= listed
