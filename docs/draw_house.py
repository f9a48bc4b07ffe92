"""Drawings of the rooms and their imports: `python docs/draw_house.py` writes docs/house.svg and docs/house.txt.

The floors are those of pyproject.toml's [tool.importlinter], from the top down; a room is a folder or a file in shardlib/.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardlib"

WIDTH, HEIGHT, ROOM, MARGIN = 960, 74, 34, 20  # pixels: of the drawing, a floor, a room, the margin


def floors() -> list[list[str]]:
    """Rooms by floor, from the top down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "floors")
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def imports() -> dict[str, set[str]]:
    """Room -> the rooms that its files import from, including imports for type checkers."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.stem.strip("_") and path.name != "__init__.py"}
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in rooms:
            found.setdefault(room, set()).update(_imported(ast.parse(path.read_text()), rooms) - {room})
    return found


def _imported(tree: ast.Module, rooms: set[str]) -> set[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {parts[1] for name in names if (parts := name.split("."))[0] == "shardlib" and len(parts) > 1} & rooms


def text() -> str:
    """A line for each room, floor by floor, with the rooms that it imports from."""
    uses = imports()
    lines = []
    for number, rooms in zip(range(len(floors()), 0, -1), floors()):
        lines.append(f"floor {number}")
        lines += [f"  {room:12} <- {' '.join(sorted(uses.get(room, ()))) or 'nothing'}" for room in rooms]
    return "\n".join(lines) + "\n"


def svg() -> str:
    """Floors as rows, rooms as boxes, imports as lines that run down."""
    uses, storeys = imports(), floors()
    left = {}  # room -> its box: left edge, top, width
    for number, rooms in enumerate(storeys):
        width = (WIDTH - MARGIN * (len(rooms) + 1)) / len(rooms)
        for index, room in enumerate(rooms):
            left[room] = MARGIN + index * (width + MARGIN), MARGIN + number * HEIGHT, width
    lines = [
        f'<line x1="{_middle(left[room]):.0f}" y1="{left[room][1] + ROOM}" x2="{_middle(left[used]):.0f}" '
        f'y2="{left[used][1]}" stroke="#4878a8" stroke-opacity="0.25"/>'
        for room in left
        for used in sorted(uses.get(room, set()) & left.keys())
    ]
    boxes = [
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{ROOM}" rx="4" fill="#eef3f8" stroke="#4878a8"/>'
        f'<text x="{_middle((x, y, width)):.0f}" y="{y + 22}" text-anchor="middle">{room}</text>'
        for room, (x, y, width) in left.items()
    ]
    height = len(storeys) * HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *lines, *boxes, "</svg>"]) + "\n"


def _middle(box: tuple[float, int, float]) -> float:
    return box[0] + box[2] / 2


DRAWINGS = {"house.txt": text, "house.svg": svg}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (ROOT / "docs" / name).write_text(draw())
