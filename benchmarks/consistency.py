"""`fit` with `ReplicaConsistency` against `fit` without it."""

import keras

import keras_mirror as km
from benchmarks.models import BATCH, build, data
from benchmarks.pairing import interleave
from keras_mirror.report import Report


class EveryBatch(keras.callbacks.Callback):
    """Looks at every batch and does nothing: what a check every few batches is compared with, too."""

    async_safe = True
    every_batch = True


CONTENDERS = {
    "without": list,
    "without, Python after every batch": lambda: [EveryBatch()],
    'every="epoch"': lambda: [km.ReplicaConsistency()],
    "every=10": lambda: [km.ReplicaConsistency(10)],
    "every=1": lambda: [km.ReplicaConsistency(1)],
}


def compare(kind, steps, rounds):
    """One row per contender: the same model, trained by each in turn."""
    x, y = data(kind, steps)
    model = km.mirrored_model(build(kind), devices=km.virtual_cpus(2))

    def run(callbacks):
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        return 2 * steps

    timings = interleave({name: lambda make=make: run(make()) for name, make in CONTENDERS.items()}, rounds)
    return [
        {
            "model": kind,
            "checks": name,
            "ms a step": timings.median(name) * 1e3,
            "ratio": timings.ratio(name, "without"),
            "ratio to Python after every batch": timings.ratio(name, "without, Python after every batch"),
        }
        for name in CONTENDERS
    ]


def report(quick=False):
    """The whole comparison as a `Report`."""
    steps, rounds = (50, 3) if quick else (100, 7)
    rows = [row for kind in ("mlp", "cnn") for row in compare(kind, steps, rounds)]
    return Report(
        f"fit with ReplicaConsistency against fit without, two CPU replicas, batch {BATCH}, {steps} steps an epoch",
        ["model", "checks", "ms a step", "ratio", "ratio to Python after every batch"],
        rows,
        ["Fits of two epochs with Adam: a check before the first step and one at the end of each epoch, besides those asked for."],
    )
