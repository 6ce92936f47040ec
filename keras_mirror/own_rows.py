"""Datasets of which every worker reads rows of its own instead of all rows: TensorFlow's policies FILE, HINT and OFF."""

import weakref

import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.distribution import element_of, one_after_another, rows_of_batch, split
from keras_mirror.pipelines import stages_of

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
READ_BY = {
    AutoShardPolicy.FILE: "its share of the files (AutoShardPolicy.FILE)",
    AutoShardPolicy.HINT: "its shard (AutoShardPolicy.HINT)",
    AutoShardPolicy.OFF: "the dataset that it made itself (AutoShardPolicy.OFF)",
}


def policy_of(dataset):
    """The `AutoShardPolicy` that was set on a `tf.data.Dataset`; AUTO where none was."""
    return AutoShardPolicy(dataset.options().experimental_distribute.auto_shard_policy)


class OwnRows:
    """Makes of a worker's own dataset one of its parts of the global batches, which does not end before the others'.

    Of `n` workers each cuts its batches into `n` pieces, one a step, so that together they have as many rows
    in a step as a batch has; where pieces differ in size, the workers begin with different ones. After its
    last row a worker goes on with batches of no rows, for as long as another has some.

    Args:
        worker: int, which of the workers this is.
        workers: int, how many there are.
    """

    def __init__(self, worker, workers):
        self._worker = worker
        self._workers = workers
        self._made = weakref.WeakSet()

    def holds(self, dataset):
        """Whether a dataset, or one that it was made from, is one of `parts`."""
        return any(stage.dataset in self._made for stage in stages_of(dataset))

    def wanted(self, dataset):
        """Whether the options of a dataset say that each worker reads rows of its own."""
        return self._workers > 1 and policy_of(dataset) in READ_BY

    def parts(self, dataset):
        """An endless dataset of this worker's parts of the global batches, those after its last row empty.

        Raises:
            ValueError: If its files cannot be told apart, or its shards.
        """
        policy = policy_of(dataset)
        own = dataset if policy == AutoShardPolicy.OFF else self._shard(dataset, policy)
        order = [(self._worker + step) % self._workers for step in range(self._workers)]
        spec = own.element_spec
        pieces = one_after_another(own.map(lambda *batch: split(element_of(batch, spec), self._workers, order)))
        return self._endless(pieces, policy)

    def parts_of_replicas(self, dataset, replicas):
        """The same of a dataset each of whose elements is one replica's, as `distribute_datasets_from_function` has it.

        `replicas` elements make one part, to be split over as many replicas of this worker.
        """

        windows = dataset.window(replicas)

        def together(*components):
            window = element_of(components, windows.element_spec)
            elements = window if isinstance(window, tf.data.Dataset) else tf.data.Dataset.zip(window)
            return elements.rebatch(np.iinfo(np.int32).max)

        return self._endless(dataset if replicas == 1 else windows.flat_map(together), AutoShardPolicy.OFF)

    def _endless(self, parts, policy):
        parts = parts.filter(lambda *batch: rows_of_batch(batch) > 0)
        sizes = Sizes(parts.element_spec)
        parts = parts.map(sizes.remember)
        empty = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: sizes.empty())
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        made = parts.concatenate(empty).filter(lambda *batch: True).with_options(options)  # filter: of unknown, not infinite, size
        self._made.add(made)
        return made

    def _shard(self, dataset, policy):
        source = stages_of(dataset)[-1].dataset.cardinality()
        if policy == AutoShardPolicy.FILE and 0 <= source < self._workers:
            raise ValueError(
                f"AutoShardPolicy.FILE: the dataset reads {int(source)} file(s), not one for each of the {self._workers} workers; "
                "write the rows into more files, or set AutoShardPolicy.DATA (every worker reads all)."
            )
        spec = tf.nest.flatten(dataset.element_spec, expand_composites=True)
        try:
            sharded = tf.raw_ops.AutoShardDataset(
                input_dataset=tf.data.experimental.to_variant(dataset),
                num_workers=self._workers,
                index=self._worker,
                auto_shard_policy=policy.value,
                num_replicas=self._workers,
                output_types=[each.dtype for each in spec],
                output_shapes=[each.shape for each in spec],
            )
        except tf.errors.NotFoundError:
            raise ValueError(
                "AutoShardPolicy.FILE: the dataset does not read from a list of files that could be shared out among the workers; "
                "read the files with TFRecordDataset, TextLineDataset or FixedLengthRecordDataset, or set AutoShardPolicy.DATA "
                "(every worker reads all) or OFF (each makes a dataset of its own)."
            ) from None
        return tf.data.experimental.from_variant(sharded, dataset.element_spec)


class Sizes:
    """What a batch without rows has to look like: like the last one, but for the rows.

    Args:
        spec: The element spec of the batches.
    """

    def __init__(self, spec):
        self._spec = spec
        self._seen = {}
        for place, leaf in enumerate(tf.nest.flatten(spec)):
            if isinstance(leaf, (tf.TensorSpec, tf.SparseTensorSpec)) and None in leaf.shape[1:].as_list():
                self._seen[place] = internals.single_variable([size or 1 for size in leaf.shape[1:]], "sizes")

    def remember(self, *batch):
        """The batch as it is; its sizes are kept."""
        batch = element_of(batch, self._spec)
        for place, leaf in enumerate(tf.nest.flatten(batch)):
            if place in self._seen:
                sizes = leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)
                self._seen[place].assign(tf.cast(sizes[1:], tf.int32))
        return batch

    def empty(self):
        """A batch of no rows."""
        leaves = [self._empty(place, leaf) for place, leaf in enumerate(tf.nest.flatten(self._spec))]
        return tf.nest.pack_sequence_as(self._spec, leaves)

    def _empty(self, place, spec):
        if isinstance(spec, tf.RaggedTensorSpec):
            values = tf.zeros([0, *(size or 1 for size in spec.shape[spec.ragged_rank + 1 :])], spec.dtype)
            return tf.RaggedTensor.from_nested_row_splits(values, [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank)
        if not isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)):
            return None  # Keras' stand-in for an absent y or weight
        if spec.shape.rank == 0:
            return tf.zeros([], spec.dtype)
        sizes = tf.concat([[0], self._seen[place].read_value() if place in self._seen else spec.shape[1:]], 0)
        if isinstance(spec, tf.SparseTensorSpec):
            indices = tf.zeros([0, spec.shape.rank], tf.int64)
            return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), tf.cast(sizes, tf.int64))
        return tf.ensure_shape(tf.zeros(sizes, spec.dtype), [None, *spec.shape[1:]])
