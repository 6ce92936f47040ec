"""Whether a loss or a metric has a number for each row of a batch, or numbers for the batch as a whole."""

import concurrent.futures

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals

SIZE = 8  # of what is unknown besides the rows


def is_by_row(function, arguments, values, known):
    """Whether the first dimension of what a function returns is that of the rows.

    Where the number of rows is unknown, so is that of the numbers for them. Where it is known, or other sizes are
    unknown as well, the function is traced once with arguments of which the number of rows alone is unknown.

    Args:
        function: `function(y_true, y_pred)`.
        arguments: The tensors that it was called with.
        values: The tensor that it returned.
        known: Dict in which the answer for tensors of this kind is kept.

    Returns:
        bool; True where it cannot be found out.
    """
    if not values.shape.rank:
        return False
    if not all(isinstance(each, tf.Tensor) and each.shape.rank for each in arguments):
        return True
    if values.shape[0] is None and all(each.shape[1:].is_fully_defined() for each in arguments):
        return True
    if values.shape[0] is not None and all(each.shape[0] is None for each in arguments):
        return False
    specs = tuple(tf.TensorSpec([None, *(size or SIZE for size in each.shape[1:])], each.dtype) for each in arguments)
    if specs not in known:
        try:
            shape = tf.function(function, autograph=False).get_concrete_function(*specs).structured_outputs.shape
            known[specs] = bool(shape.rank) and shape[0] is None
        except Exception:  # whatever a function of the user's cannot do with such tensors: it just ran with those of the step
            known[specs] = True
    return known[specs]


# Keras' own that add up over the rows of a batch, or compare them with each other.
_MIXING = ("Dice", "Tversky", "Circle", "CategoricalGeneralizedCrossEntropy")


def is_loss_of_keras(loss):
    """Whether a loss is one of Keras' that has a number for each row, whatever it is given."""
    function = getattr(loss, "fn", None)
    if isinstance(loss, keras.losses.Loss) and type(loss) is not _WRAPPER and _is_of_keras(type(loss)):
        return type(loss).__name__ not in _MIXING and getattr(loss, "axis", None) != 0
    return function is not None and is_function_of_keras(function)


_WRAPPER = next(base for base in keras.losses.MeanSquaredError.__mro__ if base.__name__ == "LossFunctionWrapper")


def is_function_of_keras(function):
    """Whether a function of two arguments is one of Keras' losses or metrics that has a number for each row."""
    names = {"dice", "tversky", "circle"}
    return _is_of_keras(function) and getattr(function, "__name__", "circle") not in names


def _is_of_keras(thing):
    return (getattr(thing, "__module__", None) or "").split(".")[0] == "keras"


class RowsApart:
    """Finds out by trying whether a function of targets and outputs has a number for each row, made of that row alone.

    It is tried on small batches of several kinds of numbers, all rows together and each alone. What cannot be tried,
    draws random numbers, reads a variable, or never gives numbers that are finite, is not known to.

    Args:
        function: `function(y_true, y_pred)`.
    """

    _ROWS = 3

    def __init__(self, function):
        self._function = function
        self._known = {}

    def __call__(self, *arguments):
        leaves = tf.nest.flatten(arguments)
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            return False
        key = tuple((leaf.dtype, *leaf.shape[1:]) for leaf in leaves)
        if key not in self._known:
            specs = tf.nest.map_structure(
                lambda leaf: tf.TensorSpec([None, *(size or SIZE for size in leaf.shape[1:])], leaf.dtype), arguments
            )
            with concurrent.futures.ThreadPoolExecutor(1) as thread:  # this one is in its step, on a replica
                self._known[key] = thread.submit(self._try, specs).result()
        return self._known[key]

    def _try(self, specs):
        try:
            traced = tf.function(self._function, autograph=False).get_concrete_function(*specs)
            if any(each.dtype == tf.resource for each in traced.captured_inputs) or not keeps_nothing(traced.graph):
                return False
        except Exception:  # whatever a function of the user's cannot do with such tensors
            return False
        verdicts = [self._verdict(traced, specs, draw) for draw in (around_zero, fractions, zeros_and_ones)]
        return False not in verdicts and True in verdicts

    def _verdict(self, traced, specs, draw):
        """True, False, or None where these numbers tell nothing."""
        generator = np.random.RandomState(7)
        given = [
            tf.cast(tf.constant(draw(generator, [self._ROWS, *spec.shape[1:]])), spec.dtype) for spec in tf.nest.flatten(specs)
        ]
        try:
            together = traced(*tf.nest.pack_sequence_as(specs, given)).numpy()
            if together.shape[:1] != (self._ROWS,):
                return False
            alone = [
                traced(*tf.nest.pack_sequence_as(specs, [each[row : row + 1] for each in given])).numpy()
                for row in range(self._ROWS)
            ]
        except Exception:
            return None
        alone = np.concatenate(alone)
        if not np.isfinite(together).all() or not np.isfinite(alone).all():
            return None
        return bool(together.shape == alone.shape and np.allclose(together, alone, rtol=1e-4, atol=1e-6))


# Operations that TensorFlow calls stateful and that keep nothing.
_HARMLESS = frozenset(
    "Placeholder PartitionedCall StatefulPartitionedCall Assert If While StatelessIf StatelessWhile ReadVariableOp ResourceGather "
    "ResourceGatherNd LookupTableFindV2 LookupTableSizeV2".split()
)


def keeps_nothing(graph):
    """Whether a graph, with the functions that it calls, neither changes anything nor draws random numbers."""
    return not any(_is_stateful(operation) and operation not in _HARMLESS for operation in _operations(graph))


def changes_a_variable(graph):
    """Whether a graph, with the functions that it calls, assigns to a variable."""
    return any(operation.startswith(("Assign", "ResourceScatter")) for operation in _operations(graph))


def _operations(graph):
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return {node.op for node in nodes}


def _is_stateful(operation):
    definition = internals.definition_of_operation(operation)
    return definition is not None and definition.is_stateful


def around_zero(generator, shape):
    return generator.randn(*shape)


def fractions(generator, shape):
    return generator.uniform(0.05, 0.95, shape)


def zeros_and_ones(generator, shape):
    return generator.randint(0, 2, shape)
