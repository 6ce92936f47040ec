"""What the lint finds before training: a small wrong input for each code, and a right one that stays silent."""

import functools
import linecache
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning, OutOfScopeError, errors

mirrored_model = functools.partial(km.mirrored_model, view="replica")  # what is told of code that has its replica's rows alone


def model_with(*layers, cls=keras.Sequential, **compiling):
    """A built, compiled model on two replicas with the given layers (functions that make them) before its head."""

    def build_fn():
        model = cls([keras.Input((6,)), *[make() for make in layers], keras.layers.Dense(1)])
        model.compile(**{"optimizer": "sgd", "loss": "mse", **compiling})
        return model

    return mirrored_model(build_fn, devices=2)


def train(model, x, y, **arguments):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **arguments)


def codes(report):
    return [(finding.code, finding.severity) for finding in report.findings]


# --- layers whose copies drift apart ---------------------------------------------------------


class Tracking(keras.layers.Layer):
    """Remembers the mean of its inputs, as each replica sees them."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.remember(inputs)
        return inputs

    def remember(self, inputs):
        self.seen.assign(keras.ops.mean(inputs))


class GlobalTracking(Tracking):
    def remember(self, inputs):
        mean, context = km.global_mean(keras.ops.mean(inputs, axis=-1)), tf.distribute.get_replica_context()
        self.seen.assign(mean if context is None else context.all_reduce("SUM", mean))


class MeanTracking(Tracking):
    def build(self, shape):
        super().build(shape)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="mean")


def test_a_layer_that_keeps_what_its_replica_saw():
    (finding,) = km.audit(model_with(Tracking)).findings
    assert (finding.code, finding.severity) == ("KM110", "error")
    assert (
        finding.path.endswith("/seen")
        and "only the first one is saved" in finding.effect
        and 'aggregation="mean"' in finding.remedy
    )
    assert not km.audit(model_with(GlobalTracking)).findings


@pytest.mark.parametrize(("cls", "rows"), [(GlobalTracking, 7), (MeanTracking, 8)])
def test_the_remedies_for_such_a_layer_are_right(data, cls, rows):
    x, y = data
    model = model_with(cls)
    train(model, x[:rows], y[:rows])
    for copy in model.layers[0].seen.value.values:
        np.testing.assert_allclose(copy.numpy(), x[:rows].mean(), atol=1e-6)
    assert not km.audit(model).findings


# --- accumulated gradients -------------------------------------------------------------------


class Accumulating(keras.Sequential):
    aggregation = tf.VariableAggregation.SUM

    def build(self, shape):
        super().build(shape)
        self.kept = tf.Variable(tf.zeros((6, 1)), trainable=False, aggregation=self.aggregation)
        self.rows = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)


class AccumulatingLocally(Accumulating):
    aggregation = tf.VariableAggregation.NONE


def test_gradients_accumulated_in_variables_that_are_summed():
    (finding,) = km.audit(model_with(cls=Accumulating)).findings
    assert (finding.code, finding.severity) == ("KM111", "warning")
    assert "a wrong factor" in finding.effect and "gradient_accumulation_steps" in finding.remedy
    assert not km.audit(model_with(cls=AccumulatingLocally)).findings


# --- what is made in the wrong place ---------------------------------------------------------


def test_a_seed_generator_made_outside():
    generator = keras.random.SeedGenerator(3)

    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = generator

        def call(self, inputs):
            return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.generator)

    (finding,) = km.audit(model_with(Noise)).findings
    assert (finding.code, finding.severity) == ("KM104", "error") and "test_lint.py" in str(finding)


def test_a_model_made_in_another_thread(build_fn):
    def build_in_thread():
        made = []
        thread = threading.Thread(target=lambda: made.append(build_fn()), name="builder")
        thread.start()
        thread.join()
        return made[0]

    with pytest.warns(MirrorWarning) as seen:
        report = km.audit(mirrored_model(build_in_thread, devices=2))
    assert any(str(w.message).startswith("KM101 mirrored_model: 4 of the model's 4 weights") for w in seen)
    found = [finding for finding in report.findings if finding.code == "KM109"]
    assert len(found) >= 4 and all(finding.severity == "error" for finding in found)
    assert found[0].origin.thread == "builder" and "in the thread that calls build_fn" in found[0].remedy


def test_what_was_made_again_is_a_note():
    optimizer = keras.optimizers.Adam(0.25)
    with pytest.warns(MirrorWarning, match="^KM108 mirrored_model: the optimizer 'adam'"):
        report = km.audit(model_with(optimizer=optimizer))
    assert codes(report) == [("KM108", "note")] and not report
    assert report.findings[0].origin.function == "test_what_was_made_again_is_a_note"
    assert "1 note" in report.title and "are in scope" in report.title


# --- settings --------------------------------------------------------------------------------


def test_jit_compile_in_a_scope_by_hand(build_fn):
    reports = {}
    for jit in (True, False):
        with km.MirroredStrategy(2).scope():
            model = build_fn()
            model.compile("sgd", "mse", jit_compile=jit)
        reports[jit] = km.audit(model)
    assert codes(reports[True]) == [("KM112", "error")] and "jit_compile=False" in str(reports[True])
    assert not reports[False].findings


def test_eager_runs_and_local_batch_normalization_are_notes():
    def build_fn():
        model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    assert codes(km.audit(mirrored_model(build_fn, devices=2, batch_norm="local"))) == [("KM113", "note"), ("KM114", "note")]
    assert codes(km.audit(mirrored_model(build_fn, devices=2))) == [("KM113", "note")]
    assert not km.audit(mirrored_model(lambda: build_plain(), devices=2, batch_norm="local")).findings


def build_plain():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


# --- own steps -------------------------------------------------------------------------------


class LocalMean(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.square(y - self(x, training=True))
            loss = tf.reduce_mean(error)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class GlobalMean(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Watching(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "error": tf.reduce_mean(tf.abs(data[1] - self(data[0])))}


def local_step(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.ops.mean((y - model(x)) ** 2) + 0.1
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return {"loss": loss}


def test_a_mean_over_own_rows_is_told_by_its_line():
    report = km.audit(model_with(cls=LocalMean))
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("KM201", "warning") and finding.path == "LocalMean.train_step"
    assert "2.00 times too large" in finding.effect and "global_mean" in finding.remedy
    with open(__file__) as source:
        assert source.read().splitlines()[finding.origin.line - 1].strip() == "loss = tf.reduce_mean(error)"
    assert "1 finding about the code" in report.title


def test_a_mean_in_a_step_function_too():
    model = mirrored_model(build_plain, devices=2, step=local_step)
    assert [(f.code, f.path) for f in km.audit(model).findings] == [("KM201", "local_step")]
    assert not km.audit(mirrored_model(build_plain, devices=1, step=local_step)).findings


@pytest.mark.parametrize("cls", [GlobalMean, Watching])
def test_steps_that_are_right_stay_silent(cls):
    assert not km.audit(model_with(cls=cls)).findings


class SummedLosses(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.reduce_mean(tf.square(y - self(x)), axis=-1)) + sum(self.losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def loss_with(*lines):
    """A class whose own step makes its loss with the given lines."""
    body = "".join(f"            {line}\n" for line in ("loss = km.global_mean(tf.square(y - self(x)))", *lines))
    name = f"<loss {lines}>"
    text = STEP.replace("            loss = {}\n", body).format()
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    return attempt(text, name)


@pytest.mark.parametrize(
    "lines",
    [
        ("for each in self.losses:", "    loss += each"),
        ("for each in self.losses:", "    loss = loss + 2.0 * each"),
        ("for number, each in enumerate(self.losses):", "    loss += each"),
        ("loss += sum(each for each in self.losses)",),
        ("mine = self.losses", "loss += tf.add_n(mine)"),
        ("loss = tf.add_n([loss, *self.losses])",),
        ("loss += keras.ops.sum(self.losses)",),
    ],
)
def test_every_way_to_add_up_the_regularisers_is_found(lines):
    assert codes(km.audit(model_with(regularized, cls=loss_with(*lines)))) == [("KM209", "warning")]


@pytest.mark.parametrize(
    "lines",
    [
        ("for each in self.losses:", "    loss += tf.nn.scale_regularization_loss(each)"),
        ("losses = [loss, loss]", "loss = sum(losses)"),
        ("for each in self.losses:", "    tf.debugging.check_numerics(each, 'loss')"),
    ],
)
def test_other_sums_and_loops_are_no_fault(lines):
    assert codes(km.audit(model_with(regularized, cls=loss_with(*lines)))) == []


class ScaledLosses(SummedLosses):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.reduce_mean(tf.square(y - self(x)), axis=-1))
            loss += tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def regularized():
    return keras.layers.Dense(2, kernel_regularizer="l2")


def test_a_sum_of_regularisers_counts_once_per_replica():
    (finding,) = km.audit(model_with(regularized, cls=SummedLosses)).findings
    assert (finding.code, finding.severity) == ("KM209", "warning") and "count 2 times" in finding.effect
    assert not km.audit(model_with(cls=SummedLosses)).findings, "there is nothing to add up"
    assert not km.audit(model_with(regularized, cls=ScaledLosses)).findings


def test_the_remedy_for_regularisers_is_right(data):
    x, y = data
    one = keras.Sequential([keras.Input((6,)), regularized(), keras.layers.Dense(1)])
    one.compile("sgd", "mse")
    many = model_with(regularized, cls=ScaledLosses)
    many.set_weights(one.get_weights())
    for model in (one, many):
        train(model, x, y)
    for a, b in zip(one.get_weights(), many.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)


# --- no false alarms -------------------------------------------------------------------------


def layer_zoo():
    """Layers of Keras with an input each; between them every kind of state that a layer of Keras has."""
    layers = keras.layers
    rows, image, words = (np.ones(shape, "float32") for shape in ((2, 6), (2, 8, 8, 3), (2, 5, 4)))
    on_rows = [
        layers.Dense(2), layers.BatchNormalization(), layers.LayerNormalization(), layers.UnitNormalization(), layers.Dropout(0.5),
        layers.GaussianDropout(0.5), layers.GaussianNoise(0.1), layers.AlphaDropout(0.5), layers.PReLU(), layers.Normalization(),
        layers.SpectralNormalization(layers.Dense(2)), layers.Rescaling(2.0), layers.ActivityRegularization(0.1),
        layers.EinsumDense("ab,bc->ac", output_shape=3), layers.Discretization(bin_boundaries=[0.0, 1.0]),
    ]  # fmt: skip
    on_images = [
        layers.Conv2D(2, 3), layers.DepthwiseConv2D(3), layers.SeparableConv2D(2, 3), layers.Conv2DTranspose(2, 3),
        layers.SpatialDropout2D(0.5), layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomContrast(0.1),
        layers.GroupNormalization(3), layers.MaxPooling2D(), layers.GlobalAveragePooling2D(),
    ]  # fmt: skip
    on_words = [
        layers.LSTM(3, dropout=0.1, recurrent_dropout=0.1), layers.GRU(3, stateful=True), layers.Bidirectional(layers.SimpleRNN(2)),
        layers.TimeDistributed(layers.Dense(2)), layers.Conv1D(2, 2), layers.Masking(),
    ]  # fmt: skip
    return [*[(each, rows) for each in on_rows], *[(each, image) for each in on_images], *[(each, words) for each in on_words]]


def metric_zoo():
    made = []
    for cls in (value for value in vars(keras.metrics).values() if isinstance(value, type)):
        for arguments in ({}, {"num_classes": 3}, {"num_classes": 3, "target_class_ids": [1]}, {"recall": 0.5}):
            try:
                made.append(cls(**arguments))
                break
            except TypeError:  # base classes, and those that need other arguments
                continue
    return made


def optimizer_zoo():
    special = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    kinds = [kind for name, kind in vars(keras.optimizers).items() if isinstance(kind, type) and name not in special]
    more = [keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2)]
    more += [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())]
    return [kind() for kind in kinds if issubclass(kind, keras.optimizers.Optimizer)] + more


class Zoo(keras.Model):
    def __init__(self):
        super().__init__()
        self.animals = layer_zoo()
        self.kept_layers = [layer for layer, _ in self.animals]
        self.kept_metrics = metric_zoo()
        for layer, inputs in self.animals:
            layer(inputs)
        for number, optimizer in enumerate(optimizer_zoo()):
            optimizer.build(self.kept_layers[0].trainable_variables)
            setattr(self, f"optimizer_{number}", optimizer)


def test_the_layers_metrics_and_optimizers_of_keras_are_clean():
    with km.MirroredStrategy(2).scope():
        zoo = Zoo()
    report = km.audit(zoo)
    assert len(zoo.kept_metrics) > 40 and len(zoo.kept_layers) > 30 and report.checked > 200
    assert report.findings == []


# --- reading the report, and silence ----------------------------------------------------------


COUNTER = tf.Variable(0, trainable=False)


class Outside(LocalMean):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counter = COUNTER


def test_errors_stand_first_and_each_remedy_once():
    report = km.audit(model_with(Tracking, Tracking, cls=Outside, run_eagerly=True))
    assert [severity for _, severity in codes(report)] == ["error", "error", "error", "warning", "note"]
    assert sorted(code for code, _ in codes(report)) == ["KM105", "KM110", "KM110", "KM113", "KM201"]
    text = str(report)
    assert report.title == f"Scope audit: 3 of {report.checked} variables need attention, 1 finding about the code, 1 note"
    assert text.count("call() changes it by the replica's own rows") == 1
    assert text.index("KM110") < text.index("KM201") < text.index("KM113")
    assert "<th>code</th><th>severity</th>" in report._repr_html_() and "KM105" in report._repr_html_()
    assert all({"what goes wrong", "write instead"} <= set(row) for row in report.rows)
    assert str(report.findings[0]).startswith(f"{report.findings[0].code} error: ")


def test_codes_can_be_left_out():
    model = model_with(Tracking, cls=LocalMean)
    assert codes(km.audit(model, ignore=("KM110",))) == [("KM201", "warning")]
    assert not km.audit(model, ignore=("KM110", "KM201")).findings
    with pytest.raises(ValueError, match="audit: ignore: there is no code 'KM999'; the codes are KM101, .*KM201"):
        km.audit(model, ignore=("KM999",))
    with pytest.raises(TypeError, match=r"write \('KM110',\)"):
        km.audit(model, ignore="KM110")
    with pytest.raises(ValueError, match="ScopeAuditor: ignore: there is no code"):
        km.ScopeAuditor(ignore=("KM1",))


def test_only_errors_raise_and_notes_say_nothing(data):
    model = model_with(Tracking, cls=LocalMean, run_eagerly=True)
    with pytest.raises(OutOfScopeError, match="^KM110 error: [^;]*$"):
        model.fit(*data, verbose=0, callbacks=[km.ScopeAuditor("raise")])
    auditor = km.ScopeAuditor("raise", ignore=("KM110",))
    with pytest.warns(MirrorWarning) as seen:
        model.fit(data[0][:4], data[1][:4], batch_size=4, verbose=0, callbacks=[auditor])
    texts = [str(warning.message) for warning in seen if warning.category is MirrorWarning]
    assert len([text for text in texts if text.startswith("KM201 ScopeAuditor: LocalMean.train_step")]) == 1
    assert not any("KM113" in text or "KM110" in text for text in texts)
    assert codes(auditor.report()) == [("KM201", "warning"), ("KM113", "note")]


@pytest.mark.parametrize("audited", [True, False])
def test_a_local_mean_is_said_once_by_the_name_of_the_step_at_the_line_that_trains(data, audited):
    model = model_with(cls=LocalMean)
    with pytest.warns(MirrorWarning) as seen:
        model.fit(*data, verbose=0, callbacks=[km.ScopeAuditor()] if audited else [])
        train(model, *data)
    (warning,) = [each for each in seen if each.category is MirrorWarning]
    text = "ScopeAuditor: LocalMean.train_step of model" if audited else "LocalMean.train_step makes its own loss"
    assert str(warning.message).startswith(f"KM201 {text}")
    assert linecache.getline(warning.filename, warning.lineno).strip().startswith("model.fit(*data, verbose=0, callbacks=")


@pytest.mark.parametrize("way", ["step", "model.train_step"])
def test_a_local_mean_of_a_loop_is_said_by_the_name_of_the_step(data, way):
    def local_mean():
        model = LocalMean([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd")
        return model

    def my_step(model, batch):
        return LocalMean.train_step(model, batch)

    model = mirrored_model(local_mean, devices=2, step=my_step if way == "step" else None)
    name = "my_step" if way == "step" else "LocalMean.train_step"
    with pytest.warns(MirrorWarning, match=f"^KM201 {name} makes its own loss"):
        for batch in model.distribute_strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data).batch(8)):
            model.distribute_strategy.run(model.train_step, args=(batch,))


def said(model, data):
    """Codes of what is warned of while `model` trains on `data`."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, *data)
    return [str(each.message)[:5] for each in seen if each.category is MirrorWarning]


def attempt(text, file="<a cell>"):
    """The class or function that a cell of a notebook with this source defines."""
    names = {"keras": keras, "tf": tf, "km": km, "__name__": __name__}
    exec(compile(text, file, "exec"), names)
    return names["made"]


STEP = """
class MyModel(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = {}
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {{"loss": loss}}
made = MyModel
"""
WRONG = (
    "tf.reduce_mean(tf.square(y - self(x)))",
    "tf.reduce_sum(tf.square(y - self(x))) / tf.cast(tf.shape(y)[0], tf.float32)",
    "keras.ops.mean(tf.square(y - self(x)))",
)


def test_another_wrong_step_of_the_same_name_is_told_again(data):
    attempts = [STEP.format(loss) for loss in WRONG]
    assert [said(model_with(cls=attempt(text)), data) for text in attempts] == [["KM201"]] * 3
    assert said(model_with(cls=attempt(attempts[0])), data) == [], "the cell was run again unchanged"
    assert said(model_with(cls=attempt(STEP.format("self.compute_loss(x, y, self(x))"))), data) == []


def test_the_functions_that_a_step_calls_tell_it_apart(data):
    def step_with(loss):
        def step(model, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                value = loss(y, model(x))
            model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            return {"loss": value}

        return mirrored_model(build_plain, devices=2, step=step)

    def first():
        return step_with(lambda y, p: tf.reduce_mean(tf.square(y - p)))

    assert said(first(), data) == ["KM201"] and said(first(), data) == []
    assert said(step_with(lambda y, p: tf.reduce_mean(tf.abs(y - p))), data) == ["KM201"]


def test_another_loss_of_the_same_name_is_told_again(data):
    losses = [f"def my_loss(y, p): return tf.reduce_{how}(tf.square(y - p))\nmade = my_loss" for how in ("mean", "sum", "sum")]
    assert [said(model_with(loss=attempt(text)), data) for text in losses] == [["KM204"], ["KM204"], []]


def test_another_compute_loss_of_a_class_of_the_same_name_is_told_again(data):
    text = """
class Mine(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return {}
made = Mine
"""
    losses = ("tf.reduce_mean(tf.square(y - y_pred))", "tf.reduce_sum(tf.square(y - y_pred))")
    attempts = [text.format(loss) for loss in (*losses, losses[1])]
    assert [said(model_with(cls=attempt(each)), data) for each in attempts] == [["KM203"], ["KM203"], []]


def test_another_step_of_a_loop_is_told_again(data):
    step = "def step(x, y): return tf.reduce_mean(x) {} tf.reduce_mean(y)\nmade = step"
    strategy = km.MirroredStrategy(2)
    for text in (step.format("+"), step.format("-")):
        with pytest.warns(MirrorWarning, match=r"^KM206 strategy.run\(step\)"):
            strategy.run(attempt(text), args=(tf.constant(data[0]), tf.constant(data[1])))
    strategy.run(attempt(text), args=(tf.constant(data[0]), tf.constant(data[1])))


def warned(code):
    errors.forget_warnings()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        errors.warn_once("key", "Something.", code=code)
    return [str(warning.message) for warning in seen]


def test_warnings_can_be_silenced_one_by_one():
    with km.silence("KM201", "KM205"):
        assert warned("KM201") == warned("KM205") == [] and warned("KM202") == ["KM202 Something."]
    assert warned("KM201") == ["KM201 Something."]
    quiet, more = km.silence("KM201"), km.silence("KM201")
    assert "silent: KM201" in repr(quiet)
    quiet.undo()
    quiet.undo()
    assert warned("KM201") == []
    more.undo()
    assert warned("KM201") == ["KM201 Something."] and "no longer silent" in repr(quiet)


def test_what_was_silent_is_said_afterwards():
    with km.silence("KM201"):
        errors.warn_once("cause", "Something.", code="KM201")
    with pytest.warns(MirrorWarning, match="Something"):
        errors.warn_once("cause", "Something.", code="KM201")


def test_silence_names_what_exists():
    with pytest.raises(ValueError, match="silence: there is no code 'KM000'; the codes are KM101, KM102"):
        km.silence("KM201", "KM000")
    with pytest.raises(ValueError, match="silence: name one code or more; the codes are KM101"):
        km.silence()
    assert warned("KM201") == ["KM201 Something."]
