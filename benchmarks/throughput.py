"""What a `Throughput` costs: `fit` with it against `fit` without."""

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

    timings = interleave({"without": contender([]), "with": contender([km.Throughput()])}, rounds, warm_up=2)
    return {
        "model": kind,
        "without, ms a step": timings.median("without") * 1e3,
        "with, ms a step": timings.median("with") * 1e3,
        "ratio": timings.ratio("with", "without"),
        "least": min(a / b for a, b in zip(timings.seconds["with"], timings.seconds["without"])),
        "most": max(a / b for a, b in zip(timings.seconds["with"], timings.seconds["without"])),
    }


def report(quick=False):
    """The whole comparison as a `Report`."""
    steps, rounds = (100, 5) if quick else (200, 15)
    rows = [compare(kind, steps, rounds) for kind in ("mlp", "cnn")]
    columns = ["model", "without, ms a step", "with, ms a step", "ratio", "least", "most"]
    return Report(f"fit with a Throughput against fit without, two CPU replicas, batch {BATCH}", columns, rows)
