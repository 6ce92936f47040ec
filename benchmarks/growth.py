"""How the cost of a step and of the first step grows with replicas and variables."""

import pathlib
import time

import numpy as np
import tensorflow as tf

import keras_mirror as km
from benchmarks.models import BATCH, build, data, many_layers
from benchmarks.pairing import interleave
from keras_mirror.report import Report

REPLICAS = (1, 2, 4, 8)
VARIABLES = (10, 100, 1000)


def pair(build_fn, replicas):
    """The same model under plain MirroredStrategy and under this package."""
    devices = km.virtual_cpus(max(REPLICAS))[:replicas]
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())

    def plain():
        with strategy.scope():
            return build_fn()

    return {"plain": plain, "keras_mirror": lambda: km.mirrored_model(build_fn, devices=devices)}


def measure(build_fn, x, y, replicas, rounds):
    """Seconds to the first step and seconds per step, of both."""
    models, first = {}, {}
    for name, make in pair(build_fn, replicas).items():
        start = time.perf_counter()
        models[name] = make()
        models[name].fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        first[name] = time.perf_counter() - start
    steps = len(x) // BATCH

    def run(model):
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
        return steps

    timings = interleave({name: lambda model=model: run(model) for name, model in models.items()}, rounds)
    return {
        "plain, ms a step": timings.median("plain") * 1e3,
        "ours, ms a step": timings.median("keras_mirror") * 1e3,
        "plain, s to first": first["plain"],
        "ours, s to first": first["keras_mirror"],
    }


def report(quick=False):
    """Both tables as one `Report`."""
    rounds = 2 if quick else 5
    km.virtual_cpus(max(REPLICAS))
    x, y = data("mlp", 10 if quick else 50)
    rows = [{"replicas": n, "variables": 4, **measure(build("mlp"), x, y, n, rounds)} for n in REPLICAS]
    small = np.random.RandomState(0).rand(10 * BATCH, 8).astype("float32")
    counts = VARIABLES[:2] if quick else VARIABLES
    rows += [{"replicas": 2, "variables": n, **measure(many_layers(n), small, small, 2, rounds)} for n in counts]
    columns = ["replicas", "variables", "plain, ms a step", "ours, ms a step", "plain, s to first", "ours, s to first"]
    result = Report(f"Growth with replicas (MLP) and with variables (narrow layers), batch {BATCH}", columns, rows)
    path = plot(rows)
    if path:
        result.notes.append(f"Plotted in {path}.")
    return result


def plot(rows):
    """Draws the table into `docs/growth.png`; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), layout="constrained")
    parts = {"replicas": rows[: len(REPLICAS)], "variables": rows[len(REPLICAS) :]}
    for row, (quantity, label) in zip(axes, (("ms a step", "ms a step"), ("s to first", "seconds to the first step"))):
        for axis, (by, part) in zip(row, parts.items()):
            for name, text in (("plain", "plain MirroredStrategy"), ("ours", "keras_mirror")):
                axis.plot([r[by] for r in part], [r[f"{name}, {quantity}"] for r in part], marker="o", label=text)
            axis.set(xlabel=f"number of {by}", ylabel=label, xscale="log", yscale="log")
            axis.set_xticks([r[by] for r in part], [str(r[by]) for r in part])
            axis.minorticks_off()
    axes[0][0].legend()
    path = pathlib.Path(__file__).parent.parent / "docs" / "growth.png"
    figure.savefig(path, dpi=120)
    return path.relative_to(path.parent.parent)
