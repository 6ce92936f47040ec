"""The learning rate of a larger batch, against arithmetic on paper."""

import keras
import numpy as np
import pytest

import keras_mirror as km
from keras_mirror.callbacks.scale_learning_rate import ScaledSchedule


@pytest.fixture
def model_of():
    """Builds a model with one weight whose gradient is always 1, so that a step moves it by the learning rate."""

    def make(rate, devices=2, wrap=lambda optimizer: optimizer):
        def build():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
            model.compile(wrap(keras.optimizers.SGD(rate)), loss=lambda y, y_pred: y_pred)
            return model

        return km.mirrored_model(build, devices=devices)

    return make


X = np.ones((8, 1), "float32")


def moved(model, epochs=1, verbose=0, **arguments):
    """By how much each step of batches of two moves the weight."""
    seen = [float(model.weights[0].numpy()[0, 0])]

    class Weights(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(model.weights[0].numpy()[0, 0]))

    scaling = km.scale_learning_rate(**arguments)
    model.fit(X, X, batch_size=2, epochs=epochs, verbose=verbose, shuffle=False, callbacks=[scaling, Weights()])
    return list(-np.diff(seen))


@pytest.mark.parametrize("rule, expected", [("linear", 0.4), ("sqrt", 0.2)])
def test_rules(model_of, rule, expected, capsys):
    model = model_of(0.1)
    assert moved(model, from_batch=256, to_batch=1024, rule=rule, verbose=2) == pytest.approx([expected] * 4)
    assert f"scale_learning_rate: 0.1 -> {expected} ({rule} rule, global batch 256 -> 1024)\n" in capsys.readouterr().out
    assert moved(model, from_batch=256, to_batch=1024, rule=rule) == pytest.approx([expected] * 4)  # a second fit: once only
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(expected)


def test_warm_up_is_linear_in_optimizer_steps_and_goes_on_in_the_next_fit(model_of, capsys, tmp_path):
    model = model_of(0.1)
    arguments = {"from_batch": 2, "to_batch": 10, "warmup_steps": 5}
    # 0.1 + 0.4 * t / 5 for t = 0 to 3, then t = 4, and 0.5 from t = 5 on
    assert moved(model, verbose=2, **arguments) == pytest.approx([0.1, 0.18, 0.26, 0.34], rel=1e-5)
    assert "0.1 -> 0.5 (linear rule, global batch 2 -> 10), from the one to the other over 5 steps" in capsys.readouterr().out
    assert moved(model, **arguments) == pytest.approx([0.42, 0.5, 0.5, 0.5], rel=1e-5)
    model.save(tmp_path / "model.keras")
    config = keras.saving.load_model(tmp_path / "model.keras", compile=False), model.optimizer.get_config()["learning_rate"]
    assert config[1]["class_name"] == "PolynomialDecay"


def test_a_model_that_was_trained_before_is_traced_again(model_of):
    model = model_of(0.1)
    model.fit(X, X, batch_size=2, epochs=2, verbose=0)  # from the second epoch on, many steps in one call
    assert moved(model, epochs=2, from_batch=2, to_batch=4, warmup_steps=12)[:4] == pytest.approx(
        [0.1 * (1 + t / 12) for t in (8, 9, 10, 11)], rel=1e-5
    )


def test_schedules_are_multiplied(model_of, capsys):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.01])  # steps 0 and 1, then 2 and on
    steps = moved(model_of(schedule), from_batch=4, to_batch=12, warmup_steps=2, verbose=2)
    assert steps == pytest.approx([0.1 * 1, 0.1 * 2, 0.01 * 3, 0.01 * 3], rel=1e-5)
    assert "1 -> 3 times the schedule PiecewiseConstantDecay" in capsys.readouterr().out
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(ScaledSchedule(schedule, 3.0, 2)))
    assert float(again(1)) == pytest.approx(0.2)


def test_loss_scaling_and_one_device_of_plain_keras(model_of):
    wrapped = model_of(0.1, wrap=lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0))
    assert moved(wrapped, from_batch=1, to_batch=3) == pytest.approx([0.3] * 4)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    plain.compile(keras.optimizers.SGD(0.1), loss=lambda y, y_pred: y_pred)
    assert moved(plain, from_batch=1, to_batch=2, warmup_steps=2) == pytest.approx([0.1, 0.15, 0.2, 0.2], rel=1e-5)


def killed_and_restored(model_of, directory, order, warmup_steps=0):
    """Steps of a run that is killed in its second epoch, and those of the same script, started again."""
    make = {
        "scaling": lambda: km.scale_learning_rate(2, 8, warmup_steps=warmup_steps),
        "backup": lambda: keras.callbacks.BackupAndRestore(directory),
    }

    class Steps(keras.callbacks.Callback):
        def __init__(self, most):
            super().__init__()
            self.weights, self.most = [], most

        def on_train_batch_begin(self, batch, logs=None):
            self.weights.append(float(self.model.weights[0].numpy()[0, 0]))
            if len(self.weights) == self.most:
                raise KeyboardInterrupt

    for most in (7, 0):
        model, steps = model_of(0.1), Steps(most)
        callbacks = [*[make[name]() for name in order], steps]
        arguments = {"batch_size": 2, "epochs": 3, "verbose": 0, "shuffle": False, "callbacks": callbacks}
        if most:
            with pytest.raises(KeyboardInterrupt):
                model.fit(X, X, **arguments)
        else:
            model.fit(X, X, **arguments)
    return list(-np.diff(steps.weights)), model


@pytest.mark.parametrize("order", [("scaling", "backup"), ("backup", "scaling")])
@pytest.mark.parametrize("warmup_steps", [0, 6])
def test_a_restored_backup_is_not_scaled_again(model_of, tmp_path, order, warmup_steps):
    steps, _ = killed_and_restored(model_of, tmp_path / "backup", order, warmup_steps=warmup_steps)
    # 0.1 times 4 linearly over 6 steps: epochs 2 and 3 are steps 4 to 11, and the last is not seen
    expected = [0.1 + 0.3 * min(t / 6, 1) for t in range(4, 11)] if warmup_steps else [0.4] * 7
    assert steps == pytest.approx(expected, rel=1e-5)


def test_plain_keras_has_to_put_it_before_the_backup(model_of, tmp_path):
    def plain(rate):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(rate), loss=lambda y, y_pred: y_pred)
        return model

    steps, model = killed_and_restored(plain, tmp_path / "right", ("scaling", "backup"))
    assert steps == pytest.approx([0.4] * 7)
    with pytest.raises(ValueError, match="a backup was restored before it.*put scale_learning_rate before BackupAndRestore"):
        killed_and_restored(plain, tmp_path / "wrong", ("backup", "scaling"))


def test_refusals(model_of):
    for arguments, text in [
        ({"from_batch": 0, "to_batch": 1}, "from_batch must be a positive number of rows, and got 0"),
        ({"from_batch": 1, "to_batch": 2.5}, "to_batch must be a positive number of rows, and got 2.5"),
        ({"from_batch": 1, "to_batch": 2, "rule": "cubic"}, "rule must be 'linear' or 'sqrt', and got 'cubic'"),
        ({"from_batch": 1, "to_batch": 2, "warmup_steps": -1}, "warmup_steps must be a number of steps, and got -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            km.scale_learning_rate(**arguments)
    model = model_of(0.1)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss")
    with pytest.raises(ValueError, match="ReduceLROnPlateau assigns learning rates.*warmup_steps=0"):
        model.fit(X, X, verbose=0, callbacks=[km.scale_learning_rate(1, 2, warmup_steps=3), plateau])
    model.fit(X, X, verbose=0, callbacks=[km.scale_learning_rate(1, 2), plateau])
    with pytest.raises(ValueError, match=r"scaled by \(1, 2, 'linear', 0\) before"):
        model.fit(X, X, verbose=0, callbacks=[km.scale_learning_rate(1, 4)])
