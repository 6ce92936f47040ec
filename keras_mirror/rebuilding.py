"""Optimizers, losses and metrics that were made outside of the scope, made again inside."""

import keras

from keras_mirror.provenance import origin_of


def outside(thing, strategy):
    """Variables of an optimizer, metric or loss that were not made in the strategy's scope."""
    variables = list(getattr(thing, "variables", ())) or [v for v in vars(thing).values() if isinstance(v, keras.Variable)]
    return [v for v in variables if not strategy.extended.variable_created_in_scope(v.value)]


def rebuild_in_scope(arguments, strategy):
    """Copies a structure of compile arguments, with what is out of scope made again from its config.

    Call it inside the scope. Containers without anything to rebuild are returned as they are.

    Args:
        arguments: Dict, list, tuple or single object; other values pass through.
        strategy: The strategy.

    Returns:
        `(arguments, sentences)`: one sentence per object that was made again.

    Raises:
        ValueError: If an object cannot be made from its own config.
    """
    sentences = []

    def visit(thing):
        if isinstance(thing, dict):
            visited = {key: visit(value) for key, value in thing.items()}
            return visited if any(visited[key] is not thing[key] for key in thing) else thing
        if isinstance(thing, (list, tuple)):
            visited = [visit(value) for value in thing]
            return type(thing)(visited) if any(a is not b for a, b in zip(visited, thing)) else thing
        if not isinstance(thing, (keras.optimizers.Optimizer, keras.metrics.Metric, keras.losses.Loss)):
            return thing
        strangers = outside(thing, strategy)
        if not strangers:
            return thing
        origin = origin_of(strangers[0], thing)
        what = f"{_role(thing)} {thing.name!r}{f' ({origin})' if origin else ''}"
        sentences.append(
            f"the {what} was made outside of the strategy's scope and was made again inside from its config"
            + (", without its state" if getattr(thing, "built", False) and _has_state(thing) else "")
            + "; make it in build_fn to keep the object itself."
        )
        return _again(thing, what)

    return visit(arguments), sentences


def _role(thing):
    if isinstance(thing, keras.optimizers.Optimizer):
        return "optimizer"
    return "metric" if isinstance(thing, keras.metrics.Metric) else "loss"


def _has_state(thing):
    return isinstance(thing, keras.optimizers.Optimizer) and int(keras.ops.convert_to_numpy(thing.iterations)) > 0


def _again(thing, what):
    try:
        return type(thing).from_config(thing.get_config())
    except Exception as error:
        raise ValueError(
            f"mirrored_model: the {what} was made outside of the strategy's scope and cannot be made again from its config "
            f"({type(error).__name__}: {error}); make it in build_fn."
        ) from error
