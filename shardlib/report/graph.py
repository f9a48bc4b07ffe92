"""A picture of a step's graph: what is alive at each operation, and its exchanges."""

from __future__ import annotations

from pathlib import Path

from shardlib.common.display.colours import BLUE, ORANGE, VERMILLION
from shardlib.common.optional import new_figure, save_figure
from shardlib.execute.graph.analysis import alive, kind_of
from shardlib.execute.graph.nodes import BLOCK, FORWARD, PHASE
from shardlib.execute.graph.runner import GraphPipe, GraphStage

_OTHERS, _WHOLES = "#c9c9c9", BLUE
_EXCHANGES = {"gather": BLUE, "reduce-scatter": VERMILLION, "all-reduce": ORANGE}


def draw_graph(graph: GraphStage | GraphPipe, path: str | Path) -> None:
    """Writes a PNG with a panel for each graph of ``train_step.graph``: bytes alive at each operation, gathered parameters
    (blue) on top of all other memory that the graph makes (grey).

    Ticks above mark exchanges, where they start. Every other block of the forward is shaded. Missing folders are created.

    Raises:
        MissingPackage: matplotlib is not installed; the message says what to install.
        ValueError: there is no graph: no step was taken, or the loss cannot be traced.
    """
    if not graph.graphs:
        raise ValueError(str(graph))
    figure = new_figure(10.0, 2.6 * len(graph.graphs))
    for axes, (name, each) in zip(figure.subplots(len(graph.graphs), squeeze=False)[:, 0], graph.graphs.items()):
        nodes = list(each.nodes)
        wholes, others = ([size / 2**20 for size in sizes] for sizes in zip(*alive(each)))
        axes.stackplot(range(len(nodes)), others, wholes, step="mid", colors=[_OTHERS, _WHOLES], linewidth=0)
        top = 1.12 * max(map(sum, zip(wholes, others)))
        for kind, colour in _EXCHANGES.items():
            at = [place for place, node in enumerate(nodes) if kind_of(node) == kind]
            if at:
                axes.vlines(at, 0.95 * top, top, color=colour, linewidth=1.2, label=f"{len(at)} × {kind}")
        places = [place for place, node in enumerate(nodes) if node.op == "call_function"]
        # What starts an exchange stands in the block before the one that it is for.
        computes = [place for place in places if not any(map(kind_of, (nodes[place], *nodes[place].users)))]
        blocks = [(place, nodes[place].meta[BLOCK]) for place in computes if nodes[place].meta[PHASE] == FORWARD]
        for number in {block for _, block in blocks if block is not None and block % 2 == 0}:
            own = [place for place, block in blocks if block == number]
            axes.axvspan(own[0] - 0.5, own[-1] + 0.5, color="#eeeeee", zorder=0)
        turn = next((place for place in places if nodes[place].meta[PHASE] != FORWARD), len(nodes))
        if places[0] < turn < len(nodes):  # a pipeline's stage has graphs of one of them
            axes.axvline(turn, color="#1c1c1c", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate("backward", (turn, 0.9 * top), (4, 0), textcoords="offset points", fontsize=8, va="top")
        axes.set(ylim=(0, top), xlim=(places[0], len(nodes)), xlabel="operation", ylabel="MiB alive", title=name)
        axes.spines[["top", "right"]].set_visible(False)
        if any(map(kind_of, nodes)):
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)
