"""`mirrored_model` itself: what it returns, refuses and makes again."""

import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning


def model_of(x=6):
    return keras.Sequential([keras.Input((x,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def compiled(**arguments):
    model = model_of()
    model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    return model


class NotOurs:
    pass


NotOurs.__module__ = "tf_keras.src.engine"


@pytest.mark.parametrize(
    ("arguments", "error", "fragments"),
    [
        (dict(build_fn=3), TypeError, ["build_fn must be a function", "int"]),
        (dict(build_fn=None), TypeError, ["build_fn must be a function", "None"]),
        (dict(build_fn=lambda: None), TypeError, ["must return a keras.Model", "return model"]),
        (dict(build_fn=lambda: keras.layers.Dense(1)), TypeError, ["must return a keras.Model", "Dense"]),
        (dict(build_fn=NotOurs), TypeError, ["tf_keras", "Keras 3", "import keras"]),
        (dict(build_fn=model_of), ValueError, ["not compiled", "compile=dict(optimizer="]),
        (dict(build_fn=compiled, compile=dict(loss="mse")), ValueError, ["compiled the model already"]),
        (dict(build_fn=model_of, compile="adam"), TypeError, ["compile must be a dict", "dict(optimizer='adam'"]),
        (dict(build_fn=compiled, devices=2, strategy="x"), ValueError, ["devices and strategy", "only one"]),
        (dict(build_fn=compiled, strategy="x"), TypeError, ["keras_mirror.MirroredStrategy", "str"]),
        (dict(build_fn=compiled, batch_norm="global"), ValueError, ["batch_norm", "'sync', 'local'", "'global'"]),
        (dict(build_fn=compiled, step=3), TypeError, ["step(model, data) -> logs"]),
        (dict(build_fn=lambda: compiled(jit_compile=True)), ValueError, ["jit_compile=True", "jit_compile=False"]),
        (dict(build_fn=model_of, compile=dict(loss="mse", jit_compile=True)), ValueError, ["jit_compile=False"]),
    ],
)
def test_bad_input_gets_one_sentence(arguments, error, fragments):
    with pytest.raises(error) as raised:
        km.mirrored_model(**arguments)
    for fragment in fragments:
        assert fragment in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_plain_strategy_is_refused_with_the_line_to_write():
    plain = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with pytest.raises(TypeError, match=r"write strategy=keras_mirror.MirroredStrategy\(\['CPU:0', 'CPU:1'\]\) instead"):
        km.mirrored_model(compiled, strategy=plain)
    with pytest.raises(TypeError, match="keras_mirror.MirroredStrategy"):
        km.mirrored_model(compiled, strategy=tf.distribute.OneDeviceStrategy("CPU:0"))


def test_the_same_model_twice_is_refused():
    model = km.mirrored_model(compiled, devices=2)
    with pytest.raises(ValueError, match="made before; build a new one"):
        km.mirrored_model(lambda: model, devices=2)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize("kind", [keras.Sequential, keras.Model, Own])
def test_it_returns_the_users_own_object(kind):
    made = []

    def build_fn():
        if kind is keras.Model:
            inputs = keras.Input((6,))
            made.append(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
        else:
            made.append(kind([keras.Input((6,)), keras.layers.Dense(1)]) if kind is keras.Sequential else kind())
        made[-1].compile("sgd", "mse")
        return made[-1]

    model = km.mirrored_model(build_fn, devices=2)
    assert model is made[0]
    assert type(model).__module__.split(".")[0] != "keras_mirror"


def test_a_saved_model_loads_without_this_package(tmp_path, data):
    x, y = data
    model = km.mirrored_model(lambda: compiled(optimizer="adam", metrics=["mae"]), devices=2)
    model.fit(x, y, batch_size=8, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    np.save(tmp_path / "x.npy", x)
    script = f"""
import sys
import keras, numpy as np
model = keras.models.load_model({str(path)!r})
np.save({str(tmp_path / "p.npy")!r}, model.predict(np.load({str(tmp_path / "x.npy")!r}), verbose=0))
assert int(model.optimizer.iterations.numpy()) == 4
model.fit(np.ones((4, 6)), np.ones((4, 1)), verbose=0)
assert not any(name.startswith("keras_mirror") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_cloning_gives_a_plain_model(data):
    x, _ = data
    model = km.mirrored_model(compiled, devices=2)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(clone.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert clone.distribute_strategy is not model.distribute_strategy


def test_what_was_made_outside_is_made_again_inside_and_said():
    optimizer = keras.optimizers.Adam(0.25)
    metric = keras.metrics.MeanAbsoluteError(name="mine")
    with pytest.warns(MirrorWarning) as seen:
        model = km.mirrored_model(lambda: compiled(optimizer=optimizer, metrics=[metric]), devices=2)
    texts = [str(w.message) for w in seen if w.category is MirrorWarning]
    assert any("optimizer 'adam'" in text and "test_model.py:" in text and "make it in build_fn" in text for text in texts)
    assert any("metric 'mine'" in text for text in texts)
    assert model.optimizer is not optimizer
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    assert not km.audit(model)


def test_an_object_that_cannot_be_made_again_is_an_error():
    class Odd(keras.metrics.Metric):
        def __init__(self, needed, name="odd"):
            super().__init__(name=name)
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(1.0)

        def result(self):
            return self.total

    odd = Odd(1)
    with pytest.raises(ValueError, match="metric 'odd'.*cannot be made again from its config.*make it in build_fn"):
        km.mirrored_model(lambda: compiled(metrics=[odd]), devices=2)


def test_weights_made_outside_are_said(data):
    layer = keras.layers.Dense(2)
    layer.build((None, 6))
    with pytest.warns(MirrorWarning, match="2 of the model's 4 weights.*'dense/kernel'.*test_model.py.*made outside of build_fn"):
        km.mirrored_model(
            lambda: keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)]),
            devices=2,
            compile=dict(optimizer="sgd", loss="mse"),
        )


def test_compiling_again_outside_of_the_scope_works(data):
    x, y = data
    one, many = compiled(), None
    start = one.get_weights()
    many = km.mirrored_model(compiled, devices=2)
    many.set_weights(start)
    for model in (one, many):
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    with pytest.warns(MirrorWarning, match="made again inside"):
        many.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mae")
    one.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mae")
    for model in (one, many):
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(one.get_weights(), many.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_models_share_a_strategy():
    strategy = km.MirroredStrategy(2)
    first, second = (km.mirrored_model(compiled, strategy=strategy) for _ in range(2))
    assert first.distribute_strategy is second.distribute_strategy is strategy


@pytest.mark.parametrize(
    ("feed", "fragment"),
    [
        (lambda: (np.zeros((0, 6)), np.zeros((0, 1))), "empty"),
        (lambda: (tf.data.Dataset.from_tensor_slices((np.ones((4, 6)), np.ones((4, 1)))).batch(2).take(0),), "empty"),
        (lambda: (tf.data.Dataset.from_tensor_slices((np.ones((4, 6)), np.ones((4, 1)))),), ".batch(n)"),
        (
            lambda: (
                tf.data.Dataset.from_tensor_slices((np.ones((4, 6)), np.ones((4, 1)))).batch(2).map(lambda x, y: (x[2:], y[2:])),
            ),
            "batch of 0 rows",
        ),
    ],
)
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_data_without_rows_is_refused(feed, fragment, method):
    model = km.mirrored_model(compiled, devices=2)
    before = model.get_weights()
    with pytest.raises(ValueError) as raised:
        getattr(model, method)(*feed(), verbose=0)
    assert fragment in str(raised.value)
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_a_dataset_that_turns_out_empty_is_refused():
    model = km.mirrored_model(compiled, devices=2)
    rows = tf.data.Dataset.from_tensor_slices((np.ones((4, 6)), np.ones((4, 1)))).filter(lambda x, y: False).batch(2)
    with pytest.raises(ValueError, match="yielded no batch"):
        model.fit(rows, verbose=0)


def test_step_replaces_the_train_step(data):
    x, y = data

    def step(model, batch):
        features, target = batch
        with tf.GradientTape() as tape:
            loss = km.global_mean(keras.ops.square(target - model(features, training=True)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss, "rows": tf.shape(features)[0]}

    one = compiled()
    many = km.mirrored_model(compiled, devices=4, step=step)
    many.set_weights(one.get_weights())
    history = many.fit(x, y, batch_size=7, shuffle=False, verbose=0).history
    one.fit(x[:28], y[:28], batch_size=7, shuffle=False, verbose=0)
    # The log of an own step is that of the last batch, which is the one row that is left, before its update.
    expected = float(((y[28:] - one.predict(x[28:], verbose=0)) ** 2).mean())
    np.testing.assert_allclose(history["loss"], [expected], rtol=1e-4)
    assert history["rows"] == [1.0]
    one.fit(x[28:], y[28:], batch_size=7, shuffle=False, verbose=0)
    for a, b in zip(one.get_weights(), many.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_hand_made_mean_is_flagged_once_with_the_remedy(data):
    x, y = data

    def step(model, batch):
        features, target = batch
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(target - model(features, training=True)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    model = km.mirrored_model(compiled, devices=2, step=step, view="replica")
    with pytest.warns(MirrorWarning, match=r"2\.00 times too large.*keras_mirror\.global_mean") as seen:
        model.fit(x, y, batch_size=7, epochs=2, verbose=0)
    assert len([w for w in seen if w.category is MirrorWarning]) == 1


def test_the_engine_shadows_only_names_that_the_model_has():
    from keras_mirror.engine import Engine

    model = compiled()
    for name in Engine.SHADOWS:
        assert isinstance(getattr(model, name), types.MethodType), name
