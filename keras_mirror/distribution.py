"""A dataset of global batches as a dataset with one balanced part per replica."""

import functools
import weakref

import tensorflow as tf

from keras_mirror import internals
from keras_mirror.batches import split_bounds
from keras_mirror.rows import rows_of

NO_ROWS = (
    "the dataset yields a batch of 0 rows, which has no mean to train on; leave empty batches out, for example with dataset.filter."
)


def check_batched(spec):
    """Refuses elements that are not batches.

    Of what has no rows only the weight of a whole batch is let through: a number elsewhere is most likely one
    of a single example, in a dataset that was never batched.

    Raises:
        ValueError: If a component has no first dimension, or the first dimensions differ.
    """
    rows, weighted = {}, type(spec) is tuple and len(spec) == 3
    for path, leaf in _named_leaves(spec):
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0 and weighted and path.split("/")[0] == "2":
            continue
        if shape.rank == 0:
            raise ValueError(
                f"the dataset's component {path} has no rows to split over replicas (shape ()); every component of a batch but "
                "its weight needs a first dimension. If these are single examples, add .batch(n) to the dataset; if it is one "
                "number for a whole batch, repeat it for each row: tf.repeat(number, tf.shape(x)[0])."
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


def split(batch, replicas, ids=None):
    """The parts of one global batch, in order: a tuple of `replicas` structures like `batch`.

    Each part is a copy. A slice would share memory with the batch, and a batch from a Python
    generator shares memory with the user's own arrays, which TensorFlow then overwrites in place.

    Args:
        batch: Structure of tensors (dense, ragged, sparse) with rows in their first dimension; a scalar is
            part of every part.
        replicas: int, number of parts.
        ids: Which of the parts; all if None.
    """
    leaves = tf.nest.flatten(batch)
    parts = [[_part(leaf, replicas, index) for leaf in leaves] for index in ids or range(replicas)]
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
    if leaf.shape.rank == 0:
        return tf.identity(leaf)
    rows = leaf.shape[0] if leaf.shape.rank else None
    start, stop = split_bounds(tf.shape(leaf)[0] if rows is None else rows, replicas, index)
    return tf.gather(leaf, tf.range(start, stop))


def element_of(arguments, spec):
    """The element of a dataset with this element spec from the arguments that `map` passes: those of a tuple, even of one."""
    return arguments if type(spec) is tuple else arguments[0]


def _split(replicas, ids, batch):
    return split(batch, replicas, ids)


def _checked_split(replicas, ids, batch):
    unknown = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] is None]
    if not unknown:
        return split(batch, replicas, ids)
    with tf.control_dependencies([tf.debugging.Assert(tf.shape(unknown[0])[0] > 0, [NO_ROWS])]):
        return split(batch, replicas, ids)


def rows_of_batch(batch):
    """Rows of a global batch, a scalar int64 tensor."""
    for leaf in tf.nest.flatten(batch):
        rows = None if leaf is None or isinstance(leaf, tf.experimental.Optional) else rows_of(leaf)
        if rows is not None:
            return tf.cast(rows, tf.int64)
    raise ValueError("the batch has no component with rows in its first dimension.")


def _split_and_rows(splitting, replicas, ids, batch):
    return splitting(replicas, ids, batch), rows_of_batch(batch)


def split_dataset(dataset, replicas, ids=None, may_be_empty=False):
    """Maps each global batch of `dataset` to the tuple of its parts.

    With `ids`, to `(parts, rows)`: those parts alone and the rows of the global batch. Batches of no rows
    are refused, unless they `may_be_empty`.
    """
    spec = dataset.element_spec
    check_batched(spec)
    splitting = _split if may_be_empty else _checked_split
    of_batch = functools.partial(*([splitting] if ids is None else [_split_and_rows, splitting]), replicas, ids)
    split = tf.autograph.experimental.do_not_convert(lambda *arguments: of_batch(element_of(arguments, spec)))
    return dataset.map(split, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def one_after_another(parts):
    """A dataset of tuples of parts as a dataset of single parts, for TensorFlow's own distribution."""

    def chain(*parts):
        return functools.reduce(lambda a, b: a.concatenate(b), [tf.data.Dataset.from_tensors(p) for p in parts])

    return parts.flat_map(tf.autograph.experimental.do_not_convert(chain))


def regroup(strategy, parts):
    """One structure whose leaves hold one part per replica of this process, from a tuple of structures."""
    if strategy.num_replicas_in_sync == 1:
        return parts[0]
    leaves, first = [tf.nest.flatten(part) for part in parts], strategy.replica_ids[0]

    def group(k):
        if leaves[0][k] is None:
            return None
        return strategy.experimental_distribute_values_from_function(
            lambda context: leaves[context.replica_id_in_sync_group - first][k]
        )

    return tf.nest.pack_sequence_as(parts[0], [group(k) for k in range(len(leaves[0]))])


def per_replica_spec(parts_spec, replicas=None):
    """The element spec of `regroup`ed parts, from the tuple of the specs of this process's parts."""
    if (replicas or len(parts_spec)) == 1:
        return parts_spec[0]
    return tf.nest.map_structure(lambda *specs: internals.per_replica_spec(specs), *parts_spec)


class ReplicaDataset(tf.distribute.DistributedDataset):
    """What a strategy of this package makes of a dataset on CPU replicas, and on several workers.

    One `tf.data` pipeline yields the parts of all replicas of this process together. It does not copy to devices
    ahead of time, which CPU replicas do not need, and is several times cheaper a step than
    TensorFlow's distributed iterator.

    Args:
        strategy: The strategy.
        dataset: The dataset of global batches.
        asks: What to ask the other workers before each batch: `"nothing"`, `"end"` for whether they have one,
            too, or `"rows"` for how many rows of their own they have.

    Attributes:
        source: The dataset of global batches that it was made from.
        global_spec: The element spec of the global batches.
        cardinality: Number of global batches, or `tf.data`'s negative codes for infinite and unknown.
    """

    def __init__(self, strategy, dataset, asks="nothing"):
        self._strategy = strategy
        self._parts = strategy.split_dataset(dataset)
        self._asks = asks
        self.source = dataset
        self.global_spec = dataset.element_spec
        self.cardinality = dataset.cardinality()
        if not tf.is_symbolic_tensor(self.cardinality):
            self.cardinality = self.cardinality.numpy()

    @property
    def element_spec(self):
        """Like `tf.data.Dataset.element_spec`, with a spec per replica in each leaf."""
        return self._strategy.assembled_spec(self._parts.element_spec)

    def __iter__(self):
        return ReplicaIterator(self._strategy, iter(self._parts), self._asks)

    def reduce(self, initial_state, reduce_func):
        """Folds `reduce_func(state, batch)` over the batches; what `for` in a `tf.function` calls."""
        iterator = iter(self)

        def body(optional, more, state):
            state = reduce_func(state, iterator.value_of(optional))
            return (*iterator.next_and_more(), state)

        _, _, state = tf.while_loop(
            lambda optional, more, state: more, body, [*iterator.next_and_more(), initial_state], parallel_iterations=1
        )
        return state


class ReplicaIteratorSpec(tf.TypeSpec):
    """Lets a `ReplicaIterator` be an argument of a `tf.function`.

    TensorFlow makes copies of a spec from its serialized form, which has to be hashable, so the
    strategy is in it as a number.
    """

    _strategies = weakref.WeakValueDictionary()

    def __init__(self, strategy_id, asks, iterator_spec):
        self._strategy_id = strategy_id
        self._asks = asks
        self._iterator_spec = iterator_spec

    @classmethod
    def of(cls, iterator):
        """The spec of a `ReplicaIterator`."""
        cls._strategies[id(iterator._strategy)] = iterator._strategy
        return cls(id(iterator._strategy), iterator._asks, iterator._iterator._type_spec)

    value_type = property(lambda self: ReplicaIterator)

    def _serialize(self):
        return (self._strategy_id, self._asks, self._iterator_spec)

    def _alike(self, other):
        same = isinstance(other, ReplicaIteratorSpec) and other._strategy_id == self._strategy_id
        return same and other._asks == self._asks

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
        return None if common is None else ReplicaIteratorSpec(self._strategy_id, self._asks, common)

    @property
    def _component_specs(self):
        return self._iterator_spec

    def _to_components(self, value):
        return value._iterator

    def _from_components(self, components):
        return ReplicaIterator(self._strategies[self._strategy_id], components, self._asks)


class ReplicaIterator(tf.distribute.DistributedIterator, tf.__internal__.CompositeTensor):
    """Iterates over a `ReplicaDataset`, in Python or inside a `tf.function`."""

    def __init__(self, strategy, iterator, asks="nothing"):
        self._strategy = strategy
        self._iterator = iterator
        self._asks = asks

    @property
    def _type_spec(self):
        return ReplicaIteratorSpec.of(self)

    @property
    def element_spec(self):
        """As of the dataset."""
        return self._strategy.assembled_spec(self._iterator.element_spec)

    def __iter__(self):
        return self

    def __next__(self):
        if self._asks == "nothing":
            return self._strategy.assemble(next(self._iterator))
        if tf.inside_function():
            return self.get_next()
        optional, more = self.next_and_more()
        if not more:
            self._strategy.data_ended()
            raise StopIteration
        return self.value_of(optional)

    def get_next(self):
        """The next batch; raises `tf.errors.OutOfRangeError` at the end."""
        if self._asks == "nothing":
            return self._strategy.assemble(self._iterator.get_next())
        optional, more = self.next_and_more()
        if not tf.inside_function():
            if not more:
                raise tf.errors.OutOfRangeError(None, None, "End of sequence")
            return self.value_of(optional)
        with tf.control_dependencies([tf.debugging.Assert(more, ["End of sequence on one of the workers"])]):
            return self.value_of(optional)

    def get_next_as_optional(self):
        """The next batch as something with `has_value()` and `get_value()`."""
        return ReplicaOptional(self, self._iterator.get_next_as_optional())

    def next_and_more(self):
        """The next batch as a bare `tf.experimental.Optional`, which can be a loop's state, and whether it is one."""
        optional = self._iterator.get_next_as_optional()
        return optional, self.has_value(optional)

    def has_value(self, optional):
        """Whether there was another batch, on all workers where their sizes are unknown; a scalar bool tensor."""
        if self._asks == "nothing":
            return optional.has_value()
        if self._asks == "end":
            return self._strategy.all_have(optional.has_value())
        return self._strategy.any_has(optional.get_value()[1])

    def value_of(self, optional):
        """The batch in a bare optional of this iterator."""
        value = optional.get_value()
        return self._strategy.assemble_own(value) if self._asks == "rows" else self._strategy.assemble(value)


class ReplicaOptional:
    """A batch that may be absent, as `tf.experimental.Optional`."""

    def __init__(self, iterator, optional):
        self._iterator = iterator
        self.optional = optional

    def has_value(self):
        """Whether there was another batch; a scalar bool tensor."""
        return self._iterator.has_value(self.optional)

    def get_value(self):
        """The batch."""
        return self._iterator.value_of(self.optional)
