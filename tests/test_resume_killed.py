"""A real process, killed again and again, ends as one that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

KILLS = 3
SCRIPT = """
import os, sys
import keras, numpy as np
import keras_mirror as km

km.virtual_cpus(2)
keras.utils.set_random_seed(7)
directory, out = sys.argv[1:]

def build():
    layers = [keras.Input((6,)), keras.layers.Dense(64), keras.layers.Dropout(0.2), keras.layers.BatchNormalization()]
    model = keras.Sequential(layers + [keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model

class Told(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("step", flush=True)

rows = np.random.RandomState(0)
x, y = rows.randn(83, 6).astype("float32"), rows.randn(83, 1).astype("float32")
model = km.mirrored_model(build, devices=2)
callbacks = [Told(), keras.callbacks.CSVLogger(out + ".csv"), km.Resume(directory, save_freq=1)]
history = model.fit(x, y, batch_size=8, epochs=3, validation_data=(x[:9], y[:9]), verbose=0, callbacks=callbacks)
np.savez(out, *[v.numpy() for v in model.variables + model.optimizer.variables])
import json
json.dump(history.history, open(out + ".json", "w"))
"""  # 3 epochs of 11 steps, the last of 3 rows


def start(tmp_path, directory, out):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / directory), str(tmp_path / out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)


def run_until(process, steps, pause=0.0):
    """Kills the process some steps (and a moment more) from here; returns the steps it told of, and how it ended."""
    told = 0
    try:
        for _ in process.stdout:
            told += 1
            if told == steps:
                time.sleep(pause)
                process.send_signal(signal.SIGKILL)
        return told, process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def test_killed_at_random_moments(tmp_path):
    assert run_until(start(tmp_path, "alone", "right"), steps=None)[1] == 0
    choose = random.Random(5)
    for _ in range(KILLS):  # with a save after each step, most moments are in the middle of one
        steps = choose.randint(3, 9)
        told, code = run_until(start(tmp_path, "killed", "found"), steps, pause=choose.random() * 0.02)
        assert code == -signal.SIGKILL and told >= steps
    assert not (tmp_path / "found.npz").exists()
    told, code = run_until(start(tmp_path, "killed", "found"), steps=None)
    assert code == 0 and told < 33
    with np.load(tmp_path / "right.npz") as right, np.load(tmp_path / "found.npz") as found:
        assert len(right.files) > 15
        for name in right.files:
            assert right[name].tobytes() == found[name].tobytes(), name
    assert json.loads((tmp_path / "right.json").read_text()) == json.loads((tmp_path / "found.json").read_text())
    assert (tmp_path / "right.csv").read_text() == (tmp_path / "found.csv").read_text()
