"""Code of the user's own in unusual places: late weights, overridden methods of optimizers, inner graphs."""

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_mirror as km
from tests.equivalence.harness import X, Y, assert_equal, fit, mlp, trained

optimizers = keras.optimizers


# --- weights made after mirrored_model ----------------------------------------------------------


def after(change, optimizer):
    """Trains, changes the model, compiles again, trains again."""

    def use(model):
        first = trained(model, X, Y, epochs=1)
        change(model)
        model.compile(optimizer(), "mse")
        return [first, trained(model, X, Y, epochs=1)]

    return use


def in_scope(change):
    def changed(model):
        if model.distribute_strategy is None:
            return change(model)
        with model.distribute_strategy.scope():
            return change(model)

    return changed


CHANGES = {
    "lora": lambda model: model.layers[0].enable_lora(2),
    "another layer": lambda model: model.add(layers.Dense(2)),
}


@pytest.mark.parametrize("wrap", [lambda change: change, in_scope], ids=["anywhere", "in scope"])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_made_later(change, wrap):
    assert_equal(mlp(), after(wrap(CHANGES[change]), lambda: optimizers.Adam(0.01)), 3)


def test_weights_made_later_with_sgd():
    assert_equal(mlp(), after(CHANGES["lora"], lambda: optimizers.SGD(0.05)), 2)


def add_a_built_layer(model):
    late = layers.Dense(1, name="late")
    late.build((None, 1))
    model.add(late)


def with_a_stranger():
    model = km.mirrored_model(mlp(), devices=2)
    add_a_built_layer(model)
    return model


def test_a_layer_built_outside_is_told_at_compile():
    model = with_a_stranger()
    with pytest.warns(km.MirrorWarning, match=r"KM101.*'late/kernel' \(.*test_own_code.py.* exist on one device only; .*scope\(\)"):
        model.compile("sgd", "mse")


def test_a_layer_built_outside_is_told_at_evaluate():
    model = with_a_stranger()
    with pytest.warns(km.MirrorWarning, match=r"KM101.*'late/kernel'"):
        model.evaluate(X, Y, verbose=0)


def test_an_optimizer_that_cannot_keep_anything_for_a_weight_says_which():
    model = with_a_stranger()
    with pytest.raises(ValueError, match=r"the weight 'late/kernel' \(.*test_own_code.py.*with model.distribute_strategy.scope"):
        model.compile("adam", "mse")


def test_a_layer_built_later_as_the_sentence_says():
    assert_equal(mlp(), after(in_scope(add_a_built_layer), lambda: optimizers.Adam(0.01)), 3)


# --- optimizers whose methods are overridden ----------------------------------------------------


class SignFirst(optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(ops.sign(gradient), variable) for gradient, variable in grads_and_vars])


class SignThere(optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([ops.sign(gradient) for gradient in grads], trainable_variables)


@pytest.mark.parametrize("cls", [SignFirst, SignThere])
def test_gradients_are_added_up_before_an_override_sees_them(cls):
    assert_equal(mlp(lambda: cls(0.01)), fit(X, Y), 3)


def test_check_sees_an_overridden_apply_gradients():
    result = km.check(km.mirrored_model(mlp(lambda: SignFirst(0.01)), devices=2), (X[:5], Y[:5]))
    assert not result, str(result)


# --- tf.function in the step --------------------------------------------------------------------


class InGraph(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()
        self.dense = layers.Dense(3)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)
        self.built = True

    @tf.function
    def call(self, x, training=False):
        return self.dense(self.norm(x, training=training))


def test_batch_normalisation_in_a_tf_function():
    def build():
        model = keras.Sequential([keras.Input((6,)), InGraph(), layers.Dense(1)])
        model.compile(optimizers.SGD(0.05), "mse")
        return model

    assert_equal(build, lambda model: [trained(model, X, Y), model.predict(X, verbose=0)], 3, tol=1e-4)


class StepInGraph(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    @tf.function
    def train_step(self, data):
        x, y = data
        if tf.reduce_sum(tf.zeros(1)) > 1:  # control flow that AutoGraph converts
            x = x * 2
        return super().train_step((x, y))

    @tf.function
    def test_step(self, data):
        return super().test_step(data)


def test_a_train_step_that_is_a_tf_function():
    def build():
        model = StepInGraph()
        model.compile(optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    assert_equal(build, lambda model: trained(model, X, Y, validation_data=(X, Y)), 3)


# --- refused in one sentence --------------------------------------------------------------------


def test_clear_session_in_build_fn():
    def build():
        keras.utils.clear_session()
        return mlp()()

    with pytest.raises(RuntimeError, match=r"^keras.utils.clear_session\(\) was called inside the scope .* call it before"):
        km.mirrored_model(build, devices=2)
    assert_equal(mlp(), fit(X, Y, epochs=1), 2)


def sequential(*parts):
    def build():
        model = keras.Sequential([*(part() for part in parts), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    return build


def test_a_fixed_batch_size():
    """Only a hint: Keras takes batches of other sizes, and replicas parts."""
    build = sequential(lambda: keras.Input(batch_shape=(6, 6)))
    assert_equal(build, fit(X[:12], Y[:12], batch_size=6), 2)


def test_a_stateful_layer():
    build = sequential(lambda: keras.Input(batch_shape=(6, 3, 2)), lambda: layers.LSTM(2, stateful=True, name="memory"))
    with pytest.raises(ValueError, match="the layer 'memory' is stateful.*stateful=False"):
        km.mirrored_model(build, devices=2).predict(X[:6].reshape(6, 3, 2), batch_size=6, verbose=0)
