"""Weights that are made after the model, such as those of `enable_lora`: in the scope where possible, else told."""

import contextlib
import functools

import tensorflow as tf

from keras_mirror import internals
from keras_mirror.errors import warn_once
from keras_mirror.provenance import origin_of


def make_weights_in(strategy, layer):
    """Makes what a layer makes later, after `build_fn` has ended, in the strategy's scope.

    Args:
        strategy: The strategy of the model.
        layer: A Keras layer, changed in place: its `add_weight`, and its `build`, which may make layers.
    """
    for name in ("add_weight", "build"):
        internals.set_attribute(layer, name, _in_scope(strategy, getattr(layer, name)))


def _in_scope(strategy, method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        if tf.distribute.has_strategy():
            return method(*args, **kwargs)
        with strategy.scope():
            return method(*args, **kwargs)

    return call


def warn_of_strangers(model, strategy):
    """Warns of weights that were not made in the strategy's scope and exist on one device only."""
    strangers = _strangers(model.weights, strategy)
    if strangers:
        warn_once(
            ("strangers", id(model), len(strangers)),
            f"mirrored_model: {len(strangers)} of the model's {len(model.weights)} weights, the first of them "
            f"{_named(model, strangers[0])}, were made outside of build_fn and exist on one device only; make their layers inside "
            "build_fn, or later inside `with model.distribute_strategy.scope():`. keras_mirror.audit(model) lists all of them.",
            code="KM101",
        )


@contextlib.contextmanager
def explaining_strangers(model, strategy):
    """Where the body builds an optimizer that keeps variables for each weight, says which weight it cannot keep any for."""
    try:
        yield
    except ValueError as error:
        strangers = _strangers(model.trainable_variables, strategy)
        if not strangers or "colocate_vars_with" not in str(error):
            raise
        raise ValueError(
            f"mirrored_model: the optimizer cannot be built, because the weight {_named(model, strangers[0])} was made outside of "
            "the strategy's scope and exists on one device only; make its layer inside build_fn, or later inside "
            "`with model.distribute_strategy.scope():`, and compile again."
        ) from None


def _strangers(weights, strategy):
    return [weight for weight in weights if not strategy.extended.variable_created_in_scope(weight.value)]


def _named(model, weight):
    holders = [layer for layer in internals.layers_of(model) if any(weight is v for v in internals.own_variables(layer))]
    origin = origin_of(weight, *holders)
    return f"{weight.path!r}{f' ({origin.place})' if origin else ''}"
