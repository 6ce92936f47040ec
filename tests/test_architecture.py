"""The order in which files may import each other, their size, and that the docs name every internal."""

import ast
import pathlib
import re

import keras_mirror
from keras_mirror.codes import CODES
from keras_mirror.engine import Engine
from keras_mirror.global_batches import GlobalBatchStrategy

ROOT = pathlib.Path(keras_mirror.__file__).parent
ORDER = [  # lowest first: a file may import those above it in this list only
    "codes",
    "places",
    "user_code",
    "errors",
    "counts_outside",
    "agreement",
    "cluster",
    "watchdog",
    "report",
    "timing",
    "throughput_report",
    "rows_report",
    "speedup",
    "saves",
    "counters",
    "batches",
    "internals.of_tensorflow",
    "internals.of_keras",
    "internals.of_workers",
    "internals",
    "hardware",
    "searching",
    "provenance",
    "rows",
    "randomness",
    "shared_seeds",
    "shadowing",
    "holdings",
    "stateful_layers",
    "late_weights",
    "inlining",
    "one_device",
    "pipelines",
    "clearing",
    "distribution",
    "own_rows",
    "global_batches",
    "strategy",
    "messages",
    "readings",
    "multiworker",
    "row_needs",
    "empty_parts",
    "by_row",
    "layer_losses",
    "layer_trials",
    "optimizers",
    "random_states",
    "whole_view",
    "view_splits",
    "view_calls",
    "view_steps",
    "gather",
    "losses",
    "own_layers",
    "normalization",
    "rebuilding",
    "steps",
    "shares",
    "graph_clock",
    "executor",
    "progress",
    "pacing",
    "replica_steps",
    "engine",
    "pipeline_order",
    "positions",
    "variables_state",
    "chief_files",
    "cluster_engine",
    "model",
    "findings",
    "reading",
    "row_values",
    "row_objects",
    "row_flow",
    "row_changes",
    "hints",
    "auditing",
    "snapshot",
    "comparing",
    "mixtures",
    "even_randomness",
    "gradients",
    "rounding",
    "row_mixing",
    "cause",
    "sums",
    "causes",
    "checking",
    "copies",
    "divergence",
    "consistency",
    "planning",
    "fingerprints",
    "feeds",
    "steadiness",
    "deliveries",
    "data_findings",
    "pipeline_findings",
    "data_audit",
    "loop",
    "observing",
    "callbacks.row_windows",
    "callbacks.replica_batch_logger",
    "callbacks.replica_consistency",
    "callbacks.throughput",
    "callbacks.resume",
    "callbacks.scale_learning_rate",
    "callbacks.scope_auditor",
    "callbacks",
    "scaling_runs",
    "__init__",
    "proving",
    "demo",
    "cli",
    "__main__",
]


def files():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__") if name != "__init__" else name, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "keras_mirror":
            below = node.module.removeprefix("keras_mirror").lstrip(".")
            yield from [below] if below else [alias.name for alias in node.names if (ROOT / f"{alias.name}.py").exists()]


def test_every_file_has_a_place_in_the_order():
    assert sorted(name for name, _ in files()) == sorted(ORDER)


def test_files_import_only_what_is_below_them():
    for name, path in files():
        for below in imports(path):
            assert ORDER.index(below) < ORDER.index(name), f"{name} imports {below}"


def test_what_a_class_of_several_workers_extends_is_there():
    """A method that was renamed in the base class alone would never be called again."""
    for path, base in ((ROOT / "cluster_engine.py", Engine), (ROOT / "multiworker.py", GlobalBatchStrategy)):
        extended = set(re.findall(r"super\(\)\.(\w+)\(", path.read_text())) - {"__init__"}
        overridden = set(re.findall(r"^    def (\w+)\(", path.read_text(), re.M)) & extended
        assert overridden and all(hasattr(base, name) for name in overridden), path


def test_no_file_is_long():
    for name, path in files():
        assert len(path.read_text().splitlines()) <= 400, name


def test_private_names_of_keras_and_tensorflow_stay_in_one_place():
    private = re.compile(r"(keras\.src|tensorflow\.python|keras\.api)")
    for name, path in files():
        if name.split(".")[0] != "internals":
            assert not private.search(path.read_text()), name


def test_the_docs_explain_every_internal():
    page = (ROOT.parent / "docs" / "internals.md").read_text()
    functions = re.findall(r"^def (\w+)", "".join(path.read_text() for path in (ROOT / "internals").glob("*.py")), re.M)
    assert functions
    for function in functions:
        assert f"`{function}`" in page, function


def test_public_names_are_documented():
    for name in keras_mirror.__all__:
        assert getattr(keras_mirror, name).__doc__, name


def test_every_code_has_a_page_and_every_page_a_code():
    folder = ROOT.parent / "docs" / "codes"
    index = (folder / "README.md").read_text()
    used = {code for name, path in files() if name != "codes" for code in re.findall(r"KM\d{3}", path.read_text())}
    assert used == set(CODES) and list(CODES) == sorted(CODES)
    for code, title in CODES.items():
        page = folder / f"{code}.md"
        assert page.exists(), f"{code} has no page docs/codes/{code}.md"
        headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
        assert headings == [f"{code}: {title}", "Symptom", "Cause", "Cure"], code
        assert re.search(rf"^\| \[{code}\]\({code}\.md\) \| \w+ \| {re.escape(title)} \|", index, re.M), (
            f"{code} in docs/codes/README.md"
        )
    assert {path.stem for path in folder.glob("KM*.md")} == used
