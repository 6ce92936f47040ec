"""A replica without rows, and layers that cannot run on none: what they do for a row of zeros does not count."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.harness import IMAGES, X, Y, assert_equal, fit

VIDEO = np.random.RandomState(4).rand(9, 3, 6, 6, 2).astype("float32")
SOUND = np.random.RandomState(5).rand(9, 256).astype("float32")
KEEP = dict(batch_size=4)  # 9 rows: the last batch has one, and the second replica none


class MaxPool(layers.Layer):
    def call(self, x):
        return ops.max_pool(x, 2)


class Reflect(layers.Layer):
    def call(self, x):
        return tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")


class Convolution(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 2), name="kernel")

    def call(self, x):
        return tf.nn.avg_pool2d(tf.nn.conv2d(x, self.kernel, 1, "SAME"), 2, 2, "SAME")


class InALoop(layers.Layer):
    """The operation is in a function that the layer's graph calls."""

    def call(self, x):
        return tf.while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, tf.nn.max_pool2d(y, 3, 1, "SAME")), (0, x))[1]


class Block(layers.Layer):
    """Batch normalisation, metrics and a layer of the user's own, beside a pooling by hand."""

    def __init__(self):
        super().__init__()
        self.normalize, self.pool = layers.BatchNormalization(momentum=0.5), MaxPool()
        self.seen = keras.metrics.MeanSquaredError(name="seen")
        self.average = keras.metrics.Mean(name="average")

    def call(self, x, training=None):
        x = self.normalize(x + 1.0, training=training)
        per_image = ops.mean(x, axis=(1, 2))
        self.seen.update_state(per_image, per_image + 2.0 + ops.abs(per_image))
        self.average.update_state(per_image + 5.0)
        return ops.max_pool(self.pool(x), 2)


class Losses(layers.Layer):
    """Losses that are not zero for a row of zeros, beside a pooling by hand."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2, bias_initializer="ones", activity_regularizer=keras.regularizers.L2(0.1))

    def call(self, x):
        x = self.dense(x)
        self.add_loss(ops.mean(ops.square(x + 1.0)))
        return ops.max_pool(x, 2)


def on(shape, *made):
    def build():
        model = keras.Sequential([keras.Input(shape), *(make() for make in made), layers.Flatten(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        return model

    return build


def conv():
    return layers.Conv2D(2, 3)


def with_functions():
    inputs = keras.Input((6, 6, 1))
    hidden = ops.pad(ops.max_pool(conv()(inputs), 2), [[0, 0], [1, 1], [1, 1], [0, 0]], mode="reflect")
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


class Own(keras.Model):
    """A model whose own `call` pools, in one way while training and in another way else."""

    def __init__(self):
        super().__init__()
        self.conv, self.dense = conv(), layers.Dense(1)

    def call(self, inputs, training=False):
        x = self.conv(inputs["image"])
        x = ops.max_pool(x, 2) if training else ops.average_pool(x, 2)
        return self.dense(ops.reshape(x, (-1, 8)))


def own():
    model = Own()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


IMAGE = (6, 6, 1)
CASES = {
    "max_pool": (on(IMAGE, conv, MaxPool), IMAGES[:9]),
    "reflect": (on(IMAGE, Reflect, conv), IMAGES[:9]),
    "convolution": (on(IMAGE, Convolution), IMAGES[:9]),
    "in a loop": (on(IMAGE, conv, InALoop), IMAGES[:9]),
    "lambda": (on(IMAGE, conv, lambda: layers.Lambda(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"))), IMAGES[:9]),
    "block": (on(IMAGE, conv, Block), IMAGES[:9]),
    "losses": (on(IMAGE, conv, Losses), IMAGES[:9]),
    "functions between layers": (with_functions, IMAGES[:9]),
    "own model": (own, {"image": IMAGES[:9]}),
    "ConvLSTM2D": (on((3, 6, 6, 2), lambda: layers.ConvLSTM2D(2, 3)), VIDEO),
    "Bidirectional ConvLSTM1D": (on((3, 6, 2), lambda: layers.Bidirectional(layers.ConvLSTM1D(2, 3))), VIDEO[..., 0, :]),
    "MelSpectrogram": (on((256,), lambda: layers.MelSpectrogram(64, 32, max_freq=4000, num_mel_bins=8)), SOUND),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_that_cannot_run_on_no_rows(name):
    build, x = CASES[name]
    assert_equal(build, fit(x, Y[:9], validation_data=(x, Y[:9]), **KEEP), 2, tol=1e-4)


def test_eager_steps():
    def build():
        model = CASES["block"][0]()
        model.compile(keras.optimizers.SGD(0.001), "mse", run_eagerly=True)
        return model

    assert_equal(build, fit(IMAGES[:9], Y[:9], **KEEP), 2, tol=1e-4)


def test_predictions_have_the_rows_of_the_data():
    assert_equal(CASES["block"][0], lambda model: model.predict(IMAGES[:9], batch_size=4, verbose=0), 2, tol=1e-4)


def test_layers_that_can_run_on_no_rows_do():
    """So that one which exchanges rows with the other replicas does not see a row of zeros."""
    seen = []

    class Centered(layers.Layer):
        def call(self, x):
            context = tf.distribute.get_replica_context()
            if context is None or context.num_replicas_in_sync == 1:
                return x - ops.mean(x, axis=0)
            seen.append(1)
            total, rows = context.all_reduce("SUM", [tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], x.dtype)])
            return x - total / rows

    assert_equal(on((6,), lambda: layers.Dense(3), Centered), fit(X[:9], Y[:9], **KEEP), 2, view="replica")
    assert seen
