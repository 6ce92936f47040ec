"""Models of every make, and models with steps and losses of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.harness import IMAGES, LABELS, SERIES, TOKENS, WEIGHTS, X, Y, assert_equal, fit, mlp, trained


def compiled(model, optimizer=None, loss="mse", **kwargs):
    model.compile(optimizer or keras.optimizers.SGD(0.02), loss, **kwargs)
    return model


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4, activation="tanh")
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="relu", kernel_regularizer="l2")])
    outer = keras.Sequential([keras.Input((6,)), inner, layers.Dense(1)])
    return compiled(outer)


def shared_layers():
    a, b = keras.Input((3,)), keras.Input((3,))
    shared = layers.Dense(4, activation="tanh", activity_regularizer="l2")
    return compiled(keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([shared(a), shared(b)]))))


def recurrent(layer, **kwargs):
    def build():
        return compiled(keras.Sequential([keras.Input((5, 3)), layer(4, **kwargs), layers.Dense(1)]))

    return build


def masked_recurrent(layer):
    def build():
        return compiled(keras.Sequential([keras.Input((5,)), layers.Embedding(9, 4, mask_zero=True), layer(4), layers.Dense(1)]))

    return build


def attention():
    inputs = keras.Input((5, 3))
    attended = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(inputs, inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(attended))))


def convolution():
    model = keras.Sequential(
        [keras.Input((6, 6, 1)), layers.Conv2D(3, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3)]
    )
    return compiled(model, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


MODELS = {
    "functional": (mlp(), X, Y),
    "sequential without input": (lambda: compiled(keras.Sequential([layers.Dense(4), layers.Dense(1)])), X, Y),
    "subclassed, not built": (lambda: compiled(Subclassed(), "adam", metrics=["mae"]), X, Y),
    "nested": (nested, X, Y),
    "shared layers": (shared_layers, [X[:, :3], X[:, 3:]], Y),
    "lstm": (recurrent(layers.LSTM), SERIES, Y),
    "gru": (recurrent(layers.GRU, return_sequences=False, unroll=True), SERIES, Y),
    "bidirectional": (lambda: compiled(keras.Sequential([layers.Bidirectional(layers.GRU(2)), layers.Dense(1)])), SERIES, Y),
    "lstm with mask": (masked_recurrent(layers.LSTM), TOKENS, Y),
    "gru with mask": (masked_recurrent(layers.GRU), TOKENS, Y),
    "convolution": (convolution, IMAGES, LABELS),
    "attention": (attention, SERIES, Y),
}


class Autoencoder(keras.Model):
    """Its own step makes targets of the inputs, which come alone or in tuples of one."""

    in_tuples = False

    def train_step(self, data):
        x = data[0] if self.in_tuples else data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=x, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {**self.compute_metrics(x, x, y_pred), "loss": loss}


ALONE = {
    "array": lambda: X,
    "dataset": lambda: tf.data.Dataset.from_tensor_slices(X).batch(7),
    "dataset of tuples of one": lambda: tf.data.Dataset.from_tensor_slices((X,)).batch(7),
    "tuples of one, unknown size": lambda: tf.data.Dataset.from_tensor_slices((X,)).batch(7).filter(lambda x: True),
}


@pytest.mark.parametrize("data", ALONE)
def test_inputs_without_targets(data):
    def build():
        inputs = keras.Input((6,))
        model = Autoencoder(inputs, layers.Dense(6)(layers.Dense(3, activation="tanh")(inputs)))
        model.in_tuples = "tuples" in data
        return compiled(model, metrics=["mae"])

    steps = 10 if "unknown" in data else None
    assert_equal(build, lambda model: trained(model, ALONE[data](), batch_size=7 if data == "array" else None), 3, steps=steps)


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind):
    build, x, y = MODELS[kind]
    assert_equal(build, fit(x, y), 3, tol=1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_precision(policy):
    assert_equal(mlp(), fit(X, Y), 2, policy=policy, tol=2e-2 if policy == "mixed_bfloat16" else 1e-6)


class TracksLoss(keras.Model):
    """As in the Keras guides: an own `train_step` and an own tracker of the loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1, kernel_regularizer="l2")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.loss_tracker, self.error]

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.error.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.compute_loss(x, y, y_pred))
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}], ids=["", "many steps", "eager"])
def test_own_steps(options, replicas):
    def use(model):
        return [trained(model, X, Y, validation_data=(X[:12], Y[:12])), model.evaluate(X, Y, batch_size=5, verbose=0)]

    assert_equal(lambda: compiled(TracksLoss(), **options), use, replicas)


def test_own_train_step_with_weights():
    assert_equal(lambda: compiled(TracksLoss()), fit(X, Y, sample_weight=WEIGHTS), 3)


class LogsLoss(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), training=True)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "mean_of_x": ops.mean(x)}


def test_own_train_step_that_returns_the_loss():
    assert_equal(lambda: compiled(LogsLoss()), fit(X, Y), 3)


class ComputeMetrics(Subclassed):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "error": ops.mean(ops.abs(y - y_pred))}


class AddsToLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training)


class HandMade(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return ops.mean(ops.square(y - y_pred))


class HalvesLoss(Subclassed):
    def compute_loss(self, *args, **kwargs):
        return 0.5 * super().compute_loss(*args, **kwargs)


class MixesLoss(Subclassed):
    """A compiled loss plus a mean made by hand."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + ops.mean(ops.abs(y - y_pred))


@pytest.mark.parametrize("model", [ComputeMetrics, AddsToLoss, HandMade, HalvesLoss, MixesLoss])
def test_overridden_parts(model):
    def use(one):
        return [trained(one, X, Y), one.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)]

    assert_equal(lambda: compiled(model(), metrics=["mae"]), use, 3)


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.critic = keras.Sequential([keras.Input((1,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    def compile(self, generator_optimizer, critic_optimizer, loss):
        super().compile()
        self.generator_optimizer, self.critic_optimizer, self.loss_of = generator_optimizer, critic_optimizer, loss

    def call(self, x):
        return self.generator(x)

    def train_step(self, data):
        x, real = data
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(x, training=True)
            on_real, on_fake = self.critic(real, training=True), self.critic(fake, training=True)
            critic_loss = self.loss_of(tf.ones_like(on_real), on_real) + self.loss_of(tf.zeros_like(on_fake), on_fake)
            generator_loss = self.loss_of(tf.ones_like(on_fake), on_fake)
        for loss, part, optimizer in (
            (critic_loss, self.critic, self.critic_optimizer),
            (generator_loss, self.generator, self.generator_optimizer),
        ):
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        self.generator_loss.update_state(generator_loss)
        self.critic_loss.update_state(critic_loss)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.parametrize("replicas", [1, 3])
def test_two_optimizers(replicas):
    def build():
        model = Gan()
        binary = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05), binary)
        return model

    assert_equal(build, fit(X, Y), replicas)


COMPILE = {
    "names": lambda: {"optimizer": "adam", "loss": "mse", "metrics": ["mae"]},
    "objects": lambda: {
        "optimizer": keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), momentum=0.5),
        "loss": keras.losses.Huber(),
        "metrics": [keras.metrics.MeanAbsoluteError()],
        "weighted_metrics": ["mse"],
    },
    "options": lambda: {"optimizer": "sgd", "loss": ["mse"], "steps_per_execution": 2, "run_eagerly": False},
}


@pytest.mark.parametrize("kind", COMPILE)
def test_compile_outside(kind):
    def build():
        return keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(1)])

    assert_equal(build, fit(X, Y), 3, compile=COMPILE[kind])


def test_step_in_place_of_train_step():
    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    runs = [assert_equal(mlp(), lambda model: model.fit(X, Y, batch_size=7, shuffle=False, verbose=0) and None, 3, step=step)]
    assert np.isfinite(runs[0].many.get_weights()[0]).all()
