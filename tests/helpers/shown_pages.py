"""What is wrong with HTML: tags that do not match, things that are fetched or run, pictures that nobody describes."""

from html.parser import HTMLParser

EMPTY = {
    "meta",
    "rect",
    "line",
    "path",
    "polyline",
    "polygon",
    "circle",
    "br",
}  # without an end tag, or closed by themselves


class Page(HTMLParser):
    """Reads HTML; refuses tags that do not match.

    Attributes:
        tags: the names of all elements.
        texts: what is between them.
        hints: the values of ``title=`` and ``aria-label=``, and the texts of ``<title>``.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.texts, self.hints, self._open = [], [], [], []
        self.feed(html)
        self.close()
        assert not self._open, self._open
        assert "script" not in self.tags and "link" not in self.tags and "iframe" not in self.tags
        namespace = 'xmlns="http://www.w3.org/2000/svg"'  # a name, which nobody fetches
        rest = html.replace(namespace, "")
        assert not any(word in rest for word in ("http:", "https:", "url(", "@import", "src=", "href="))
        assert self.tags.count("svg") == self.described, "a picture without a title"

    described = 0

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self.hints += [given[name] for name in ("title", "aria-label") if given.get(name)]
        assert not [name for name, _ in attrs if name.startswith("on") or not name.replace("-", "").isalnum()]
        if tag == "svg":
            self.described += bool(given.get("aria-label")) and given.get("role") == "img"
        if tag not in EMPTY or tag in ("rect", "circle", "polygon"):
            self._open.append(tag)
        if tag == "meta":
            assert self._open[-1] == "head"

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, (tag, self._open)
        self._open.pop()

    def handle_data(self, data):
        (self.hints if self._open and self._open[-1] == "title" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)
