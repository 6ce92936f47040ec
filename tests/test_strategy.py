"""The strategy alone, under loops that know nothing of this package."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning


def parts_of(strategy, value):
    return [part.numpy().tolist() for part in strategy.experimental_local_results(value)]


@pytest.mark.parametrize(
    ("rows", "batch", "replicas", "expected"),
    [
        (5, 5, 4, [[[0, 1], [2], [3], [4]]]),
        (7, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
        (5, 4, 3, [[[0, 1], [2], [3]], [[4], [], []]]),
        (3, 2, 1, [[[0, 1]], [[2]]]),
    ],
)
def test_batches_are_split_evenly_and_in_order(rows, batch, replicas, expected):
    strategy = km.MirroredStrategy(replicas)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(rows).batch(batch))
    assert [parts_of(strategy, value) for value in dataset] == expected


def test_structures_strings_bools_ragged_and_sparse_are_split():
    strategy = km.MirroredStrategy(2)
    ragged = tf.ragged.constant([[1], [2, 3], []])
    dataset = tf.data.Dataset.from_tensors(
        ({"s": tf.constant(["a", "b", "c"]), "b": tf.constant([True, False, True])}, (ragged, tf.sparse.eye(3)))
    )
    features, (r, e) = next(iter(strategy.experimental_distribute_dataset(dataset)))
    s, b = features["s"], features["b"]
    assert parts_of(strategy, s) == [[b"a", b"b"], [b"c"]]
    assert parts_of(strategy, b) == [[True, False], [True]]
    assert [part.to_list() for part in strategy.experimental_local_results(r)] == [[[1], [2, 3]], [[]]]
    dense = [tf.sparse.to_dense(part).numpy() for part in strategy.experimental_local_results(e)]
    np.testing.assert_array_equal(np.concatenate(dense), np.eye(3))


@pytest.mark.parametrize(
    ("dataset", "error", "fragments"),
    [
        (lambda: tf.data.Dataset.range(0).batch(2), ValueError, ["empty", "no batch"]),
        (lambda: tf.data.Dataset.range(4), ValueError, ["component 0", "shape ()", ".batch(n)"]),
        (lambda: tf.data.Dataset.from_tensors((tf.ones((4, 3)), 1.0)), ValueError, ["component 1", "one number for a whole batch"]),
        (lambda: tf.data.Dataset.from_tensors((tf.zeros((6,)), tf.zeros((1,)))), ValueError, ["0: 6", "1: 1", ".batch(n)"]),
        (lambda: tf.data.Dataset.from_tensors(tf.zeros((0, 3))), ValueError, ["batch of 0 rows"]),
        (lambda: np.zeros(4), TypeError, ["tf.data.Dataset", "ndarray", "from_tensor_slices"]),
    ],
)
def test_what_cannot_be_split_is_refused(dataset, error, fragments):
    with pytest.raises(error) as raised:
        km.MirroredStrategy(2).experimental_distribute_dataset(dataset())
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_a_batch_without_rows_in_the_stream_is_an_error():
    strategy = km.MirroredStrategy(2)
    dataset = tf.data.Dataset.range(4).batch(2).map(lambda x: x[x[0] :])
    with pytest.raises(tf.errors.InvalidArgumentError, match="batch of 0 rows"):
        list(strategy.experimental_distribute_dataset(dataset))


def test_iterators_pass_through_tf_functions():
    strategy = km.MirroredStrategy(2)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(7).batch(4))

    @tf.function
    def total(value):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(value,)), axis=None)

    @tf.function
    def by_iterator(iterator):
        return total(iterator.get_next()) + total(next(iterator))

    @tf.function
    def by_loop():
        result = tf.constant(0, tf.int64)
        for value in dataset:
            result += total(value)
        return result

    @tf.function(input_signature=[dataset.element_spec])
    def by_signature(value):
        return total(value)

    assert int(by_iterator(iter(dataset))) == 21
    assert int(by_loop()) == 21
    assert sum(int(by_signature(value)) for value in dataset) == 21


@pytest.mark.parametrize(
    ("parts", "op", "axis", "expected"),
    [
        ([[1.0, 2.0], [4.0]], "SUM", None, [5.0, 2.0]),
        ([[1.0, 2.0], [4.0]], "MEAN", None, [2.5, 2.0]),
        ([[1.0, 2.0], [4.0]], "SUM", 0, 7.0),
        ([[1.0, 2.0], [6.0]], "MEAN", 0, 3.0),
        ([[[1, 2]], [[3, 4], [5, 6]]], "SUM", None, [[4, 6], [5, 6]]),
        ([True, True], "SUM", None, 2),
        ([[True, False], [True]], "MEAN", 0, 2 / 3),
        ([["a"], ["b", "c"]], "MEAN", None, [b"a"]),
        ([3.0, 5.0], tf.distribute.ReduceOp.MEAN, None, 4.0),
    ],
)
def test_reduce_takes_any_length_and_type(parts, op, axis, expected):
    strategy = km.MirroredStrategy(2)
    value = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(parts[c.replica_id_in_sync_group]))
    result = strategy.reduce(op, value, axis=axis).numpy()
    np.testing.assert_allclose(result, expected) if result.dtype != object else np.testing.assert_array_equal(result, expected)


def test_a_sum_of_strings_is_refused():
    strategy = km.MirroredStrategy(2)
    value = strategy.experimental_distribute_values_from_function(lambda context: tf.constant("a"))
    with pytest.raises(TypeError, match="strings have no sum"):
        strategy.reduce("SUM", value)


def seed_script(strategy, x, y, batch, compiled):
    """The loop of the TensorFlow guide, word for word; 8 rows a batch."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            per_example = tf.reduce_sum(tf.square(labels - model(features, training=True)), -1)
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    def distributed_step(inputs):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)

    if compiled:
        distributed_step = tf.function(distributed_step)
    losses = [float(distributed_step(inputs)) for inputs in dist_dataset]
    return losses, model.get_weights()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_seed_script_runs_unchanged(data, replicas, compiled):
    x, y = data
    losses, (kernel, bias) = seed_script(km.MirroredStrategy(replicas), x, y, 8, compiled)
    w, b, expected = np.ones((6, 1)), np.zeros(1), []
    for start in range(0, len(x), 8):  # the same in NumPy
        rows, labels = x[start : start + 8], y[start : start + 8]
        error = rows @ w + b - labels
        expected.append((error**2).sum() / 8)
        w, b = w - 0.1 * 2 / 8 * rows.T @ error, b - 0.1 * 2 / 8 * error.sum(0)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(kernel, w, atol=1e-5)
    np.testing.assert_allclose(bias, b, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_counted_under_any_loop(compiled):
    strategy = km.MirroredStrategy(4)
    step = (
        tf.function(lambda v: strategy.run(lambda x: x, args=(v,))) if compiled else lambda v: strategy.run(lambda x: x, args=(v,))
    )
    for value in strategy.experimental_distribute_dataset(tf.data.Dataset.range(13).batch(5)):
        step(value)
    counts = strategy.row_counters["train"].read()
    assert counts.rows.tolist() == [5, 3, 3, 2]  # batches of 5, 5, 3
    assert counts.least.tolist() == [1, 1, 1, 0] and counts.most.tolist() == [2, 1, 1, 1]
    assert counts.empty_steps.tolist() == [0, 0, 0, 1]
    assert (counts.steps, counts.uneven_steps) == (3, 3)


def test_a_tf_function_step_is_lifted_around_the_replicas():
    strategy = km.MirroredStrategy(2)
    traces = []

    @tf.function
    def step(x):
        traces.append(1)
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))

    for value in strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)):
        result = strategy.run(step, args=(value,))
    assert parts_of(strategy, result) == [22, 22]
    assert len(traces) == 2  # once per replica, not once per step
    assert strategy.row_counters["train"].read().rows.tolist() == [4, 4]


def test_data_that_nobody_distributed_is_flagged_once():
    strategy = km.MirroredStrategy(2)
    with pytest.warns(MirrorWarning, match="not distributed.*each of the 2 replicas works on all of it") as seen:
        for _ in range(3):
            strategy.run(tf.reduce_sum, args=(tf.ones((4, 2)),))
    assert len([w for w in seen if w.category is MirrorWarning]) == 1


def test_two_strategies_of_different_size_live_together(data, build_fn):
    x, y = data
    with warnings.catch_warnings():
        warnings.simplefilter("error", MirrorWarning)
        for replicas in (2, 4, 2, 3):
            km.mirrored_model(build_fn, devices=replicas).fit(x, y, batch_size=8, verbose=0)


def test_a_distributed_dataset_is_left_alone():
    strategy = km.MirroredStrategy(2)
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert strategy.experimental_distribute_dataset(dataset) is dataset


def test_parts_one_after_another_are_tensorflows_own_distribution():
    """What GPUs use, tried on CPUs: TensorFlow's iterator, fed with balanced parts."""
    from keras_mirror.distribution import one_after_another, split_dataset

    strategy = km.MirroredStrategy(4)
    parts = split_dataset(tf.data.Dataset.range(9).batch(5), 4)
    dataset = strategy.distribute_datasets_from_function(lambda context: one_after_another(parts))
    assert [parts_of(strategy, value) for value in dataset] == [[[0, 1], [2], [3], [4]], [[5], [6], [7], [8]]]
