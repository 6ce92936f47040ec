"""Optimizers, losses and metrics that were made outside of the scope, made again inside."""

import dataclasses

import keras

from keras_mirror.provenance import Origin, origin_of


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """An object that was made again inside the scope.

    Attributes:
        role: `"optimizer"`, `"metric"` or `"loss"`.
        name: Its name.
        origin: `Origin` of the first one, or None.
        effect: What was done.
        remedy: What to write to avoid it.
    """

    role: str
    name: str
    origin: Origin | None
    effect: str
    remedy: str = "make it in build_fn to keep the object itself"

    @property
    def what(self):
        """Role, name and place."""
        return f"{self.role} {self.name!r}{f' ({self.origin.place})' if self.origin else ''}"

    def __str__(self):
        return f"the {self.what} {self.effect}; {self.remedy}."


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
        `(arguments, rebuilt)`: one `Rebuilt` per object that was made again.

    Raises:
        ValueError: If an object cannot be made from its own config.
    """
    rebuilt = []

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
        stateful = getattr(thing, "built", False) and _has_state(thing)
        effect = "was made outside of the strategy's scope and was made again inside from its config"
        effect += ", without its state" if stateful else ""
        rebuilt.append(Rebuilt(_role(thing), thing.name, origin_of(strangers[0], thing), effect))
        return _again(thing, rebuilt[-1].what)

    return visit(arguments), rebuilt


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
