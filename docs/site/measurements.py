"""The measurements: a page for each table of benchmarks/results, drawn from the rows that were measured."""

import csv
import html
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

from shardlib.common.optional import new_figure, save_figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Rows = list[dict[str, str]]
REPEATED = ("round", "seed")  # columns that number what was done again
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")  # Okabe and Ito's
STYLES = ("-", "--", ":", "-.")


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read(path: Path) -> tuple[list[str], Rows]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or ()), rows


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def bars(columns: list[str], rows: Rows) -> list[str]:
    """Section by section: the median of each case's rounds, with the smallest and largest, and a bar to compare by."""
    value = columns[-1]
    sections: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        sections[row["section"]][row["what"]].append(row[value])
    lines = []
    for section, cases in sections.items():
        found = {what: [number(text) for text in texts] for what, texts in cases.items()}
        numbers = {what: [each for each in values if each is not None] for what, values in found.items()}
        if any(None in values for values in found.values()):  # checksums and the like
            lines += [
                "",
                f"### {section}",
                "",
                *table(["case", value], [[what, texts[0]] for what, texts in cases.items()]),
            ]
            continue
        largest = max(abs(median(values)) for values in numbers.values()) or 1
        body = [
            [what, shown(median(values)), f"{shown(min(values))} to {shown(max(values))}", str(len(values))]
            for what, values in numbers.items()
        ]
        widths = [max(100 * abs(median(values)) / largest, 0.5) for values in numbers.values()]
        heads = ["case", f"{value}, median", "smallest to largest", "rounds"]
        lines += ["", f"### {section}", "", *table(heads, body, widths)]
    return lines


def table(heads: list[str], rows: list[list[str]], bars: list[float] | None = None) -> list[str]:
    """Rows as HTML, which may be wider than a page; ``bars`` adds one to each row, in per cent."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads) + ("<th></th>" if bars else "")
    lines = [f'<div class="wide"><table class="rows"><thead><tr>{head}</tr></thead><tbody>']
    for index, row in enumerate(rows):
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in row)
        bar = f'<td class="bar"><span style="width:{bars[index]:.1f}%"></span></td>' if bars else ""
        lines.append(f"<tr>{cells}{bar}</tr>")
    return [*lines, "</tbody></table></div>"]


def curves(name: str, columns: list[str], rows: Rows, folder: Path) -> list[str]:
    """Loss against steps, a line for each kind of run: the mean of its seeds."""
    keys = [column for column in columns[: columns.index("step")] if column not in REPEATED]
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        label = ", ".join(row[key] if number(row[key]) is None else f"{key} {row[key]}" for key in keys)
        found[label][int(row["step"])].append(float(row["loss"]))
    figure = new_figure(9, 5)
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(found.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}
        steps = sorted(points)
        axes.plot(steps, [sum(points[step]) / len(points[step]) for step in steps], label=label, linewidth=1.2, **style)
    highest = sorted(mean for points in found.values() for step in points for mean in points[step])
    axes.set_ylim(highest[0] - 0.05, highest[int(0.98 * (len(highest) - 1))])
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"{name}: means of seeds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    save_figure(figure, folder / f"{name}.curves.png")
    return ["", f"![Loss against steps, a line for each kind of run]({name}.curves.png)", ""]


def plain(columns: list[str], rows: Rows) -> list[str]:
    """Rows as they are, where they are few; numbers of what was done again are brought together by their median."""
    values = [column for column in columns if column not in REPEATED]
    exact = [
        column
        for column in values
        if any(number(row[column]) is None for row in rows) or column in ("rate", "ranks", "stage")
    ]
    groups: dict[tuple[str, ...], Rows] = defaultdict(list)
    for row in rows:
        groups[tuple(row[column] for column in exact)].append(row)
    measured = [column for column in values if column not in exact]
    body = [
        [*key, *(shown(median(float(row[column]) for row in group)) for column in measured), str(len(group))]
        for key, group in groups.items()
    ]
    return ["", *table([*exact, *measured, "rows"], body)]


def written(text: str, name: str) -> str:
    """The table's own page, with its headings a level lower."""
    head, _, body = text.partition("\n")
    if ", measured by " in head:  # older tables have their command there alone
        body = f"\n- command: {head.split(', measured by ')[1]}\n{body}"
    body = re.sub(r"\]\((\w[\w-]*)\.(?:csv)\)", r"](\1.md)", body)
    return re.sub(r"^(#+) ", r"#\1 ", body.replace("\n\n\n", "\n\n"), flags=re.M)


def title(text: str) -> str:
    """Of a table's page, without the command, which it has below."""
    return text.partition("\n")[0].strip("# ").split(", measured by")[0]


def page(path: Path, folder: Path) -> str:
    """What `benchmarks` wrote when it measured, and its rows."""
    text = path.read_text()
    lines = [f"# {title(text)}", "", "## As written by the benchmark", written(text, path.stem)]
    rows_of = path.with_suffix(".csv")
    if rows_of.exists():
        columns, rows = read(rows_of)
        lines += ["", "## From the rows", "", f"{len(rows):,} rows of `benchmarks/results/{rows_of.name}`."]
        if "section" in columns and len(columns) == 4:
            lines += bars(columns, rows)
        elif "step" in columns and "loss" in columns:
            lines += curves(path.stem, columns, rows, folder)
        else:
            lines += plain(columns, rows)
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for picture in RESULTS.glob("*.png"):
        (folder / picture.name).write_bytes(picture.read_bytes())
    listed = []
    for path in sorted(RESULTS.glob("*.md")):
        (folder / path.name).write_text(page(path, folder))
        machine = re.search(r"^- machine: (.+)$", path.read_text(), re.M)
        listed.append(f"| [{title(path.read_text())}]({path.name}) | {machine[1] if machine else ''} |")
    toctree = "\n".join(path.stem for path in sorted(RESULTS.glob("*.md")))
    (folder / "index.md").write_text(
        "# Measurements\n\nMade with this site from `benchmarks/results`. What they say, with what was aimed for and missed, "
        "is in [measured](../measured.md).\n\n| table | machine |\n|---|---|\n"
        + "\n".join(listed)
        + f"\n\n```{{toctree}}\n:hidden:\n{toctree}\n```\n"
    )
