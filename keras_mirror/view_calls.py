"""What Keras' layers and TensorFlow's gradients and random numbers do where code sees the whole batch.

The functions are replaced while a view is open in any thread, and do what they always did in threads that have none.
"""

import contextlib
import functools
import threading

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.inlining import inlined
from keras_mirror.layer_losses import adds_up_over_rows, has_entries_of_rows
from keras_mirror.layer_trials import BY_ROW, how_it_goes, is_trying
from keras_mirror.rows import rows_of
from keras_mirror.view_splits import splits_by_rows
from keras_mirror.whole_view import current_view

_lock = threading.Lock()
_open = 0
_originals = []


@contextlib.contextmanager
def whole_batch_calls():
    """While entered by any thread, layers, gradients and random numbers follow the view of the thread that calls them."""
    global _open
    with _lock:
        if not _open:
            _replace()
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                while _originals:
                    setattr(*_originals.pop())


def _replace():
    seeds = internals.seeds_of_operations()
    for holder, name, replacement in (
        (keras.layers.Layer, "__call__", _call_layer),
        (tf.GradientTape, "gradient", _gradient_of_tape),
        (tf, "gradients", _gradients_of_graph),
        (*seeds, _seeds),
        (internals.class_of_tf_functions(), "__call__", _call_tf_function),
        *((*method, _read) for method in internals.reads_of_variables()),
    ):
        original = getattr(holder, name)
        _originals.append((holder, name, original))
        setattr(holder, name, _unless_closed(original, replacement))


def _unless_closed(original, replacement):
    @functools.wraps(original)
    def call(*args, **kwargs):
        view = current_view()
        if view is None and replacement is _call_layer and is_trying():
            return _call_in_trial(original, *args, **kwargs)
        if view is None or (view.inside and replacement is not _read):
            return original(*args, **kwargs)
        return replacement(view, original, *args, **kwargs)

    return tf.autograph.experimental.do_not_convert(call)


# --- layers -------------------------------------------------------------------------------------


def _call_layer(view, original, layer, *args, **kwargs):
    """A layer of Keras' runs on the replica's own rows, and what it returns is gathered; one of the user's sees the whole batch."""
    for each in internals.layers_of(layer):
        view.prepare(each)
    if view.can_meet and not all(each.built for each in internals.layers_of(layer)):
        _build(view, layer, args, kwargs)
    if not view.can_meet or not (splits_by_rows(layer) or _is_tried_to(view, layer, args, kwargs)):
        return original(layer, *args, **kwargs)
    leaves = _leaves_with_rows((args, kwargs))
    if not leaves:
        return _with_gradient_once(view, layer, (args, kwargs), original(layer, *args, **kwargs))
    mine = {id(leaf): view.with_notes(leaf, view.own) for leaf in leaves}
    args, kwargs = _mapped(lambda leaf: mine.get(id(leaf), leaf), (args, kwargs))
    rows, global_rows = rows_of(mine[id(leaves[0])]), rows_of(leaves[0])
    before = [loss for each in internals.layers_of(layer) for loss in internals.list_of_losses(each)]
    with view.on_own_rows(rows, global_rows):
        outputs = original(layer, *args, **kwargs)
    _add_up_losses(view, layer, before, rows, global_rows)
    return _mapped(lambda leaf: view.with_notes(leaf, view.whole) if _has_rows(leaf) else leaf, outputs)


def _is_tried_to(view, layer, args, kwargs):
    """Whether a layer of the user's own goes row by row, in training and else, where the call does not say which it is."""
    if isinstance(layer, keras.layers.Lambda) or not all(each.built for each in internals.layers_of(layer)):
        return False
    unsaid = internals.takes_training(layer) and "training" not in kwargs
    calls = [{**kwargs, "training": training} for training in (True, False)] if unsaid else [kwargs]
    return all(how_it_goes(layer, view.strategy, args, each) == BY_ROW for each in calls)


def _call_in_trial(original, layer, *args, **kwargs):
    if splits_by_rows(layer) and internals.takes_training(layer):
        kwargs["training"] = False
    return original(layer, *args, **kwargs)


def _build(view, layer, args, kwargs):
    """Builds a layer that is called for the first time, once for all replicas: inside of their step no weights can be made."""

    def build(strategy, *ignored):
        with tf.init_scope(), strategy.scope(), contextlib.suppress(Exception):  # what is wrong is raised where it is called
            if not all(each.built for each in internals.layers_of(layer)):
                layer(*symbolic_args, **symbolic_kwargs)
        for each in internals.layers_of(layer):
            view.prepare(each)

    symbolic_args, symbolic_kwargs = _mapped(
        lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)), (args, kwargs)
    )
    view.merged(build)


def _with_gradient_once(view, layer, given, outputs):
    """What every replica made of numbers that are no rows, such as embedded positions, with its gradient on the first alone.

    The mean over replicas would be the same; but of sparse gradients there would be as many entries for one as there
    are replicas, which Adam, which squares each by itself, tells from one.
    """
    if any(_is_tensor(leaf) and leaf.dtype.is_floating for leaf in keras.tree.flatten(given)):
        return outputs
    for variable in layer.trainable_variables:
        view.read_on_own_rows[id(variable.handle)] = variable

    @tf.custom_gradient
    def once(output):
        return tf.identity(output), lambda up: up * view.replicas if view.is_first else tf.zeros_like(up)

    return _mapped(lambda leaf: once(leaf) if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating else leaf, outputs)


def _mapped(function, structure):
    return keras.tree.map_structure(lambda leaf: function(leaf) if _is_tensor(leaf) else leaf, structure)


def _is_tensor(leaf):
    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))


def _has_rows(leaf):
    return _is_tensor(leaf) and leaf.shape.rank != 0


def _leaves_with_rows(structure):
    """The tensors that are cut: the first one with rows decides how many there are, one row alone is for all of them."""
    leaves = [leaf for leaf in keras.tree.flatten(structure) if _has_rows(leaf) and leaf.shape[0] != 1]
    return [leaf for leaf in leaves if leaf.shape[0] == leaves[0].shape[0]]


def _add_up_losses(view, layer, before, rows, global_rows):
    """Makes what layers added on their own rows what one device would have added."""
    for each in internals.layers_of(layer):
        losses = internals.list_of_losses(each)
        regularizer = getattr(each, "activity_regularizer", None)
        for index, loss in enumerate(losses):
            if not any(loss is other for other in before):
                with view.on_own_rows(rows, global_rows):
                    adds_up = (regularizer is not None and adds_up_over_rows(regularizer)) or has_entries_of_rows(loss)
                has_rows = tf.cast(rows, loss.dtype)
                share = tf.minimum(has_rows, 1) if adds_up else tf.math.divide_no_nan(has_rows, tf.cast(global_rows, loss.dtype))
                losses[index] = view.sum_of_shares(tf.reduce_sum(loss), share)


# --- gradients ----------------------------------------------------------------------------------


def _is_variable(source):
    return isinstance(source, (tf.Variable, keras.Variable)) or internals.is_distributed(source)


def _reduced(view, gradients, sources):
    """The gradients, those of variables reduced over the replicas; in a branch of the graph all is whole anyway."""
    flat, of = tf.nest.flatten(gradients), tf.nest.flatten(sources)
    if not view.can_meet or len(flat) != len(of):
        return gradients
    at = [index for index, source in enumerate(of) if _is_variable(source) and not _is_whole(view, flat[index], source)]
    for index, gradient in zip(at, view.means_of_gradients([flat[index] for index in at])):
        flat[index] = gradient
    return tf.nest.pack_sequence_as(gradients, flat)


def _is_whole(view, gradient, source):
    """Whether a sparse gradient is that of the whole batch already, as no layer read the variable on own rows.

    Its mean over the replicas would have each entry as often as there are replicas, which Adam, which squares each
    entry by itself, tells from one.
    """
    return isinstance(gradient, tf.IndexedSlices) and id(source.handle) not in view.read_on_own_rows


def _read(view, original, variable, *args, **kwargs):
    if view.inside:
        view.read_on_own_rows[id(variable.handle)] = variable
    return original(variable, *args, **kwargs)


def _gradient_of_tape(view, original, tape, target, sources, *args, **kwargs):
    # As they are now: a tape that persists goes on to record, and what it records of the reduction is its identity.
    return _reduced(view, original(tape, target, sources, *args, **kwargs), sources)


def _gradients_of_graph(view, original, ys, xs, *args, **kwargs):
    return _reduced(view, original(ys, xs, *args, **kwargs), xs if isinstance(xs, (list, tuple)) else [xs])


# --- random numbers, functions in functions -----------------------------------------------------


def _seeds(view, original, op_seed):
    return view.seeds(lambda: _never_by_chance(original(op_seed)))


def _never_by_chance(seeds):
    """Two seeds that are not both zero, for which TensorFlow takes others on each device."""
    if any(seed not in (None, 0) for seed in seeds):
        return seeds
    return internals.seeds_by_chance()


def _call_tf_function(view, original, function, *args, **kwargs):
    """A `tf.function` is part of the step: in a graph of its own replicas could not exchange anything."""
    if view.graph is not None and not view.can_meet:
        return original(function, *args, **kwargs)
    return inlined(function)(*args, **kwargs)
