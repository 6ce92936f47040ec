"""A loop that is entirely the user's: counted, audited, and told where it goes wrong."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning, OutOfScopeError

outside = tf.Variable(0, trainable=False)


def dataset(data, batch=9):
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


def loop(strategy, step, data, compiled):
    run = lambda batch: strategy.run(step, args=(batch,))  # noqa: E731
    run = tf.function(run) if compiled else run
    for batch in strategy.experimental_distribute_dataset(data):
        run(batch)


def right_step(model):
    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.square(y - model(x, training=True)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_are_counted(data, build_fn, compiled):
    model = km.mirrored_model(build_fn, devices=4)
    logger = km.ReplicaBatchLogger()
    with km.observe(model, callbacks=[logger]):
        loop(model.distribute_strategy, right_step(model), dataset(data), compiled)
    assert [row["rows"] for row in logger.report().rows] == [10, 7, 6, 6]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_strategy_alone_can_be_observed(data, compiled):
    strategy = km.MirroredStrategy(2)
    logger = km.ReplicaBatchLogger()
    with km.observe(strategy, callbacks=[logger, km.ScopeAuditor("raise")]):
        loop(strategy, lambda batch: tf.reduce_sum(batch[0]), dataset(data), compiled)
    assert [row["rows"] for row in logger.report().rows] == [16, 13]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forgotten_counter_is_found_before_it_counts(data, build_fn, compiled):
    model = km.mirrored_model(build_fn, devices=2)
    train = right_step(model)
    outside.assign(0)

    def step(batch):
        outside.assign_add(1)
        train(batch)

    with pytest.raises(OutOfScopeError, match="test_observe.py:11"):
        with km.observe(model, callbacks=[km.ScopeAuditor("raise")]):
            loop(model.distribute_strategy, step, dataset(data), compiled)
    assert int(outside) == (0 if compiled else 2)  # eager: the first step had to run to be seen


def test_the_optimizer_variables_of_a_plain_loop_are_not_flagged(data):
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - model(x))) / 9
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with km.observe(strategy, callbacks=[km.ScopeAuditor("raise")]):
        loop(strategy, step, dataset(data), True)
    assert int(optimizer.iterations.numpy()) == 4


def test_a_local_mean_is_flagged_with_its_factor(data, build_fn):
    model = km.mirrored_model(build_fn, devices=4)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.warns(MirrorWarning, match=r"step makes its own loss.*4\.00 times too large.*global_mean"):
        loop(model.distribute_strategy, step, dataset(data, 8), True)


def test_a_loss_divided_twice_is_flagged(data, build_fn):
    model = km.mirrored_model(build_fn, devices=2)
    strategy = model.distribute_strategy

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.square(y - model(x))) / strategy.num_replicas_in_sync
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.warns(MirrorWarning, match=r"num_replicas_in_sync.*2\.00 times too small.*Drop the division"):
        loop(strategy, step, dataset(data, 8), True)


def test_a_python_number_that_traces_every_step_is_flagged(data):
    strategy = km.MirroredStrategy(2)
    batches = list(strategy.experimental_distribute_dataset(dataset(data, 8)))

    @tf.function
    def run(batch, number):
        return strategy.run(numbered_step, args=(batch, number))

    def numbered_step(batch, number):
        return tf.reduce_sum(batch[0]) * number

    with pytest.warns(MirrorWarning, match=r"numbered_step\) was traced 6 times.*tf\.constant\(value\)") as seen:
        for number in range(9):
            run(batches[0], number)
    assert len([w for w in seen if w.category is MirrorWarning]) == 1


def test_a_manual_shard_is_flagged(data):
    strategy = km.MirroredStrategy(2)
    shard = tf.data.Dataset.from_tensor_slices(data).shard(2, 0).batch(4).prefetch(1)
    with pytest.warns(MirrorWarning, match=r"sharded by hand.*leave out dataset\.shard"):
        strategy.experimental_distribute_dataset(shard)


def test_steps_that_move_nothing_are_flagged(data, build_fn):
    model = km.mirrored_model(build_fn, devices=2)
    with pytest.warns(MirrorWarning, match="never moved model.optimizer.iterations"):
        with km.observe(model):
            loop(model.distribute_strategy, lambda batch: tf.reduce_sum(model(batch[0])), dataset(data), True)


@pytest.mark.parametrize("optimizer", ["adam", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())])
def test_an_unbuilt_optimizer_is_built_inside_the_graph(data, optimizer):
    def build_fn():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), "mse")
        return model

    model = km.mirrored_model(build_fn, devices=2)
    with model.distribute_strategy.scope():
        model.build((None, 6))
    assert not model.optimizer.built
    loop(model.distribute_strategy, right_step(model), dataset(data), True)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert not km.audit(model)


def test_a_regulariser_counts_once(data):
    """`loss += sum(model.losses)` counts it once per replica; `model.compute_loss` and this sum do not."""

    def build_fn():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_regularizer="l2", kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
        return model

    model = km.mirrored_model(build_fn, devices=4)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x) * 0.0 + y)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    loop(model.distribute_strategy, step, dataset(data, 29), True)
    np.testing.assert_allclose(model.get_weights()[0], np.full((6, 1), 1 - 2 * 0.01), rtol=1e-6)  # l2 is 0.01 * w^2


def test_only_models_and_strategies_of_this_package_can_be_observed(build_fn):
    for wrong in (3, build_fn(), tf.distribute.get_strategy()):
        with pytest.raises(TypeError, match="observe: expected a keras_mirror.MirroredStrategy"):
            with km.observe(wrong):
                pass
