"""Tables that people read: as aligned text in a terminal, as HTML in a notebook. No TensorFlow."""

import html
import importlib
import io

import rich.box
import rich.console
import rich.markup
import rich.table


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
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in self.columns:
            numeric = all(isinstance(row.get(column), (int, float)) for row in self.rows)
            table.add_column(rich.markup.escape(column), justify="right" if numeric and self.rows else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*[rich.markup.escape(_text(row.get(column))) for column in self.columns])
        stream = io.StringIO()
        console = rich.console.Console(file=stream, width=140, color_system=None, legacy_windows=False, force_jupyter=False)
        if self.rows:
            console.print(table)
        lines = [line.rstrip() for line in stream.getvalue().splitlines()]
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
