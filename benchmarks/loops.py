"""`TrainingLoop.run` against the loops that people write, plain `fit`, and one device."""

import keras
import tensorflow as tf

import keras_mirror as km
from benchmarks.models import BATCH, build, data
from benchmarks.pairing import interleave
from keras_mirror.report import Report

# How many times faster at least ("at most" for one device: how many times its step time).
LIMITS = {
    ("mlp", "seed loop, eager"): "at least 20",
    ("mlp", "seed loop, tf.function"): "at least 2.5",
    ("cnn", "seed loop, tf.function"): "at least 1",
    ("mlp", "plain fit"): "at least 2",
    ("mlp", "one device, 50 steps a call"): "at most 2.0 times its step time",
}


def seed_loop(kind, compiled):
    """The loop of the TensorFlow guide: `strategy.run` and `strategy.reduce` in a plain Python loop."""
    strategy = tf.distribute.MirroredStrategy(km.virtual_cpus(2), cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = build(kind)()
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def train_step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_object(y, predictions), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(y, predictions)
        return loss

    def distributed_step(inputs):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)

    step = tf.function(distributed_step) if compiled else distributed_step

    def run(x, y):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).prefetch(tf.data.AUTOTUNE)
        for inputs in strategy.experimental_distribute_dataset(dataset):
            float(step(inputs))
        return len(x) // BATCH

    return run


def plain_fit(kind):
    """`fit` of plain Keras under MirroredStrategy."""
    strategy = tf.distribute.MirroredStrategy(km.virtual_cpus(2), cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = build(kind)()
    return _fit(model)


def one_device(kind):
    """`fit` of plain Keras on one device, 50 steps in each graph call."""
    return _fit(build(kind, 50)())


def whole_run(kind):
    """`TrainingLoop.run`."""
    loop = km.TrainingLoop(km.mirrored_model(build(kind), devices=km.virtual_cpus(2)))

    def run(x, y):
        loop.run((x, y), batch_size=BATCH, verbose=0)
        return len(x) // BATCH

    return run


def _fit(model):
    def run(x, y):
        model.fit(x, y, batch_size=BATCH, verbose=0)
        return len(x) // BATCH

    return run


def compare(kind, steps, rounds):
    """One row per opponent."""
    x, y = data(kind, steps)
    few = slice(0, 10 * BATCH)  # the eager loop is slow enough with ten steps
    runs = {"TrainingLoop.run": whole_run(kind), "plain fit": plain_fit(kind), "one device, 50 steps a call": one_device(kind)}
    runs["seed loop, tf.function"] = seed_loop(kind, True)
    contenders = {name: lambda run=run: run(x, y) for name, run in runs.items()}
    eager = seed_loop(kind, False)
    contenders["seed loop, eager"] = lambda: eager(x[few], y[few])
    timings = interleave(contenders, rounds, warm_up=2)
    ours = "TrainingLoop.run"
    rows = []
    for name in ("seed loop, eager", "seed loop, tf.function", "plain fit", "one device, 50 steps a call"):
        rows.append(
            {
                "model": kind,
                "against": name,
                "ms a step": timings.median(name) * 1e3,
                "ours, ms a step": timings.median(ours) * 1e3,
                "times faster": timings.ratio(name, ours),
                "times its step time": timings.ratio(ours, name),
                "asked for": LIMITS.get((kind, name), ""),
            }
        )
    return rows


def report(quick=False):
    """The whole comparison as a `Report`."""
    steps, rounds = (50, 3) if quick else (200, 7)
    rows = [row for kind in ("mlp", "cnn") for row in compare(kind, steps, rounds)]
    columns = ["model", "against", "ms a step", "ours, ms a step", "times faster", "times its step time", "asked for"]
    return Report(f"TrainingLoop.run against other loops, two CPU replicas, batch {BATCH}", columns, rows)
