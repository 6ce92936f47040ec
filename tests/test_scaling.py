"""Speed-up and efficiency: the arithmetic on paper, and that measuring leaves nothing behind."""

import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror.speedup import ScalingReport

RATES = {1: [100.0, 200.0, 100.0], 2: [150.0, 400.0, 180.0], 4: [90.0, 210.0, 150.0]}


def test_speed_up_is_compared_round_by_round():
    expected = """\
Scaling with the global batch fixed
replicas   global batch   rows per replica   examples/s   least   most   speed-up   from    to   efficiency %
─────────────────────────────────────────────────────────────────────────────────────────────────────────────
       1              8                  8          100     100    200          1      1     1            100
       2              8                  4          180     150    400        1.8    1.5     2             90
       4              8                  2          150      90    210       1.05    0.9   1.5          26.25
Speed-up against 1 replica: median of 3 rounds, from the least to the most of them.
The speed-up of 2 replicas is rough: it varied by over a quarter; take more steps or repeats.
Whether 4 replicas are faster or slower than 1 is not certain: the rounds disagree."""
    assert str(ScalingReport(RATES, {1: 8, 2: 8, 4: 8})) == expected
    assert ScalingReport({2: [10.0], 4: [15.0]}, {2: 8, 4: 16}).rows[1]["efficiency %"] == 75.0
    assert ScalingReport({2: [10.0], 4: [15.0]}, {2: 8, 4: 16}).title == "Scaling with the rows per replica fixed"


def test_the_plot():
    import matplotlib

    matplotlib.use("Agg")
    axes = ScalingReport(RATES, {1: 8, 2: 8, 4: 8}).plot()
    ideal, measured = axes.lines[:2]
    assert ideal.get_xydata().tolist() == [[1, 1], [2, 2], [4, 4]]
    np.testing.assert_allclose(measured.get_xydata(), [[1, 1], [2, 1.8], [4, 1.05]])


def state():
    keras_state = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        None if keras_state is None else keras_state.state.numpy().tolist(),
        tf.distribute.has_strategy(),
    )


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.ones((6, 6), "float32"), np.ones((6, 1), "float32")


@pytest.mark.parametrize("kind", ["dataset", "arrays", "PyDataset"])
def test_it_measures_in_turn_and_leaves_nothing_behind(data, kind):
    given = {"dataset": lambda: tf.data.Dataset.from_tensor_slices(data).batch(6), "arrays": lambda: data, "PyDataset": Sequence}
    built, turns = [], []

    class Turns(keras.Model):
        def __init__(self):
            super().__init__()
            self.dropout, self.dense = keras.layers.Dropout(0.5), keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.dense(self.dropout(x, training=training))

        def fit(self, *args, **kwargs):
            turns.append(self.distribute_strategy.num_replicas_in_sync)
            return super().fit(*args, **kwargs)

    def build():
        built.append(np.random.rand() + random.random())
        model = Turns()
        model.compile("sgd", "mse")
        return model

    keras.random.normal((2,))
    before = state()
    batch_size = 6 if kind == "arrays" else None
    report = km.scaling(build, given[kind](), (1, 2), batch_size=batch_size, steps=3, repeats=2)
    assert state() == before
    assert keras.layers.Dense(1).name == "dense"  # the name it would have had
    assert len(built) == 2 and turns == [1, 2] * 3
    assert [(row["replicas"], row["global batch"], row["rows per replica"]) for row in report.rows] == [(1, 6, 6), (2, 6, 3)]
    assert all(0 < row["least"] <= row["examples/s"] <= row["most"] for row in report.rows)
    assert "say nothing about GPUs" in str(report)
    assert tf.random.normal((1,)).shape == (1,)


def test_weak_scaling_keeps_the_rows_per_replica(data, build_fn):
    for given, batch_size in ((tf.data.Dataset.from_tensor_slices(data).batch(3), None), (data, 3)):
        report = km.scaling(build_fn, given, (1, 2), batch_size=batch_size, scale_batch=True, steps=2, repeats=1)
        assert [(row["global batch"], row["rows per replica"]) for row in report.rows] == [(3, 3), (6, 3)]


def test_examples_are_counted_by_the_clock_that_is_given(data, build_fn):
    class Ticking:
        now = 0.0

        def __call__(self):
            self.now += 1.0
            return self.now

    # After the first turn one call of one step of 5 rows: one look, at its end.
    report = km.scaling(build_fn, data, (1, 2), batch_size=5, steps=1, repeats=1, clock=Ticking())
    assert [row["speed-up"] for row in report.rows] == [1, 1] and report.rows[0]["examples/s"] == 5


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        (dict(replicas=(2, 1)), ValueError, r"increasing numbers of replicas such as \(1, 2, 4\)"),
        (dict(replicas=()), ValueError, "increasing numbers"),
        (dict(replicas=2), ValueError, "increasing numbers"),
        (dict(replicas=(1, 99)), RuntimeError, r"call keras_mirror.virtual_cpus\(99\) at the top of the script"),
        (dict(devices=["CPU:0"]), ValueError, "2 replicas need 2 devices, and devices names 1: CPU:0"),
        (dict(steps=0), ValueError, "steps must be a positive whole number"),
        (dict(repeats=1.5), ValueError, "repeats must be a positive whole number"),
        (dict(batch_size=None), ValueError, "arrays have no batches; pass batch_size="),
        (dict(data=()), ValueError, "scaling: the tuple of arrays is empty"),
        (dict(data=7), TypeError, "a tuple of arrays or a keras.utils.PyDataset, and got int"),
        (dict(data=tf.data.Dataset.range(4).batch(2)), ValueError, "has batches already"),
        (dict(data=tf.data.Dataset.range(0).batch(2), batch_size=None), ValueError, "yields no batch"),
        (dict(data=Sequence(), scale_batch=True), ValueError, "larger batches, which a PyDataset cannot"),
        (dict(data=Sequence(), steps=5), ValueError, "has 4 batches, fewer than steps=5"),
    ],
)
def test_what_is_refused(data, build_fn, changed, error, text):
    with pytest.raises(error, match=text):
        km.scaling(build_fn, **{**dict(data=data, replicas=(1, 2), batch_size=4), **changed})


def test_a_fresh_process_is_told_what_to_write():
    code = "import tensorflow as tf, keras_mirror as km; tf.zeros(()); km.scaling(lambda: None, None, (1, 2))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "call keras_mirror.virtual_cpus(2) at the top of the script" in answer.stderr
