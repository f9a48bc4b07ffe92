"""What is wrong with a folder of built pages: found in the files, and by a browser that opens each of them."""

import functools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

# In a page: pictures that did not load, and what is wider than the window and does not scroll by itself.
PICTURES = "[...document.images].filter((one) => !(one.complete && one.naturalWidth)).map((one) => one.src)"
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class _Page(HTMLParser):
    """A page's links, the anchors that it has, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "script") and "src" in given:
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given["href"])


@functools.cache  # every page has the same links at its side
def _file(folder: Path, link: str) -> Path | None:
    target = (folder / link).resolve()
    return target if target.is_file() else None


def dead_links(folder: Path) -> list[str]:
    """Links to files or anchors that are not there, and whatever is loaded from another host."""
    pages = {path: _Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(folder)
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{where} loads {link}")
                continue
            target = _file(path.parent, unquote(parts.path)) if parts.path else path
            if target is None:
                found.append(f"{where} leads to {link}, which is not there")
            elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where} leads to {link}, and that page has no such anchor")
    return found


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """A tab that goes on to the next page closes its connections; what fails is seen in the tab."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the folder's pages, on this machine alone."""
    server = _Server(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def browser() -> Iterator:
    """A headless Chromium, that of the system or the one that $CHROME names."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = os.environ.get("CHROME") or next(filter(None, map(shutil.which, names)), None)
    assert program, "the site is looked at in Chromium, which is not here: apt-get install chromium, or set CHROME"
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


def seen(folder: Path) -> list[str]:
    """Errors in the console, answers that fail, requests elsewhere, pictures that do not load, pages wider than a window."""
    found: list[str] = []
    with served(folder) as base, browser() as opened:
        tab = opened.new_page(viewport=PHONE)
        where = ""
        tab.on("console", lambda said: said.type == "error" and found.append(f"{where}: {said.text}"))
        tab.on("pageerror", lambda error: found.append(f"{where}: {error}"))
        tab.on(
            "response", lambda answer: answer.status >= 400 and found.append(f"{where}: {answer.status} {answer.url}")
        )
        tab.on(
            "request",
            lambda asked: asked.url.startswith((base, "data:", "blob:")) or found.append(f"{where} asks {asked.url}"),
        )
        for path in sorted(folder.rglob("*.html")):
            where = path.relative_to(folder).as_posix()
            tab.set_viewport_size(PHONE)
            tab.goto(base + where, wait_until="load")
            for size in (PHONE, DESK):
                tab.set_viewport_size(size)
                if (more := tab.evaluate(WIDTH)) > 0:
                    found.append(f"{where} is {more} pixels wider than a window of {size['width']}")
            found.extend(f"{where}: {picture} does not load" for picture in tab.evaluate(PICTURES))
    return found


def searched(folder: Path, words: str) -> list[str]:
    """Titles that the site's own search finds."""
    with served(folder) as base, browser() as opened:
        tab = opened.new_page(viewport=DESK)
        tab.goto(f"{base}search.html?q={words}")
        tab.wait_for_selector("#search-results li", timeout=20_000)
        return tab.locator("#search-results li a").all_inner_texts()
