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


PATH = "encoder/bidirectional_lstm/forward_layer/lstm_cell/recurrent_kernel"


@pytest.mark.parametrize(("terminal", "ends"), [(140, "/"), (120, "/"), (80, "/"), (50, "/_")])
def test_paths_are_folded_at_slashes(terminal, ends, monkeypatch):
    monkeypatch.setattr("keras_mirror.report._terminal", lambda: terminal)
    row = {"variable": PATH, "kind": "optimizer state", "since": "between step 8 and step 12", "done": "copied from replica 1"}
    _, *lines = str(Report("Title", list(row), [row])).splitlines()
    cells = [line[: lines[0].index("kind")].strip() for line in lines[2:]]
    cells = [cell for cell in cells if cell]
    assert max(map(len, lines)) <= terminal and len(cells) > 1
    assert "".join(cells) == PATH  # nothing is lost or added
    assert all(cell[-1] in ends for cell in cells[:-1])


def test_a_table_that_cannot_be_folded_stays_too_wide(monkeypatch):
    monkeypatch.setattr("keras_mirror.report._terminal", lambda: 20)
    row = {"name": "indivisible" * 3, "other": "x"}
    assert "indivisible" * 3 + "   x" in str(Report("Title", list(row), [row]))


def test_question_marks_stand_among_numbers():
    assert str(Report("Title", ["rows"], [{"rows": "?"}, {"rows": 29}])).splitlines()[3:] == ["   ?", "  29"]


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
