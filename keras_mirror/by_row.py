"""Whether a loss or a metric has a number for each row of a batch, or numbers for the batch as a whole."""

import tensorflow as tf

_SIZE = 8  # of what is unknown besides the rows


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
    specs = tuple(tf.TensorSpec([None, *(size or _SIZE for size in each.shape[1:])], each.dtype) for each in arguments)
    if specs not in known:
        try:
            shape = tf.function(function, autograph=False).get_concrete_function(*specs).structured_outputs.shape
            known[specs] = bool(shape.rank) and shape[0] is None
        except Exception:  # whatever a function of the user's cannot do with such tensors: it just ran with those of the step
            known[specs] = True
    return known[specs]
