"""What a reduction costs between real processes of this machine, beside the arithmetic of `benchmarks.communication`.

`python -m benchmarks.links` starts 2, 3 and 4 workers, one after the other, each a process with one CPU device, that
reduce by the ring of TensorFlow over gRPC and the loopback interface, as a step of training does; and two CPU replicas
of one process, which reduce to one device. Takes about two minutes.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

import keras_mirror as km
from benchmarks.communication import MODELS, Link, ring_bytes, ring_seconds
from benchmarks.models import BATCH, build, data
from keras_mirror.optimizers import reduce_gradients
from keras_mirror.report import Report
from tests.multiworker.harness import addresses, environment, run_commands

SIZES = (4, 256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes
WORKERS = (2, 3, 4)
SMALL, LARGE = 4 << 10, 1 << 20  # up to the one, a reduction costs latency alone; from the other on, hardly any
AT_ONCE = 16 << 20  # bytes reduced in one graph call, so that Python's share of it is small
IDLE, FITS = 2.0, (20, 60)  # seconds of idling, and steps of two fits


# --- on a worker ---------------------------------------------------------------------------------


def loopback():
    """Bytes that all processes in this network have sent over its loopback interface."""
    line = next(line for line in pathlib.Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def reductions(strategy, size):
    """`reduce(times)`: so many steps, one after the other, that reduce one gradient of `size` bytes and do nothing else."""
    with strategy.scope():
        gradient = tf.Variable(tf.ones([size // 4]), trainable=False)

    def step(ran, _):
        total = strategy.run(lambda: reduce_gradients([gradient.read_value()])[0])
        return ran + 1, strategy.experimental_local_results(total)[0]

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int32)])
    def reduce(times):
        start = [tf.constant(0), tf.zeros([size // 4])]
        return tf.while_loop(lambda ran, _: ran < times, step, start, parallel_iterations=1)[1][:1]

    assert float(reduce(tf.constant(1))[0]) == strategy.num_replicas_in_sync
    return reduce


def measured(strategy, rounds):
    """Medians of seconds and of bytes on the loopback interface for each size; the rest of the interface idles."""
    reduce = {size: reductions(strategy, size) for size in SIZES}
    meet = tf.constant(1)
    reduce[SIZES[0]](meet)
    before = loopback()
    time.sleep(IDLE)
    idle = (loopback() - before) / IDLE
    seconds, sent = {size: [] for size in SIZES}, {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            times = max(1, min(100, AT_ONCE // size))
            reduce[SIZES[0]](meet).numpy()
            before, start = loopback(), time.perf_counter()
            reduce[size](tf.constant(times)).numpy()
            spent = time.perf_counter() - start
            seconds[size].append(spent / times)
            sent[size].append((loopback() - before - idle * spent) / times)
    return {
        "seconds": [statistics.median(each) for each in seconds.values()],
        "bytes": [statistics.median(each) for each in sent.values()],
        "idle": idle,
    }


def bytes_of_a_step(strategy):
    """Bytes on the loopback interface for one step of `fit`: what a longer fit sends more than a shorter one."""
    model = km.mirrored_model(build("mlp"), strategy=strategy)
    x, y = data("mlp", max(FITS))
    sent = []
    for steps in (FITS[0], *FITS):  # the first one traces
        before = loopback()
        model.fit(x[: steps * BATCH], y[: steps * BATCH], batch_size=BATCH, verbose=0)
        sent.append(loopback() - before)
    return (sent[2] - sent[1]) / (FITS[1] - FITS[0])


def work(file, rounds):
    """Measures, together with the others that `TF_CONFIG` names, or alone on two CPU replicas."""
    if "TF_CONFIG" not in os.environ:
        result = measured(km.MirroredStrategy(km.virtual_cpus(2)), rounds)
    else:
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        strategy = km.MultiWorkerMirroredStrategy(communication_options=options, timeout_seconds=120)
        result = {**measured(strategy, rounds), "fit": bytes_of_a_step(strategy)}
        if not strategy.is_chief:
            return
    pathlib.Path(file).write_text(json.dumps(result))


# --- around the workers ----------------------------------------------------------------------------


def results_of(workers, rounds):
    """What the chief of so many workers measured; of one, its two replicas."""
    with tempfile.TemporaryDirectory() as place:
        file = pathlib.Path(place) / "result.json"
        command = [sys.executable, "-m", "benchmarks.links", "--work", file, "--rounds", rounds]
        at = addresses(workers)
        environments = [environment()] if workers == 1 else [environment(at, index) for index in range(workers)]
        for status, output in run_commands([(command, each) for each in environments], timeout=300):
            if status != 0:
                raise RuntimeError(f"a worker ended with status {status}:\n{output[-3000:]}")
        return json.loads(file.read_text())


def link_of(result, workers):
    """The `Link` that fits best: latency from the small sizes, bandwidth from the slope over the large ones."""
    seconds = np.array(result["seconds"])
    small = [at for at, size in enumerate(SIZES) if size <= SMALL]
    large = [at for at, size in enumerate(SIZES) if size >= LARGE]
    latency = seconds[small].mean() / (2 * (workers - 1))
    sent = [ring_bytes(SIZES[at], workers) for at in large]
    slope = np.polyfit(sent, seconds[large], 1, w=1 / seconds[large])[0]  # so that each size counts by its relative error
    return Link(f"{workers} workers", latency, 1 / slope)


def rows_of(result, workers, link):
    """One row a size, and one for a step of `fit`."""
    for size, seconds, sent in zip(SIZES, result["seconds"], result["bytes"]):
        yield {
            "processes": workers,
            "reduced, bytes": size,
            "ms": 1e3 * seconds,
            "ms, by a and b of 2": 1e3 * ring_seconds(size, workers, link),
            "each sent, bytes": round(sent / workers),
            "by the formula": round(ring_bytes(size, workers)),
        }
    size = 4 * MODELS["MLP 784-128-10"]
    yield {
        "processes": workers,
        "reduced, bytes": f"{size} (a step of fit)",
        "each sent, bytes": round(result["fit"] / workers),
        "by the formula": round(ring_bytes(size, workers)),
    }


def report(quick=False):
    """Seconds and bytes of reductions of 4 bytes to 64 MiB."""
    rounds = 2 if quick else 7
    rows, notes, first = [], [], None
    alone = results_of(1, rounds)
    for size, seconds in zip(SIZES, alone["seconds"]):
        rows.append({"processes": "1 (2 replicas)", "reduced, bytes": size, "ms": 1e3 * seconds})
    for workers in WORKERS:
        result = results_of(workers, rounds)
        link = link_of(result, workers)
        first = first or link
        rows += rows_of(result, workers, first)
        notes.append(
            f"{link.name}: a = {1e6 * link.latency:.0f} µs, b = {link.bandwidth / 1e6:.0f} MB/s a worker, "
            f"{workers * link.bandwidth / 1e6:.0f} MB/s all together; idle, {result['idle']:.0f} bytes/s (subtracted)."
        )
    notes.append(f"Medians of {rounds} rounds; all workers share the {os.cpu_count()} cores of this machine.")
    columns = ["processes", "reduced, bytes", "ms", "ms, by a and b of 2", "each sent, bytes", "by the formula"]
    return Report("Reductions between processes of this machine, over gRPC and loopback", columns, rows, notes)


def main(arguments=None):
    """Prints the report; with `--work`, is one of the processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, for a rough look")
    parser.add_argument("--work", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.work, options.rounds)
    else:
        print(report(options.quick))


if __name__ == "__main__":
    main()
