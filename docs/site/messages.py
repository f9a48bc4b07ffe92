"""All messages of the library, by exception, read from its source."""

import ast
import html
from collections import defaultdict
from pathlib import Path

from shardlib import errors

PACKAGE = Path(errors.__file__).parent


def template(node: ast.expr) -> str:
    """The text of an expression that makes a string; … stands for what is known in a run alone."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "…"


def found() -> dict[str, dict[str, str]]:
    """Exception -> message -> the file that raises it."""
    messages: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
                text = template(node.exc.args[0])
                if name[:1].isupper() and len(text.replace("…", "").strip()) > 12:
                    messages[name].setdefault(text, f"shardlib/{path.relative_to(PACKAGE)}")
    return messages


def page() -> str:
    """Exceptions of the library first, then Python's own."""
    own = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    messages = found()
    lines = [
        "# All messages",
        "",
        "Read from the source: what `raise` says, by exception; … stands for names and sizes. The usual ones, with why and "
        "what to do, are in [troubleshooting](troubleshooting.md). Paste a part of a message:",
        "",
        '<input id="filter" type="search" placeholder="part of a message" aria-label="part of a message">',
        "",
    ]
    for name in sorted(messages, key=lambda name: (name not in own, name)):
        lines += [f"## {name}", "", (getattr(errors, name).__doc__ or "") if name in own else "", ""]
        lines += ['<div class="messages">']
        for text, file in sorted(messages[name].items()):
            lines += [f'<p class="message">{html.escape(text).replace(chr(10), "<br>")} <span>{file}</span></p>']
        lines += ["</div>", ""]
    return "\n".join(lines)
