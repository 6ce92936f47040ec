"""Callbacks that look after every n-th step: the right steps are seen, in calls of several steps."""

import keras
import numpy as np
import pytest

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
