"""What a model holds besides layers: optimizers and losses, in attributes, lists and dicts, its own and its submodels'."""

import re

import keras

from keras_mirror import internals

_OF_COMPILE = (
    "loss",
    "_compile_loss",
)  # what `compile` was given and what it made of it


def models_of(model):
    """`(prefix, model)` for the model, with the prefix `""`, and for every Keras model nested in it, each once.

    A prefix is the nested model's name without the numbers that Keras gives; two of one name are told apart.
    """
    taken = {}
    for each in internals.layers_of(model):
        if each is model:
            yield "", each
        elif isinstance(each, keras.Model):
            name = without_numbers(each.name)
            taken[name] = taken.get(name, 0) + 1
            yield f"{name}{f' ({taken[name]})' if taken[name] > 1 else ''}.", each


def _holders_of(model):
    """`(prefix, holder)` for the models of `models_of`, and then for layers of the user's own, named likewise."""
    yield from models_of(model)
    taken = {}
    for each in internals.layers_of(model):
        if not isinstance(each, keras.Model) and not type(each).__module__.startswith("keras."):
            name = without_numbers(each.name)
            taken[name] = taken.get(name, 0) + 1
            yield f"layer {name}{f' ({taken[name]})' if taken[name] > 1 else ''}.", each


def without_numbers(path):
    """`path` without the numbers that Keras gives to objects of the same kind: `dense_3/kernel` is `dense/kernel`."""
    return re.sub(r"_\d+(?=_|/|$)", "", path)


def held(model, kind):
    """Everything of a kind that the model holds: in attributes, in lists, tuples and dicts there, and in nested models.

    Args:
        model: A Keras model.
        kind: A class.

    Yields:
        `(name, thing, put)`, each thing once: its name, as `optimizer`, `opts[0]` or `generator.optimizer`, and
        a function that puts another thing in its place.
    """
    seen = set()
    for prefix, each in _holders_of(model):
        for name, value in list(vars(each).items()):
            if name not in _OF_COMPILE and not name.startswith("_self_"):  # TensorFlow's notes for checkpoints
                yield from _inside(prefix + name, value, _setter(each, name), kind, seen)


def _setter(holder, name):
    def put(value):
        tracked = isinstance(value, (keras.optimizers.Optimizer, list, dict, tuple))
        setattr(holder, name, value) if tracked else internals.set_attribute(holder, name, value)

    return put


def _inside(name, value, put, kind, seen):
    if isinstance(value, kind):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value, put
        return
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    entries = list(value) if isinstance(value, tuple) else value  # several may be put into one tuple
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield from _inside(f"{name}[{key!r}]", value[key], _item_setter(value, entries, key, put), kind, seen)


def _item_setter(container, entries, key, put_container):
    def put(new):
        entries[key] = new
        if isinstance(container, tuple):
            put_container(type(container)(*entries) if hasattr(container, "_fields") else tuple(entries))

    return put


def optimizers_of(model):
    """Every optimizer that the model holds, by a name that is the same in the next process; see `held`."""
    return {name: optimizer for name, optimizer, _ in held(model, keras.optimizers.Optimizer)}
