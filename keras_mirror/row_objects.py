"""Python objects behind the names of a function's source, found without running code of the user's."""

import ast
import inspect
import types

from keras_mirror import internals
from keras_mirror.places import is_library
from keras_mirror.row_values import Value, is_variable

_PROPERTIES = ("weights", "variables", "layers", "metrics")  # and `trainable_weights`, ...; others may do anything


def value_of(thing, holder=None):
    if isinstance(thing, types.MethodType):
        thing, holder = thing.__func__, thing.__self__
    if isinstance(thing, staticmethod):
        thing, holder = thing.__func__, None
    if isinstance(thing, types.FunctionType):
        return Value(functions=((thing, None if isinstance(holder, (type, types.ModuleType)) else holder),))
    if hasattr(type(thing), "python_function"):
        return Value(functions=((thing.python_function, holder),))
    reads = frozenset([id(internals.container_of(thing))]) if is_variable(thing) else frozenset()
    return Value(objects=() if thing is None else (thing,), reads=reads)


def attribute_of(thing, name):
    """An attribute, without running code of the user's."""
    own = vars(thing).get(name) if hasattr(thing, "__dict__") else None
    if own is not None:
        return own
    found = inspect.getattr_static(thing, name, None)
    if isinstance(found, property):
        return getattr(thing, name, None) if name.endswith(_PROPERTIES) and is_library(found.fget.__code__.co_filename) else None
    return found


def looked_up(function, name):
    """What a name of a function's stands for outside of it, and where it is: a `(kind, object)`."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    names = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    if name in names:
        try:
            return "closure variable", names[name].cell_contents
        except ValueError:
            return "closure variable", None
    return "global", function.__globals__.get(name)


def constant(node):
    if isinstance(node, ast.Slice):
        lower = None if node.lower is None else constant(node.lower)
        upper = None if node.upper is None else constant(node.upper)
        return slice(lower, upper)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
