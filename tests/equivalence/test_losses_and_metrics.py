"""Losses with every reduction, weights and masks, and metrics, are those of the global batch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_mirror as km
from tests.equivalence.harness import LABELS, SERIES, TOKENS, WEIGHTS, X, Y, assert_equal, fit, mlp, trained

L = keras.losses
REDUCTIONS = ["sum", None, "mean", "sum_over_batch_size", "mean_with_sample_weight"]
SMALL = lambda: keras.optimizers.SGD(0.002)  # noqa: E731
EACH_TOKEN = (np.arange(29 * 5).reshape(29, 5) % 4 / 2.0).astype("float32")


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(reduction, weights):
    build = mlp(SMALL, lambda: L.MeanSquaredError(reduction=reduction), metrics=["mae"])
    assert_equal(build, fit(X, Y, sample_weight=weights), 3)


def tagger(loss, **compile):
    def build():
        inputs = keras.Input((5,))
        hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile(SMALL(), loss(), **compile)
        return model

    return build


@pytest.mark.parametrize("weights", [None, EACH_TOKEN], ids=["", "weighted tokens"])
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_reductions_with_a_mask(reduction, weights):
    build = tagger(lambda: L.MeanSquaredError(reduction=reduction), metrics=["mae"], weighted_metrics=["mse"])
    assert_equal(build, fit(TOKENS, TOKENS[..., None].astype("float32"), sample_weight=weights), 3)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_weights_of_zero(reduction):
    weights = WEIGHTS.copy()
    weights[:20] = 0.0
    build = mlp(SMALL, lambda: L.MeanSquaredError(reduction=reduction), weighted_metrics=["mae"])
    assert_equal(build, fit(X, Y, sample_weight=weights), 3)


def test_rows_that_are_all_masked():
    tokens = TOKENS.copy()
    tokens[:9] = 0
    assert_equal(tagger(L.MeanSquaredError), fit(tokens, tokens[..., None].astype("float32")), 3)


CLASSES = np.eye(3, dtype="float32")[LABELS]
LOSSES = {
    "sparse": (lambda: L.SparseCategoricalCrossentropy(from_logits=True), 3, LABELS),
    "ignored_class": (lambda: L.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), 3, LABELS),
    "categorical": (lambda: L.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), 3, CLASSES),
    "focal": (lambda: L.CategoricalFocalCrossentropy(from_logits=True), 3, CLASSES),
    "binary": (lambda: L.BinaryCrossentropy(from_logits=True), 1, (LABELS > 1)[:, None].astype("float32")),
    "hinge": (lambda: L.Hinge(), 1, np.sign(Y)),
    "huber": (lambda: L.Huber(), 1, Y),
    "log_cosh": (lambda: L.LogCosh(), 1, Y),
    "cosine": (lambda: L.CosineSimilarity(), 3, CLASSES),
    "kl": (lambda: L.KLDivergence(), 3, CLASSES),
    "poisson": (lambda: L.Poisson(), 1, np.abs(Y)),
    "name": (lambda: "mean_absolute_error", 1, Y),
    "function": (lambda: keras.losses.mean_squared_error, 1, Y),
}


def heads(kinds):
    """A model with an output of its own for each loss, so that each has its log and weights that no other moves."""

    def build():
        inputs = keras.Input((6,))
        hidden = {kind: layers.Dense(4, activation="tanh", name=f"before_{kind}")(inputs) for kind in kinds}
        activations = {"kl": "softmax", "poisson": "softplus"}
        outputs = {kind: layers.Dense(LOSSES[kind][1], activations.get(kind), name=kind)(hidden[kind]) for kind in kinds}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), {kind: LOSSES[kind][0]() for kind in kinds})
        return model

    return build


@pytest.mark.parametrize("first", [0, 1])
def test_built_in_losses(first):
    kinds = list(LOSSES)[first::2]
    assert_equal(heads(kinds), fit(X, {kind: LOSSES[kind][2] for kind in kinds}), 3, traced=True)


@pytest.mark.parametrize(
    "kind, weights",
    [("ignored_class", None), ("name", None), ("function", None), ("sparse", WEIGHTS), ("binary", WEIGHTS)],
    ids=["ignored class", "name", "function", "sparse, weighted", "binary, weighted"],
)
def test_a_built_in_loss_alone(kind, weights):
    loss, outputs, y = LOSSES[kind]
    assert_equal(mlp(loss=loss, outputs=outputs), fit(X, y, sample_weight=weights), 3)


def test_ctc():
    def build():
        model = keras.Sequential([keras.Input((5, 3)), layers.Dense(4)])
        model.compile(SMALL(), L.CTC())
        return model

    assert_equal(build, fit(SERIES, TOKENS[:, :2].clip(1, 3), epochs=1), 2)


class Quartic(L.Loss):
    def __init__(self, power=4, **kwargs):
        super().__init__(**kwargs)
        self.power = power

    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** self.power, -1) / 50


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
def test_own_loss_class(weights):
    assert_equal(mlp(SMALL, lambda: Quartic(3, name="quartic")), fit(X, Y, sample_weight=weights), 3)


class WholeLoss(L.Loss):
    """Overrides `__call__`, not `call`."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred))

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), -1)


def scalar_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def row_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), -1)


def entry_loss(y_true, y_pred):
    return ops.square(y_true - y_pred)


def column_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), 0)


def kept_loss(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), keepdims=True)


@pytest.mark.parametrize("loss", [scalar_loss, row_loss, entry_loss, WholeLoss, column_loss, kept_loss])
def test_function_losses(loss):
    metrics = None if loss is WholeLoss else lambda: [loss]
    assert_equal(mlp(loss=loss() if loss is WholeLoss else loss, metrics=metrics), fit(X, Y), 3)


@pytest.mark.parametrize("batch_size", [6, 9])
def test_as_many_columns_as_rows(batch_size):
    """Three numbers for a batch on replicas of three (two) rows: no shape tells that they are not for the rows."""
    build = mlp(loss=column_loss, outputs=3, metrics=lambda: [column_loss])
    assert_equal(build, fit(X[:18], CLASSES[:18], batch_size=batch_size), 3)


@pytest.mark.parametrize("k", [0, 1, 2, -1, 255])
@pytest.mark.parametrize("rows", [29, 1])
def test_ignored_class(k, rows):
    loss = lambda: L.SparseCategoricalCrossentropy(from_logits=True, ignore_class=k)  # noqa: E731
    labels = np.where(LABELS == 2, k, LABELS)
    labels[28] = 1 - k if k in (0, 1) else 0
    assert_equal(mlp(SMALL, loss, 3), fit(X[-rows:], labels[-rows:], epochs=1), 3)


@pytest.mark.parametrize("loss", [L.Dice, L.Tversky])
def test_losses_over_axes(loss):
    """Of rows and over the batch they equal one device; in the replica's view a warning says what to write instead."""
    ones = (SERIES > 0).astype("float32")
    kinds = {(6,): (X, CLASSES, -1), (5, 3): (SERIES, ones, (1, 2))}

    def build(shape, **kwargs):
        model = keras.Sequential([keras.Input(shape), layers.Dense(3, activation="sigmoid")])
        model.compile("sgd", loss(**kwargs))
        return model

    for shape, (x, y, axis) in kinds.items():
        assert_equal(lambda: build(shape, axis=axis), fit(x, y), 3)  # noqa: B023
        over_batch = functools.partial(build, shape, name=f"over_batch_{len(shape)}")
        assert_equal(over_batch, fit(x, y), 3)
        model = km.mirrored_model(over_batch, devices=2, view="replica")
        with pytest.warns(km.MirrorWarning, match="KM204.*It is no mean") as told:
            model.evaluate(x, y, verbose=0)
        assert f"with keras.losses.{loss.__name__}(axis={axis}) to be exact." in str(told[0].message)


class MeanOfBatches(keras.metrics.Metric):
    """Counts batches, and adds up a mean of each: NaN of no rows."""

    def __init__(self, name="mean_of_batches"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.batches = self.add_weight(shape=(), initializer="zeros", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.mean(ops.abs(y_true)))
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


class OwnMean(keras.Model):
    """A `Mean` of what the step makes of its rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = keras.metrics.Mean(name="size")

    def train_step(self, data):
        logs = super().train_step(data)
        self.size.update_state(tf.reduce_mean(tf.abs(data[1])))
        return {**logs, "size": self.size.result()}


def test_metrics_of_batches_leave_replicas_without_rows_out():
    def build():
        inputs = keras.Input((6,))
        model = OwnMean(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse", metrics=[MeanOfBatches()])
        return model

    assert_equal(build, fit(X[:7], Y[:7], batch_size=6), 3)
    history = km.mirrored_model(build, devices=3, view="replica").fit(X[:7], Y[:7], batch_size=6, shuffle=False, verbose=0).history
    means = [np.abs(part).mean() for part in (Y[:2], Y[2:4], Y[4:6], Y[6:7])]  # the second batch is one row of one replica
    assert history["mean_of_batches"] == pytest.approx([np.mean(means)]) and history["size"] == pytest.approx([np.mean(means)])


@pytest.mark.parametrize("loss", [scalar_loss, row_loss, entry_loss])
def test_function_losses_of_sequences(loss):
    def build():
        model = keras.Sequential([keras.Input((5, 3)), layers.Dense(2)])
        model.compile(SMALL(), loss, metrics=[loss])
        return model

    assert_equal(build, fit(SERIES, SERIES[..., :2]), 3)


@pytest.mark.parametrize("loss", [row_loss, entry_loss, column_loss])
def test_function_losses_of_sequences_of_any_length(loss):
    """The first size of a loss is unknown, be it of the rows or of the steps."""

    def batches():
        for start in range(0, 29, 7):
            rows = SERIES[start : start + 7, : 4 + start % 2]
            yield rows, rows[..., :2]

    def build():
        model = keras.Sequential([keras.Input((None, 3)), layers.Dense(2)])
        model.compile(SMALL(), loss)
        return model

    spec = tuple(tf.TensorSpec([None, None, size]) for size in (3, 2))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    assert_equal(build, lambda model: trained(model, data), 3, steps=10)


def many_outputs(**compile):
    def build():
        inputs = keras.Input((6,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        model = keras.Model(inputs, {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)})
        model.compile(
            "sgd",
            {"a": L.MeanSquaredError(reduction="mean_with_sample_weight"), "b": L.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"a": 0.5, "b": 2.0},
            metrics={"a": ["mae", keras.metrics.RootMeanSquaredError()], "b": "accuracy"},
            weighted_metrics={"b": ["accuracy"]},
            **compile,
        )
        return model

    return build


@pytest.mark.parametrize("weights", [None, {"a": WEIGHTS, "b": WEIGHTS[::-1].copy()}], ids=["", "weighted"])
def test_many_outputs(weights):
    assert_equal(many_outputs(), fit(X, {"a": Y, "b": LABELS}, sample_weight=weights), 3, traced=True)


def test_many_outputs_in_eager_steps():
    assert_equal(many_outputs(run_eagerly=True), fit(X, {"a": Y, "b": LABELS}), 3)


def test_many_outputs_of_batches_of_one_size():
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y, "b": LABELS})).batch(7, drop_remainder=True)
    assert_equal(many_outputs(), lambda model: trained(model, data), 3, traced=True)


def test_loss_for_one_of_two_outputs():
    def build():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)])
        model.compile("sgd", ["mse", None])
        return model

    assert_equal(build, fit(X, [Y, Y]), 2, traced=True)


class AddsLoss(layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x):
        losses = {
            "mean": ops.mean(ops.square(x)),
            "kept": ops.mean(ops.square(x), keepdims=True),
            "constant": ops.convert_to_tensor(0.5),
            "rows": ops.mean(ops.square(x), -1) / 10,
            "entries": ops.square(x) / 10,
        }
        self.add_loss(losses[self.kind])
        return x


@pytest.mark.parametrize("kind", ["mean", "kept", "constant", "rows", "entries"])
def test_add_loss(kind):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), AddsLoss(kind), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit(X, Y), 3)
    if kind in ("rows", "entries"):  # the number of rows is known while tracing
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6, drop_remainder=True)
        assert_equal(build, lambda model: trained(model, data), 2)


@pytest.mark.parametrize("regularizer", ["l1", "l2"])
def test_activity_regularizer(regularizer):
    assert_equal(mlp(SMALL, dense={"activity_regularizer": regularizer}), fit(X, Y), 3)


@pytest.mark.parametrize("which", ["kernel_regularizer", "bias_regularizer"])
def test_weight_regularizers(which):
    assert_equal(mlp(dense={which: keras.regularizers.L1L2(0.1, 0.1)}), fit(X, Y, validation_data=(X[:10], Y[:10])), 3)


def test_orthogonal_regularizer():
    assert_equal(mlp(dense={"kernel_regularizer": keras.regularizers.OrthogonalRegularizer()}), fit(X, Y), 2)


class Span(keras.metrics.Metric):
    """An own metric with two results, one of them a number of rows."""

    def __init__(self, name="span"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.rows = self.add_weight(shape=(), initializer="zeros", name="rows", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.rows.assign_add(ops.shape(y_true)[0])

    def result(self):
        return {"span": self.total / ops.cast(self.rows, "float32"), "rows": self.rows + 0}


M = keras.metrics
POSITIVE = (Y > 0).astype("float32")
CORRELATION = (lambda: [M.PearsonCorrelation()]) if hasattr(M, "PearsonCorrelation") else list
METRICS = {  # outputs, activation, labels, and metrics, of which each has its own log
    "numbers": (1, None, Y, lambda: ["mae", M.RootMeanSquaredError(), M.R2Score(), Span(), row_loss, scalar_loss]),
    "classes": (
        3, "softmax", LABELS,
        lambda: ["accuracy", M.SparseTopKCategoricalAccuracy(2), M.MeanIoU(3, sparse_y_pred=False)],
    ),
    "one hot": (
        3, "softmax", CLASSES,
        lambda: [M.OneHotMeanIoU(3), M.F1Score(average="macro"), *CORRELATION()],
    ),
    "yes or no": (
        1, "sigmoid", POSITIVE,
        lambda: [M.AUC(num_thresholds=20), M.Precision(), M.RecallAtPrecision(0.4, num_thresholds=20), M.FalseNegatives()],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", METRICS)
def test_metrics(kind):
    outputs, activation, y, metrics = METRICS[kind]
    loss = "sparse_categorical_crossentropy" if y is LABELS else "mse"
    build = mlp(lambda: "sgd", loss, outputs, activation, metrics=metrics)

    def use(model):
        logs = trained(model, X, y, validation_data=(X[:11], y[:11]))
        assert len(logs["history"]) >= 2 * (1 + len(metrics()))
        return [logs, model.evaluate(X, y, batch_size=5, verbose=0, return_dict=True)]

    assert_equal(build, use, 3, tol=1e-4)


def test_a_result_that_is_a_variable_stays_that_of_its_epoch():
    class Rows(Span):
        def result(self):
            return {"rows": self.rows}  # Keras' own history holds the variable, which shows its last count everywhere

    model = km.mirrored_model(mlp(metrics=lambda: [Rows()]), devices=3)
    logs = trained(model, X, Y, validation_data=(X[:11], Y[:11]))["history"]
    assert logs["rows"] == [29, 29] and logs["val_rows"] == [11, 11]


@pytest.mark.parametrize("metric", ["mae", "accuracy", M.MeanSquaredError])
def test_weighted_metrics_with_class_weight(metric):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])
        model.compile(
            "sgd",
            "sparse_categorical_crossentropy" if metric == "accuracy" else "mse",
            weighted_metrics=[metric if isinstance(metric, str) else metric()],
        )
        return model

    y = LABELS if metric == "accuracy" else CLASSES
    assert_equal(build, fit(X, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5}), 3)


def test_mean_of_a_layer():
    class Watched(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = M.Mean(name="mean_of_inputs")

        def call(self, x):
            self.mean.update_state(x)
            return x

    def build():
        model = keras.Sequential([keras.Input((6,)), Watched(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit(X, Y), 3)


def test_logs_of_rows_counted_by_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(7)
    assert_equal(mlp(metrics=[Span], weighted_metrics=["mse"]), lambda model: trained(model, data, validation_data=data), 4)
