"""`check`: the gradients of one device come from a plain Keras model, the causes from faults made on purpose."""

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import internals
from keras_mirror.comparing import compare, factor_between
from keras_mirror.snapshot import copies_of

mirrored_model = functools.partial(km.mirrored_model, view="replica")  # what is told of code that has its replica's rows alone

pytestmark = pytest.mark.filterwarnings("ignore::keras_mirror.errors.MirrorWarning")
layers = keras.layers


@pytest.fixture
def batch():
    rng = np.random.RandomState(0)
    return rng.randn(8, 6).astype("float32"), rng.randn(8, 1).astype("float32")


def built_of(*made, **compile):
    def build():
        model = keras.Sequential([keras.Input((6,)), *[make() for make in made]])
        model.compile(**{"optimizer": "sgd", "loss": "mse", **compile})
        return model

    return build


def dense(units=4):
    return lambda: layers.Dense(units)


class OwnStep(keras.Model):
    """A train step as people write it; `loss` and `change` make the faults."""

    def __init__(self, loss, change=lambda gradients: gradients):
        super().__init__()
        self.hidden, self.out = layers.Dense(3), layers.Dense(1)
        self.own_loss, self.change = loss, change

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(self, y, self(x, training=True))
        gradients = self.change(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step(*arguments):
    def build():
        model = OwnStep(*arguments)
        model.compile("sgd", "mse")
        return model

    return build


def keras_loss(model, y, p):
    return model.compute_loss(y=y, y_pred=p)


def local_mean(model, y, p):
    return tf.reduce_mean(tf.square(y - p))


def kinds(report):
    return [cause.kind for cause in report.causes]


@pytest.mark.parametrize("rows", [8, 7, 1])
def test_gradients_of_one_device_and_their_split(batch, rows):
    build = built_of(lambda: layers.Dense(4, activation="tanh"), layers.BatchNormalization, dense(1))
    model = mirrored_model(build, devices=3)
    one = build()
    one.set_weights(model.get_weights())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(batch[1][:rows] - one(batch[0][:rows], training=True)))
    expected = tape.gradient(loss, one.trainable_variables)

    report = km.check(model, (batch[0][:rows], batch[1][:rows]))
    splits = {8: [(3, 3, 2), (2, 2, 2)], 7: [(3, 2, 2), (2, 2, 2)], 1: [(1, 0, 0)]}[rows]
    assert list(report.differences) == splits
    found = report.differences[splits[0]]
    for variable, gradient in zip(model.trainable_variables, expected):
        assert found[variable.path].size == pytest.approx(float(tf.reduce_max(tf.abs(gradient))), rel=1e-3, abs=1e-5)
        assert found[variable.path].off < 1e-4
    assert not report and report.causes == []


def test_report(batch):
    text = str(km.check(mirrored_model(built_of(dense(1)), devices=2), batch))
    lines = text.splitlines()
    assert lines[0] == "Check: all 2 gradients equal those of one device on 2 replicas"
    assert lines[1].split("   ")[0] == "variable" and "off by, 4 + 4 rows" in lines[1] and "off by, 4 + 3 rows" in lines[1]
    assert lines[3].endswith("equal")
    assert lines[-1] == "Each row of the batch of 8 reaches exactly one replica (4 + 4)."


def test_leaves_the_model_as_it_was(batch):
    build = built_of(dense(), layers.BatchNormalization, lambda: layers.Dropout(0.5), dense(1), optimizer="adam", metrics=["mae"])
    model = mirrored_model(build, devices=2)
    model.fit(*batch, verbose=0)
    parts = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [copy.numpy() for variable in parts for copy in copies_of(variable)]
    callables = {name: vars(layer).get("call") for name, layer in enumerate(model.layers)}
    rows = model.distribute_strategy.row_counters["train"].read().steps
    following = np.random.RandomState(0)
    np.random.set_state(following.get_state())
    tf.random.set_seed(5)
    assert kinds(km.check(model, batch)) == ["random layers"]
    after = [copy.numpy() for variable in parts for copy in copies_of(variable)]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert callables == {name: vars(layer).get("call") for name, layer in enumerate(model.layers)}
    assert model.distribute_strategy.row_counters["train"].read().steps == rows
    assert np.random.rand() == following.rand()
    drawn = tf.random.normal([3]).numpy()
    tf.random.set_seed(5)
    np.testing.assert_array_equal(drawn, tf.random.normal([3]).numpy())
    history = model.fit(*batch, verbose=0).history  # the optimizer still applies
    assert np.isfinite(history["loss"]).all() and int(model.optimizer.iterations.numpy()) == 2


def test_random_layers_are_by_design(batch):
    report = km.check(mirrored_model(built_of(dense(), lambda: layers.Dropout(0.5), dense(1)), devices=2), batch)
    (cause,) = report.causes
    assert cause.kind == "random layers" and cause.by_design and "dropout" in cause.evidence
    assert "with the same numbers for every row replicas equal one device" in cause.evidence
    assert not report and report.title.endswith("on 2 replicas, by design")


def test_other_faults_are_found_behind_random_layers(batch):
    build = built_of(dense(), lambda: layers.Dropout(0.5), layers.BatchNormalization, dense(1))
    report = km.check(mirrored_model(build, devices=2, batch_norm="local"), batch)
    assert kinds(report) == ["random layers", "local batch statistics"]
    assert "a difference stays" in report.causes[0].evidence
    assert "batch_normalization" in report.causes[1].evidence and "batch_norm='sync'" in report.causes[1].remedy


@pytest.mark.parametrize("replicas", [2, 4])
def test_local_mean_is_named_with_its_factor(batch, replicas):
    report = km.check(mirrored_model(own_step(local_mean), devices=replicas), batch)
    assert report and kinds(report) == ["local mean"]  # of which parts of unequal size are no second cause
    assert f"{replicas}.00 times those of one device" in report.causes[0].evidence
    assert "global_mean" in report.causes[0].remedy


def test_division_by_replicas_is_right_for_equal_parts_only(batch):
    def divided(model, y, p):
        return local_mean(model, y, p) / model.distribute_strategy.num_replicas_in_sync

    report = km.check(mirrored_model(own_step(divided), devices=2), batch)
    assert kinds(report) == ["unequal parts"]
    even, uneven = report.differences.values()
    assert all(each.equal for each in even.values()) and not all(each.equal for each in uneven.values())


def test_division_on_top_of_a_global_mean(batch):
    def twice(model, y, p):
        return km.global_mean(tf.square(y - p)) / model.distribute_strategy.num_replicas_in_sync

    report = km.check(mirrored_model(own_step(twice), devices=2), batch)
    assert kinds(report) == ["divided twice"] and "0.50 times" in report.causes[0].evidence


CLIPS = {
    "norm": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0],
    "value": lambda gradients: [tf.clip_by_value(gradient, -0.05, 0.05) for gradient in gradients],
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipping_by_hand(batch, clip):
    report = km.check(mirrored_model(own_step(keras_loss, clip), devices=2), batch)
    assert kinds(report) == ["clipping before the reduction"]
    assert "clips each replica's part" in report.causes[0].evidence and "clipnorm=" in report.causes[0].remedy


def test_the_optimizers_own_clipping_is_right(batch):
    build = built_of(dense(), dense(1), optimizer=keras.optimizers.SGD(0.1, clipnorm=0.01))
    assert not km.check(mirrored_model(build, devices=2), batch)


def test_a_sum_is_no_wrong_factor(batch):
    build = built_of(dense(), dense(1), loss=keras.losses.MeanSquaredError(reduction="sum"))
    assert not km.check(mirrored_model(build, devices=2), batch)


def test_state_that_nobody_synchronises(batch):
    class Seen(layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

        def call(self, x, training=None):
            if training:
                self.mean.assign(tf.reduce_mean(x, 0))
            return x

    report = km.check(mirrored_model(built_of(Seen, dense(1)), devices=2), batch)
    (cause,) = report.causes
    assert cause.kind == "unsynchronised state" and "seen/mean" in cause.evidence and "all_reduce" in cause.remedy
    at = int(np.argmax(np.abs(batch[0][:4].mean(0) - batch[0][4:7].mean(0))))  # 7 rows: the parts are 4 and 3
    for mean in (batch[0][:4, at], batch[0][4:7, at], batch[0][:7, at]):
        assert f"{mean.mean():.4g}" in cause.evidence


def test_layer_that_mixes_rows(batch):
    class Centered(layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, 0, keepdims=True)

    report = km.check(mirrored_model(built_of(dense(), Centered, layers.BatchNormalization, dense(1)), devices=2), batch)
    (cause,) = report.causes
    assert cause.kind == "local batch statistics" and "(Centered)" in cause.evidence and "batch_normalization" not in cause.evidence


def test_loss_that_mixes_rows(batch):
    def contrast(model, y, p):
        return km.global_mean(tf.reduce_mean(tf.square(p @ tf.transpose(p)), -1))

    report = km.check(mirrored_model(own_step(contrast), devices=2), batch)
    assert kinds(report) == ["rows are mixed"] and "gather its inputs" in report.causes[0].remedy


def over_replicas(value):
    context = tf.distribute.get_replica_context()
    return value if context is None else context.all_reduce("SUM", value)


class Centered(layers.Layer):
    """As the remedy for a layer that mixes rows has it."""

    def call(self, x):
        return x - over_replicas(km.global_mean(x[:, 0]))


class MeanSeen(layers.Layer):
    """As the remedy for state that nobody synchronises has it."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.seen.assign(over_replicas(km.global_mean(keras.ops.mean(x, -1))))
        return x


class RowsSeen(layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.seen.assign_add(over_replicas(tf.cast(tf.shape(x)[0], "float32")))
        return x


@pytest.mark.parametrize("cured", [Centered, MeanSeen, RowsSeen])
def test_what_a_step_reduces_itself_counts_once_on_one_device(batch, cured):
    build = built_of(cured, dense(1))
    assert km.check(mirrored_model(build, devices=3), batch).causes == []


def test_gradients_that_are_summed_twice(batch):
    """Variables with an aggregation are sums already, and the optimizer sums once more."""

    def accumulated(model):
        if not hasattr(model, "sums"):
            aggregation = tf.VariableAggregation.SUM
            model.sums = [
                tf.Variable(tf.zeros_like(v), trainable=False, aggregation=aggregation) for v in model.trainable_variables
            ]
        return model.sums

    class Accumulating(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables)):
                total.assign_add(gradient)
            self.optimizer.apply([total.read_value() for total in self.sums], self.trainable_variables)
            return {"loss": loss}

    def build():
        inputs = keras.Input((6,))
        model = Accumulating(inputs, layers.Dense(1)(inputs))
        accumulated(model)
        model.compile("sgd", "mse")
        return model

    report = km.check(mirrored_model(build, devices=3), batch)
    assert "gradients changed before the reduction" in kinds(report) and "gradient_accumulation_steps" in str(report)


def test_variables_of_tensorflow_are_state_too(batch):
    class Seen(layers.Layer):
        def build(self, shape):
            self.mean = tf.Variable(tf.zeros(shape[-1]), trainable=False)

        def call(self, x):
            self.mean.assign(tf.reduce_mean(x, 0))
            return x

    (cause,) = km.check(mirrored_model(built_of(Seen, dense(1)), devices=2), batch).causes
    assert cause.kind == "unsynchronised state" and "test_check.py:" in cause.evidence


@pytest.mark.parametrize(("value", "one", "many"), [(1, 1, 3), (2, 2, 6)])
def test_counter_of_which_there_is_one(batch, value, one, many):
    counter = tf.Variable(0, trainable=False)

    def counting(model, y, p):
        counter.assign_add(value)
        return keras_loss(model, y, p)

    (cause,) = km.check(mirrored_model(own_step(counting), devices=3), batch).causes
    assert cause.kind == "unsynchronised state" and f"holds replica 0 {many}, and {one} on one device" in cause.evidence
    assert counter.numpy() == 0


class Sampling(layers.Layer):
    """Noise without an argument `training`, as in variational autoencoders."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)


def test_noise_that_does_not_ask_whether_it_trains(batch):
    (cause,) = km.check(mirrored_model(built_of(dense(), Sampling, dense(1)), devices=3), batch).causes
    assert cause.kind == "random layers" and cause.by_design and "sampling" in cause.evidence


def test_noise_of_a_step(batch):
    """As in adversarial pairs: the model itself cannot be called with the batch."""

    class Generating(keras.Model):
        def __init__(self):
            super().__init__()
            self.made, self.seeds = layers.Dense(1), keras.random.SeedGenerator(3)
            self.made.build((None, 2))
            self.built = True

        def call(self, noise):
            return self.made(noise)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                noise = keras.random.normal((tf.shape(x)[0], 2), seed=self.seeds)
                loss = km.global_mean(tf.square(self(noise) - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def build():
        model = Generating()
        model.compile("sgd")
        return model

    report = km.check(mirrored_model(build, devices=3), batch)
    assert kinds(report) == ["random layers"] and not report and report.title.endswith("by design")


def test_random_numbers_from_a_fixed_seed(batch):
    def dropped(model, y, p):
        return keras_loss(model, y, tf.nn.experimental.stateless_dropout(p, 0.5, seed=[1, 2]))

    (cause,) = km.check(mirrored_model(own_step(dropped), devices=2), batch).causes
    assert cause.kind == "random layers" and cause.by_design


THRESHOLD = -1.5  # 3 of the first 4 rows are above, and all of the others


def test_denominators_of_each_replica(batch):
    """A masked mean by hand, and as the remedy has it."""

    def masked(model, y, p):
        weight = tf.cast(y > THRESHOLD, tf.float32)
        return tf.reduce_sum(weight * tf.square(y - p)) / tf.reduce_sum(weight)

    def cured(model, y, p):
        weight = tf.cast(y > THRESHOLD, tf.float32)
        return km.global_mean(weight * tf.square(y - p)) / over_replicas(km.global_mean(weight))

    report = km.check(mirrored_model(own_step(masked), devices=2), batch)
    assert kinds(report) == ["local denominator"]
    cause = report.causes[0]
    valid = [int((part > THRESHOLD).sum()) for part in (batch[1][:4], batch[1][4:])]
    shares = [n / sum(valid) for n in valid]
    assert valid[0] != valid[1] and f"times {shares[0]:.3g}, {shares[1]:.3g} they add up" in cause.evidence
    assert km.check(mirrored_model(own_step(cured), devices=2), batch).causes == []


@pytest.mark.parametrize("replicas", [2, 3])
def test_regularizers_of_each_replica(batch, replicas):
    def added(model, y, p):
        return km.global_mean(tf.square(y - p)) + sum(model.losses)

    def divided(model, y, p):
        return km.global_mean(tf.square(y - p)) + sum(model.losses) / model.distribute_strategy.num_replicas_in_sync

    def build(loss):
        model = OwnStep(loss)
        model.hidden = layers.Dense(3, kernel_regularizer="l2")
        model.compile("sgd")
        return model

    (cause,) = km.check(mirrored_model(lambda: build(added), devices=replicas), batch).causes
    assert cause.kind == "regularizers counted again" and f"off by {replicas - 1} times" in cause.evidence
    assert km.check(mirrored_model(lambda: build(divided), devices=replicas), batch).causes == []


def test_a_sum_beside_a_mean(batch):
    class Both(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(tf.square(y - y_pred)) + 0.1 * tf.reduce_sum(tf.square(y_pred))

    def build():
        inputs = keras.Input((6,))
        model = Both(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))
        model.compile("sgd")
        return model

    (cause,) = km.check(mirrored_model(build, devices=2), batch).causes
    assert cause.kind == "sum over rows" and "comes to 0.5 times what it should be" in cause.evidence
    assert "the rest, a mean, to what it should be" in cause.evidence


def test_python_values_in_a_step(batch):
    """NumPy's numbers and an attribute that counts are constants of a graph, another each time that it is traced."""

    class Noisy(layers.Layer):
        def call(self, x):
            return x * np.random.rand()

    class Counting(layers.Layer):
        calls = 0

        def call(self, x):
            self.calls += 1
            return x * self.calls

    for layer in (Noisy, Counting):
        (cause,) = km.check(mirrored_model(built_of(layer, dense(1)), devices=2), batch).causes
        assert cause.kind == "non-determinism" and "traced twice on one device" in cause.evidence


def test_python_in_a_step_of_a_loop(batch):
    """It is converted, as by the `tf.function` around a loop."""

    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.square(y - model(x, training=True)))
            if tf.shape(x)[0] > 1000:
                loss = loss * 2.0
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    assert km.check(mirrored_model(built_of(dense(1)), devices=2), batch, step=step).causes == []


def test_non_determinism(batch):
    def noisy(model, y, p):
        return model.compute_loss(y=y, y_pred=p + tf.random.normal(tf.shape(p)))

    report = km.check(mirrored_model(own_step(noisy), devices=2), batch)
    assert kinds(report) == ["non-determinism"] and "run twice on one device" in report.causes[0].evidence


def test_rows_that_get_lost(batch):
    class Careless(km.MirroredStrategy):
        def experimental_distribute_dataset(self, dataset, options=None):
            return super().experimental_distribute_dataset(dataset.map(lambda *each: tf.nest.map_structure(lambda t: t[:6], each)))

    report = km.check(mirrored_model(built_of(dense(1)), strategy=Careless(2)), batch)
    assert kinds(report) == ["rows"] and "of 8 rows, 2 reach no replica and 0 more than one, the first of them row 6" in str(report)


def test_step_of_a_loop_and_model_made_by_hand(batch):
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        model = built_of(dense(), dense(1))()

    @tf.function
    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.square(y - model(x, training=True)))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    assert not km.check(model, batch, step=step)
    # Keras alone divides each replica's mean by the number of replicas.
    assert kinds(km.check(model, batch)) == ["unequal parts"]


ALIKE = {"one": [dense(), layers.BatchNormalization], "two": [dense(), layers.BatchNormalization] * 2}


@pytest.mark.parametrize("made", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("spread", [0.0, 1e-6])
def test_gradients_that_cancel_are_equal_to_rounding(made, spread):
    """Normalised rows that are nearly alike are all rounding, which batch normalisation makes thirty times larger."""
    rng = np.random.RandomState(3)
    x = (np.repeat(rng.randn(1, 6), 13, 0) + spread * rng.randn(13, 6)).astype("float32")
    y = np.repeat(rng.randn(1, 1), 13, 0).astype("float32")
    report = km.check(mirrored_model(built_of(*made, dense(1)), devices=2), (x, y))
    assert not report and report.title.startswith("Check: all") and report.causes == []


def test_statistics_that_are_nothing_but_rounding(batch):
    """What a batch normalisation makes has a mean of zero, and the moving mean of the next is what is left of it."""
    normalizations = [layers.BatchNormalization, dense()] * 3
    assert km.check(mirrored_model(built_of(*normalizations), devices=3), batch).causes == []


def test_step_that_depends_on_the_last_bit_hides_nothing(batch):
    def chaotic(model, y, p):
        last_bits = tf.reduce_sum(tf.bitcast(model.hidden.kernel + 0.0, tf.int32)) % 2
        return local_mean(model, y, p) * (1 + 9 * tf.cast(last_bits, "float32"))

    report = km.check(mirrored_model(own_step(chaotic), devices=2), batch)
    assert kinds(report) == ["local mean"]
    assert "change by their last bit" in report.notes[-1]


def test_loss_that_depends_on_the_order_of_rows(batch):
    def ordered(model, y, p):
        rows = tf.cast(tf.range(tf.shape(p)[0]), "float32")
        return km.global_mean(rows * tf.squeeze(tf.square(y - p), -1))

    assert kinds(km.check(mirrored_model(own_step(ordered), devices=2), batch)) == ["rows are mixed"]


def test_data_of_other_kinds(batch):
    table = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")

    def build():
        inputs = {"word": keras.Input((1,), dtype="string", name="word"), "x": keras.Input((6,), name="x")}
        hidden = layers.Concatenate()([layers.Flatten()(table(inputs["word"])), inputs["x"]])
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
        return model

    x = {"word": np.array([["a"], ["b"]] * 4), "x": batch[0]}
    dataset = tf.data.Dataset.from_tensor_slices((x, batch[1], np.arange(8.0))).batch(5)
    report = km.check(mirrored_model(build, devices=2), dataset)
    assert not report and list(report.differences) == [(3, 2), (2, 2)]


def test_batch_that_was_distributed(batch):
    model = mirrored_model(built_of(dense(1)), devices=2)
    distributed = model.distribute_strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(batch).batch(5))
    assert list(km.check(model, next(iter(distributed))).differences) == [(3, 2), (2, 2)]


def test_half_precision_is_compared_as_such(batch):
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    assert not km.check(mirrored_model(built_of(lambda: layers.Dense(4, activation="tanh"), dense(1)), devices=2), batch)


def test_tools_work_inside_of_the_scope(batch):
    """Where a script has all of its lines: a distributed variable has no handle there."""
    strategy = km.MirroredStrategy(2)
    model = mirrored_model(built_of(dense(), layers.BatchNormalization, dense(1), metrics=["mae"]), strategy=strategy)
    with strategy.scope():
        assert not km.audit(model) and not km.check(model, batch) and not km.compare_replicas(model)
        assert km.origin(model.weights[0]).in_scope
        model.fit(*batch, verbose=0, callbacks=[km.ReplicaConsistency("epoch", "raise"), km.ScopeAuditor("raise")])


def test_one_replica(batch):
    report = km.check(mirrored_model(built_of(dense(1)), devices=["CPU:0"]), batch)
    assert not report and report.title == "Check: one replica is one device" and "devices=2" in report.notes[0]


def test_bad_input(batch, build_fn):
    model = mirrored_model(build_fn, devices=2)
    with pytest.raises(TypeError, match="expected a keras.Model, and got str"):
        km.check("model", batch)
    with pytest.raises(ValueError, match="not made in the scope.*mirrored_model"):
        km.check(build_fn(), batch)
    with pytest.raises(TypeError, match="step must be a function"):
        km.check(model, batch, step=3)
    for bad in [(batch[0], batch[1][:3]), (batch[0][:0], batch[1][:0]), 3.0]:
        with pytest.raises(ValueError, match="a batch needs rows"):
            km.check(model, bad)
    with pytest.raises(ValueError, match="the dataset is empty"):
        km.check(model, tf.data.Dataset.from_tensor_slices(batch).batch(2).take(0))
    with km.MirroredStrategy(2).scope():
        uncompiled = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="not compiled.*step="):
        km.check(uncompiled, batch)


def test_a_model_of_several_workers_is_refused(batch, build_fn):
    """A strategy of the class is enough: nothing is asked of the other workers, which would wait for an answer."""
    strategy = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    strategy._extended = types.SimpleNamespace(_num_replicas_in_sync=4, worker_devices=["CPU:0", "CPU:1"])
    model = build_fn()
    internals.set_training_strategy(model, strategy)
    with pytest.raises(ValueError, match=r"check: the model was made for several workers.*without TF_CONFIG.*devices=4\), batch\)"):
        km.check(model, batch)
    with pytest.raises(ValueError, match=r"audit_data: this process holds 2 of 4 replicas.*in one process.*audit_data\(data, 4\)"):
        km.audit_data(batch, model)


def test_arithmetic_of_the_comparison():
    one, many = {"a": np.array([1.0, -4.0]), "b": np.array([1e-9])}, {"a": np.array([2.0, -8.0]), "b": np.array([3e-9])}
    differences = compare(one, many, 1e-4)
    assert (differences["a"].size, differences["a"].off, differences["a"].equal) == (4.0, 4.0, False)
    assert differences["b"].equal  # rounding, next to a gradient of 4
    assert factor_between(one, many, 1e-4) == (pytest.approx(2.0), True)
    assert factor_between(one, {"a": np.array([4.0, -8.0])}, 1e-4)[1] is False
    assert np.isnan(compare(one, {"a": np.array([np.inf, 1.0])}, 1e-4)["a"].off)
    assert not compare({"a": np.zeros(1)}, {"c": np.ones(1)}, 1e-4)["c"].equal
