"""Weights of rows, tokens and classes, and every kind of validation data."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.equivalence.harness import LABELS, SERIES, TOKENS, WEIGHTS, XV, YV, X, Y, assert_equal, fit, mlp, trained

EACH_TOKEN = (np.arange(29 * 5).reshape(29, 5) % 4 / 2.0).astype("float32")
CLASS_WEIGHT = {0: 1.0, 1: 3.0, 2: 0.5}


def classifier(**compile):
    return mlp(loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), outputs=3, **compile)


def test_sample_weight():
    assert_equal(mlp(metrics=["mse"], weighted_metrics=["mae"]), fit(X, Y, sample_weight=WEIGHTS), 3)


def test_class_weight():
    assert_equal(classifier(metrics=["accuracy"]), fit(X, LABELS, class_weight=CLASS_WEIGHT), 3)


def test_class_weight_of_a_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(7)
    assert_equal(classifier(), lambda model: trained(model, data, class_weight=CLASS_WEIGHT), 2)


def test_weights_per_time_step():
    def build():
        model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(3, return_sequences=True), layers.Dense(1)])
        model.compile("sgd", "mse", weighted_metrics=["mae"])
        return model

    assert_equal(build, fit(SERIES, SERIES[..., :1], sample_weight=EACH_TOKEN), 3)


@pytest.mark.parametrize("weights", [None, EACH_TOKEN], ids=["", "tokens"])
def test_masks_and_weights(weights):
    def build():
        inputs = keras.Input((5,))
        hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
        outputs = layers.Dense(9)(layers.GRU(4, return_sequences=True)(hidden))
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        return model

    assert_equal(build, fit(TOKENS, TOKENS, sample_weight=weights), 3)


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(index * 4, index * 4 + 4)
        return XV[rows], YV[rows]


def rows():
    for start in range(0, 11, 4):
        yield XV[start : start + 4], YV[start : start + 4]


VALIDATION = {
    "split": lambda: {"validation_split": 0.3},
    "arrays": lambda: {"validation_data": (XV, YV)},
    "arrays in batches of 3": lambda: {"validation_data": (XV, YV), "validation_batch_size": 3},
    "weighted arrays": lambda: {"validation_data": (XV, YV, WEIGHTS[:11])},
    "some steps": lambda: {"validation_data": (XV, YV), "validation_steps": 1},
    "every other epoch": lambda: {"validation_data": (XV, YV), "validation_freq": 2},
    "named epochs": lambda: {"validation_data": (XV, YV), "validation_freq": [1, 3]},
    "dataset": lambda: {"validation_data": tf.data.Dataset.from_tensor_slices((XV, YV)).batch(4)},
    "endless dataset": lambda: {
        "validation_data": tf.data.Dataset.from_tensor_slices((XV, YV)).batch(4).repeat(),
        "validation_steps": 2,
    },
    "pydataset": lambda: {"validation_data": Rows()},
    "generator": lambda: {"validation_data": rows(), "epochs": 1},
}


@pytest.mark.parametrize("kind", VALIDATION)
def test_validation(kind):
    kwargs = VALIDATION[kind]()
    build = mlp(metrics=["mae"], weighted_metrics=["mse"])

    def use(model):
        return trained(model, X, Y, **{"epochs": 3, **(VALIDATION[kind]() if kind == "generator" else kwargs)})

    assert_equal(build, use, 3)


def test_validation_split_with_weights():
    assert_equal(mlp(weighted_metrics=["mae"]), fit(X, Y, sample_weight=WEIGHTS, validation_split=0.2), 2)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_a_weight_of_a_whole_batch(reduction):
    def difference(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))

    build = mlp(
        lambda: keras.optimizers.SGD(0.002),
        lambda: keras.losses.MeanSquaredError(reduction=reduction),
        weighted_metrics=lambda: ["mae", keras.metrics.RootMeanSquaredError(), keras.metrics.Precision(), difference],
    )
    data = tf.data.Dataset.from_tensor_slices((X, (Y > 0).astype("float32"))).batch(7)
    data = data.map(lambda x, y: (x, y, tf.reduce_mean(tf.abs(x))))
    # In eager steps Keras leaves a batch of one row as it is, in place of dividing by the weight.
    assert_equal(build, lambda model: trained(model, data, validation_data=data.take(2)), 3, steps=10, traced=True)


def test_a_weight_of_a_whole_batch_under_a_mask():
    def build():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(1)(layers.Embedding(9, 4, mask_zero=True)(inputs)))
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensor_slices((TOKENS, TOKENS[..., None].astype("float32"))).batch(7)
    data = data.map(lambda x, y: (x, y, tf.reduce_mean(tf.cast(x, "float32"))))
    assert_equal(build, lambda model: trained(model, data), 3, steps=10)
