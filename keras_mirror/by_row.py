"""Whether a loss or a metric has a number for each row of a batch, or numbers for the batch as a whole."""

import tensorflow as tf


def is_by_row(function, arguments, values, known):
    """Whether the first dimension of what a function returns is that of the rows.

    Where the number of rows is unknown, so is that of the numbers for them. Where it is known, the function is
    traced once with arguments of an unknown number of rows.

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
    if values.shape[0] is None or not all(isinstance(each, tf.Tensor) and each.shape.rank for each in arguments):
        return True
    if all(each.shape[0] is None for each in arguments):
        return False
    specs = tuple(tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in arguments)
    if specs not in known:
        try:
            shape = tf.function(function, autograph=False).get_concrete_function(*specs).structured_outputs.shape
            known[specs] = bool(shape.rank) and shape[0] is None
        except Exception:  # whatever a function of the user's cannot do with such tensors: it just ran with those of the step
            known[specs] = True
    return known[specs]
