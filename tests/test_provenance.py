"""Where variables came from. The right line is the one on which the test itself creates the variable."""

import gc
import inspect
import linecache
import pathlib
import subprocess
import sys
import threading
import weakref

import keras
import nbclient
import nbformat
import pytest
import tensorflow as tf

import keras_mirror as km


def here():
    """The number of the line that calls it."""
    return inspect.currentframe().f_back.f_lineno


def in_thread(function, name="builder"):
    made = []
    thread = threading.Thread(target=lambda: made.append(function()), name=name)
    thread.start()
    thread.join()
    return made[0]


def test_a_variable_made_by_hand():
    variable, line = tf.Variable(0), here()
    origin = km.origin(variable)
    assert isinstance(origin, km.Origin)
    assert (origin.file, origin.line, origin.function) == (__file__, line, "test_a_variable_made_by_hand")
    assert origin.layer is None and not origin.in_scope and origin.thread == "MainThread" and not origin.by_keras


def test_the_layer_optimizer_or_metric_is_named():
    dense, dropout = keras.layers.Dense(2, name="mine"), keras.layers.Dropout(0.5, name="drops")
    dense.build((None, 3)), here()
    optimizer, line = keras.optimizers.Adam(name="steps"), here()
    metric = keras.metrics.Mean(name="seen")
    assert [km.origin(v).layer for v in dense.variables] == ["mine", "mine"]
    assert km.origin(optimizer.iterations).layer == "steps" and km.origin(optimizer.iterations).line == line
    assert km.origin(metric.variables[0]).layer == "seen"
    assert km.origin(dropout.seed_generator.state).layer == "drops"
    assert all(km.origin(v).by_keras for v in (*dense.variables, *metric.variables, dropout.seed_generator.state))


def test_distributed_variables_and_their_copies():
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        variable, line = tf.Variable(1.0), here()
    for each in (variable, *variable.values):
        origin = km.origin(each)
        assert (origin.file, origin.line, origin.in_scope) == (__file__, line, True)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable, line = tf.Variable(1.0), here()
    assert km.origin(variable).line == line and km.origin(variable).in_scope


def test_after_clear_session_and_in_threads():
    keras.backend.clear_session()
    assert km.origin(tf.Variable(0)).line == here()

    def make():
        keras.backend.clear_session()
        return [tf.Variable(0), keras.layers.Dense(1).add_weight(name="kernel")], here()

    (by_hand, weight), line = in_thread(make)
    for variable in (by_hand, weight):
        origin = km.origin(variable)
        assert (origin.line, origin.thread, origin.function) == (line, "builder", "make")


def test_inside_a_function():
    made = []

    @tf.function
    def traced():
        if not made:
            made.append(tf.Variable(1.0))
        return made[0] + 1.0

    traced()
    lines, first = inspect.getsourcelines(traced.python_function)
    line = first + next(i for i, text in enumerate(lines) if "tf.Variable" in text)
    assert (km.origin(made[0]).file, km.origin(made[0]).line) == (__file__, line)


def test_other_creator_scopes_and_nesting_go_on_working():
    names = []

    def creator(following, **kwargs):
        names.append(kwargs["name"])
        return following(**kwargs)

    with tf.variable_creator_scope(creator), km.MirroredStrategy(2).scope():
        inside = tf.Variable(0, name="inside")
    outside = tf.Variable(0, name="outside")
    assert "inside" in names and "outside" not in names
    assert km.origin(inside).in_scope and not km.origin(outside).in_scope


def test_nothing_is_kept_alive():
    def make():
        variable, layer = tf.Variable(0), keras.layers.Dense(2)
        layer.build((None, 3))
        origins = [km.origin(variable), km.origin(layer.kernel)]
        return origins, [weakref.ref(each) for each in (variable, layer, layer.kernel, layer.kernel.value)]

    origins, references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert all(str(origin) for origin in origins)


def test_a_deleted_local_is_gone_though_others_are_made_after_it():
    first = tf.Variable(0)
    reference = weakref.ref(first)
    second = tf.Variable(1)
    del first
    gc.collect()
    assert reference() is None and km.origin(second).line


def test_text_is_one_readable_line(monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parent)
    variable, line = tf.Variable(0), here()
    text = f"test_provenance.py:{line} (in test_text_is_one_readable_line, out of scope, thread 'MainThread')"
    assert str(km.origin(variable)) == text and repr(km.origin(variable)) == f"<Origin {text}>"
    layer = keras.layers.Dense(1, name="head")
    with km.MirroredStrategy(2).scope():
        layer.build((None, 1))
    assert ", by 'head', in scope," in str(km.origin(layer.kernel))


@pytest.mark.parametrize("what", [None, 3, "kernel", keras.layers.Layer(), tf.constant(1.0), [tf.Variable(0)]])
def test_only_variables_have_an_origin(what):
    with pytest.raises(TypeError, match=f"expected a keras.Variable or .*, and got {type(what).__name__}.*layer.variables"):
        km.origin(what)


def cell(name, source, scope):
    """Runs source as a notebook does: compiled under a name that only linecache knows."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), scope)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<ipython-input-7-0123abcd>", "In[7], line 2"),
        ("/tmp/ipykernel_123/456.py", "a notebook cell, line 2 (counter = tf.Variable(0))"),
    ],
)
def test_a_cell_is_called_what_a_person_calls_it(name, shown):
    scope = {"tf": tf}
    cell(name, "# count\ncounter = tf.Variable(0)\n", scope)
    assert km.origin(scope["counter"]).place == shown
    assert str(km.origin(scope["counter"])).startswith(shown + " (out of scope")


def test_in_a_real_notebook():
    notebook = nbformat.v4.new_notebook()
    sources = [
        "import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\nimport keras, tensorflow as tf\nearly = tf.Variable(0)",
        "import keras_mirror as km\n\ndef make():\n    return tf.Variable(0)",
        "keras.backend.clear_session()\ncounter = make()\nprint(km.origin(counter))",
    ]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    printed = "".join(output.text for output in notebook.cells[-1].outputs if output.get("name") == "stdout")
    assert printed == "In[2], line 4 (in make, out of scope, thread 'MainThread')\n"


def test_variables_from_before_the_import_are_looked_up_by_name(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """import tensorflow as tf
early = tf.Variable(0)
nameless = [tf.Variable(0)]
import keras_mirror as km
origin = km.origin(early)
print(origin.line, origin.thread, origin.in_scope, origin.file.endswith("script.py"), km.origin(nameless[0]))
"""
    )
    answer = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert answer.stdout == "2 None False True None\n", answer.stderr[-500:]
