"""`fit`, `evaluate`, `predict` and the methods for one batch, alone and one after another."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_mirror as km
from tests.equivalence.harness import WEIGHTS, XV, X, Y, assert_equal, fit, mlp, trained

DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)


class MeanOfPredictions(keras.Model):
    def predict_step(self, data):
        return {"rows": self(data, training=False), "mean": tf.reduce_mean(self(data, training=False))}


def test_a_predict_step_that_returns_a_number_for_a_batch():
    def build():
        inputs = keras.Input((6,))
        model = MeanOfPredictions(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensor_slices(X).batch(7)
    assert_equal(build, lambda model: [model.predict(data, verbose=0)], 1)
    with pytest.raises(ValueError, match="MeanOfPredictions.predict_step returns one number for a batch.*3 numbers.*numpy.mean"):
        km.mirrored_model(build, devices=3).predict(data, verbose=0)


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluate(replicas):
    def use(model):
        return [
            [
                model.evaluate(X, Y, batch_size=7, verbose=0, return_dict=return_dict),
                model.evaluate(X, Y, batch_size=64, verbose=0, sample_weight=WEIGHTS, return_dict=return_dict),
                model.evaluate(DATA, verbose=0, return_dict=return_dict),
                model.evaluate(X[:2], Y[:2], verbose=0, return_dict=return_dict),
                model.evaluate(DATA.repeat(), steps=3, verbose=0, return_dict=return_dict),
            ]
            for return_dict in (True, False)
        ]

    assert_equal(mlp(metrics=["mae"], weighted_metrics=["mse"]), use, replicas)


def two_outputs():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {"a": layers.Dense(1, name="a")(inputs), "b": layers.Dense(3, name="b")(inputs)})
    model.compile("sgd", {"a": "mse", "b": None})
    return model


@pytest.mark.parametrize("replicas", [1, 3])
def test_predict(replicas):
    def use(model):
        results = [model.predict(X, batch_size=size, verbose=0) for size in (1, 3, 7, 29, 64)]
        results += [model.predict(DATA.map(lambda x, y: x), verbose=0), model.predict(DATA, verbose=0)]
        results += [model.predict(DATA.map(lambda x, y: x).repeat(), steps=3, verbose=0), model.predict(X[:1], verbose=0)]
        return results

    assert_equal(mlp(), use, replicas)


@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=str)
def test_predict_with_options(options):
    assert_equal(mlp(**options), lambda model: [model.predict(X, batch_size=5, verbose=0), model.predict(DATA, verbose=0)], 3)


def test_predict_keeps_the_order_of_rows_and_names_of_outputs():
    def use(model):
        return [model.predict(X, batch_size=size, verbose=0) for size in (4, 7)]

    assert_equal(two_outputs, use, 3)


@pytest.mark.parametrize("build", [mlp(), two_outputs], ids=["one output", "two outputs"])
@pytest.mark.parametrize("first, then", [(1, 5), (8, 2)])
def test_predict_on_batch(build, first, then):
    assert_equal(build, lambda model: [model.predict_on_batch(X[:rows]) for rows in (first, then)], 3)


class CountsRows(keras.metrics.Metric):
    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.count


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_one_batch(replicas, eager):
    def use(model):
        first = model.train_on_batch(X[:8], Y[:8], return_dict=True)
        assert first["rows"] == 8
        tested = model.test_on_batch(X[:5], Y[:5], return_dict=True)
        weighted = model.train_on_batch(X[8:15], Y[8:15], sample_weight=WEIGHTS[8:15])
        model.reset_metrics()
        tail = model.train_on_batch(X[:1], Y[:1])
        return [first, tested, weighted, tail, model.test_on_batch(X, Y, sample_weight=WEIGHTS), model.evaluate(X, Y, verbose=0)]

    assert_equal(
        lambda: mlp(lambda: keras.optimizers.Adam(0.01), metrics=[CountsRows(), "mae"], run_eagerly=eager)(), use, replicas
    )


def test_one_batch_with_class_weight():
    build = mlp(loss="sparse_categorical_crossentropy", outputs=3, activation="softmax")
    labels = np.arange(7) % 3
    assert_equal(build, lambda model: model.train_on_batch(X[:7], labels, class_weight={0: 1.0, 1: 5.0, 2: 0.1}), 2)


def test_one_batch_before_fit():
    def use(model):
        first = model.train_on_batch(X[:7], Y[:7])
        return [first, trained(model, X, Y), model.train_on_batch(X[:7], Y[:7])]

    def build():
        model = keras.Sequential([layers.Dense(4), layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        return model

    assert_equal(build, use, 3)


def test_two_fits_in_a_row():
    assert_equal(
        mlp(lambda: keras.optimizers.Adam(0.01)),
        lambda model: [trained(model, X, Y), trained(model, X[:10], Y[:10], batch_size=4), trained(model, DATA)],
        3,
    )


def test_evaluate_and_predict_before_and_between_fits():
    def use(model):
        results = [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)]
        for _ in range(2):
            results += [
                trained(model, X, Y, epochs=1),
                model.evaluate(XV, Y[:11], batch_size=4, verbose=0),
                model.predict(XV, verbose=0),
            ]
        return results

    assert_equal(mlp(metrics=["mae"]), use, 3)


def test_fit_after_an_exception():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("enough")

    def use(model):
        with pytest.raises(RuntimeError, match="enough"):
            trained(model, X, Y, callbacks=[Stop()])
        return trained(model, X, Y)

    assert_equal(mlp(lambda: keras.optimizers.Adam(0.01)), use, 3)


def test_fit_after_an_exception_in_the_graph():
    def use(model):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            model.fit(X[:, :5], Y, verbose=0)
        return trained(model, X, Y)

    assert_equal(mlp(), use, 2)


def test_recompile_between_fits():
    def use(model):
        first = trained(model, X, Y)
        model.compile(keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
        return [first, trained(model, X, Y), model.evaluate(X, Y, verbose=0, return_dict=True)]

    assert_equal(mlp(metrics=["mae"]), use, 3)


@pytest.mark.parametrize("rows", [28, 29])
@pytest.mark.parametrize("steps", [3, 50])
def test_steps_per_execution(steps, rows):
    def use(model):
        logs = trained(model, X[:rows], Y[:rows], validation_data=(X[:11], Y[:11]))
        return [logs, model.evaluate(X, Y, batch_size=5, verbose=0), model.predict(X, batch_size=5, verbose=0)]

    assert_equal(mlp(metrics=["mae"], steps_per_execution=steps), use, 3)


def test_steps_per_execution_over_an_endless_dataset():
    assert_equal(mlp(steps_per_execution=3), lambda model: trained(model, DATA.repeat(), steps_per_epoch=6), 2)


@pytest.mark.parametrize("replicas", [1, 3])
def test_eager_steps(replicas):
    assert_equal(mlp(metrics=["mae"], run_eagerly=True), fit(X, Y, validation_data=(X[:11], Y[:11])), replicas)


def test_eager_steps_many_per_execution():
    assert_equal(mlp(metrics=["mae"], run_eagerly=True, steps_per_execution=2), fit(X, Y), 2)


def test_weights_got_and_set():
    def use(model):
        before = model.get_weights()
        trained(model, X, Y, epochs=1)
        after = model.get_weights()
        model.set_weights([w * 0.5 for w in before])
        model.layers[-1].kernel.assign(model.layers[-1].kernel * 2.0)
        return [before, after, trained(model, X, Y, epochs=1), model.get_weights()]

    assert_equal(mlp(), use, 3)


def test_called_directly():
    assert_equal(mlp(), lambda model: [trained(model, X, Y), model(X).numpy(), model(tf.constant(X[:3]), training=True).numpy()], 2)


def test_two_models_of_different_size_take_turns():
    models = {r: km.mirrored_model(mlp(), devices=[f"CPU:{i}" for i in range(r)]) for r in (2, 3)}
    models[1] = mlp()()
    for model in models.values():
        model.set_weights(models[1].get_weights())
    for _ in range(2):
        for model in models.values():
            trained(model, X, Y, epochs=1)
    for model in models.values():
        for right, found in zip(models[1].get_weights(), model.get_weights()):
            np.testing.assert_allclose(found, right, atol=2e-5)
