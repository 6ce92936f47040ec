"""The copies that the replicas hold of each variable: which must agree, whether they do, and making them agree."""

import collections
import dataclasses
import math

import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.auditing import held_variables
from keras_mirror.engine import engine_of

PACK_BELOW = 16384  # entries; below, an operation costs more than copying the entries into a packet

_KINDS = {"optimizer": "optimizer state", "seed generator": "random seed", "metric": "metric state", "layer": "layer state"}
_OF_THE_STEP = "variable of the step"


@dataclasses.dataclass(frozen=True)
class Copies:
    """A variable and what every replica holds of it.

    Attributes:
        path: The variable's path, or its name.
        kind: `"weight"`, `"layer state"`, `"metric state"`, `"optimizer state"`, `"random seed"` or
            `"variable of the step"`.
        holder: The layer, optimizer or metric that holds it; None for a variable of the step.
        variable: The distributed `tf.Variable`.
        copies: Tuple of one `tf.Variable` per replica.
    """

    path: str
    kind: str
    holder: object
    variable: tf.Variable
    copies: tuple

    @property
    def is_unsynchronized(self):
        """Whether it is state that every replica updates by itself, as nobody said how to aggregate it."""
        own = self.kind in ("layer state", "metric state", _OF_THE_STEP)
        return own and self.variable.aggregation == tf.VariableAggregation.NONE

    @property
    def is_averaged(self):
        """Whether a repair averages the copies; else it copies one of them."""
        return self.is_unsynchronized and self.variable.dtype.is_floating


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The variables of a model, by what may be expected of their copies; see `inventory`."""

    mirrored: list  # `Copies` that must agree
    local: list  # paths of what each replica counts by itself, until it is summed or averaged when somebody reads it
    metrics: int  # how many of these are state of metrics
    single: list  # paths of variables that exist once


def inventory(model, strategy):
    """Lists what a model holds and what its traced steps use, once each.

    Args:
        model: A built `keras.Model`.
        strategy: The `tf.distribute.Strategy` it trains with.

    Returns:
        An `Inventory`.
    """
    mirrored, local, single, metrics, seen = [], [], [], 0, {}
    for kind, holder, variable in _everything(model, strategy):
        value = internals.container_of(variable)
        if id(value) in seen or "keras_mirror_own" in vars(value):  # hasattr would reduce a metric's state
            continue
        seen[id(value)] = value
        path = getattr(variable, "path", None) or value.name.split(":")[0]  # a captured copy calls itself .../replica_1
        copies = strategy.experimental_local_results(value)
        if len(copies) != strategy.num_replicas_in_sync:
            single.append(path)
        elif value.synchronization == tf.VariableSynchronization.ON_READ:
            local.append(path)
            metrics += kind == "metric"
        else:
            mirrored.append(Copies(path, _kind(kind, value), holder, value, tuple(copies)))
    return Inventory(_with_unique_paths(mirrored), local, metrics, single)


def _everything(model, strategy):
    yield from held_variables(model)
    engine = engine_of(model)
    for variable in [*(engine.captured if engine else ()), *getattr(strategy, "captured", ())]:
        yield "step", None, variable


def _kind(kind, value):
    if kind in ("layer", "step") and value.trainable:
        return "weight"
    return _KINDS.get(kind, _OF_THE_STEP)


def _with_unique_paths(mirrored):
    counts, unique = collections.Counter(), []
    for each in mirrored:
        counts[each.path] += 1
        number = counts[each.path]
        unique.append(each if number == 1 else dataclasses.replace(each, path=f"{each.path} ({number})"))
    return unique


# --- checksums: one number per copy ------------------------------------------------------------


def checksum_function(mirrored):
    """A function in a graph that returns the checksums of all copies, an int64 array of `[replica, variable]`.

    Each replica's device sums the bits of its own copies, each entry times an odd number of its place,
    wrapping around at 64 bits: equal copies have equal sums, one entry that differs always shows, and
    several that differ cancel by a coincidence of 64 bits only. All that travels is one vector a replica.

    Args:
        mirrored: List of `Copies`, at least one.
    """

    def checksums():
        rows = [_checksums_of_replica([each.copies[r] for each in mirrored]) for r in range(len(mirrored[0].copies))]
        with tf.device("CPU:0"):
            return tf.stack(rows)

    # Concrete, as TensorFlow counts the calls of all functions made on this line and takes a function a model for retracing.
    return tf.function(tf.autograph.experimental.do_not_convert(checksums)).get_concrete_function()


def _checksums_of_replica(copies):
    packets = collections.defaultdict(list)
    for index, copy in enumerate(copies):
        size = copy.shape.num_elements()
        packed = size is not None and size < PACK_BELOW and not copy.dtype.is_complex
        packets[copy.dtype if packed else index].append(index)
    sums = [None] * len(copies)
    with tf.device(copies[0].device):
        last = []
        for indices in packets.values():
            with tf.control_dependencies(last):  # one after the other, so that they share the same memory
                found = _checksums([copies[index].read_value() for index in indices])
            last = [found[-1]]
            for index, checksum in zip(indices, found):
                sums[index] = checksum
        return tf.stack(sums)


def _checksums(values):
    """The checksum of each value; all of one dtype, or only one."""
    if len(values) == 1:
        words = _in_pairs(_flat(values[0]))
        return [tf.reduce_sum(words * _odd_numbers(tf.size(words, tf.int64)))]
    sizes = [math.prod(value.shape) for value in values]
    words = _as_int64(tf.concat([_flat(value) for value in values], 0))
    pieces = tf.split(words * _odd_numbers(sum(sizes)), sizes)
    return [tf.reduce_sum(piece) for piece in pieces]


def _flat(value):
    value = tf.reshape(value, [-1])
    return tf.concat([tf.math.real(value), tf.math.imag(value)], 0) if value.dtype.is_complex else value


def _in_pairs(flat):
    """The bits as int64; of 32-bit floats two in one, as large variables should not be copied to twice their size."""
    if flat.dtype != tf.float32:
        return _as_int64(flat)
    if flat.shape[0] is None or flat.shape[0] % 2:
        flat = tf.pad(flat, [[0, tf.size(flat) % 2]])
    return tf.bitcast(tf.reshape(flat, [-1, 2]), tf.int64)


def _as_int64(flat):
    if flat.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(flat, 2**62)
    if flat.dtype.is_floating:
        flat = tf.bitcast(flat, {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[flat.dtype.size])
    return tf.cast(flat, tf.int64)


def _odd_numbers(count):
    """Odd numbers that differ from place to place, spread over 64 bits by the golden ratio (Knuth, TAOCP 3, 6.4)."""
    return tf.range(tf.cast(count, tf.int64)) * 2 * -7046029254386353131 + 1


# --- comparing in full -------------------------------------------------------------------------


def compare(each, sums):
    """Compares the copies of one variable with those that most replicas agree on, of those with the fewest NaN.

    Args:
        each: The `Copies`.
        sums: Checksum of each copy.

    Returns:
        `(reference, differs)`: the first replica whose copy most replicas have (replica 0 on a tie), where
        one with fewer NaN comes before all that have more; and a dict of replica to the largest absolute
        difference of its copy from that one: NaN where only one of the two is NaN, infinite where only one is. Copies
        whose bits differ but whose numbers do not (0.0 and -0.0, kinds of NaN) are not in it.
    """
    counts = collections.Counter(sums)
    nans = (
        {checksum: _nans(each.copies[sums.index(checksum)]) for checksum in counts} if len(counts) > 1 else dict.fromkeys(counts, 0)
    )
    reference = max(range(len(sums)), key=lambda replica: (-nans[sums[replica]], counts[sums[replica]], -replica))
    others = [replica for replica, checksum in enumerate(sums) if checksum != sums[reference]]
    found = {replica: _difference(each.copies[reference], each.copies[replica]) for replica in others}
    return reference, {replica: largest for replica, largest in found.items() if largest is not None}


def _nans(copy):
    """How many entries are no numbers."""
    if not (copy.dtype.is_floating or copy.dtype.is_complex):
        return 0
    with tf.device(copy.device):
        return int(tf.math.count_nonzero(tf.math.is_nan(tf.abs(copy.read_value()))))


def _difference(one, other):
    """The largest absolute difference as a float, None where all numbers are equal."""
    if one.shape != other.shape or tf.reduce_any(tf.shape(one) != tf.shape(other)):
        return math.nan
    with tf.device(one.device):
        a, b = one.read_value(), tf.identity(other.read_value())
        same = a == b
        if a.dtype.is_floating:
            same |= tf.math.is_nan(a) & tf.math.is_nan(b)
        if tf.reduce_all(same):
            return None
        if a.dtype == tf.string:
            return math.nan
        off = tf.abs(_number(a) - _number(b))
        off = tf.where(same, tf.zeros_like(off), off if a.dtype.is_floating or a.dtype.is_complex else tf.maximum(off, 1))
        return math.nan if tf.reduce_any(tf.math.is_nan(off)) else float(tf.reduce_max(off))


def _number(value):
    """In a precision that holds the difference."""
    if value.dtype.is_complex or value.dtype in (tf.float32, tf.float64):
        return value
    return tf.cast(value, tf.float32 if value.dtype.is_floating else tf.float64)


# --- repairing ---------------------------------------------------------------------------------


def repair(each, reference):
    """Makes all copies bit-identical and says how.

    State that every replica updates by itself is averaged, each replica counting once and a NaN not at
    all; whole numbers and whatever training keeps equal are copied from the reference.

    Args:
        each: The `Copies`.
        reference: int, the replica to copy from.

    Returns:
        `"averaged"` or `"copied from replica <reference>"`.
    """
    value = _average(each.copies) if each.is_averaged else each.copies[reference].read_value()
    for copy in each.copies:
        with tf.device(copy.device):
            copy.assign(value)
    return "averaged" if each.is_averaged else f"copied from replica {reference}"


def _average(copies):
    with tf.device(copies[0].device):
        values = [_number(copy.read_value()) for copy in copies]
        is_number = [tf.logical_not(tf.math.is_nan(value)) for value in values]
        total = tf.add_n([tf.where(ok, value, tf.zeros_like(value)) for ok, value in zip(is_number, values)])
        count = tf.add_n([tf.cast(ok, total.dtype) for ok in is_number])
        return tf.cast(total / count, copies[0].dtype)


def as_numbers(checksums):
    """The checksums on the host, one tuple of ints a variable."""
    return [tuple(column) for column in np.asarray(checksums).T.tolist()]
