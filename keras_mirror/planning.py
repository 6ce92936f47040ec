"""The split of every step, predicted before training."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.batches import plan_steps
from keras_mirror.report import Report


class Plan(Report):
    """What `plan` returns: print it, or read it.

    Attributes:
        replicas: int, number of replicas.
        steps: List of `PlannedStep`: runs of equal steps with `count`, `rows`, `per_replica`.
        complete: Whether every step of an epoch is in it.
    """

    def __init__(self, replicas, steps, complete):
        self.replicas = replicas
        self.steps = steps
        self.complete = complete
        columns = ["steps", "global batch", *[f"replica {index}" for index in range(replicas)]]
        rows = [
            {"steps": step.count, "global batch": step.rows, **{f"replica {i}": n for i, n in enumerate(step.per_replica)}}
            for step in steps
        ]
        super().__init__(self._title(), columns, rows, self._notes())

    def _title(self):
        count, rows = sum(step.count for step in self.steps), sum(step.count * step.rows for step in self.steps)
        what = "an epoch" if self.complete else "the first steps"
        told = [
            f"{number} {noun}{'s' * (number != 1)}" for number, noun in ((rows, "row"), (count, "step"), (self.replicas, "replica"))
        ]
        return f"Batch plan: {told[0]} in {told[1]} on {told[2]} ({what})"

    def _notes(self):
        notes = []
        uneven = sum(step.count for step in self.steps if len(set(step.per_replica)) > 1)
        empty = sum(step.count for step in self.steps if 0 in step.per_replica)
        if uneven:
            notes.append(
                f"{uneven} of {sum(step.count for step in self.steps)} steps are uneven; results stay those of one device."
            )
        if empty:
            notes.append(f"In {empty} a replica has no rows and only waits: the batch is smaller than the number of replicas.")
        return notes


def plan(data, model_or_strategy, *, batch_size=None, steps=None):
    """Predicts how each global batch will be split over the replicas, without training.

    Costs one pass over the rows of `data` where their number is not known (a `tf.data.Dataset` is
    read once from its start; give `steps` to read less of it).

    Args:
        data: Batched `tf.data.Dataset`, `keras.utils.PyDataset`, array, structure of arrays such as
            `(x, y)`, or an int, the number of rows.
        model_or_strategy: A model of `mirrored_model`, a strategy, or an int, the number of replicas.
        batch_size: Rows of a global batch, for arrays and ints; 32 as in `fit` if `None`.
        steps: Read at most so many batches; needed for an infinite dataset.

    Returns:
        A `Plan`.

    Raises:
        TypeError: For a Python generator, which the plan would use up, and for other data.
        ValueError: For an infinite dataset without `steps`, and for data without rows.

    Example:

    >>> print(km.plan(29, 2, batch_size=8))
    Batch plan: 29 rows in 4 steps on 2 replicas (an epoch)
    steps   global batch   replica 0   replica 1
    ────────────────────────────────────────────
        3              8           4           4
        1              5           3           2
    1 of 4 steps are uneven; results stay those of one device.
    """
    batches = _batch_rows(data, batch_size, steps)
    if steps is not None:
        batches = itertools.islice(batches, steps + 1)
    rows = list(batches)
    complete = steps is None or len(rows) <= steps
    rows = rows if complete else rows[:steps]
    if not rows:
        raise ValueError("plan: the data is empty: it holds no batch.")
    if 0 in rows:
        raise ValueError("plan: the data holds a batch of 0 rows, which has no mean to train on; leave empty batches out.")
    return Plan(_replicas(model_or_strategy), plan_steps(rows, _replicas(model_or_strategy)), complete)


def _replicas(model_or_strategy):
    if isinstance(model_or_strategy, int):
        return model_or_strategy
    if isinstance(model_or_strategy, keras.Model):
        model_or_strategy = internals.training_strategy(model_or_strategy) or tf.distribute.get_strategy()
    if isinstance(model_or_strategy, tf.distribute.Strategy):
        return model_or_strategy.num_replicas_in_sync
    raise TypeError(f"plan: expected a model, a strategy or a number of replicas, and got {type(model_or_strategy).__name__}.")


def _batch_rows(data, batch_size, steps):
    if isinstance(data, tf.data.Dataset):
        return _dataset_rows(data, steps)
    if isinstance(data, keras.utils.PyDataset):
        return (_rows(data[index]) for index in range(len(data)))
    if hasattr(data, "__next__"):
        raise TypeError("plan: a generator can be read only once, and planning would use it up; pass what it is made from.")
    rows = data if isinstance(data, int) else _rows(data)
    size = 32 if batch_size is None else batch_size
    return (min(size, rows - start) for start in range(0, rows, size))


def _dataset_rows(dataset, steps):
    if steps is None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("plan: the dataset is infinite; say how many steps to look at, as in plan(data, model, steps=10).")
    if steps is not None:
        dataset = dataset.take(steps + 1)

    def rows(*batch):
        leaf = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
        return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf, tf.int64)[0]

    return (int(n) for n in dataset.map(rows).as_numpy_iterator())


def _rows(batch):
    for leaf in keras.tree.flatten(batch):
        if leaf is not None and np.ndim(leaf):
            return len(leaf) if not hasattr(leaf, "shape") else int(leaf.shape[0])
    raise TypeError(f"plan: expected a dataset, arrays or a number of rows, and got {type(batch).__name__}.")
