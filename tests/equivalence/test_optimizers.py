"""Every optimizer, and every option of one, makes the same updates on replicas as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.equivalence.harness import BATCH, TOKENS, WEIGHTS, X, Y, assert_equal, fit, mlp, trained

optimizers = keras.optimizers
OPTIMIZERS = [
    name
    for name in (
        "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion", "Lamb", "Muon",
    )
    if hasattr(optimizers, name) and not (name == "Muon" and keras.__version__.startswith("3.10"))  # fails there on one device
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    assert_equal(mlp(lambda: getattr(optimizers, name)(learning_rate=0.01)), fit(X, Y), 3, tol=1e-4)


OPTIONS = {
    "nesterov": lambda: optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "centered": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "clipnorm": lambda: optimizers.SGD(0.05, clipnorm=0.3),
    "clipvalue": lambda: optimizers.SGD(0.05, clipvalue=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.05, global_clipnorm=0.3),
    "weight decay": lambda: optimizers.SGD(0.05, weight_decay=0.05),
    "accumulation of 2": lambda: optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "accumulation of 3": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "averages": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8),
    "averages that overwrite": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "loss_scale_factor": lambda: optimizers.SGD(0.05, loss_scale_factor=16.0),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=3),
    "exponential decay": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
    "cosine with warm-up": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.0, 8, warmup_target=0.05, warmup_steps=3)),
    "steps of rates": lambda: optimizers.SGD(optimizers.schedules.PiecewiseConstantDecay([3, 6], [0.1, 0.05, 0.01])),
    "clip, decay, averages": lambda: optimizers.AdamW(
        0.01, weight_decay=0.1, clipnorm=0.2, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
    ),
    "accumulation, clip, schedule": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), momentum=0.9, global_clipnorm=0.4, gradient_accumulation_steps=2
    ),
    "accumulation, averages, decay": lambda: optimizers.Lion(
        0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=3
    ),
    "loss scale, clip, averages": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05, clipvalue=0.2, use_ema=True, ema_overwrite_frequency=3), initial_scale=32.0, dynamic_growth_steps=2
    ),
    "loss scale, accumulation": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05, gradient_accumulation_steps=2), initial_scale=32.0
    ),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option(options):
    assert_equal(mlp(OPTIONS[options]), fit(X, Y), 3, tol=1e-4)


@pytest.mark.parametrize("options", ["clipnorm", "accumulation of 2", "averages that overwrite", "loss scale"])
def test_options_in_eager_steps(options):
    assert_equal(mlp(OPTIONS[options], run_eagerly=True), fit(X, Y, epochs=1), 2)


@pytest.mark.parametrize("options", ["accumulation of 3", "averages that overwrite", "loss scale"])
def test_options_in_many_steps_per_execution(options):
    assert_equal(mlp(OPTIONS[options], steps_per_execution=3), fit(X, Y), 3, tol=1e-4)


@pytest.mark.parametrize("names", [["bias"], ["dense"]])
def test_exclusion_from_weight_decay(names):
    def optimizer():
        made = optimizers.AdamW(0.01, weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=names)
        return made

    assert_equal(mlp(optimizer), fit(X, Y), 2)


def test_an_infinity_on_one_replica_skips_the_step():
    x = X[:12].copy()
    x[11] = np.inf  # the last row of the second batch: on the last replica alone

    def use(model):
        logs = trained(model, x, Y[:12], batch_size=6, epochs=1)
        return {"epoch": logs["epoch"]}

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.05), initial_scale=64.0), "mse")
        return model

    runs = assert_equal(build, use, 3)
    assert runs.many.optimizer.dynamic_scale.numpy() == 32.0
    assert runs.many.optimizer.inner_optimizer.iterations.numpy() == 1
    assert np.isfinite(runs.many.get_weights()[0]).all()


EMBEDDING_OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "adam": lambda: optimizers.Adam(0.01),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.01),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.001),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.01),
    "accumulation": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averages": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adagrad(0.1), initial_scale=64.0),
    "momentum, clip, accumulation": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1, gradient_accumulation_steps=3),
}


@pytest.mark.parametrize("options", EMBEDDING_OPTIMIZERS)
def test_embeddings(options):
    def build():
        model = keras.Sequential([keras.Input((5,)), layers.Embedding(9, 4), layers.Flatten(), layers.Dense(1)])
        model.compile(EMBEDDING_OPTIMIZERS[options](), "mse")
        return model

    assert_equal(build, fit(TOKENS, Y), 3, tol=1e-4)


CONSTRAINTS = {
    "max_norm": lambda: keras.constraints.MaxNorm(0.5),
    "non_neg": lambda: "non_neg",
    "unit_norm": lambda: keras.constraints.UnitNorm(),
}


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_constraints(constraint):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, kernel_constraint=CONSTRAINTS[constraint]()), layers.Dense(1)])
        model.compile(optimizers.SGD(0.01, momentum=0.5), "mse")
        return model

    assert_equal(build, fit(X, Y), 3)


def test_constraint_with_accumulation():
    def build():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.5)), layers.Dense(1)]
        )
        model.compile(optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        return model

    assert_equal(build, fit(X, Y), 2)


@pytest.mark.parametrize("options", ["clipnorm", "accumulation of 2", "averages that overwrite"])
def test_frozen_layers(options):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, trainable=False), layers.Dense(3), layers.Dense(1)])
        model.compile(OPTIONS[options](), "mse")
        return model

    assert_equal(build, fit(X, Y), 2)


def test_freezing_between_two_fits():
    def use(model):
        first = trained(model, X, Y, epochs=1)
        model.layers[0].trainable = False
        model.compile(optimizers.Adam(0.01), "mse")
        return [first, trained(model, X, Y, epochs=1)]

    assert_equal(mlp(), use, 3)


def test_weights_with_clipping_and_accumulation():
    build = mlp(lambda: optimizers.SGD(0.05, clipnorm=0.3, gradient_accumulation_steps=2), weighted_metrics=["mae"])
    assert_equal(build, fit(X, Y, sample_weight=WEIGHTS), 3)


def test_a_variable_without_gradient():
    class Unused(layers.Layer):
        def build(self, shape):
            self.unused = self.add_weight(shape=(3,), name="unused")
            self.used = self.add_weight(shape=(6,), name="used")

        def call(self, x):
            return x * self.used

    def build():
        model = keras.Sequential([keras.Input((6,)), Unused(), layers.Dense(1)])
        model.compile(optimizers.Adam(0.01), "mse")
        return model

    assert_equal(build, fit(X, Y), 2)


def test_large_gradients_that_travel_alone():
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3000, activation="tanh"), layers.Dense(1)])
        model.compile(optimizers.SGD(0.001, clipnorm=1.0), "mse")
        return model

    assert_equal(build, fit(X, Y, epochs=1), 3, tol=1e-4)


def test_learning_rate_set_by_hand():
    def use(model):
        first = trained(model, X, Y, epochs=1)
        model.optimizer.learning_rate = 0.001
        second = trained(model, X, Y, epochs=1)
        model.optimizer.learning_rate.assign(0.2)
        return [first, second, trained(model, X, Y, epochs=1)]

    assert_equal(mlp(), use, 3)


def test_averages_are_finalized():
    def use(model):
        trained(model, X, Y)
        model.optimizer.finalize_variable_values(model.trainable_variables)
        return model.predict(X, verbose=0)

    assert_equal(mlp(lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9)), use, 3)


def test_tensorflow_dataset_of_tokens_with_clipping():
    data = tf.data.Dataset.from_tensor_slices((TOKENS, Y)).batch(BATCH)

    def build():
        model = keras.Sequential([layers.Embedding(9, 4), layers.GlobalAveragePooling1D(), layers.Dense(1)])
        model.compile(optimizers.Adam(0.01, global_clipnorm=0.05), "mse")
        return model

    assert_equal(build, lambda model: trained(model, data), 2, tol=1e-4)
