"""Reads data as `fit` feeds it to the replicas, and remembers which row went where."""

import dataclasses
import inspect
import itertools

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.distribution import NO_ROWS, split_dataset
from keras_mirror.fingerprints import row_hashes
from keras_mirror.strategy import MirroredStrategy

LOOK_AFTER = 100  # batches of data of unknown length, after which it is asked whether it has an end


class OneDevice:
    """In place of a strategy, for data that is to be read as one device reads it."""

    num_replicas_in_sync = 1

    def experimental_distribute_dataset(self, dataset):
        """The dataset itself."""
        return dataset

    def parts(self, batch):
        """The batch itself, in a list."""
        return [batch]


class Split:
    """In place of a strategy, for a number of replicas without devices: the same arithmetic."""

    def __init__(self, replicas):
        self.num_replicas_in_sync = replicas

    def experimental_distribute_dataset(self, dataset):
        """A dataset of tuples with one part per replica."""
        return split_dataset(dataset, self.num_replicas_in_sync)

    def parts(self, batch):
        """The parts of a batch, one per replica."""
        return list(batch)


class Distributed:
    """A strategy, and how to take its batches apart."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.num_replicas_in_sync = strategy.num_replicas_in_sync
        self.experimental_distribute_dataset = strategy.experimental_distribute_dataset

    def parts(self, batch):
        """The parts of a batch, one structure per replica."""
        leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
        local = [self.strategy.experimental_local_results(leaf) for leaf in leaves]
        return [[leaf[replica] for leaf in local] for replica in range(self.num_replicas_in_sync)]


@dataclasses.dataclass
class Reading:
    """One pass over data.

    Attributes:
        hashes: uint64 array, `row_hashes` of the rows in the order of their delivery.
        step: int array, the step in which each row was delivered, from 0.
        replica: int array, the replica that it was delivered to.
        steps: int, number of steps.
        empty_batch: The step whose batch held no rows, or None.
    """

    hashes: np.ndarray
    step: np.ndarray
    replica: np.ndarray
    steps: int
    empty_batch: int | None = None

    def __len__(self):
        return len(self.hashes)


class Feed:
    """Data on its way to the replicas, epoch after epoch, by the code that `fit` uses.

    Args:
        kind: What `kind_of` says of the data.
        data: The data.
        target: `OneDevice`, `Split` or `Distributed`.
        batch_size: As in `fit`, for arrays.
        steps: At most so many batches an epoch; the next epoch goes on where it ended, as in `fit`.
        shuffle: Whether arrays and PyDatasets are shuffled, as in `fit`.
    """

    def __init__(self, kind, data, target, batch_size=None, steps=None, shuffle=False):
        self._kind, self._data, self._target, self._steps = kind, data, target, steps
        self._batch_size = batch_size
        self._shuffle = shuffle and kind in ("arrays", "PyDataset") and not is_endless_py_dataset(data)
        self._adapter = self._iterator = None
        self._batches = () if kind == "generator function" else self._distribute()
        if kind == "generator" and is_plain(target):
            next(iter(self._batches), None)  # as Keras does to build the model

    def epoch(self):
        """Reads one epoch.

        Returns:
            A `Reading`.
        """
        if self._kind == "generator function":
            self._batches = self._distribute()
        if self._adapter is not None:
            self._adapter.on_epoch_begin()
        reading = _read(self._target, self._next_batches(), self._steps is None and self._length_is_unknown())
        if self._adapter is not None:
            self._adapter.on_epoch_end()
        return reading

    def _next_batches(self):
        if self._steps is None or self._kind == "generator function":
            return itertools.islice(self._batches, self._steps)
        first = next(self._iterator, None) if self._iterator is not None else None
        if first is None:
            self._iterator = iter(self._batches)
            return itertools.islice(self._iterator, self._steps)
        return itertools.islice(itertools.chain([first], self._iterator), self._steps)

    def _length_is_unknown(self):
        if self._kind == "dataset":
            return bool(self._data.cardinality() == tf.data.UNKNOWN_CARDINALITY)
        return self._kind not in ("arrays", "PyDataset")

    def _distribute(self):
        if self._kind == "dataset":
            return self._target.experimental_distribute_dataset(self._data)
        if self._kind == "distributed dataset":
            return self._data
        if self._kind == "dataset function":
            if isinstance(self._target, OneDevice):
                return dataset_for(self._kind, self._data)
            return self._target.strategy.distribute_datasets_from_function(self._data)
        return self._adapted()

    def _adapted(self):
        x, y, sample_weight = _arrays(self._data) if self._kind == "arrays" else (self._data, None, None)
        if self._kind == "generator function":
            first, x = _peeked(iter(self._data()))
            if first is None:
                return ()
        if self._kind == "PyDataset" and x.num_batches == 0:
            return ()
        steps = self._steps if self._kind == "arrays" else None
        adapted = internals.epoch_iterator(_Holder(self._target), x, y, sample_weight, self._batch_size, steps, self._shuffle, None)
        self._adapter = adapted.data_adapter
        return internals.dataset_of(adapted)


@dataclasses.dataclass
class _Holder:
    distribute_strategy: object  # the one attribute of a model that its iterator over data asks for


def _read(target, batches, may_be_endless):
    hashes, step, replica, seen, steps, empty = [], [], [], set(), 0, None
    try:
        for index, batch in enumerate(batches):
            parts = [row_hashes(part) for part in target.parts(batch)]
            if not any(map(len, parts)):
                empty = index if empty is None else empty
            for number, part in enumerate(parts):
                hashes.append(part)
                step.append(np.full(len(part), index, np.int32))
                replica.append(np.full(len(part), number, np.int16))
            steps += 1
            seen.add(hash(b"".join(part.tobytes() for part in parts)))
            if may_be_endless and steps >= LOOK_AFTER and len(seen) * 10 <= steps:
                raise ValueError(
                    f"audit_data: the data has yielded {steps} batches and only {len(seen)} different ones, so it seems to have no "
                    f"end; say how many make an epoch, as in audit_data(data, strategy, steps={len(seen)})."
                )
    except tf.errors.InvalidArgumentError as error:
        if NO_ROWS not in str(error):
            raise
        empty = steps
    return Reading(_joined(hashes, np.uint64), _joined(step, np.int32), _joined(replica, np.int16), steps, empty)


def _joined(arrays, dtype):
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _peeked(iterator):
    first = next(iterator, None)
    return first, (batch for batch in itertools.chain([first], iterator))


def recorded(generator, hashes):
    """A generator of the same batches that adds the `row_hashes` of each to the list `hashes`."""
    for batch in generator:
        hashes.append(row_hashes(batch))
        yield batch


def _arrays(data):
    parts = data if isinstance(data, tuple) else (data,)
    if len(parts) > 3:
        raise ValueError(f"audit_data: a tuple of arrays is (x, y) or (x, y, sample_weight), and this one has {len(parts)} parts.")
    return (*parts, *[None] * (3 - len(parts)))


def dataset_for(kind, data):
    """The `tf.data.Dataset` that the data is, or that its function makes for one replica; None where it is none.

    Raises:
        TypeError: If the function makes something else.
    """
    if kind == "dataset function":
        data = data(tf.distribute.InputContext(1, 0, 1))
        if not isinstance(data, tf.data.Dataset):
            raise TypeError(
                f"audit_data: the function of an input context made a {type(data).__name__}; "
                "it has to return a tf.data.Dataset, as for distribute_datasets_from_function."
            )
    return data if kind in ("dataset", "dataset function") else None


def is_plain(target):
    """Whether `fit` on this strategy runs as Keras made it, not as this package does."""
    return isinstance(target, Distributed) and not isinstance(target.strategy, MirroredStrategy)


def is_endless_py_dataset(data):
    """Whether `data` is a PyDataset that says it has no end."""
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is None


def kind_of(data):
    """What sort of data this is, in a word or two.

    Raises:
        TypeError: If `fit` would not take it either.
    """
    if isinstance(data, tf.distribute.DistributedDataset):
        return "distributed dataset"
    if isinstance(data, tf.data.Dataset):
        return "dataset"
    if isinstance(data, keras.utils.PyDataset):
        return "PyDataset"
    if hasattr(data, "__next__"):
        return "generator"
    if callable(data):
        return "dataset function" if _takes_an_argument(data) else "generator function"
    leaves = tf.nest.flatten(data) if isinstance(data, (tuple, list, dict)) else [data]
    if leaves and all(leaf is None or getattr(leaf, "shape", ()) for leaf in leaves) and any(leaf is not None for leaf in leaves):
        return "arrays"
    raise TypeError(
        f"audit_data: expected a tf.data.Dataset, a PyDataset, a generator, a function that makes one, or arrays such as (x, y), "
        f"and got {type(data).__name__}."
    )


def _takes_an_argument(function):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(each.kind in kinds and each.default is inspect.Parameter.empty for each in parameters)
