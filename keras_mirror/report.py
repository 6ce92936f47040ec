"""Tables that people read: as aligned text in a terminal, as HTML in a notebook. No TensorFlow."""

import html
import importlib
import io
import re
import shutil
import sys

import rich.box
import rich.cells
import rich.console
import rich.markup
import rich.table

WIDEST = 140
GAP = 3  # between two columns
UNKNOWN = "?"  # in a column of numbers
BREAK = "\x1f"  # a space without width, at which a line may be broken


class Report:
    """A titled table with notes below it.

    `print(report)` shows aligned text; a notebook shows an HTML table (no scripts); `report.rows`
    is the data, one dict a row.

    Args:
        title: Line above the table.
        columns: Names of the columns, in order.
        rows: List of dicts that map every column to a value; floats are shown with four digits.
        notes: Sentences below the table.
    """

    def __init__(self, title, columns, rows, notes=()):
        self.title = title
        self.columns = list(columns)
        self.rows = list(rows)
        self.notes = list(notes)

    def __str__(self):
        cells = [[column, *(_text(row.get(column)) for row in self.rows)] for column in self.columns]
        widths, after = _widths(cells, _terminal())
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for (name, *_), column, width in zip(cells, self.columns, widths):
            numeric = all(isinstance(row.get(column), (int, float)) or row.get(column) == UNKNOWN for row in self.rows)
            justify = "right" if numeric and self.rows else "left"
            table.add_column(rich.markup.escape(name), justify=justify, overflow="fold", width=width)
        for row in list(zip(*cells))[1:]:
            table.add_row(*[rich.markup.escape(re.sub(f"([{after}])", rf"\1{BREAK}", cell)) for cell in row])
        stream = io.StringIO()
        width = sum(widths) + GAP * len(widths)
        console = rich.console.Console(file=stream, width=width, color_system=None, legacy_windows=False, force_jupyter=False)
        if self.rows:
            console.print(table)
        lines = [line.replace(BREAK, "").rstrip() for line in stream.getvalue().splitlines()]
        return "\n".join([self.title, *lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_text(row.get(column)))}</td>" for column in self.columns) + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""
        return f"<div><p><b>{html.escape(self.title)}</b></p>{table}{notes}</div>"


def _terminal():
    """How wide a table should be."""
    shown = sys.stdout is not None and sys.stdout.isatty()
    return min(shutil.get_terminal_size().columns, WIDEST) if shown else WIDEST


def _widths(cells, most):
    """The width of each column, and after which characters its words may be broken.

    Names are broken at their slashes, and where that is too wide after `_` and `.` as well, but nowhere else:
    a table that is too wide even so stays too wide.

    Args:
        cells: List of columns, each a list of texts.
        most: int, how wide the whole table should be.
    """
    room = most - GAP * len(cells)
    widths = [max(map(rich.cells.cell_len, column)) for column in cells]
    for after in ("/", "/_."):
        pieces = [re.findall(rf"[^\s{after}]+[{after}]?|[{after}]", " ".join(column)) for column in cells]
        least = [max(map(rich.cells.cell_len, found), default=0) for found in pieces]
        if sum(least) <= room:
            break
    while sum(widths) > room and widths != least:
        widest = max((index for index in range(len(widths)) if widths[index] > least[index]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths, after


def axes_or_new(ax=None):
    """`ax`, or the axes of a new figure, for the `plot(ax=None)` of a report, which returns the axes.

    Raises:
        ImportError: If matplotlib, which nothing but plots needs, is not installed.
    """
    if ax is not None:
        return ax
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ImportError("plot() draws with matplotlib, which is not installed: pip install 'keras_mirror[plots]'.") from None
    return pyplot.subplots(figsize=(7, 3.5), layout="constrained")[1]


def _text(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
