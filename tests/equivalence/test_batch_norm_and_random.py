"""Batch normalisation over the global batch, and random layers."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mirror as km
from tests.equivalence.harness import IMAGES, LABELS, TOKENS, X, Y, assert_equal, copies_of, fit, trained


def normalized(**kwargs):
    def build():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(**kwargs), layers.ReLU(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    return build


def fit_and_predict(x, y, **kwargs):
    def use(model):
        logs = trained(model, x, y, validation_data=(x[:11], y[:11]), **kwargs)
        return [logs, model.predict(x, batch_size=6, verbose=0)]

    return use


@pytest.mark.parametrize("rows, replicas", [(28, 2), (29, 3), (29, 4), (29, 1)])
def test_rows(rows, replicas):
    assert_equal(normalized(), fit_and_predict(X[:rows], Y[:rows]), replicas, tol=1e-4)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5}, {"scale": False, "center": False}, {"epsilon": 0.1}, {"trainable": False}], ids=str
)
def test_options(options):
    assert_equal(normalized(**options), fit_and_predict(X, Y), 3, tol=1e-4)


def test_columns_far_from_zero():
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization(momentum=0.0)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    x = X + 3000
    runs = assert_equal(build, fit(x, X, batch_size=29, epochs=1), 4, tol=1e-3)
    np.testing.assert_allclose(runs.many.layers[-1].moving_mean.numpy(), x.astype("float64").mean(0), rtol=1e-6)
    np.testing.assert_allclose(runs.many.layers[-1].moving_variance.numpy(), x.astype("float64").var(0), rtol=1e-3)


def test_images_and_a_nested_model():
    def build():
        inner = keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(3, 3), layers.BatchNormalization(), layers.ReLU()])
        inputs = keras.Input((6, 6, 1))
        model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(inner(inputs))))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    assert_equal(build, fit_and_predict(IMAGES, LABELS), 3, tol=1e-4)


def test_channels_first_axis():
    def build():
        model = keras.Sequential([keras.Input((5, 4)), layers.BatchNormalization(axis=1), layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit_and_predict(np.resize(X, (29, 5, 4)), Y), 3, tol=1e-4)


@pytest.mark.parametrize("replicas", [1, 3])
def test_masked_tokens(replicas):
    def build():
        hidden = layers.Embedding(9, 4, mask_zero=True)(inputs := keras.Input((5,)))
        model = keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(hidden)))
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit_and_predict(TOKENS, TOKENS[..., None].astype("float32")), replicas, tol=1e-4)


def test_bfloat16():
    assert_equal(normalized(), fit(X, Y), 2, policy="mixed_bfloat16", tol=5e-2)


def test_synchronized_layer_of_keras():
    assert_equal(normalized(synchronized=True), fit_and_predict(X, Y), 3, tol=1e-4)


def test_built_with_the_first_batch():
    def build():
        model = keras.Sequential([layers.Dense(5), layers.BatchNormalization(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit_and_predict(X, Y), 3, tol=1e-4)


@pytest.mark.parametrize("eager", [False, True])
def test_accumulation_and_averages(eager):
    def build():
        model = normalized()()
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2)
        model.compile(optimizer, "mse", run_eagerly=eager)
        return model

    assert_equal(build, fit_and_predict(X, Y), 3, tol=1e-4)


def test_local_statistics_agree_and_are_finite():
    model = km.mirrored_model(normalized(momentum=0.5), devices=[f"CPU:{i}" for i in range(3)], batch_norm="local")
    model.fit(X, Y, batch_size=7, epochs=3, verbose=0, shuffle=False)
    for variable in model.variables:
        copies = [copy.numpy() for copy in copies_of(model, variable)]
        assert np.isfinite(copies[0]).all(), variable.path
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0], err_msg=variable.path)


def test_local_statistics_are_the_mean_over_rows():
    def build():
        model = keras.Sequential([keras.Input((1,)), layers.BatchNormalization(momentum=0.0)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    model = km.mirrored_model(build, devices=["CPU:0", "CPU:1"], batch_norm="local")
    x = np.array([[0.0], [2.0], [10.0]])  # parts [0, 2] and [10]: means 1 and 10, variances 1 and 0
    model.fit(x, x, batch_size=3, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.layers[-1].moving_mean.numpy(), [(2 * 1 + 10) / 3], rtol=1e-6)
    np.testing.assert_allclose(model.layers[-1].moving_variance.numpy(), [2 * 1 / 3], rtol=1e-6)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x + 1.0)))
        return x


class Block(layers.Layer):
    """Adds losses before and behind a normalisation within one layer."""

    def __init__(self):
        super().__init__()
        self.parts = [AddsLoss(), layers.BatchNormalization(), layers.Dense(2, activity_regularizer="l1")]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


REGULARIZED = {
    "before": lambda: [layers.Dense(2, activity_regularizer="l2"), layers.BatchNormalization()],
    "behind": lambda: [layers.BatchNormalization(), layers.Dense(2, activity_regularizer="l2")],
    "add_loss": lambda: [layers.Dense(2), AddsLoss(), layers.BatchNormalization()],
    "between": lambda: [layers.BatchNormalization(), AddsLoss(), layers.BatchNormalization(), AddsLoss()],
    "within": lambda: [Block()],
}


@pytest.mark.parametrize("kind", REGULARIZED)
@pytest.mark.parametrize("eager", [False, True])
def test_losses_of_layers_around_a_normalization(kind, eager):
    """All replicas wait for each other in the middle of the model, and share its layers."""

    def build():
        model = keras.Sequential([keras.Input((6,)), *REGULARIZED[kind](), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.02), "mse", run_eagerly=eager)
        return model

    assert_equal(build, fit(X[:15], Y[:15], epochs=1, validation_data=(X[:8], Y[:8])), 3)


def masks_of(layer, replicas, steps=3, seed=7):
    """The outputs of a random layer for eight rows of ones, per step and row."""
    seen = []

    class Catch(layers.Layer):
        def __init__(self):
            super().__init__()
            self.random = layer()

        def call(self, x, training=None):
            seen.append((x.shape[0], self.random(x, training=training).numpy()) if hasattr(x, "numpy") else None)
            return x

    def build():
        model = keras.Sequential([keras.Input((16,)), Catch(), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = km.mirrored_model(build, devices=[f"CPU:{i}" for i in range(replicas)]) if replicas else build()
    model.fit(np.ones((8 * steps, 16), "float32"), np.ones((8 * steps, 1)), batch_size=8, shuffle=False, verbose=0)
    parts = [part[1] for part in seen if part is not None and part[0] == 8 // max(replicas, 1)]
    return np.array(parts)


RANDOM = {
    "dropout": lambda: layers.Dropout(0.5),
    "gaussian dropout": lambda: layers.GaussianDropout(0.5),
    "gaussian noise": lambda: layers.GaussianNoise(1.0),
    "alpha dropout": lambda: layers.AlphaDropout(0.5),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_every_replica_and_step_draws_anew(kind):
    parts = masks_of(RANDOM[kind], 2)
    assert parts.shape == (6, 4, 16)
    assert len(np.unique(parts.reshape(6, -1), axis=0)) == 6


@pytest.mark.parametrize("replicas", [1, 3])
def test_one_seed_gives_the_same_masks_again(replicas):
    first = masks_of(RANDOM["dropout"], replicas)
    np.testing.assert_array_equal(np.sort(first, 0), np.sort(masks_of(RANDOM["dropout"], replicas), 0))
    assert not np.array_equal(first, masks_of(RANDOM["dropout"], replicas, seed=8))


def test_one_replica_draws_what_one_device_draws():
    np.testing.assert_array_equal(masks_of(RANDOM["dropout"], 1), masks_of(RANDOM["dropout"], 0))


def dropped():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.4), layers.GaussianNoise(0.1), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_training_on_one_replica_with_random_layers():
    assert_equal(dropped, fit(X, Y), 1)


def test_copies_stay_equal_and_runs_repeat():
    weights = []
    for _ in range(2):
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        model = km.mirrored_model(dropped, devices=[f"CPU:{i}" for i in range(3)])
        model.fit(X, Y, batch_size=7, epochs=2, verbose=0)
        for variable in model.variables:
            copies = [copy.numpy() for copy in copies_of(model, variable)]
            assert all(np.array_equal(copies[0], copy) for copy in copies), variable.path
        weights.append(model.get_weights())
    for a, b in zip(*weights):
        np.testing.assert_array_equal(a, b)


def test_predict_and_evaluate_draw_nothing():
    assert_equal(dropped, lambda model: [model.predict(X, verbose=0), model.evaluate(X, Y, batch_size=7, verbose=0)], 3)


def test_shuffled_epochs_see_every_row():
    def build():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
        return model

    numbers = np.arange(29.0)[:, None]
    model = km.mirrored_model(build, devices=["CPU:0", "CPU:1", "CPU:2"])
    history = model.fit(numbers, numbers, batch_size=7, epochs=3, verbose=0)
    np.testing.assert_allclose(history.history["loss"], [np.mean(numbers**2)] * 3, rtol=1e-5)
