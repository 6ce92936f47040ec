"""Callbacks that look after every n-th step: the right steps are seen, in calls of several steps."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import pacing


class Calls(keras.callbacks.Callback):
    """Sees every call, however many steps it runs: its first step, and the rows that were logged after it."""

    every_batch = False

    def on_train_begin(self, logs=None):
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[-1].append((self._first, logs.get("replica_0/examples")))


@pytest.fixture(autouse=True)
def as_many_steps_as_allowed(monkeypatch):
    """So that how many steps a call runs does not depend on how fast the machine is."""
    monkeypatch.setattr(pacing, "SECONDS_PER_CALL", 1e9)


def logged(calls):
    """The steps after which rows were logged, and these: of each call, the first step of the next is the number of steps done."""
    following = [first for first, _ in calls[1:]] + [14]
    return [(done, rows) for done, (_, rows) in zip(following, calls) if rows is not None]


def fit(model, data, *callbacks, **arguments):
    x, y = data
    return model.fit(x[:28], y[:28], batch_size=2, shuffle=False, verbose=0, callbacks=callbacks, **arguments)  # 14 steps


class EveryBatch(keras.callbacks.Callback):
    every_batch = True


@pytest.mark.parametrize("others", [[], [EveryBatch]], ids=["several steps a call", "every batch"])
def test_rows_are_logged_after_the_same_steps(data, build_fn, others):
    calls = Calls()
    fit(km.mirrored_model(build_fn, devices=2), data, km.ReplicaBatchLogger(4), calls, *[made() for made in others], epochs=3)
    assert [logged(epoch) for epoch in calls.epochs] == [[(4, 4.0), (8, 4.0), (12, 4.0)]] * 3
    assert [len(epoch) for epoch in calls.epochs] == ([14, 14, 14] if others else [14, 4, 4])


def test_two_callbacks_that_look_at_different_steps(data, build_fn):
    calls, consistency = Calls(), km.ReplicaConsistency(6)
    fit(km.mirrored_model(build_fn, devices=2), data, km.ReplicaBatchLogger(4), consistency, calls, epochs=2)
    assert [len(epoch) for epoch in calls.epochs] == [14, 7]
    assert [logged(epoch) for epoch in calls.epochs] == [[(4, 4.0), (8, 4.0), (12, 4.0)]] * 2
    assert [step for step, _ in consistency.report().checks] == [0, 6, 12, 14, 20, 26, 28]


def test_steps_per_execution_of_ones_own(data, build_fn):
    def build():
        model = build_fn()
        model.compile("sgd", "mse", steps_per_execution=5)
        return model

    calls = Calls()
    fit(km.mirrored_model(build, devices=2), data, km.ReplicaBatchLogger(4), calls)
    assert calls.epochs == [[(0, 5.0), (5, 5.0), (10, 4.0)]]  # a multiple of 4 lies in each


def test_data_that_lasts_for_several_epochs_is_not_left_early(build_fn):
    """7 batches in epochs of 3, two steps a call: the call that runs one step only counts as one."""
    rng = np.random.RandomState(1)
    x, y = rng.randn(14, 6).astype("float32"), rng.randn(14, 1).astype("float32")
    keep = {"batch_size": 2, "shuffle": False, "steps_per_epoch": 3, "epochs": 3, "verbose": 0}
    model, one = km.mirrored_model(build_fn, devices=2), build_fn()
    one.set_weights(model.get_weights())
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = one.fit(x, y, **keep).history
    calls = Calls()
    with pytest.warns(UserWarning, match="ran out of data"):
        found = model.fit(x, y, callbacks=[km.ReplicaBatchLogger(2), calls], **keep).history
    assert int(model.optimizer.iterations.numpy()) == 7
    assert [[first for first, _ in epoch] for epoch in calls.epochs] == [[0, 1, 2], [0, 2], [0]]
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


DATA = {
    "arrays": lambda x, y: ((x, y), dict(batch_size=4)),  # 8 steps, of which the last has one row
    "known size": lambda x, y: ((tf.data.Dataset.from_tensor_slices((x, y)).batch(4),), {}),
    "unknown size": lambda x, y: ((tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda x, y: True),), {}),
    "endless": lambda x, y: ((tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat(),), dict(steps_per_epoch=5)),
    "with validation": lambda x, y: ((x, y), dict(batch_size=4, validation_split=0.3)),
}


def accumulating():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("kind", DATA)
def test_many_steps_a_call_equal_one_device(data, kind):
    def run(model, kind):
        args, kwargs = DATA[kind](*data)
        return model, model.fit(*args, epochs=3, shuffle=False, verbose=0, **kwargs).history

    one, many = accumulating(), km.mirrored_model(accumulating, devices=3)
    many.set_weights(one.get_weights())
    # One device takes the attempt to get one more batch for a step, where it does not know how many there are.
    (one, right), (many, found) = run(one, kind.replace("unknown", "known")), run(many, kind)
    assert many.train_function.steps_of_last_call > 1
    for a, b in zip(one.get_weights(), many.get_weights()):
        np.testing.assert_allclose(b, a, atol=2e-5)
    assert set(found) == set(right)
    for name in right:
        np.testing.assert_allclose(found[name], right[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("kind", DATA)
def test_the_progress_bar_ends_with_the_steps_that_were_run(data, kind, capsys):
    args, kwargs = DATA[kind](*data)
    km.mirrored_model(accumulating, devices=2).fit(*args, epochs=3, verbose=1, **kwargs)
    steps = {"endless": 5, "with validation": 5}.get(kind, 8)  # 20 rows of 29 are left beside those for validation
    shown = [int(done) for done in re.findall(r"(\d+)/\d+\S* ", capsys.readouterr().out)]
    assert shown.count(steps) >= 3 and max(shown) == steps
