"""A worker that fails: `python fail.py WHAT`, and what the others say of it."""

import os
import signal
import socket
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_mirror as km
from keras_mirror import cluster, internals


class Fails(keras.callbacks.Callback):
    """On worker 1, in the middle of the first epoch."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and self.model.distribute_strategy.cluster.me == 1:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(15)


def build_fn():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def leave(*args):
    """In place of TensorFlow's constructor, after the greeting."""
    os._exit(0)


def only_listen(*args):
    """The same, as long as the other one is there; accepts connections, as TensorFlow would, and never answers."""
    workers = cluster.from_environment()
    with socket.create_server(("127.0.0.1", int(workers.this.address.rpartition(":")[2]))):
        for there in (True, False):
            while cluster.answers(workers.workers[1 - workers.me]) != there:
                time.sleep(0.2)
    os._exit(0)


AFTER_THE_GREETING = {("left", 1): leave, ("silent", 0): only_listen}


def main(what):
    """Prints the error and how long it took."""
    start = time.monotonic()
    internals.collective_extended = AFTER_THE_GREETING.get((what, cluster.from_environment().me), internals.collective_extended)
    try:
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=5) if what == "stuck" else None
        model = km.mirrored_model(build_fn, strategy=km.MultiWorkerMirroredStrategy(communication_options=options))
        start = time.monotonic()
        model.fit(np.ones((60, 2)), np.ones((60, 1)), batch_size=10, verbose=0, callbacks=[Fails(what)])
    except Exception as error:
        print(f"{type(error).__name__} after {time.monotonic() - start:.0f} s: {error}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
