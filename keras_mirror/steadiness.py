"""Whether data yields the same rows each time it is read, and what changes if it does not."""

import numpy as np
import tensorflow as tf

from keras_mirror.feeds import Feed, OneDevice
from keras_mirror.fingerprints import Source
from keras_mirror.pipeline_order import inspect_pipeline
from keras_mirror.pipelines import BATCHING, ROWS_AT_A_TIME, stages_of


def same_rows(one, other):
    """Whether two readings hold the same rows equally often, in whatever order."""
    return np.array_equal(np.sort(one), np.sort(other))


def is_used_up(first, later, read_again):
    """Whether data that yields fewer rows after its first reading is used up by it, or yields others each time.

    Used up, it goes on yielding the same: nothing, or what is left. A generator that is made anew each time and
    leaves out rows as it likes does not.

    Args:
        first: `row_hashes` of the first reading.
        later: List of the same of later ones.
        read_again: Function that reads once more.
    """
    if not any(map(len, later)):
        return True
    return _within(later[-1], first) and all(same_rows(later[-1], other) for other in [*later[:-1], read_again()])


def _within(part, whole):
    """Whether a reading holds all rows of another."""
    values, counts = np.unique(part, return_counts=True)
    available = dict(zip(*(each.tolist() for each in np.unique(whole, return_counts=True))))
    return all(available.get(value, 0) >= count for value, count in zip(values.tolist(), counts.tolist()))


def draws_numbers(dataset):
    """Whether a map or another function of a pipeline is seen to draw random numbers."""
    return any("Shuffle" not in kind and kind != "Random" for kind, *_ in inspect_pipeline(dataset).seeds)


def changed_at(index, first, again, source, batches):
    """Whether an index of a PyDataset yields rows of other indices when it is read again.

    Rows that only hold something else, by augmentation, are not in the source and do not count.

    Args:
        index: int.
        first: `row_hashes` of what it yielded.
        again: The same when it was read again.
        source: `Source` of all rows.
        batches: int array, the index at which each row of the source was read.
    """
    rows = source.positions(np.setdiff1d(again, first))
    return bool(np.any(batches[rows[rows >= 0]] != index))


def sides_changed(shuffle):
    """Rows before a shuffle that the take, skip or shard after it selects in one of two readings only.

    For pipelines whose later stages change rows, so that the end does not tell. Nothing if the rows before
    the shuffle change, too.

    Args:
        shuffle: `Stage` of the shuffle.
    """
    selected = [stage for stage in shuffle.above if stage.kind in ("Take", "Skip", "Shard")][-1]
    source = Source(_rows(shuffle.input))
    one, other = (source.positions(_rows(selected.dataset)) for _ in range(2))
    return np.zeros(0, int) if np.any(one < 0) or np.any(other < 0) else np.setxor1d(one, other)


def _rows(dataset):
    kinds = {stage.kind for stage in stages_of(dataset)}
    if "Unbatch" in kinds or not kinds & (BATCHING | {"PaddedBatch"}):
        dataset = dataset.batch(ROWS_AT_A_TIME if same_shapes(dataset) else 1)
    return Feed("dataset", dataset, OneDevice()).epoch().hashes


def same_shapes(dataset):
    """Whether all elements of a dataset are known to have the same shapes."""
    return all(
        getattr(spec, "shape", None) is not None and spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec)
    )
