"""`scaling`: trains throwaway models on more and more replicas and compares how fast they go."""

import contextlib
import os
import time

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.callbacks import Throughput
from keras_mirror.hardware import checked, resolve
from keras_mirror.model import mirrored_model
from keras_mirror.snapshot import Snapshot
from keras_mirror.speedup import ScalingReport

SAME_CORES = (
    "The replicas are virtual CPUs that share the same {cores} cores, and one replica uses all of them already: these numbers say "
    "nothing about GPUs."
)


def scaling(
    build_fn,
    data,
    replicas=(1, 2, 4),
    *,
    batch_size=None,
    scale_batch=False,
    steps=20,
    repeats=5,
    devices=None,
    compile=None,
    step=None,
    batch_norm="sync",
    clock=time.perf_counter,
):
    """Measures how much faster training is on more replicas of this machine.

    Builds a model for each number of replicas and trains them in turn, over and over (1, 2, 4, 1,
    2, 4, ...), so that what else goes on in the machine meets all of them. The first turn is
    warm-up. The models are thrown away; random state and the names that Keras gives to layers are
    as before.

    Costs `repeats + 1` times `steps` steps of each model, and tracing each of them.

    Args:
        build_fn: As in `mirrored_model`. It is called once for each number of replicas.
        data: A batched `tf.data.Dataset` (its batches are global batches), a tuple of arrays
            `(x, y)` or `(x, y, sample_weight)` with `batch_size`, or a `keras.utils.PyDataset`. Repeated
            where it is too short, but for a `PyDataset`, of which an epoch has to hold `steps` batches.
        replicas: Increasing numbers of replicas; speed-up is counted against the first.
        batch_size: int, rows of a global batch, for arrays.
        scale_batch: False: the global batch stays the same, so the parts get smaller. True: the first
            of `replicas` trains on the batches of `data`, and the others on as many more rows as they
            have more replicas. Not for a `PyDataset`.
        steps: int, steps of each turn.
        repeats: int, turns that count.
        devices: List of device names to take the replicas from; None for GPUs, or for virtual CPUs
            where there is no GPU.
        compile: As in `mirrored_model`.
        step: As in `mirrored_model`.
        batch_norm: As in `mirrored_model`.
        clock: Returns seconds; for tests.

    Returns:
        A `Report` with the columns `replicas`, `global batch`, `rows per replica`, `examples/s` (the
        median), `least`, `most`, `speed-up` (with `from` and `to` over the turns) and `efficiency %`,
        speed-up divided by how many times more replicas there are. `.plot()` draws it.

    Raises:
        ValueError: If an argument is out of range, there are fewer devices than replicas, or the data
            have no batches.
        RuntimeError: If TensorFlow has started with fewer CPU devices than replicas.
        TypeError: If `data` is something else.

    Example:

    >>> print(km.scaling(build_fn, dataset, replicas=(1, 2)))
    """
    replicas = _checked_replicas(replicas)
    for name, number in (("steps", steps), ("repeats", repeats)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"scaling: {name} must be a positive whole number, and got {number!r}.")
    if scale_batch and isinstance(data, keras.utils.PyDataset):
        raise ValueError(
            "scaling: scale_batch makes larger batches, which a PyDataset cannot; pass a tf.data.Dataset or arrays, or "
            "scale_batch=False."
        )
    names = _devices(devices, replicas[-1])
    with _nothing_left_behind():
        feeds = {n: _Feed(data, batch_size, n // replicas[0] if scale_batch else 1, steps) for n in replicas}
        runs = {}
        for n in replicas:
            model = mirrored_model(build_fn, devices=names[:n], compile=compile, step=step, batch_norm=batch_norm)
            runs[n] = _Run(model, feeds[n], steps, clock)
        rates = {n: [] for n in replicas}
        for turn in range(repeats + 1):
            for n, run in runs.items():
                rate = run.rate()
                if turn:
                    rates[n].append(rate)
    shared = names[0].startswith("CPU") and len(replicas) > 1
    notes = [SAME_CORES.format(cores=os.cpu_count())] if shared else []
    return ScalingReport(rates, {n: feed.rows for n, feed in feeds.items()}, notes)


def _checked_replicas(replicas):
    replicas = list(replicas) if isinstance(replicas, (list, tuple, range)) else replicas
    whole = isinstance(replicas, list) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in replicas)
    if not whole or not replicas or sorted(set(replicas)) != replicas:
        raise ValueError(f"scaling: replicas must be increasing numbers of replicas such as (1, 2, 4), and got {replicas!r}.")
    return replicas


def _devices(devices, most):
    if devices is None:
        return resolve(most)
    names = checked(list(devices))
    if len(names) < most:
        raise ValueError(f"scaling: {most} replicas need {most} devices, and devices names {len(names)}: {', '.join(names)}.")
    return names


class _Feed:
    """The data of one number of replicas, without end.

    Attributes:
        data: What `fit` takes.
        rows: Rows of a global batch.
    """

    def __init__(self, data, batch_size, times, steps):
        if isinstance(data, keras.utils.PyDataset):
            self.data, self.rows = _of_py_dataset(data, steps)
            return
        if isinstance(data, (tuple, list)):
            if batch_size is None:
                raise ValueError("scaling: arrays have no batches; pass batch_size=, the rows of a global batch.")
            if not data:
                raise ValueError("scaling: the tuple of arrays is empty; pass (x, y) or (x, y, sample_weight).")
            arrays = tuple(each for each in keras.utils.unpack_x_y_sample_weight(tuple(data)) if each is not None)
            data = tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(batch_size)
            data = data.prefetch(tf.data.AUTOTUNE)
        elif not isinstance(data, tf.data.Dataset):
            raise TypeError(
                f"scaling: data must be a tf.data.Dataset of global batches, a tuple of arrays or a keras.utils.PyDataset, "
                f"and got {type(data).__name__}."
            )
        elif batch_size is not None:
            raise ValueError("scaling: the dataset has batches already; batch_size is for arrays.")
        first = next(iter(data), None)
        if first is None:
            raise ValueError("scaling: the dataset is empty: it yields no batch.")
        self.rows = _rows_of(first) * times
        self.data = data.repeat() if times == 1 else data.rebatch(self.rows).repeat()


def _of_py_dataset(data, steps):
    if data.num_batches is not None and data.num_batches < steps:
        raise ValueError(f"scaling: an epoch of the PyDataset has {data.num_batches} batches, fewer than steps={steps}.")
    return data, _rows_of(data[0])


def _rows_of(batch):
    return int(tf.shape(tf.nest.flatten(batch)[0])[0])


class _Run:
    """A throwaway model that is trained for some steps each time it is asked how fast it is."""

    def __init__(self, model, feed, steps, clock):
        self._model = model
        self._feed = feed
        self._steps = steps
        self._throughput = Throughput(warmup=1, log=False, clock=clock)

    def rate(self):
        """Examples per second; NaN in the first turn if it had a single step."""
        self._model.fit(
            self._feed.data,
            steps_per_epoch=self._steps,
            verbose=0,
            shuffle=False,
            callbacks=[self._throughput],
        )
        return self._throughput.spans[0].examples_per_second


@contextlib.contextmanager
def _nothing_left_behind():
    """Afterwards random numbers, and the names of layers, go on as if nothing had been built or trained."""
    snapshot, names = Snapshot(), internals.counters_of_names()
    try:
        yield
    finally:
        snapshot.restore()
        internals.set_counters_of_names(names)
