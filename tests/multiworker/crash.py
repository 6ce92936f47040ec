"""A training that saves after every step: `python crash.py FILE DIRECTORY [STEP WORKER]`; that worker is killed in that step."""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_mirror as km


class Killed(keras.callbacks.Callback):
    """As by the system, with no chance to say goodbye."""

    def __init__(self, step, worker):
        super().__init__()
        self.step = int(step)
        self.worker = int(worker)

    def on_train_batch_end(self, batch, logs=None):
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        if step == self.step and self.model.distribute_strategy.worker == self.worker:
            os.kill(os.getpid(), signal.SIGKILL)


def build_fn():
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def main(file, directory, *kill):
    keras.utils.set_random_seed(3)
    model = km.mirrored_model(build_fn)
    random = np.random.RandomState(5)
    x, y = random.randn(29, 6), random.randn(29, 1)
    callbacks = [km.Resume(directory, save_freq=1), *([Killed(*kill)] if kill else [])]
    history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    result = {"weights": [w.ravel().tolist() for w in model.get_weights()], "loss": history.history["loss"]}
    pathlib.Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
