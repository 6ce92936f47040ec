"""Copies that differ are found, named, dated and repaired; what is local by design is left alone."""

import math
import warnings

import keras
import matplotlib
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning, ReplicasDifferError

matplotlib.use("Agg")
# Batches of 8 rows on 2 replicas; the last of these ends with rows 20..23 on replica 0 and 24..27 on replica 1.
ROWS = np.arange(28, dtype="float32").reshape(28, 1) * np.ones((1, 2), "float32")


class BatchMean(keras.layers.Layer):
    """Hazard 28: each replica keeps the mean of its own rows; or, synchronized, as docs/codes/KM401.md cures it."""

    def __init__(self, synchronized=False):
        super().__init__()
        self.synchronized = synchronized

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="batch_mean")
        self.seen = tf.Variable(
            0.0,
            trainable=False,
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
            name="seen",
        )

    def call(self, x, training=False):
        if training:
            total, rows = tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], x.dtype)
            self.seen.assign_add(rows)
            replica = tf.distribute.get_replica_context()
            if self.synchronized and replica is not None:
                total, rows = replica.all_reduce("SUM", [total, rows])
            self.mean.assign(total / rows)
        return x


def with_mean(devices=2, synchronized=False):
    def build_fn():
        model = keras.Sequential([keras.Input((2,)), BatchMean(synchronized), keras.layers.Dense(1)], name="net")
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    return km.mirrored_model(build_fn, devices=devices)


def copies(model, variable):
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return model.distribute_strategy.experimental_local_results(value)


def fit(model, *callbacks, rows=ROWS[4:], epochs=1, **arguments):
    return model.fit(rows, rows[:, :1], batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks, **arguments)


class WriteToOneCopy(keras.callbacks.Callback):
    """Adds to the kernel of one replica after so many batches."""

    every_batch = True

    def __init__(self, batch, replica=1, by=0.5):
        super().__init__()
        self.batch, self.replica, self.by = batch, replica, by

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.batch:
            copies(self.model, self.model.layers[-1].kernel)[self.replica].assign_add([[0.0], [self.by]])


def dense(devices=2, optimizer="sgd"):
    def build_fn():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="out")], name="net")
        model.compile(optimizer, "mse")
        return model

    return km.mirrored_model(build_fn, devices=devices)


# --- what is flagged --------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "last"])
def test_the_step_since_when_is_between_two_checks(place):
    model, check = dense(3), km.ReplicaConsistency(4)
    order = [check, WriteToOneCopy(9)] if place == "first" else [WriteToOneCopy(9), check]
    with pytest.warns(MirrorWarning) as said:
        fit(model, *order, rows=np.tile(ROWS / 28, (4, 1)))  # 14 steps
    (text,) = [str(w.message) for w in said if w.category is MirrorWarning]
    for fragment in (
        "KM402 ReplicaConsistency: net/out/kernel (weight, made at ",
        "test_replica_consistency.py:",
        "): replica 1 differs from replica 0 by up to 0.5, since between step 8 and step 12. ",
        "something wrote to one of them alone; assign outside of strategy.run",
    ):
        assert fragment in text
    assert [step for step, _ in check.record.checks] == [0, 4, 8, 12, 14]
    # Four: kernel, bias, and the optimizer's counter and learning rate.
    expected = """\
Replica consistency: 1 of 4 variables differed on 3 replicas
variable         kind     replicas   largest difference   since                        done
──────────────────────────────────────────────────────────────────────────────────────────────
net/out/kernel   weight   1                         0.5   between step 8 and step 12   nothing
5 checks, from step 0 to step 14; in the last one 3 of 4 variables were equal.
Local by design, so not compared: 2 of metrics."""
    assert str(check.report()) == expected
    assert "<table>" in check.report()._repr_html_()


def test_a_layer_with_state_of_its_own_is_flagged_by_name_and_the_users_accumulator_is_left_alone():
    model, check = with_mean(), km.ReplicaConsistency()
    with pytest.warns(MirrorWarning, match=r"KM401.*net/batch_mean/batch_mean \(layer state.*with its own rows.*KM401\.md"):
        fit(model, check)
    one, two = (copy.numpy() for copy in copies(model, model.layers[0].mean))
    np.testing.assert_array_equal(one, [21.5, 21.5])  # rows 20 to 23
    np.testing.assert_array_equal(two, [25.5, 25.5])  # rows 24 to 27
    (row,) = check.report().rows
    assert (row["variable"], row["kind"], row["replicas"], row["largest difference"]) == (
        "net/batch_mean/batch_mean",
        "layer state",
        "1",
        4.0,
    )
    assert row["since"] == "between step 0 and step 3"
    assert [copy.numpy() for copy in copies(model, model.layers[0].seen)] == [12, 12]
    assert check.report().notes[-1] == "Local by design, so not compared: 4 of metrics and 1 (net/batch_mean/seen)."


def test_the_cure_of_the_page_is_silent_and_right():
    model = with_mean(3, synchronized=True)
    check = km.ReplicaConsistency(1, "raise")
    fit(model, check, rows=ROWS[:17])  # the last batch has one row
    assert not check.report()
    np.testing.assert_array_equal(model.layers[0].mean.numpy(), [16, 16])


def test_a_replica_dependent_assign_of_a_variable_of_the_step_is_flagged():
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        last = tf.Variable(0, trainable=False, name="last")
        total = tf.Variable(
            0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name="total",
        )

    def step(x):
        values = x[:, 0]
        copies_of_last = strategy.experimental_local_results(last)
        copies_of_last[int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))].assign(values[0])
        total.assign_add(values[0])

    run = tf.function(lambda batch: strategy.run(step, args=(batch,)))
    check = km.ReplicaConsistency(on_violation="repair")
    data = tf.data.Dataset.from_tensor_slices(ROWS.astype("int32")).batch(4)
    with pytest.warns(MirrorWarning, match=r"last \(variable of the step.* by up to 2, .*copied from replica 0"):
        with km.observe(strategy, callbacks=[check]):
            for batch in strategy.experimental_distribute_dataset(data):
                run(batch)
    (row,) = check.report().rows
    assert (row["variable"], row["since"]) == ("last", "step 7 or before")  # 28 rows in batches of 4
    assert [copy.numpy() for copy in strategy.experimental_local_results(last)] == [24, 24]
    assert [copy.numpy() for copy in strategy.experimental_local_results(total)] == [84, 98]  # 0+4+..+24, 2+6+..+26


def test_raise_stops_at_the_end_of_the_batch_with_the_sentence():
    model, check = dense(), km.ReplicaConsistency(2, "raise")
    with pytest.raises(ReplicasDifferError, match=r"net/out/kernel .*since between step 0 and step 2\. Training keeps"):
        fit(model, check, WriteToOneCopy(0))
    assert int(model.optimizer.iterations.numpy()) == 2
    assert isinstance(check.violation, ReplicasDifferError)
    with pytest.raises(ReplicasDifferError, match="since step 2 or before"):
        fit(model, check)
    assert km.compare_replicas(model, repair=True)
    fit(model, check)
    assert check.violation is None and not check.report()


def test_nan_on_all_replicas_is_equal_and_nan_on_one_is_not():
    model = dense(3)
    kernel = copies(model, model.layers[-1].kernel)
    for copy in kernel:
        copy.assign([[1.0], [math.nan]])
    assert not km.compare_replicas(model)
    kernel[2].assign([[1.0], [3.0]])
    report = km.compare_replicas(model)
    assert math.isnan(report.rows[0]["largest difference"]) and report.rows[0]["replicas"] == "0, 1"
    with pytest.warns(MirrorWarning, match="replicas 0 and 1 hold NaN where replica 2 does not.* since before the first step"):
        fit(model, km.ReplicaConsistency())


@pytest.mark.parametrize(
    ("values", "blamed", "kept"),
    [
        ((math.nan, 2.0, math.nan), "0, 2", 2.0),  # two empty parts
        ((math.nan, math.nan, 2.0, 3.0), "0, 1, 3", 2.0),
        ((math.nan, 3.0, 2.0, 2.0), "0, 1", 2.0),
        ((2.0, 2.0, math.nan), "2", 2.0),
    ],
)
def test_nan_is_never_what_the_others_are_measured_against(values, blamed, kept):
    model = dense(len(values))
    kernel = copies(model, model.layers[-1].kernel)
    for copy, value in zip(kernel, values):
        copy.assign([[1.0], [value]])
    (row,) = km.compare_replicas(model, repair=True).rows
    assert row["replicas"] == blamed and math.isnan(row["largest difference"])
    assert [copy.numpy()[1, 0] for copy in kernel] == [kept] * len(values)


def test_the_majority_is_the_reference_and_zero_equals_minus_zero():
    model = dense(4)
    kernel = copies(model, model.layers[-1].kernel)
    for copy, value in zip(kernel, (3.0, 1.0, 1.0, 2.0)):
        copy.assign([[value], [0.0]])
    (row,) = km.compare_replicas(model, repair=True).rows
    assert (row["replicas"], row["largest difference"], row["done"]) == ("0, 3", 2.0, "copied from replica 1")
    assert [copy.numpy()[0, 0] for copy in kernel] == [1, 1, 1, 1]
    kernel[3].assign([[1.0], [-0.0]])
    assert not km.compare_replicas(model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "uint8", "bool", "complex64", "complex128", "string"])
@pytest.mark.parametrize("size", [3, 20001])
def test_every_dtype_and_size_is_compared(dtype, size):
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        start = tf.fill([size], "a") if dtype == "string" else tf.cast(tf.ones([size]), dtype)
        own = [tf.Variable(start, trainable=False, name="own"), tf.Variable(start, trainable=False, name="other")]
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.layers[0].own, model.layers[0].other = own
    assert not km.compare_replicas(model)
    value = tf.fill([1], "b") if dtype == "string" else tf.cast(tf.zeros([1]), dtype)
    copy = strategy.experimental_local_results(own[0])[1]
    copy.assign(tf.concat([start[1:], value], 0))
    (row,) = km.compare_replicas(model).rows
    assert row["variable"] == "own" and row["kind"] == "variable of the step"
    assert row["largest difference"] == 1.0 or (dtype == "string" and math.isnan(row["largest difference"]))
    copy.assign(tf.concat([value, start[1:]], 0))  # replica 0 would have the same sum of bits with the entries swapped
    strategy.experimental_local_results(own[0])[0].assign(tf.concat([start[1:], value], 0))
    assert km.compare_replicas(model)


def test_tolerance_lets_small_differences_pass():
    model = dense()
    copies(model, model.layers[-1].kernel)[1].assign_add([[0.0], [0.25]])
    assert not km.compare_replicas(model, tolerance=0.26)
    assert km.compare_replicas(model, tolerance=0.24).rows[0]["largest difference"] == 0.25


def test_a_model_of_plain_mirrored_strategy_is_checked_too():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    check = km.ReplicaConsistency()
    with pytest.warns(MirrorWarning, match=r"moving_mean.*statistics of its own rows.*mirrored_model, or pass synchronized=True"):
        fit(model, check, rows=np.square(ROWS[4:]))
    assert {row["variable"].split("/")[-1] for row in check.report().rows} == {"moving_mean", "moving_variance"}


# --- what is not ------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "batch_norm"), [(2, "sync"), (3, "sync"), (3, "local")])
def test_an_ordinary_fit_is_silent(replicas, batch_norm):
    def build_fn():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        adam = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
        model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse", metrics=["mae"])
        return model

    model = km.mirrored_model(build_fn, devices=replicas, batch_norm=batch_norm)
    check = km.ReplicaConsistency(1, "raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error", MirrorWarning)
        fit(model, check, rows=ROWS[:27] / 28)
    assert len(check.record.checks) == 5 and not check.report()  # before the first and after each of 4 steps
    compared = len(check.record.last.inventory.mirrored)
    assert compared >= len(model.weights) + 3 * len(model.trainable_weights)  # Adam's two moments and the average of each
    assert check.report().title == f"Replica consistency: all {compared} variables agree on {replicas} replicas"


def test_one_replica_has_nothing_to_compare():
    model, check = dense(1), km.ReplicaConsistency(1)
    fit(model, check)
    assert str(check.report()) == "Replica consistency: one replica, so there is nothing to compare"
    assert not hasattr(model._keras_mirror_checker, "_function")


def test_a_variable_made_outside_the_scope_is_only_listed():
    outside = tf.Variable(1.0, trainable=False, name="outside")
    model = dense()
    model.layers[-1].counter = outside
    report = km.compare_replicas(model)
    assert not report and "there is one copy only: 1 (outside); see keras_mirror.audit(model)." in report.notes[-1]


# --- repairing --------------------------------------------------------------------------------


def test_statistics_are_averaged_and_weights_copied_bit_for_bit():
    model, check = with_mean(3), km.ReplicaConsistency(on_violation="repair")
    with pytest.warns(MirrorWarning) as said:
        fit(model, check, WriteToOneCopy(2, replica=2), rows=ROWS[:24])
    texts = sorted(str(w.message) for w in said if w.category is MirrorWarning)
    assert len(texts) == 2 and "and was averaged." in texts[0] and "and was copied from replica 0." in texts[1]
    # The last batch is rows 16 to 23, in parts of 3, 3 and 2: means 17, 20 and 22.5.
    means = [copy.numpy() for copy in copies(model, model.layers[0].mean)]
    np.testing.assert_allclose(means[0], [59.5 / 3] * 2, rtol=1e-6)
    kernels = [copy.numpy() for copy in copies(model, model.layers[-1].kernel)]
    for first, *others in (means, kernels):
        for other in others:
            assert first.tobytes() == other.tobytes()
    assert {row["variable"]: row["done"] for row in check.report().rows} == {
        "net/batch_mean/batch_mean": "averaged",
        "net/dense/kernel": "copied from replica 0",
    }
    assert "were equal before the repair." in check.report().notes[0]
    kernels_before = kernels[0].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MirrorWarning)  # the layer's mean was said before
        fit(model, check, rows=ROWS[:24], epochs=2)
    assert [row["done"] for row in check.report().rows] == ["averaged, 2 times"]
    one, two, three = (copy.numpy() for copy in copies(model, model.layers[-1].kernel))
    assert one.tobytes() == two.tobytes() == three.tobytes() and (one != kernels_before).all()


def test_an_average_leaves_out_nan():
    model = with_mean(3)
    mean = copies(model, model.layers[0].mean)
    for copy, value in zip(mean, ([1.0, math.nan], [math.nan, math.nan], [5.0, math.nan])):
        copy.assign(value)
    assert km.compare_replicas(model, repair=True).rows[0]["done"] == "averaged"
    for copy in mean:
        np.testing.assert_array_equal(copy.numpy(), [3.0, math.nan])


# --- around it --------------------------------------------------------------------------------


def test_a_loop_by_hand_and_a_whole_run_are_checked():
    model, check = dense(optimizer="adam"), km.ReplicaConsistency(2)
    loop = km.TrainingLoop(model, callbacks=[check])
    with pytest.warns(MirrorWarning, match="momentum .*optimizer state.*since between step 2 and step 4"):
        for _ in loop.epochs(1):
            for number, batch in enumerate(loop.batches((ROWS, ROWS[:, :1]), batch_size=8)):
                loop.train_step(batch)
                if number == 2:
                    copies(model, model.optimizer.variables[2])[1].assign_add([[1.0], [1.0]])
    assert [step for step, _ in check.record.checks] == [0, 2, 4]
    km.compare_replicas(model, repair=True)
    loop = km.TrainingLoop(model, callbacks=[km.ReplicaConsistency(on_violation="raise")])
    loop.run((ROWS, ROWS[:, :1]), epochs=2, batch_size=8, verbose=0)


def test_the_plot_shows_the_recorded_numbers(tmp_path):
    model, check = dense(), km.ReplicaConsistency(1)
    with pytest.warns(MirrorWarning):
        fit(model, check, WriteToOneCopy(1))
    axes = check.report().plot()
    lines = {line.get_label(): line.get_xydata() for line in axes.get_lines()}
    np.testing.assert_allclose(lines["net/out/kernel"], [(0, 0), (1, 0), (2, 0.5), (3, 0.5)], rtol=1e-6)
    assert axes.get_yscale() == "symlog"
    assert km.compare_replicas(model, repair=True)
    fit(model, check, rows=ROWS[:1])
    flat = check.report().plot(matplotlib.pyplot.subplots()[1])
    np.testing.assert_array_equal(flat.get_lines()[0].get_xydata(), [(3, 0), (4, 0)])
    assert flat.get_yscale() == "linear"
    matplotlib.pyplot.close("all")


def test_many_models_are_not_taken_for_one_function_traced_again(caplog):
    for _ in range(7):
        model = dense()
        assert not km.compare_replicas(model) and not km.compare_replicas(model)
    assert not [record for record in caplog.records if "retracing" in record.getMessage()]


def test_nothing_was_checked_yet():
    assert str(km.ReplicaConsistency().report()) == "Replica consistency: nothing was checked yet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be 'epoch' or a positive number of batches, and got 0"),
        ({"every": True}, "and got True"),
        ({"on_violation": "fix"}, "on_violation must be 'warn', 'raise' or 'repair', and got 'fix'"),
        ({"tolerance": -1}, "tolerance must be a number of at least 0, and got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        km.ReplicaConsistency(**arguments)


def test_only_keras_models_are_compared():
    with pytest.raises(TypeError, match="compare_replicas: expected a keras.Model, and got int"):
        km.compare_replicas(3)
