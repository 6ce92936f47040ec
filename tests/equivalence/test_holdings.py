"""Optimizers, losses and metrics that a model holds in lists, dicts and nested models train as on one device."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_mirror as km
from keras_mirror.holdings import optimizers_of
from keras_mirror.variables_state import variables_of
from tests.equivalence.harness import BATCH, X, Y, assert_equal, fit, trained

optimizers = keras.optimizers


class TwoParts(keras.Model):
    """Two layers, each updated by an optimizer of its own, and a loss from a dict."""

    def __init__(self, put):
        super().__init__()
        self.parts = [layers.Dense(1), layers.Dense(1)]
        self.held = put([optimizers.Adam(0.05, clipnorm=0.1), optimizers.SGD(0.05, clipnorm=0.1)])
        self.losses_of_mine = {"square": keras.losses.MeanSquaredError()}

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
        self.built = True

    def call(self, x):
        return self.parts[0](x) + self.parts[1](x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.losses_of_mine["square"](y, self(x, training=True))
        held = list(self.held.values() if isinstance(self.held, dict) else self.held)
        for optimizer, part in zip(held, self.parts):
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def two_parts(put=list):
    def build():
        model = TwoParts(put)
        model.compile("sgd", "mse")
        return model

    return build


def and_slots(use):
    """What `use` returns, and the values of the variables of all optimizers."""

    def used(model):
        result = use(model)
        return [result, [v.numpy() for each in optimizers_of(model).values() for v in each.variables if each.iterations.numpy()]]

    return used


PUTS = {"list": list, "tuple": tuple, "dict": lambda pair: dict(zip("ab", pair)), "nested": lambda pair: [{"a": pair[:1]}, pair[1]]}


@pytest.mark.parametrize("put", ["list", "tuple", "dict"])
def test_optimizers_in_a(put):
    assert_equal(two_parts(PUTS[put]), and_slots(fit(X, Y)), 3)


@pytest.mark.parametrize("put", ["list", "tuple", "dict"])
def test_optimizers_made_outside_of_build_fn(put):
    held = [optimizers.Adam(0.05), optimizers.SGD(0.05, momentum=0.5)]

    def build():
        model = TwoParts(lambda pair: PUTS[put](held))
        model.compile("sgd", "mse")
        return model

    with pytest.warns(km.MirrorWarning, match="made outside of the strategy's scope"):
        model = km.mirrored_model(build, devices=2)
    assert not any(optimizer in held for optimizer in optimizers_of(model).values())
    keras.utils.set_random_seed(1)
    trained(model, X, Y)


def test_names_of_optimizers_do_not_depend_on_what_was_made_before():
    for _ in range(2):
        model = two_parts(PUTS["nested"])()
        assert set(optimizers_of(model)) == {"optimizer", "held[0]['a'][0]", "held[1]"}
        assert {name.split("/")[0] for name in variables_of(model)} >= {"held[0]['a'][0]", "held[1]"}
    for _ in range(2):
        model = submodels(GeneratorAndDiscriminator)()
        assert set(optimizers_of(model)) == {"optimizer", "sequential.optimizer", "sequential (2).optimizer"}


def test_check_finds_optimizers_in_a_list():
    model = km.mirrored_model(two_parts(), devices=2)
    result = km.check(model, (X[:5], Y[:5]))
    assert not result, str(result)


class GeneratorAndDiscriminator(keras.Model):
    def __init__(self):
        super().__init__()
        self.g = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="tanh")])
        self.d = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        self.g.compile(optimizers.Adam(0.05, clipnorm=0.1))
        self.d.compile(optimizers.Adam(0.05, clipnorm=0.1))

    def call(self, x):
        return self.d(self.g(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = km.global_mean(tf.square(y - self(x, training=True)))
        for model in (self.g, self.d):
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return {"loss": loss}


def submodels(cls):
    def build():
        model = cls()
        model.compile("sgd", "mse")
        return model

    return build


def test_optimizers_of_submodels():
    assert_equal(submodels(GeneratorAndDiscriminator), and_slots(fit(X, Y)), 3)


class Around(keras.Model):
    """A model that is trained by the step of the one within."""

    def __init__(self):
        super().__init__()
        self.within = keras.Sequential([keras.Input((6,)), layers.Dense(1, kernel_regularizer="l2")])
        self.within.compile(optimizers.Adam(0.05, global_clipnorm=0.3), "mse", metrics=["mae"])

    def call(self, x):
        return self.within(x)

    def train_step(self, data):
        return self.within.train_step(data)

    def test_step(self, data):
        return self.within.test_step(data)


class AroundItsLoss(Around):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.within.compute_loss(x, y, self.within(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("cls", [Around, AroundItsLoss])
def test_steps_and_losses_of_submodels(cls):
    assert_equal(submodels(cls), and_slots(fit(X, Y)), 3)


def test_steps_of_submodels_read_their_metrics_over_all_replicas():
    def use(model):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        trained(model, data, epochs=1)
        return [metric.result().numpy() for metric in model.within.metrics if metric.name == "loss"] + [
            {name: float(value) for name, value in model.within.get_metrics_result().items()}
        ]

    assert_equal(submodels(Around), use, 3)


def test_a_loss_of_the_models_own_that_is_added():
    class Adds(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(6)
            self.distances = [keras.losses.MeanSquaredError()]

        def call(self, x):
            output = self.dense(x)
            self.add_loss(self.distances[0](x, output))
            return output[:, :1]

    def build():
        model = Adds()
        model.compile(optimizers.SGD(0.05), "mse")
        return model

    assert_equal(build, fit(X, Y), 3)
