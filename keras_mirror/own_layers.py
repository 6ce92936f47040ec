"""A layer of the user's own in a step that works on a replica's rows: where it mixes rows, it is given those of all."""

import functools

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.empty_parts import is_own
from keras_mirror.layer_trials import KEEPS, MIXES, how_it_goes, is_trying
from keras_mirror.losses import mark_as_share
from keras_mirror.row_needs import is_looking
from keras_mirror.rows import current_part
from keras_mirror.view_splits import mixes_in_functions
from keras_mirror.view_steps import counted_once, gathered_structure, sees_a_part, viewing_the_whole


def show_whole(layer, prepare):
    """Makes a layer of the user's own that mixes rows, or keeps something of them, see the rows of all replicas.

    Gradients come out right as they are: what goes in is gathered, what comes out is cut, and each is the other's gradient.

    Args:
        layer: A Keras layer, changed in place if the user wrote what it does, or functions between its layers.
        prepare: Called with each layer that runs on the replica's own rows.
    """
    if not isinstance(layer, keras.Layer) or not (is_own(layer) or mixes_in_functions(layer)):
        return
    own = layer.call

    @functools.wraps(own)
    def call(*args, **kwargs):
        if not sees_a_part() or is_trying() or is_looking() or not _needs_all(layer, args, kwargs):
            return own(*args, **kwargs)
        layers = internals.layers_of(layer)
        before = [loss for each in layers for loss in internals.list_of_losses(each)]
        with viewing_the_whole(prepare) as (view, _):
            with counted_once(view, lambda: [metric for each in layers for metric in internals.metrics_of(each)], read=True):
                outputs = own(*gathered_structure(view, args), **gathered_structure(view, kwargs))
            outputs = keras.tree.map_structure(lambda leaf: view.with_notes(leaf, view.own) if _has_rows(leaf) else leaf, outputs)
        for losses in map(internals.list_of_losses, layers):
            for index, loss in enumerate(losses):
                if not any(loss is other for other in before):  # every replica has all of it
                    losses[index] = mark_as_share(tf.reduce_sum(loss) / tf.cast(view.replicas, loss.dtype))
        return outputs

    internals.set_attribute(layer, "call", call)


def _has_rows(leaf):
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0


def _needs_all(layer, args, kwargs):
    """Whether it is known to mix rows, to add a loss, or to change a variable, and every replica can do so alike."""
    if not all(each.built for each in internals.layers_of(layer)):
        return False
    counts = [
        v for each in internals.layers_of(layer) for v in internals.own_variables(each) if internals.is_read_together(v.value)
    ]
    return not counts and how_it_goes(layer, current_part().strategy, args, kwargs) in (MIXES, KEEPS)
