"""Runs that go on from a save end as the run that was never stopped: bit for bit on the same replicas."""

import itertools
import random
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror.saves import Saves
from keras_mirror.variables_state import give_back, values_of

ROWS, BATCH, EPOCHS = 13, 4, 2  # four steps an epoch, the last of one row
RANDOM = np.random.RandomState(3)
X = RANDOM.randn(ROWS, 6).astype("float32")
Y = (X @ RANDOM.randn(6, 1)).astype("float32")
XV, YV = X[:5] + 1, Y[:5]


def build():
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1, name="out")]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y))


class Shuffled(keras.utils.PyDataset):
    """As people write them: shuffles itself between epochs and adds noise, from NumPy's global random numbers."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(ROWS)

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows] + np.random.randn(len(rows), 6).astype("float32") * 0.1, Y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def endless():
    for step in itertools.count():
        rows = np.arange(step, step + BATCH) % ROWS
        yield X[rows] + np.float32(random.random() * 0.1), Y[rows]


KINDS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays, whole batches shuffled": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": "batch"},
    "tf.data, shuffled": lambda: {"x": batches().shuffle(9, seed=1).batch(BATCH)},
    "tf.data, unknown size": lambda: {"x": batches().filter(lambda x, y: True).shuffle(9, seed=1).batch(BATCH)},
    "tf.data, endless": lambda: {"x": batches().shuffle(9, seed=1).repeat().batch(BATCH), "steps_per_epoch": 3},
    "tf.data, passes in passes": lambda: {"x": batches().shuffle(9, seed=1).repeat(2).batch(BATCH).take(3)},
    "tf.data, random map": lambda: {"x": batches().batch(BATCH).map(lambda x, y: (x + tf.random.uniform([]), y))},
    "PyDataset": lambda: {"x": Shuffled(), "shuffle": True},
    "generator": lambda: {"x": endless(), "steps_per_epoch": 3},
}


EVERY_STEP = ("arrays", "tf.data, shuffled", "PyDataset")  # of the others some


class Copied(km.Resume):
    """Keeps every save, as a kill right after it would leave it."""

    def _save(self, epoch, step, logs):
        super()._save(epoch, step, logs)
        newest = next(iter(self._saves))
        shutil.copytree(newest, self._saves.directory.parent / f"after-{int(newest.name[5:]):02d}" / newest.name)


def fit(model, data, resume=None, callbacks=(), plateau=True, **arguments):
    """Trains as a script would that was just started; returns what it ends with."""
    arguments = {"epochs": EPOCHS, "verbose": 0, "shuffle": isinstance(data.get("x"), np.ndarray), **data, **arguments}
    arguments.setdefault("validation_data", (XV, YV))
    lowers = [keras.callbacks.ReduceLROnPlateau(monitor="mae", patience=1, min_delta=9.0, factor=0.5)] if plateau else []
    history = model.fit(callbacks=[*lowers, *callbacks, *([resume] if resume else [])], **arguments)
    return ending(model), history.history


def ending(model):
    return [entry.get("value", entry.get("copies")) for name, entry in values_of(model).items() if not name.startswith("metrics")]


def assert_equal_bits(right, found):
    assert len(right) == len(found) and len(right) > 10
    for a, b in zip(right, found):
        assert a.tobytes() == b.tobytes()


def mirrored(build_fn, **arguments):
    """A model on two replicas with all its variables, and their values."""
    model = km.mirrored_model(build_fn, devices=2)
    model.fit(X[:BATCH], Y[:BATCH], verbose=0, **arguments)
    return model, values_of(model)


def started(model, beginning):
    """As in a new process: first values, seeds of the script."""
    give_back(model, beginning)
    keras.utils.set_random_seed(7)


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_after_every_step(kind, tmp_path):
    model, beginning = mirrored(build)
    started(model, beginning)
    never_stopped, history = fit(model, KINDS[kind]())
    started(model, beginning)
    assert_equal_bits(never_stopped, fit(model, KINDS[kind](), Copied(tmp_path / "run", save_freq=1))[0])
    stops = sorted(tmp_path.glob("after-*"))
    assert len(stops) == (3 if "steps_per_epoch" in KINDS[kind]() or "passes" in kind else 4) * EPOCHS + EPOCHS
    for stop in stops if kind in EVERY_STEP else stops[1::3]:
        started(model, beginning)
        found, its_history = fit(model, KINDS[kind](), km.Resume(stop, save_freq=1))
        assert_equal_bits(never_stopped, found)
        assert its_history == history, stop


def test_arrays_shuffled_without_any_seed(tmp_path):
    """Keras shuffles them anew each epoch, as no seed was set; the orders are saved by their own seed."""
    tf.random.set_seed(None)
    model = km.mirrored_model(one_weight, devices=2)
    beginning = values_of(model)
    keep = {"x": np.arange(1.0, 14.0, dtype="float32")[:, None], "y": np.zeros((13, 1), "float32"), "batch_size": 4}
    arguments = {"epochs": 3, "verbose": 0, "shuffle": True}
    weights = Weights()
    model.fit(**keep, **arguments, callbacks=[weights, Copied(tmp_path / "run", save_freq=1)])
    orders = np.array(weights.seen).reshape(3, 4)
    assert len({tuple(order) for order in orders}) == 3  # another order each epoch
    assert orders.sum(1) == pytest.approx([91.0] * 3)  # 1 + 2 + ... + 13: each row once
    for stop in (2, 5, 6, 13):
        give_back(model, beginning)
        weights = Weights()
        model.fit(**keep, **arguments, callbacks=[weights, km.Resume(tmp_path / f"after-{stop:02d}", save_freq=1)])
        np.testing.assert_array_equal(weights.seen, orders.ravel()[-len(weights.seen) :])


def one_weight():
    """One weight whose gradient is the sum of the batch's rows."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), loss=Sum())
    return model


class Sum(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return y_pred[:, 0]


class Weights(keras.callbacks.Callback):
    """By how much each step moved the one weight."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self._before = self.model.weights[0].numpy()[0, 0]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self._before - self.model.weights[0].numpy()[0, 0])


def test_two_replicas_four_and_back(tmp_path):
    def plain():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.BatchNormalization(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    def train(replicas, **arguments):
        keras.utils.set_random_seed(7)
        model = km.mirrored_model(plain, devices=replicas)
        return fit(model, KINDS["tf.data, shuffled"](), **arguments)

    right, history = train(2)
    for replicas, stop in ((2, 2), (4, 6), (2, None)):
        try:
            found, its_history = train(replicas, resume=km.Resume(tmp_path, save_freq=1), callbacks=[StopAt(stop)])
        except Stop:
            continue
    for a, b in zip(right, found):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    for name, values in history.items():
        np.testing.assert_allclose(values, its_history[name], rtol=2e-5)


class Stop(Exception):
    pass


class StopAt(keras.callbacks.Callback):
    """Raises when optimizer step `step` begins, after it was trained and before it is saved."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if self._step is not None and int(self.model.optimizer.iterations.numpy()) == self._step:
            raise Stop


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


def test_random_numbers_without_a_seed_go_on(tmp_path):
    def noisy():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), Noise(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return model

    def train(*callbacks, resume=None):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        return fit(km.mirrored_model(noisy, devices=2), KINDS["arrays"](), resume, callbacks)

    right, history = train()
    with pytest.raises(Stop):
        train(StopAt(6), resume=km.Resume(tmp_path, save_freq=1))
    found, its_history = train(resume=km.Resume(tmp_path, save_freq=1))
    assert_equal_bits(right, found)
    assert its_history == history


def with_options():
    layers = keras.layers
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.Dropout(0.3), layers.Dense(1, dtype="float32")])
    options = {"gradient_accumulation_steps": 2, "use_ema": True, "ema_overwrite_frequency": 3, "weight_decay": 0.01}
    inner = keras.optimizers.AdamW(0.05, **options)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**16, dynamic_growth_steps=3), "mse")
    return model


def test_loss_scale_accumulation_and_averages(tmp_path):
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    model, beginning = mirrored(with_options, callbacks=[km.scale_learning_rate(4, 8, warmup_steps=5)])
    started(model, beginning)
    never_stopped, _ = fit(model, KINDS["arrays"](), None, [km.scale_learning_rate(4, 8, warmup_steps=5)], plateau=False)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert scale != 2.0**16
    started(model, beginning)
    stopping = [km.scale_learning_rate(4, 8, warmup_steps=5), Steps(6)]
    with pytest.raises(Stop):
        fit(model, KINDS["arrays"](), km.Resume(tmp_path, save_freq=1), stopping, plateau=False)
    keras.utils.set_random_seed(7)
    again = km.mirrored_model(with_options, devices=2)
    found, _ = fit(again, KINDS["arrays"](), km.Resume(tmp_path, save_freq=1), stopping[:1], plateau=False)
    assert_equal_bits(never_stopped, found)
    assert float(again.optimizer.dynamic_scale.numpy()) == scale


class Steps(keras.callbacks.Callback):
    """Raises in batch number `count`."""

    def __init__(self, count):
        super().__init__()
        self._count = count

    def on_train_batch_begin(self, batch, logs=None):
        self._count -= 1
        if not self._count:
            raise Stop


def test_many_steps_a_call_end_where_a_save_is_due(tmp_path):
    """`save_freq=2` and calls of several steps: as step by step, and it goes on from the middle of an epoch."""
    model, beginning = mirrored(build)
    data = {"x": batches().repeat(8).batch(BATCH)}  # 26 steps
    started(model, beginning)
    never_stopped, history = fit(model, data, epochs=3)
    started(model, beginning)
    resume = Copied(tmp_path / "run", save_freq=8)
    fit(model, data, resume, epochs=3)
    assert model.train_function.steps is None and model.train_function.seconds_per_step is not None
    stops = sorted(tmp_path.glob("after-*"))
    steps = [Saves(stop).read(next(iter(Saves(stop))))["step"] for stop in stops]
    assert steps == [8, 16, 24, 0] * 3
    for stop in (stops[1], stops[6]):
        started(model, beginning)
        found, its_history = fit(model, data, km.Resume(stop, save_freq=8), epochs=3)
        assert_equal_bits(never_stopped, found)
        assert its_history == history


def test_own_steps_per_execution(tmp_path):
    def several():
        model = build()
        model.steps_per_execution = 3
        return model

    model, beginning = mirrored(several)
    started(model, beginning)
    never_stopped, _ = fit(model, KINDS["arrays"](), epochs=2)
    started(model, beginning)
    fit(model, KINDS["arrays"](), Copied(tmp_path / "run", save_freq=1))
    for stop in sorted(tmp_path.glob("after-*"))[::2]:
        started(model, beginning)
        assert_equal_bits(never_stopped, fit(model, KINDS["arrays"](), km.Resume(stop, save_freq=1))[0])
