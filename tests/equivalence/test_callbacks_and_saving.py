"""Keras' own callbacks, and saving, do on replicas what they do on one device."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

from tests.equivalence.harness import XV, YV, X, Y, assert_equal, assert_same, mlp, run_both, trained

C = keras.callbacks


def test_stop_training():
    class Stop(C.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    assert_equal(mlp(), lambda model: trained(model, X, Y, callbacks=[Stop()], epochs=4), 3)


def test_initial_epoch():
    assert_equal(mlp(), lambda model: trained(model, X, Y, initial_epoch=2, epochs=4), 2)


CALLBACKS = {
    "learning rate": lambda: C.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "early stop": lambda: C.EarlyStopping("val_loss", patience=0, min_delta=10.0, restore_best_weights=True),
    "plateau": lambda: C.ReduceLROnPlateau("loss", patience=1, min_delta=10.0, factor=0.1),
    "nan": lambda: C.TerminateOnNaN(),
    "lambda": lambda: C.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own=epoch)),
    "swap": lambda: C.SwapEMAWeights(swap_on_epoch=True),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks(kind):
    build = mlp(lambda: keras.optimizers.Adam(0.01, use_ema=kind == "swap", ema_momentum=0.8), metrics=["mae"])
    assert_equal(build, lambda model: trained(model, X, Y, callbacks=[CALLBACKS[kind]()], validation_data=(XV, YV), epochs=4), 3)


def test_learning_rate_read_and_written_on_every_batch():
    class Warm(C.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            steps = float(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
            self.model.optimizer.learning_rate = 0.01 * (steps + 1)

    assert_equal(mlp(), lambda model: trained(model, X, Y, callbacks=[Warm()]), 3)


def test_weights_read_on_every_batch():
    class Norms(C.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append([np.linalg.norm(w) for w in self.model.get_weights()])

    def use(model):
        norms = Norms()
        return [trained(model, X, Y, callbacks=[norms]), norms.seen]

    assert_equal(mlp(), use, 2)


@pytest.mark.parametrize("weights_only", [True, False])
def test_model_checkpoint(tmp_path, weights_only):
    def use(model):
        name = "best.weights.h5" if weights_only else "best.keras"
        path = tmp_path / f"{type(model.distribute_strategy).__name__}{name}"
        logs = trained(
            model, X, Y, callbacks=[C.ModelCheckpoint(path, save_best_only=True, save_weights_only=weights_only, monitor="loss")]
        )
        if weights_only:
            model.load_weights(path)
            return [logs, model.get_weights()]
        return [logs, keras.models.load_model(path).get_weights()]

    assert_equal(mlp(lambda: keras.optimizers.Adam(0.01)), use, 3)


def test_backup_and_restore(tmp_path):
    class Die(C.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("killed")

    def use(model):
        folder = str(tmp_path / str(id(model)))
        with pytest.raises(RuntimeError, match="killed"):
            trained(model, X, Y, callbacks=[C.BackupAndRestore(folder), Die()], epochs=4)
        model.set_weights([w * 0 for w in model.get_weights()])
        return trained(model, X, Y, callbacks=[C.BackupAndRestore(folder)], epochs=4)

    assert_equal(mlp(lambda: keras.optimizers.Adam(0.01)), use, 3)


LOAD = """
import os, sys
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras, numpy as np
data = np.load(sys.argv[2])
model = keras.models.load_model(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("keras_mirror")]
before = model.predict(data["x"], verbose=0)
model.fit(data["x"], data["y"], batch_size=7, shuffle=False, verbose=0)
np.savez(sys.argv[3], before=before, after=model.predict(data["x"], verbose=0), steps=model.optimizer.iterations.numpy())
"""


def test_a_saved_file_goes_on_training_where_the_package_is_not_imported(tmp_path):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(5, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.0),
                layers.Dense(1),
            ]
        )
        # No Adam: before a batch normalisation the gradient of a bias is zero to rounding, and Adam enlarges the rounding.
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9, clipnorm=1.0), keras.losses.Huber(), metrics=["mae"])
        return model

    def use(model):
        trained(model, X, Y)
        before = model.predict(X, verbose=0)
        if type(model.distribute_strategy).__name__ == "MirroredStrategy":
            model.save(tmp_path / "model.keras")
        model.fit(X, Y, batch_size=7, shuffle=False, verbose=0)
        return {"before": before, "after": model.predict(X, verbose=0), "steps": model.optimizer.iterations.numpy()}

    runs = run_both(build, use, 3)
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    arguments = [sys.executable, "-c", LOAD, tmp_path / "model.keras", tmp_path / "data.npz", tmp_path / "result.npz"]
    finished = subprocess.run(arguments, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert_same(runs.of_one, dict(np.load(tmp_path / "result.npz")))


def test_clone_and_config():
    def use(model):
        trained(model, X, Y, epochs=1)
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.compile("sgd", "mse")
        again = type(model).from_config(model.get_config())
        again.set_weights(model.get_weights())
        return [clone.predict(X, verbose=0), again.predict(X, verbose=0), str(model.get_compile_config()), model.to_json()]

    runs = run_both(mlp(), use, 3)
    assert_same(runs.of_one, runs.of_many)


def test_load_weights_into_replicas(tmp_path):
    path = tmp_path / "some.weights.h5"
    mlp()().save_weights(path)

    def use(model):
        model.load_weights(path)
        return trained(model, X, Y)

    assert_equal(mlp(), use, 3)


def test_loading_a_model_to_train_it_on_replicas(tmp_path):
    model = mlp(lambda: keras.optimizers.Adam(0.01), metrics=["mae"])()
    trained(model, X, Y)
    model.save(tmp_path / "model.keras")
    assert_equal(lambda: keras.models.load_model(tmp_path / "model.keras"), lambda model: trained(model, X, Y), 3)
