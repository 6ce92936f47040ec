"""What a `Throughput` costs: `fit` with it against `fit` without."""

import time

import keras_mirror as km
from benchmarks.models import BATCH, build, data
from benchmarks.pairing import interleave
from keras_mirror.report import Report


def compare(kind, steps, rounds):
    """One row for this kind of model."""
    x, y = data(kind, steps)

    def contender(callbacks):
        model = km.mirrored_model(build(kind), devices=km.virtual_cpus(2))

        def run():
            model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
            return steps

        return run

    contenders = {"without": contender([]), "with": contender([km.Throughput()])}
    wall = interleave(contenders, rounds, warm_up=2)
    processor = interleave(contenders, rounds, clock=time.process_time)
    return {
        "model": kind,
        "without, ms a step": wall.median("without") * 1e3,
        "with, ms a step": wall.median("with") * 1e3,
        "ratio": wall.ratio("with", "without"),
        "ratio of processor time": processor.ratio("with", "without"),
    }


def report(quick=False):
    """The whole comparison as a `Report`."""
    steps, rounds = (50, 5) if quick else (100, 15)
    rows = [compare(kind, steps, rounds) for kind in ("mlp", "cnn")]
    columns = ["model", "without, ms a step", "with, ms a step", "ratio", "ratio of processor time"]
    return Report(f"fit with a Throughput against fit without, two CPU replicas, batch {BATCH}", columns, rows)
