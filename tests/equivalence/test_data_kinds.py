"""Every kind of data that `fit` takes trains the same on replicas as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.equivalence.harness import LABELS, TOKENS, WEIGHTS, X, Y, assert_equal, fit, mlp, trained


@pytest.mark.parametrize(
    "rows, batch_size, replicas",
    [(29, 7, 1), (28, 4, 2), (29, 7, 2), (29, 7, 3), (29, 7, 4), (29, 28, 4), (13, 8, 4), (5, 5, 2), (3, 10, 4), (1, 1, 3)],
)
def test_arrays(rows, batch_size, replicas):
    assert_equal(mlp(metrics=["mae"]), fit(X[:rows], Y[:rows], batch_size=batch_size), replicas)


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "int64", "bool"])
def test_arrays_of_other_types(dtype):
    x = (np.abs(X) * 3).astype(dtype)

    def build():
        inputs = keras.Input((6,), dtype=dtype)
        model = keras.Model(inputs, layers.Dense(1)(layers.Lambda(lambda t: tf.cast(t, "float32"))(inputs)))
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit(x, Y), 3, tol=1e-4)


def two_inputs():
    a, b = keras.Input((2,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.Concatenate()([a, b])))
    model.compile("sgd", "mse")
    return model


def test_dict_of_inputs():
    assert_equal(two_inputs, fit({"a": X[:, :2], "b": X[:, 2:]}, Y), 3)


def test_list_of_inputs():
    def build():
        a, b = keras.Input((2,)), keras.Input((4,))
        model = keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([a, b])))
        model.compile("sgd", "mse")
        return model

    assert_equal(build, fit([X[:, :2], X[:, 2:]], Y), 2)


def test_nested_outputs():
    def build():
        inputs = keras.Input((6,))
        model = keras.Model(
            inputs,
            {"a": layers.Dense(1, name="a")(inputs), "b": [layers.Dense(3, name="b")(inputs), layers.Dense(1, name="c")(inputs)]},
        )
        classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", {"a": "mse", "b": [classes, "mae"]})
        return model

    assert_equal(build, fit(X, {"a": Y, "b": [LABELS, Y]}), 3, traced=True)


def batches(size=7, rows=29, **kwargs):
    return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(size, **kwargs)


DATASETS = {
    "known": (lambda: batches(), {}),
    "even": (lambda: batches(4, 28), {}),
    "unknown cardinality": (lambda: batches().filter(lambda x, y: True), {}),
    "dropped remainder": (lambda: batches(drop_remainder=True), {}),
    "infinite": (lambda: batches().repeat(), {"steps_per_epoch": 4}),
    "repeat and steps per epoch": (lambda: batches().repeat(2), {"steps_per_epoch": 5}),
    "batches of changing size": (lambda: batches(5, 12).concatenate(batches(9)).concatenate(batches(1, 3)), {}),
    "with weights": (lambda: tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(7), {}),
    "prefetched and mapped": (lambda: batches().map(lambda x, y: (x * 2, y)).prefetch(2), {}),
    "unbatched and batched again": (lambda: batches().unbatch().batch(6), {}),
    "padded batches": (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).padded_batch(7), {}),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_dataset(kind):
    make, kwargs = DATASETS[kind]
    steps = None if make().cardinality() != tf.data.UNKNOWN_CARDINALITY else 2 * 5  # two epochs of 29 rows in sixes or sevens
    assert_equal(mlp(), lambda model: trained(model, make(), **kwargs), 3, steps=steps)


def rows_of(x, y, *weights, size=7):
    for start in range(0, len(x), size):
        yield tuple(array[start : start + size] for array in (x, y, *weights))


def test_distributed_by_the_users_own_function():
    """Parts of 3 rows go to 3 replicas in turn, which together are batches of 9; the last two rows go to the first."""

    def use(model):
        replicas = model.distribute_strategy.num_replicas_in_sync
        data = batches(9)
        if replicas > 1:
            data = model.distribute_strategy.distribute_datasets_from_function(lambda _: batches(9 // replicas))
        logs = trained(model, data)
        return {**logs, "evaluated": model.evaluate(data, verbose=0), "predicted": model.predict(data, verbose=0)}

    assert_equal(mlp(metrics=["mae"]), use, 3, steps=8)


@pytest.mark.parametrize("size", [7, 28])
def test_distributed_beforehand(size):
    def use(model):
        strategy = model.distribute_strategy
        data = batches(size)
        if strategy.num_replicas_in_sync > 1:
            data = strategy.experimental_distribute_dataset(data)
        logs = trained(model, data, validation_data=data)
        return {**logs, "evaluated": model.evaluate(data, verbose=0), "predicted": model.predict(data, verbose=0)}

    assert_equal(mlp(metrics=["mae"]), use, 3)


def test_generator():
    assert_equal(mlp(metrics=["mae"]), lambda model: trained(model, rows_of(X, Y), epochs=1), 3, steps=5)


def test_generator_of_weighted_rows():
    assert_equal(mlp(weighted_metrics=["mae"]), lambda model: trained(model, rows_of(X, Y, WEIGHTS), epochs=1), 3, steps=5)


def test_endless_generator():
    def endless():
        while True:
            yield from rows_of(X, Y)

    assert_equal(mlp(), lambda model: trained(model, endless(), steps_per_epoch=4), 2)


def aligned(array):
    """A copy whose memory starts at a multiple of 64 bytes, which TensorFlow uses without copying."""
    memory = np.empty(array.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("replicas", [1, 3])
def test_users_arrays_are_not_written(size, replicas):
    x, y = (aligned(np.tile(a, (3, 1))[:64, :1].repeat(8, 1).copy()) for a in (X, Y))
    before = x.copy(), y.copy()

    def build():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8)])
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    def use(model):
        return [trained(model, rows_of(x, y, size=size), epochs=1) for _ in range(2)]

    assert_equal(build, use, replicas, steps=2 * (64 // size))
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])


class Rows(keras.utils.PyDataset):
    def __init__(self, x=X, y=Y, size=6, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.size = x, y, size

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("workers", [1, 2])
def test_pydataset(workers):
    assert_equal(mlp(), lambda model: trained(model, Rows(workers=workers)), 3)


def test_strings():
    words = np.array([["a"], ["b"], ["c"], ["z"], ["b"]] * 6)[:29]

    def build():
        inputs = keras.Input((1,), dtype="string")
        one_hot = layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")(inputs)
        model = keras.Model(inputs, layers.Dense(1)(one_hot))
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensor_slices((words, Y)).batch(7)
    assert_equal(build, lambda model: [trained(model, data), model.predict(data, verbose=0)], 3)


def embedding():
    inputs = keras.Input((5,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(9, 4)(inputs))))
    model.compile("adam", "mse")
    return model


def test_whole_numbers():
    assert_equal(embedding, fit(TOKENS, Y), 3)


def test_ragged_rows():
    ragged = tf.RaggedTensor.from_tensor(TOKENS, padding=0)
    data = tf.data.Dataset.from_tensor_slices((ragged, Y)).batch(7).map(lambda x, y: (x, y))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(tf.reduce_mean(tf.cast(x, "float32"), axis=1)[:, None] if isinstance(x, tf.RaggedTensor) else x)

    def build():
        model = Model()
        model.compile("sgd", "mse", run_eagerly=False)
        return model

    assert_equal(build, lambda model: trained(model, data.map(lambda x, y: (x.to_tensor(shape=[None, 5]), y))), 3)


@pytest.mark.parametrize("replicas", [1, 3])
def test_sparse_rows(replicas):
    dense = X * (X > 0.5)
    data = tf.data.Dataset.from_tensor_slices((dense, Y)).batch(7).map(lambda x, y: (tf.sparse.from_dense(x), y))

    def build():
        inputs = keras.Input((6,), sparse=True)
        model = keras.Model(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    assert_equal(build, lambda model: trained(model, data), replicas)


def test_inputs_alone():
    class Reconstruction(layers.Layer):
        def call(self, inputs):
            x, decoded = inputs
            self.add_loss(keras.ops.mean(keras.ops.square(x - decoded)))
            return decoded

    def build():
        inputs = keras.Input((6,))
        decoded = layers.Dense(6)(layers.Dense(2, activation="tanh")(inputs))
        model = keras.Model(inputs, Reconstruction()([inputs, decoded]))
        model.compile("sgd")
        return model

    assert_equal(build, fit(X), 3)
    data = tf.data.Dataset.from_tensor_slices(X).batch(7)
    assert_equal(build, lambda model: trained(model, data), 3)
