"""A dataset of global batches as a dataset with one balanced part per replica."""

import functools
import weakref

import tensorflow as tf

from keras_mirror import internals
from keras_mirror.batches import split_bounds

NO_ROWS = (
    "the dataset yields a batch of 0 rows, which has no mean to train on; leave empty batches out, for example with dataset.filter."
)


def check_batched(spec):
    """Refuses elements that are not batches.

    Raises:
        ValueError: If a component has no first dimension, or the first dimensions differ.
    """
    rows = {}
    for path, leaf in _named_leaves(spec):
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0:
            raise ValueError(
                f"the dataset's component {path} has no rows to split over replicas (shape ()); every component of a batch "
                "needs a first dimension: add .batch(n) to the dataset."
            )
        if shape[0] == 0:
            raise ValueError(NO_ROWS)
        if shape[0] is not None:
            rows[path] = shape[0]
    if len(set(rows.values())) > 1:
        text = ", ".join(f"{path}: {n}" for path, n in rows.items())
        raise ValueError(
            f"the components of the dataset's batches differ in their number of rows ({text}); "
            "if these are single examples, add .batch(n) to the dataset."
        )


def _named_leaves(spec):
    import keras

    return [("/".join(map(str, path)) or "0", leaf) for path, leaf in keras.tree.flatten_with_path(spec)]


def split(batch, replicas):
    """The parts of one global batch, in order: a tuple of `replicas` structures like `batch`.

    Each part is a copy. A slice would share memory with the batch, and a batch from a Python
    generator shares memory with the user's own arrays, which TensorFlow then overwrites in place.

    Args:
        batch: Structure of tensors (dense, ragged, sparse) with rows in their first dimension.
        replicas: int, number of parts.
    """
    leaves = tf.nest.flatten(batch)
    parts = [[_part(leaf, replicas, index) for leaf in leaves] for index in range(replicas)]
    return tuple(tf.nest.pack_sequence_as(batch, part) for part in parts)


def _part(leaf, replicas, index):
    if leaf is None or isinstance(leaf, tf.experimental.Optional):  # Keras' stand-in for an absent y or weight
        return None
    if isinstance(leaf, tf.SparseTensor):
        start, stop = split_bounds(leaf.dense_shape[0], replicas, index)
        rest = leaf.dense_shape[1:]
        return tf.sparse.slice(leaf, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0))
    if isinstance(leaf, tf.RaggedTensor):
        start, stop = split_bounds(leaf.nrows(), replicas, index)
        return tf.gather(leaf, tf.range(start, stop))
    leaf = tf.convert_to_tensor(leaf)
    rows = leaf.shape[0] if leaf.shape.rank else None
    start, stop = split_bounds(tf.shape(leaf)[0] if rows is None else rows, replicas, index)
    return tf.gather(leaf, tf.range(start, stop))


def _checked_split(replicas, *batch):
    batch = batch if len(batch) > 1 else batch[0]
    unknown = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] is None]
    if not unknown:
        return split(batch, replicas)
    with tf.control_dependencies([tf.debugging.Assert(tf.shape(unknown[0])[0] > 0, [NO_ROWS])]):
        return split(batch, replicas)


def split_dataset(dataset, replicas):
    """Maps each global batch of `dataset` to the tuple of its parts."""
    check_batched(dataset.element_spec)
    mapped = dataset.map(functools.partial(_checked_split, replicas), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return mapped.prefetch(tf.data.AUTOTUNE)


def one_after_another(parts):
    """A dataset of tuples of parts as a dataset of single parts, for TensorFlow's own distribution."""

    def chain(*parts):
        return functools.reduce(lambda a, b: a.concatenate(b), [tf.data.Dataset.from_tensors(p) for p in parts])

    return parts.flat_map(chain)


def regroup(strategy, parts):
    """One structure whose leaves hold one part per replica, from a tuple of structures."""
    if len(parts) == 1:
        return parts[0]
    leaves = [tf.nest.flatten(part) for part in parts]

    def group(k):
        if leaves[0][k] is None:
            return None
        return strategy.experimental_distribute_values_from_function(lambda context: leaves[context.replica_id_in_sync_group][k])

    return tf.nest.pack_sequence_as(parts[0], [group(k) for k in range(len(leaves[0]))])


def per_replica_spec(parts_spec):
    """The element spec of `regroup`ed parts, from the tuple of the parts' specs."""
    if len(parts_spec) == 1:
        return parts_spec[0]
    return tf.nest.map_structure(lambda *specs: internals.per_replica_spec(specs), *parts_spec)


class ReplicaDataset(tf.distribute.DistributedDataset):
    """What `MirroredStrategy.experimental_distribute_dataset` returns on CPU replicas.

    One `tf.data` pipeline yields the parts of all replicas together. It does not copy to devices
    ahead of time, which CPU replicas do not need, and is several times cheaper a step than
    TensorFlow's distributed iterator.

    Attributes:
        source: The dataset of global batches that it was made from.
        global_spec: The element spec of the global batches.
        cardinality: Number of global batches, or `tf.data`'s negative codes for infinite and unknown.
    """

    def __init__(self, strategy, dataset):
        self._strategy = strategy
        self._parts = split_dataset(dataset, strategy.num_replicas_in_sync)
        self.source = dataset
        self.global_spec = dataset.element_spec
        self.cardinality = dataset.cardinality()
        if not tf.is_symbolic_tensor(self.cardinality):
            self.cardinality = self.cardinality.numpy()

    @property
    def element_spec(self):
        """Like `tf.data.Dataset.element_spec`, with a spec per replica in each leaf."""
        return per_replica_spec(self._parts.element_spec)

    def __iter__(self):
        return ReplicaIterator(self._strategy, iter(self._parts))

    def reduce(self, initial_state, reduce_func):
        """Folds `reduce_func(state, batch)` over the batches; what `for` in a `tf.function` calls."""
        iterator = iter(self._parts)

        def body(optional, state):
            state = reduce_func(state, regroup(self._strategy, optional.get_value()))
            return iterator.get_next_as_optional(), state

        _, state = tf.while_loop(
            lambda optional, state: optional.has_value(),
            body,
            [iterator.get_next_as_optional(), initial_state],
            parallel_iterations=1,
        )
        return state


class ReplicaIteratorSpec(tf.TypeSpec):
    """Lets a `ReplicaIterator` be an argument of a `tf.function`.

    TensorFlow makes copies of a spec from its serialized form, which has to be hashable, so the
    strategy is in it as a number.
    """

    _strategies = weakref.WeakValueDictionary()

    def __init__(self, strategy_id, iterator_spec):
        self._strategy_id = strategy_id
        self._iterator_spec = iterator_spec

    @classmethod
    def of(cls, iterator):
        """The spec of a `ReplicaIterator`."""
        cls._strategies[id(iterator._strategy)] = iterator._strategy
        return cls(id(iterator._strategy), iterator._iterator._type_spec)

    value_type = property(lambda self: ReplicaIterator)

    def _serialize(self):
        return (self._strategy_id, self._iterator_spec)

    def _alike(self, other):
        return isinstance(other, ReplicaIteratorSpec) and other._strategy_id == self._strategy_id

    def is_compatible_with(self, other):
        """Whether an iterator of this type can take the place of `other`."""
        other = other if isinstance(other, tf.TypeSpec) else tf.type_spec_from_value(other)
        return self._alike(other) and self._iterator_spec.is_compatible_with(other._iterator_spec)

    def is_subtype_of(self, other):
        """As `tf.types.experimental.TraceType.is_subtype_of`."""
        return self._alike(other) and self._iterator_spec.is_subtype_of(other._iterator_spec)

    def most_specific_common_supertype(self, others):
        """As `tf.types.experimental.TraceType.most_specific_common_supertype`."""
        if not all(self._alike(other) for other in others):
            return None
        common = self._iterator_spec.most_specific_common_supertype([other._iterator_spec for other in others])
        return None if common is None else ReplicaIteratorSpec(self._strategy_id, common)

    @property
    def _component_specs(self):
        return self._iterator_spec

    def _to_components(self, value):
        return value._iterator

    def _from_components(self, components):
        return ReplicaIterator(self._strategies[self._strategy_id], components)


class ReplicaIterator(tf.distribute.DistributedIterator, tf.__internal__.CompositeTensor):
    """Iterates over a `ReplicaDataset`, in Python or inside a `tf.function`."""

    def __init__(self, strategy, iterator):
        self._strategy = strategy
        self._iterator = iterator

    @property
    def _type_spec(self):
        return ReplicaIteratorSpec.of(self)

    @property
    def element_spec(self):
        """As of the dataset."""
        return per_replica_spec(self._iterator.element_spec)

    def __iter__(self):
        return self

    def __next__(self):
        return regroup(self._strategy, next(self._iterator))

    def get_next(self):
        """The next batch; raises `tf.errors.OutOfRangeError` at the end."""
        return regroup(self._strategy, self._iterator.get_next())

    def get_next_as_optional(self):
        """The next batch as something with `has_value()` and `get_value()`."""
        return ReplicaOptional(self._strategy, self._iterator.get_next_as_optional())

    def value_of(self, optional):
        """The batch in the bare `optional` of a `ReplicaOptional`, which can be a loop's state."""
        return regroup(self._strategy, optional.get_value())


class ReplicaOptional:
    """A batch that may be absent, as `tf.experimental.Optional`."""

    def __init__(self, strategy, optional):
        self._strategy = strategy
        self.optional = optional

    def has_value(self):
        """Whether there was another batch; a scalar bool tensor."""
        return self.optional.has_value()

    def get_value(self):
        """The batch."""
        return regroup(self._strategy, self.optional.get_value())
