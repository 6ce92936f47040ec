"""`fit` through `mirrored_model`, with both callbacks, against plain Keras under MirroredStrategy."""

import subprocess
import sys
import time

import tensorflow as tf

import keras_mirror as km
from benchmarks.models import BATCH, build, data
from benchmarks.pairing import interleave
from keras_mirror.report import Report

LIMITS = {"step time": 1.00, "time to first step": 1.20, "peak memory": 1.05}


def make(kind, impl):
    """A model of plain Keras under MirroredStrategy, or of this package, and its callbacks."""
    devices = km.virtual_cpus(2)
    if impl == "plain":
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
        with strategy.scope():
            return build(kind)(), []
    return km.mirrored_model(build(kind), devices=devices), [km.ReplicaBatchLogger(), km.ScopeAuditor()]


def first_step(kind, impl):
    """Seconds from nothing to the end of the first step."""
    x, y = data(kind, 1)
    start = time.perf_counter()
    model, callbacks = make(kind, impl)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    return time.perf_counter() - start


def peak_memory(kind, impl):
    """MiB at the peak of a process of its own that trains one epoch."""
    command = [sys.executable, "-m", "benchmarks.fit", kind, impl]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(answer.stdout.splitlines()[-1])


def compare(kind, steps, rounds):
    """One row per quantity for this kind of model."""
    firsts = {impl: [] for impl in ("plain", "mirror")}
    for _ in range(rounds):
        for impl in firsts:
            firsts[impl].append(first_step(kind, impl))
    x, y = data(kind, steps)

    def run(model, callbacks):
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
        return steps

    models = {impl: make(kind, impl) for impl in firsts}
    timings = interleave({impl: lambda pair=pair: run(*pair) for impl, pair in models.items()}, rounds)
    memory = {impl: min(peak_memory(kind, impl) for _ in range(2)) for impl in firsts}
    measured = {
        "step time": (timings.median("plain") * 1e3, timings.median("mirror") * 1e3, timings.ratio("mirror", "plain"), "ms"),
        "time to first step": (min(firsts["plain"]), min(firsts["mirror"]), min(firsts["mirror"]) / min(firsts["plain"]), "s"),
        "peak memory": (memory["plain"], memory["mirror"], memory["mirror"] / memory["plain"], "MiB"),
    }
    return [
        {"model": kind, "what": what, "unit": unit, "plain": plain, "keras_mirror": mirror, "ratio": ratio, "at most": LIMITS[what]}
        for what, (plain, mirror, ratio, unit) in measured.items()
    ]


def report(quick=False):
    """The whole comparison as a `Report`."""
    steps, rounds = (20, 3) if quick else (100, 7)
    rows = [row for kind in ("mlp", "cnn") for row in compare(kind, steps, rounds)]
    return Report(
        f"fit with both callbacks against plain Keras under tf.distribute.MirroredStrategy, two CPU replicas, batch {BATCH}",
        ["model", "what", "unit", "plain", "keras_mirror", "ratio", "at most"],
        rows,
        ["Step time: paired runs in one process. Peak memory: a process each. Time to first step: best of the rounds."],
    )


if __name__ == "__main__":
    kind, impl = sys.argv[1:]
    model, callbacks = make(kind, impl)
    x, y = data(kind, 50)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    # Not ru_maxrss: a child inherits the peak of the process that started it.
    with open("/proc/self/status") as status:
        print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
