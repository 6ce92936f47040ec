import sys

import pytest

from keras_mirror.report import Report, axes_or_new

TABLE = Report(
    "Title",
    ["name", "count [x]", "mean"],
    [{"name": "a [bold]", "count [x]": 3, "mean": 1.23456}, {"name": "<b>", "count [x]": 12, "mean": None}],
    ["A note."],
)


def test_text_is_aligned():
    expected = """\
Title
name       count [x]   mean
────────────────────────────
a [bold]           3   1.235
<b>               12
A note."""
    assert str(TABLE) == expected


def test_html_is_a_table_without_scripts_and_escaped():
    text = TABLE._repr_html_()
    assert "<table>" in text and "<script" not in text
    assert "&lt;b&gt;" in text and "<td><b></td>" not in text
    assert "<td>1.235</td>" in text and "<p>A note.</p>" in text


def test_without_rows_only_title_and_notes():
    assert str(Report("Title", ["a"], [], ["Nothing yet."])) == "Title\nNothing yet."


def test_text_stays_text_in_a_notebook(monkeypatch):
    """There rich would show the table itself and leave the text without it."""
    import rich.console

    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert "a [bold]" in str(TABLE)


def test_plots_draw_on_given_axes_or_new_ones():
    import matplotlib

    matplotlib.use("Agg")
    axes = axes_or_new()
    assert axes_or_new(axes) is axes


def test_plots_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'keras_mirror\[plots\]'"):
        axes_or_new()
