"""Variables that a layer or a step changes by the rows of its replica: found where they are, and right once cured."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km

mirrored_model = functools.partial(km.mirrored_model, view="replica")  # what is told of code that has its replica's rows alone

ROWS = 27


def model_with(*layers, cls=keras.Sequential, devices=3, step=None):
    def build_fn():
        model = cls([keras.Input((6,)), *[make() for make in layers], keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    return build_fn() if devices == 1 else mirrored_model(build_fn, devices=devices, step=step)


def train(model, data):
    x, y = data
    model.fit(x[:ROWS], y[:ROWS], batch_size=9, shuffle=False, verbose=0)
    return model


def codes(model):
    return [finding.code for finding in km.audit(model).findings]


# --- variables of the model -------------------------------------------------------------------


class Counting(keras.Sequential):
    """Counts rows, and steps, which every replica counts alike."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows, self.steps = self.make(), tf.Variable(0, trainable=False)

    def make(self):
        return tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        self.count(x)
        self.steps.assign_add(1)
        return super().train_step(data)

    def count(self, x):
        self.rows.assign_add(tf.shape(x)[0])


class Untold(Counting):
    def make(self):
        return tf.Variable(0)  # trainable, as nobody said otherwise; there is no gradient of an integer


class WithWeight(Counting):
    def make(self):
        return self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")

    def count(self, x):
        seen = keras.ops.cast(keras.ops.shape(x)[0], "float32")
        self.rows.assign(self.rows + seen)


class Inherited(WithWeight):
    def train_step(self, data):
        return super().train_step(data)


class Cured(Counting):
    def make(self):
        on_read = tf.VariableSynchronization.ON_READ
        return tf.Variable(0, trainable=False, aggregation=tf.VariableAggregation.SUM, synchronization=on_read)


class CuredWithMetric(Counting):
    def make(self):
        return keras.metrics.Sum(name="rows")

    def count(self, x):
        self.rows.update_state(tf.shape(x)[0])


@pytest.mark.parametrize("cls", [Counting, Untold, WithWeight, Inherited])
def test_a_counter_that_is_an_attribute_of_the_model(data, cls):
    assert int(train(model_with(cls=cls, devices=1), data).rows.numpy()) == ROWS
    model = model_with(cls=cls)
    (finding,) = km.audit(model).findings
    assert (finding.code, finding.severity) == ("KM106", "warning") and finding.owner == f"model {model.name}"
    assert finding.path == "attribute self.rows" or finding.path.endswith("/rows")
    assert "train_step() changes it by the replica's own rows" in finding.effect and "ON_READ" in finding.remedy
    train(model, data)
    assert int(model.rows.numpy()) == ROWS // 3 and int(model.steps.numpy()) == 3
    assert codes(model) == ["KM106"]


@pytest.mark.parametrize("cls", [Cured, CuredWithMetric])
def test_the_remedies_for_such_a_counter_are_right(data, cls):
    model = train(model_with(cls=cls), data)
    rows = model.rows.result() if cls is CuredWithMetric else model.rows
    assert int(rows.numpy()) == ROWS and codes(model) == []


def test_a_counter_of_the_model_in_a_step_function_and_in_a_loop(data):
    def step(model, batch):
        model.rows.assign_add(tf.shape(batch[0])[0])
        return keras.Model.train_step(model, batch)

    class Plain(Counting):
        train_step = keras.Model.train_step

    assert codes(model_with(cls=Plain, step=step)) == ["KM106"] and codes(model_with(cls=Plain)) == []
    model = model_with(cls=Plain)
    strategy = model.distribute_strategy

    @tf.function
    def run(batch):
        def one(batch):
            model.rows.assign_add(tf.shape(batch[0])[0])
            model.train_step(batch)

        strategy.run(one, args=(batch,))

    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data).batch(9)):
        run(batch)
    assert codes(model) == ["KM106"]


def test_a_step_without_source_is_told_of_once_it_is_traced(data):
    names = {"tf": tf, "Counting": Counting}
    text = "class Typed(Counting):\n def train_step(self, data):\n  self.rows.assign_add(tf.shape(data[0])[0]); return Counting"
    exec(f"{text}.__base__.train_step(self, data)", names)
    model = model_with(cls=names["Typed"])
    assert codes(model) == []
    train(model, data)
    assert codes(model) == ["KM106"]


# --- layers: what depends on rows, and what does not ------------------------------------------


class Layer(keras.layers.Layer):
    def build(self, shape):
        self.m = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.n = tf.Variable(0.0, trainable=False)
        self.ms = [self.add_weight(shape=(), initializer="zeros", trainable=False) for _ in range(2)]

    def call(self, x, training=None):
        self.see(x, training)
        return x


def all_mean(value):
    context, mean = tf.distribute.get_replica_context(), km.global_mean(value)
    if context is not None:
        mean = context.all_reduce("SUM", mean)
    return mean


def write(variable, value):
    variable.assign(value)


class Annealing(Layer):
    def see(self, x, training):
        inc = 1.0 if training else 0.0
        self.m.assign(self.m + inc)


class KnownDimensions(Layer):
    def see(self, x, training):
        features, rank = x.shape[-1], len(x.shape)
        _, width = keras.ops.shape(x)
        self.m.assign(float(features * rank))
        self.n.assign_add(tf.cast(width + tf.shape(x)[1] + x.shape[1:][0], "float32"))


class Reducing(Layer):
    def see(self, x, training):
        self.m.assign(0.9 * self.m + 0.1 * all_mean(x[:, 0]))
        local = keras.ops.mean(x)
        del local


class Asking(Layer):
    def see(self, x, training, mask=None, momentum=0.9):
        if mask is None and isinstance(x, tf.Tensor) and training:
            write(self.m, self.m * momentum)


class Mean(Layer):
    def see(self, x, training):
        if training:
            self.m.assign(0.9 * self.m + 0.1 * tf.reduce_mean(x))


class Alias(Layer):
    def see(self, x, training):
        v = self.m
        v.assign(tf.reduce_mean(x))


class OneOfSome(Layer):
    def see(self, x, training):
        self.ms[0].assign(tf.reduce_mean(x))


class AllOfSome(Layer):
    def see(self, x, training):
        for v, column in zip(self.ms, (x[:, 0], x[:, 1])):
            v.assign(keras.ops.mean(column))


class ByHelper(Layer):
    def see(self, x, training):
        write(self.m, keras.ops.mean(x, axis=None))


class OtherName(Layer):
    def call(me, x):  # noqa: N805
        me.m.assign(tf.reduce_mean(x))
        return x


class Kept(Layer):
    def see(self, x, training):
        self.last = tf.reduce_mean(x)
        self.remember()

    def remember(self):
        self.m.assign(self.last)


class Decided(Layer):
    def see(self, x, training):
        tf.cond(tf.reduce_max(x) > 1.0, lambda: self.n.assign_add(1.0), lambda: self.n + 0.0)


class InALambda(Layer):
    def see(self, x, training):
        tf.cond(tf.constant(True), lambda: self.n.assign(tf.reduce_mean(x)), lambda: self.n.assign(0.0))


class Rows(Layer):
    def see(self, x, training):
        self.n.assign_add(tf.cast(tf.shape(x)[0], "float32"))


class Length(Layer):
    def see(self, x, training):
        self.n.assign_add(float(x.shape[0] or 0))


@pytest.mark.parametrize("cls", [Annealing, KnownDimensions, Reducing, Asking])
def test_what_is_the_same_for_any_rows_is_no_fault(cls):
    assert codes(model_with(cls)) == []


FOUND = [(Mean, 1), (Alias, 1), (OneOfSome, 1), (AllOfSome, 2), (ByHelper, 1), (OtherName, 1), (Kept, 1), (Decided, 1)]


@pytest.mark.parametrize(("cls", "number"), [*FOUND, (InALambda, 1), (Rows, 1), (Length, 1)])
def test_what_depends_on_rows_is_found(cls, number):
    assert codes(model_with(cls)) == ["KM110"] * number


# --- an aggregation silences the audit exactly if it is right ---------------------------------


class State(keras.layers.Layer):
    """State after three batches of nine rows; `right` is arithmetic."""

    def __init__(self, aggregation):
        super().__init__()
        self.aggregation = aggregation

    def build(self, shape):
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation=self.aggregation)

    def call(self, x, training=None):
        if training:
            self.update(x, tf.distribute.get_replica_context())
        return x

    @staticmethod
    def right(x):
        return ROWS


def rows_of(x):
    return tf.cast(tf.shape(x)[0], "float32")


class AddsRows(State):
    def update(self, x, context):
        self.state.assign_add(rows_of(x))


class AddsToTheVariable(State):
    def update(self, x, context):
        self.state.value.assign_add(rows_of(x))


class WritesRows(State):
    def update(self, x, context):
        self.state.assign(self.state + rows_of(x))


class AddsAllRows(State):
    def update(self, x, context):
        rows = rows_of(x)
        self.state.assign_add(rows if context is None else context.all_reduce("SUM", rows))


class WritesSum(State):
    def update(self, x, context):
        self.state.assign(keras.ops.sum(x))

    @staticmethod
    def right(x):
        return x[18:27].sum()


class WritesMean(State):
    def update(self, x, context):
        self.state.assign(0.5 * self.state + 0.5 * keras.ops.mean(x))

    @staticmethod
    def right(x):
        return sum(0.5**power * x[start : start + 9].mean() for start, power in ((0, 3), (9, 2), (18, 1)))


class WritesGlobalMean(WritesMean):
    def update(self, x, context):
        mean = km.global_mean(keras.ops.mean(x, axis=-1))
        self.state.assign(0.5 * self.state + 0.5 * (mean if context is None else context.all_reduce("SUM", mean)))


@pytest.mark.parametrize("aggregation", ["none", "mean", "sum", "only_first_replica"])
@pytest.mark.parametrize(
    "cls",
    [AddsRows, AddsToTheVariable, WritesRows, AddsAllRows, WritesSum, WritesMean, WritesGlobalMean],
    ids=lambda cls: cls.__name__,
)
def test_the_audit_is_silent_exactly_where_the_aggregation_is_right(data, cls, aggregation):
    model = train(model_with(lambda: cls(aggregation)), data)
    is_right = np.isclose(model.layers[0].state.numpy(), cls.right(data[0]), rtol=1e-4)
    assert codes(model) == ([] if is_right else ["KM110"])


def test_the_remedy_tells_a_mean_from_a_sum():
    remedies = {
        cls: km.audit(model_with(lambda cls=cls: cls("none"))).findings[0].remedy for cls in (AddsRows, WritesSum, WritesMean)
    }
    assert remedies[AddsRows].startswith('Add what tf.distribute.get_replica_context().all_reduce("SUM", ...) returns')
    assert remedies[WritesSum].startswith("Write what") and "aggregation=" not in remedies[WritesSum]
    assert 'aggregation="mean"' in remedies[WritesMean] and "divide evenly" in remedies[WritesMean]


# --- names ------------------------------------------------------------------------------------


SEEN = tf.Variable(0, trainable=False)


def test_variables_without_a_name_are_told_apart_by_the_source(data):
    hits = tf.Variable(0, trainable=False)

    class Named(keras.Sequential):
        L = [tf.Variable(0.0), tf.Variable(0.0)]
        D = {"a": tf.Variable(0)}

        def train_step(self, data):
            Named.L[0].assign_add(1.0)
            for each in Named.L:
                each.assign_add(1.0)
            Named.D["a"].assign_add(1)
            hits.assign_add(1)
            SEEN.assign_add(1)
            return super().train_step(data)

    found = km.audit(train(model_with(cls=Named), data)).findings
    assert {finding.code for finding in found} == {"KM105"}
    assert {finding.path for finding in found} == {
        "attribute Named.L[0]", "attribute Named.L[1]", "attribute Named.D['a']", "closure variable hits", "global SEEN",
    }  # fmt: skip


def test_a_metric_from_outside_that_the_step_uses_is_told_to_be_one(data):
    error = keras.metrics.MeanAbsoluteError()

    class Watching(keras.Sequential):
        def train_step(self, data):
            error.update_state(data[1], self(data[0]))
            return super().train_step(data)

    def hidden():
        names = {"error": error, "keras": keras}
        exec(
            "def step(model, data):\n error.update_state(data[1], model(data[0]))\n return keras.Model.train_step(model, data)",
            names,
        )
        return names["step"]

    for model in (model_with(cls=Watching), model_with(step=hidden())):
        found = km.audit(train(model, data)).findings
        assert [(f.code, f.owner) for f in found] == [("KM103", "metric mean_absolute_error")] * 2
        assert found[0].remedy == "Make the metric inside build_fn"


def test_layers_and_optimizers_from_outside_that_the_step_uses_are_told_to_be_some(data):
    teacher, optimizer = keras.layers.Dense(1, name="teacher"), keras.optimizers.SGD(name="other")
    teacher.build((None, 6))

    class Distilling(keras.Sequential):
        def train_step(self, data):
            x, y = data
            return super().train_step((x, y + teacher(x) * tf.cast(optimizer.iterations, "float32")))

    found = km.audit(train(model_with(cls=Distilling), data)).findings
    assert {(f.code, f.owner) for f in found} == {("KM101", "layer teacher"), ("KM102", "optimizer other")}


# --- state of the step that is no count -------------------------------------------------------


class Averaging(keras.Sequential):
    aggregation, on_read = tf.VariableAggregation.MEAN, False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        when = tf.VariableSynchronization.ON_READ if self.on_read else tf.VariableSynchronization.AUTO
        self.mean = tf.Variable(0.0, trainable=False, aggregation=self.aggregation, synchronization=when)

    def train_step(self, data):
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(data[0]))
        return super().train_step(data)


class AveragingLocally(Averaging):
    aggregation = tf.VariableAggregation.NONE


class AveragingSums(Averaging):
    aggregation, on_read = tf.VariableAggregation.SUM, True


@pytest.mark.parametrize("cls", [Averaging, AveragingLocally, AveragingSums])
def test_a_mean_that_a_step_keeps(data, cls):
    model = train(model_with(cls=cls), data)
    is_right = np.isclose(model.mean.numpy(), WritesMean.right(data[0]), rtol=1e-4)
    assert is_right == (cls is Averaging) and codes(model) == ([] if is_right else ["KM106"])
    assert all('aggregation="mean"' in finding.remedy for finding in km.audit(model).findings)


def test_weights_and_gradients_that_a_step_keeps_are_no_fault(data):
    class Following(keras.Sequential):
        def build(self, shape):
            super().build(shape)
            self.slow = [tf.Variable(weight, trainable=False) for weight in self.get_weights()]
            self.kept = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.get_weights()]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            for kept, gradient in zip(self.kept, tape.gradient(loss, self.trainable_variables)):
                kept.assign_add(gradient)
            self.optimizer.apply([kept + 0.0 for kept in self.kept], self.trainable_variables)
            for slow, weight in zip(self.slow, self.trainable_variables):
                slow.assign(0.9 * slow + 0.1 * weight)
            for kept in self.kept:
                kept.assign(tf.zeros_like(kept))
            return {"loss": loss}

    model = model_with(lambda: keras.layers.Dense(2), cls=Following)
    assert codes(model) == [] and codes(train(model, data)) == []
