"""Whether a layer calls, by itself, an operation that cannot run on no rows: found out in a graph that is thrown away."""

import concurrent.futures
import contextlib
import contextvars

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.one_device import as_one_device
from keras_mirror.rows import current_part

# On CPUs most of them end the process (oneDNN), as a pooling behind a convolution does, or fail; cuDNN refuses them.
NEED_A_ROW = frozenset(
    "AvgPool AvgPool3D Conv Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 DepthwiseConv2dNative Dilation2D "
    "FractionalAvgPool FractionalMaxPool LRN MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax MirrorPad".split()
)

_looking = contextvars.ContextVar("keras_mirror_looking", default=None)


def is_looking():
    """Whether a layer is called only to see which operations it calls."""
    return _looking.get() is not None


@contextlib.contextmanager
def looking_away():
    """While entered, operations do not count: those of a layer in the layer, which is looked at by itself."""
    graph, aside = _looking.get()
    before = len(graph.get_operations())
    try:
        yield
    finally:
        aside.update(operation.name for operation in graph.get_operations()[before:])


def needs_a_row(call, args, kwargs):
    """Whether `call(*args, **kwargs)` calls one of `NEED_A_ROW`, other than in layers that look away.

    It is called once more to know, with placeholders, and on one device, so that nothing is exchanged
    between replicas. What it does is thrown away.

    Args:
        call: The call of a layer.
        args: Its arguments, a structure of tensors and other things.
        kwargs: Its keyword arguments, likewise.
    """
    strategy = current_part().strategy
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # that of a replica is in its step
        return thread.submit(_look, strategy, call, args, kwargs).result()


def _look(strategy, call, args, kwargs):
    internals.set_global_seed_generator(keras.random.SeedGenerator(0))  # of this thread, so that nobody else's moves on
    graph, aside = internals.scratch_graph(), set()
    token = _looking.set((graph, aside))
    try:
        with graph.as_default():
            args, kwargs = tf.nest.map_structure(_placeholder, (args, kwargs))
            rows = [leaf for leaf in tf.nest.flatten((args, kwargs)) if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0]
            with contextlib.suppress(Exception), as_one_device(strategy, rows):  # it will be raised where it is really called
                call(*args, **kwargs)
    finally:
        _looking.reset(token)
    return _calls_one(graph.as_graph_def(), aside)


def _placeholder(leaf):
    return tf.compat.v1.placeholder(leaf.dtype, leaf.shape) if isinstance(leaf, tf.Tensor) else leaf


def _calls_one(graph, aside):
    functions = {function.signature.name: function for function in graph.library.function}
    pending, seen = [node for node in graph.node if node.name not in aside], set()
    while pending:
        node = pending.pop()
        if node.op in NEED_A_ROW:
            return True
        called = {node.op, *(each.name for value in node.attr.values() for each in (value.func, *value.list.func))}
        for name in (called & set(functions)) - seen:
            seen.add(name)
            pending += functions[name].node_def
    return False
