"""Attributes that one object has for a while."""

import contextlib

from keras_mirror import internals


@contextlib.contextmanager
def shadowed(thing, **attributes):
    """While entered, `thing` has these attributes of its own; afterwards those that it had before."""
    before = {name: vars(thing)[name] for name in attributes if name in vars(thing)}
    for name, value in attributes.items():
        internals.set_attribute(thing, name, value)
    try:
        yield
    finally:
        for name in attributes:
            internals.set_attribute(thing, name, before[name]) if name in before else internals.unset_attribute(thing, name)
