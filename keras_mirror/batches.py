"""How a global batch is split over replicas: arithmetic alone, no TensorFlow."""

import dataclasses


def split_sizes(rows, replicas):
    """Rows that each replica gets of a global batch, as even as whole rows allow.

    The first `rows % replicas` replicas get one row more, so no replica is empty while rows
    suffice and no two differ by more than one.

    Args:
        rows: int, rows of the global batch.
        replicas: int, number of replicas.

    Returns:
        A list of `replicas` ints that add up to `rows`.

    Example:

    >>> split_sizes(5, 4)
    [2, 1, 1, 1]
    """
    base, extra = divmod(rows, replicas)
    return [base + (index < extra) for index in range(replicas)]


def split_bounds(rows, replicas, index):
    """First row (inclusive) and last row (exclusive) of replica `index`.

    Works on Python ints and on integer tensors alike, so the prediction of `plan` and the graph
    that splits the data are the same formula.

    Args:
        rows: int or integer tensor, rows of the global batch.
        replicas: int, number of replicas.
        index: int or integer tensor, the replica.

    Returns:
        `(start, stop)`: `ceil` of equal shares, counted from the front.

    Example:

    >>> [split_bounds(5, 4, i) for i in range(4)]
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    # The first `extra` replicas hold one row more, so replica i starts at i * base + min(i, extra).
    base = rows // replicas
    extra = rows - base * replicas
    start = index * base + _smaller(index, extra)
    stop = (index + 1) * base + _smaller(index + 1, extra)
    return start, stop


def _smaller(index, extra):
    if isinstance(extra, int):
        return min(index, extra)
    import tensorflow as tf

    return tf.minimum(tf.cast(index, extra.dtype), extra)


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A run of equal steps: `count` steps of `rows` rows, split into `per_replica`."""

    count: int
    rows: int
    per_replica: tuple


def plan_steps(batch_rows, replicas):
    """Groups consecutive batches of equal size and splits each.

    Args:
        batch_rows: Iterable of ints, the rows of each global batch in order.
        replicas: int, number of replicas.

    Returns:
        A list of `PlannedStep`.

    Example:

    >>> plan_steps([4, 4, 1], 2)
    [PlannedStep(count=2, rows=4, per_replica=(2, 2)), PlannedStep(count=1, rows=1, per_replica=(1, 0))]
    """
    steps = []
    for rows in batch_rows:
        if steps and steps[-1].rows == rows:
            steps[-1] = dataclasses.replace(steps[-1], count=steps[-1].count + 1)
        else:
            steps.append(PlannedStep(1, rows, tuple(split_sizes(rows, replicas))))
    return steps
