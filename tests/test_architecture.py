"""The order in which files may import each other, their size, and that the docs name every internal."""

import ast
import pathlib
import re

import keras_mirror

ROOT = pathlib.Path(keras_mirror.__file__).parent
ORDER = [  # lowest first: a file may import those above it in this list only
    "errors",
    "agreement",
    "cluster",
    "report",
    "batches",
    "internals",
    "hardware",
    "provenance",
    "rows",
    "distribution",
    "global_batches",
    "strategy",
    "messages",
    "readings",
    "multiworker",
    "empty_parts",
    "losses",
    "optimizers",
    "normalization",
    "randomness",
    "rebuilding",
    "steps",
    "executor",
    "progress",
    "pacing",
    "engine",
    "chief_files",
    "cluster_engine",
    "model",
    "auditing",
    "planning",
    "loop",
    "observing",
    "callbacks.replica_batch_logger",
    "callbacks.scope_auditor",
    "callbacks",
    "__init__",
    "demo",
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


def test_no_file_is_long():
    for name, path in files():
        assert len(path.read_text().splitlines()) <= 400, name


def test_private_names_of_keras_and_tensorflow_stay_in_one_file():
    private = re.compile(r"(keras\.src|tensorflow\.python|keras\.api)")
    for name, path in files():
        if name != "internals":
            assert not private.search(path.read_text()), name


def test_the_docs_explain_every_internal():
    page = (ROOT.parent / "docs" / "internals.md").read_text()
    functions = re.findall(r"^def (\w+)", (ROOT / "internals.py").read_text(), re.M)
    assert functions
    for function in functions:
        assert f"`{function}`" in page, function


def test_public_names_are_documented():
    for name in keras_mirror.__all__:
        assert getattr(keras_mirror, name).__doc__, name
