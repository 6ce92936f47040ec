"""What tells two functions of the user's apart that have the same name: the code that they run."""

import functools
import inspect
import types

from keras_mirror.places import is_library


def code_of(function):
    """A hashable value that two functions share exactly if they run the same code of the user's.

    Code objects compare by content and first line, so that a notebook cell which is run again
    unchanged gives the same. The functions of the user's that it calls belong to it: those of its
    closure, globals, defaults, and methods of the object that it is bound to.

    Args:
        function: Function, bound method, `tf.function`, `functools.partial` or object with `__call__`.
    """
    found, pending = {}, [(function, None)]
    while pending:
        each, holder = pending.pop(0)
        each, holder = _plain(each, holder)
        code = getattr(each, "__code__", None)
        if code is not None and id(code) not in found and not is_library(code.co_filename):
            found[id(code)] = code
            pending += [(callee, holder) for callee in _reached(each, holder)]
    return tuple(found.values())


def _plain(function, holder):
    """The function under its wrappers, and what it is bound to."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function, holder = function.__func__, function.__self__
        elif hasattr(function, "python_function"):
            function = function.python_function
        elif hasattr(function, "__wrapped__"):
            function = inspect.unwrap(function)
        elif isinstance(function, types.FunctionType) or not _is_users(type(function).__dict__.get("__call__")):
            return function, holder
        else:
            function, holder = type(function).__call__, function


def _is_users(function):
    return isinstance(function, types.FunctionType) and not is_library(function.__code__.co_filename)


def _reached(function, holder):
    """Functions that the source of a function may call."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    names = _names(function.__code__)
    values = [function.__globals__.get(name) for name in names]
    values += [inspect.getattr_static(type(holder), name, None) for name in names] if holder is not None else []
    values += [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value for value in values if _is_users(_plain(value, None)[0])]


def _names(code):
    """Names of globals and attributes in a code object and those within it."""
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names(each)]
    return [*code.co_names, *inner]


def is_filled(cell):
    """Whether a cell of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
