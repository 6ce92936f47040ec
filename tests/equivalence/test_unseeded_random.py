"""`keras.random` without a seed: each replica draws its own numbers, from the seed of the program, anew in each step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_mirror as km
from tests.equivalence.harness import X, Y, assert_equal, fit


class Noise(layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


class Branch(layers.Layer):
    """Draws inside of a condition."""

    def call(self, x):
        return tf.cond(tf.reduce_sum(tf.ones([2])) > 1.0, lambda: x + keras.random.uniform(keras.ops.shape(x)), lambda: x)


def noisy(layer=Noise, **compile):
    def build():
        model = keras.Sequential([keras.Input((6,)), layer(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", **compile)
        return model

    return build


class Generative(keras.Model):
    """Draws in its own step, as a GAN does, and logs what each replica drew for its first two rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        drawn = keras.random.normal(keras.ops.shape(x))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x + drawn, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.pad(drawn, [[0, 2], [0, 0]])[:2]
        return {"loss": loss, "drawn": tf.one_hot(replica, 2)[:, None, None] * first}


def generative():
    model = Generative()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize(
    "build", [noisy(), noisy(Branch), noisy(run_eagerly=True), generative], ids=["call", "cond", "eager", "step"]
)
def test_one_replica_draws_what_one_device_draws(build):
    def use(model):
        loss = fit(X, Y)(model)["history"]["loss"]
        return [loss, keras.ops.convert_to_numpy(keras.random.uniform((3,)))]  # the numbers after it go on from the same place

    assert_equal(build, use, 1)


@pytest.mark.parametrize("drawn_before", [False, True, "on other replicas"])
def test_each_replica_draws_its_own_numbers_reproducibly(drawn_before):
    def drawn():
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        if drawn_before:
            keras.random.uniform(())  # makes a generator outside of the scope
        if drawn_before == "on other replicas":
            with km.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
                keras.utils.set_random_seed(5)
                keras.random.uniform(())
        model = km.mirrored_model(generative, devices=["CPU:0", "CPU:1"], view="replica")
        logs = model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0, epochs=3).history["drawn"]
        return 2 * np.array([np.array(epoch) for epoch in logs])  # one log is the mean over two replicas

    first, again = drawn(), drawn()
    assert first.shape == (3, 2, 2, 6)
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first.round(5))) == first.size


def test_steps_without_data_draw_differently():
    strategy = km.MirroredStrategy(["CPU:0", "CPU:1"])
    step = tf.function(lambda: strategy.run(lambda: keras.random.normal((4,))))
    draws = [copy.numpy() for _ in range(2) for copy in strategy.experimental_local_results(step())]
    assert len(np.unique(draws)) == 16


def test_predicting_and_checking():
    model = km.mirrored_model(noisy(), devices=["CPU:0", "CPU:1"])
    assert np.isfinite(model.predict(X[:5], verbose=0)).all()
    before = keras.ops.convert_to_numpy(keras.random.uniform((3,)))
    for _ in range(2):
        assert not km.check(model, (X[:7], Y[:7])).causes  # the layer draws for the whole batch
    assert len(np.unique([before, keras.ops.convert_to_numpy(keras.random.uniform((3,)))])) == 6
