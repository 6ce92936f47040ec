"""Code of the user's own sees the whole batch: what it may do there, each against one device, even and uneven."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_mirror as km
from tests.equivalence.harness import X, Y, assert_equal, fit

SGD = lambda: keras.optimizers.SGD(0.02)  # noqa: E731


class Stepping(keras.Model):
    """A step of its own around `loss_of`."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(1)])
        self.tracker = keras.metrics.Mean("mean")

    def call(self, x):
        return self.net(x)

    def loss_of(self, x, y):
        return ops.mean((y - self.net(x, training=True)) ** 2)

    def updated(self, tape, loss):
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        self.tracker.update_state(loss)
        return {"mean": self.tracker.result()}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        return self.updated(tape, loss)


class Sharpness(Stepping):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        norm = tf.linalg.global_norm(gradients)
        for variable, gradient in zip(self.trainable_variables, gradients):
            variable.assign_add(0.05 * gradient / norm)
        with tf.GradientTape() as tape:
            again = self.loss_of(x, y)
        for variable, gradient in zip(self.trainable_variables, gradients):
            variable.assign_sub(0.05 * gradient / norm)
        return {**self.updated(tape, again), "norm": norm}


class GradientOfGradients(Stepping):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                loss = self.loss_of(x, y)
            gradients = inner.gradient(loss, self.trainable_variables)
            total = loss + 0.1 * tf.add_n([tf.reduce_sum(each**2) for each in gradients])
        return self.updated(outer, total)


class GradientsOfTheGraph(Stepping):
    def train_step(self, data):
        x, y = data
        gradients = tf.gradients(self.loss_of(x, y), [v.value for v in self.trainable_variables])
        clipped = [tf.clip_by_norm(each, 0.1) for each in gradients]
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"largest": tf.reduce_max([tf.norm(each) for each in clipped])}


class Queue(Stepping):
    """Rows of earlier batches, a counter of integers and a log of them."""

    def __init__(self):
        super().__init__()
        self.queue = self.add_weight(shape=(9, 1), initializer="ones", trainable=False, name="queue")
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def loss_of(self, x, y):
        z = self.net(x)
        self.queue.assign(tf.concat([z, self.queue.value], 0)[:9])
        self.count.assign_add(tf.shape(x)[0])
        return ops.mean(ops.logsumexp(z @ ops.transpose(self.queue), 1)) + ops.mean((y - z) ** 2)

    def train_step(self, data):
        return {**super().train_step(data), "rows": tf.shape(data[0])[0], "count": self.count + 0}


class Steered(Stepping):
    """`result()` of a metric changes a variable."""

    def __init__(self):
        super().__init__()
        self.strength = self.add_weight(shape=(), initializer="zeros", trainable=False, name="strength")

    def train_step(self, data):
        logs = super().train_step(data)
        self.strength.assign(0.5 * self.strength + self.tracker.result() / 7)
        return {**logs, "strength": self.strength + 0.0}


class Helper(Stepping):
    @tf.function
    def loss_of(self, x, y):
        return tf.reduce_max(tf.abs(y - self.net(x)))


class Late(Stepping):
    """Layers that the step is the first to call."""

    def __init__(self):
        super().__init__(keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]))
        self.before = layers.Dense(6)

    def loss_of(self, x, y):
        return ops.mean((y - self.net(self.before(x), training=True)) ** 2)


class InABranch(Stepping):
    """Layers in a branch of the graph, where replicas cannot exchange rows, see the whole batch on each."""

    def loss_of(self, x, y):
        return tf.cond(tf.reduce_mean(x) > 0, lambda: tf.reduce_mean((y - self.net(x)) ** 2), lambda: tf.reduce_mean(self.net(x)))


class Positions(Stepping):
    """An embedding of rows and, whole on each replica, of positions."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(4, 3)
        self.embed.build((None,))

    def loss_of(self, x, y):
        rows = self.embed(ops.cast(ops.abs(x[:, :4]) > 0.5, "int32"))
        return ops.mean((rows + self.embed(tf.range(4)[None])) ** 2) + super().loss_of(x, y)


class ForReplicas(Stepping):
    """Written for replicas: of which there is one here."""

    def loss_of(self, x, y):
        per_row = ops.sum((y - self.net(x)) ** 2, 1)
        loss = tf.nn.compute_average_loss(per_row) / tf.distribute.get_strategy().num_replicas_in_sync
        context = tf.distribute.get_replica_context()
        mixed = self.net(x)
        return loss + km.global_mean(per_row) + context.all_reduce("SUM", ops.mean(mixed)) + ops.sum(km.gather(mixed) ** 2) / 50


class WhileTraining(layers.Layer):
    """Mixes rows and keeps state in training alone, of which the call of its step says nothing."""

    def build(self, shape):
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="average")

    def call(self, x, training=False):
        if training:
            self.average.assign(0.5 * self.average + ops.mean(x, 0))
            x = x - ops.mean(x, 0)
        return x - self.average


class Untold(Stepping):
    def __init__(self):
        super().__init__()
        self.mixing, self.last = WhileTraining(), layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.mixing(self.net(x)))

    def loss_of(self, x, y):
        return ops.mean((y - self(x, training=True)) ** 2)


STEPS = (
    Sharpness, GradientOfGradients, GradientsOfTheGraph, Queue, Steered, Helper, Late, InABranch, Positions, ForReplicas, Untold,
)  # fmt: skip


def built(model, optimizer=SGD, **arguments):
    def build():
        made = model()
        made.compile(optimizer(), **arguments)
        return made

    return build


@pytest.mark.parametrize("step", STEPS)
def test_steps(step):
    """29 rows in batches of 7 on 3 replicas: the tail is one row, and two replicas have none."""
    optimizer = keras.optimizers.Adam if step is Positions else SGD
    assert_equal(built(step, optimizer), fit(X, Y), 3, traced=step in (GradientsOfTheGraph, InABranch))


@pytest.mark.parametrize("step", [Queue, Late])
def test_eager_steps(step):
    assert_equal(built(step, run_eagerly=True), fit(X[:15], Y[:15], epochs=1), 2)


class Centered(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return self.scale * x - ops.mean(x, 0)


class Averaging(layers.Layer):
    """State, a loss and a metric of its own."""

    def build(self, shape):
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="average")
        self.seen = keras.metrics.Mean("seen")

    def call(self, x):
        self.average.assign(0.5 * self.average + ops.mean(x, 0))
        self.seen.update_state(ops.max(x))
        self.add_loss(0.1 * ops.mean((x - ops.mean(x, 0)) ** 2))
        return x + tf.stop_gradient(self.average.value)


class Noise(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(4)

    def call(self, x):
        return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seed_generator)


@pytest.mark.parametrize("layer", [Centered, Averaging, Noise, lambda: layers.Lambda(lambda x: x - ops.max(x, 0))])
def test_layers_in_the_step_of_keras(layer):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layer(), layers.BatchNormalization(), layers.Dense(1)])
        model.compile(SGD(), "mse", metrics=["mae"])
        return model

    assert_equal(build, fit(X, Y, validation_data=(X[:11], Y[:11])), 3, tol=5e-5)


def test_functions_between_layers_in_the_step_of_keras():
    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(4)(inputs)
        x = layers.BatchNormalization()(x - ops.mean(x, axis=0))
        model = keras.Model(inputs, layers.Dense(1)(ops.concatenate([x, x[:, :2]], 1)))
        model.compile(SGD(), "mse")
        return model

    assert_equal(build, fit(X, Y), 3)


def root_mean(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


def rows_and_all(y_true, y_pred):
    """A number for each row that all rows are part of."""
    return ops.mean((y_true - y_pred) ** 2, -1) + root_mean(y_true, y_pred)


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y_true - y_pred))))

    def result(self):
        return self.value + 0.0


@pytest.mark.parametrize("loss", [root_mean, rows_and_all])
def test_losses_and_metrics_of_the_batch(loss):
    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(1)])
        model.compile(SGD(), loss, metrics=[loss, Largest(), "mae"])
        return model

    assert_equal(build, fit(X, Y, validation_data=(X[:11], Y[:11])), 3)


def test_gathered_probabilities_keep_their_logits():
    """Where they are as good as 0 and 1, a crossentropy of them alone is another."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="sigmoid")])
        model.compile(SGD(), lambda y, p: ops.mean(keras.losses.binary_crossentropy(y, p)))
        return model

    assert_equal(build, fit(60 * X, np.repeat(Y > 0, 3, 1).astype("float32")), 3)


def test_loops_have_the_meaning_of_the_model():
    def by_loop(model):
        if not hasattr(model, "_keras_mirror_engine"):
            return [float(model.train_step((X[at : at + 7], Y[at : at + 7]))["mean"]) for at in (0, 7, 14, 21, 28)]
        strategy, data = model.distribute_strategy, tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)
        step = tf.function(lambda batch: strategy.run(model.train_step, (batch,)))
        for batch in strategy.experimental_distribute_dataset(data):
            logs = step(batch)
        return float(strategy.reduce("SUM", logs["mean"], None))

    one, many = built(Queue)(), km.mirrored_model(built(Queue), devices=3)
    many.set_weights(one.get_weights())
    assert by_loop(many) == pytest.approx(by_loop(one)[-1], rel=1e-5)
    for a, b in zip(one.get_weights(), many.get_weights()):
        np.testing.assert_allclose(a, b, atol=2e-5)


def contrast(model, data):
    """A contrastive step in the replica's view; each replica has the whole loss, of which there are as many as replicas."""
    x, _ = data
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            z = km.gather(model(x))
            loss = ops.mean(ops.logsumexp(z @ ops.transpose(z), 1)) / tf.distribute.get_replica_context().num_replicas_in_sync
        tf.stop_gradient(tape.gradient(loss, model.trainable_weights)[0])
        own = model(x)
        with tf.GradientTape() as inner:
            inner.watch(own)
            cubes = ops.sum(km.gather(own) ** 3) / tf.distribute.get_replica_context().num_replicas_in_sync
        total = loss + 0.001 * ops.sum(inner.gradient(cubes, own) ** 2)
    model.optimizer.apply(outer.gradient(total, model.trainable_weights), model.trainable_weights)
    return {"rows": tf.shape(z)[0]}


@pytest.mark.filterwarnings("ignore:KM201")
def test_gather_in_the_replicas_view():
    class Contrast(keras.Model):
        def train_step(self, data):
            return contrast(self, data)

    def build():
        inputs = keras.Input((6,))
        model = Contrast(inputs, layers.Dense(2)(layers.Dense(4, activation="tanh")(inputs)))
        model.compile(SGD())
        return model

    assert_equal(build, fit(X, Y), 3, view="replica", tol=5e-5)


def test_gather_needs_rows_and_changes_nothing_outside_of_a_step():
    assert km.gather([1, 2]).numpy().tolist() == [1, 2]
    with pytest.raises(
        ValueError, match=r"gather: a number has no rows to gather; give it a first dimension, as in value\[None\]\."
    ):
        km.gather(3.0)


def test_a_number_of_replicas_from_outside_is_told_by_its_line():
    class Divided(Stepping):
        def loss_of(self, x, y):
            return super().loss_of(x, y)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(x, y) / count
            return self.updated(tape, loss)

    model = km.mirrored_model(built(Divided), devices=2)
    count = model.distribute_strategy.num_replicas_in_sync
    with pytest.warns(
        km.MirrorWarning, match=r"KM210 .*train_step uses count, the number of replicas \(2\), read at .*test_whole_view"
    ):
        model.fit(X, Y, batch_size=7, verbose=0)


def test_a_batch_size_made_of_the_number_of_replicas_is_nothing_to_tell():
    model = km.mirrored_model(built(Stepping), devices=2)
    batch = 4 * model.distribute_strategy.num_replicas_in_sync
    model.fit(X, Y, batch_size=batch, verbose=0)


def test_check_proves_it():
    report = km.check(km.mirrored_model(built(Queue), devices=3), (X, Y))
    assert not report and not report.causes


def test_views_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="view must be 'global' or 'replica', and got 'local'"):
        km.mirrored_model(built(Stepping), view="local")


def test_nothing_stays_replaced():
    before = [keras.layers.Layer.__call__, tf.GradientTape.gradient, tf.gradients]
    km.mirrored_model(built(Stepping), devices=2).fit(X[:7], Y[:7], batch_size=7, verbose=0)
    assert [keras.layers.Layer.__call__, tf.GradientTape.gradient, tf.gradients] == before
