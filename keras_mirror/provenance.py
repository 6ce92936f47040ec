"""Where a variable came from: file, line and function of the code that created it."""

import ast
import dataclasses
import gc
import os
import sys
import threading
import types

import tensorflow as tf

from keras_mirror import internals

_ORIGIN = "_keras_mirror_origin"
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(sys.modules[name].__file__)) + os.sep
    for name in ("keras", "tensorflow")
) + (os.path.dirname(os.path.abspath(__file__)) + os.sep,)


_open_scopes = []


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a variable was created.

    Attributes:
        file: Path, or the name of the notebook cell.
        line: int.
        function: Name of the function, `"<module>"` at top level.
        thread: Name of the thread.
    """

    file: str
    line: int
    function: str
    thread: str

    def __str__(self):
        return f"{self.file}:{self.line}"


def record(variable):
    """Remembers on the variable itself which of the user's lines is creating it right now."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is not None and _ORIGIN not in vars(variable):
        code = frame.f_code
        origin = Origin(code.co_filename, frame.f_lineno, code.co_name, threading.current_thread().name)
        try:
            setattr(variable, _ORIGIN, origin)
        except AttributeError:
            pass  # a variable type with slots tells nothing about itself
    return variable


def recording_creator(next_creator, **kwargs):
    """A `tf.variable_creator_scope` creator that records the origin of what is created."""
    return record(next_creator(**kwargs))


def watch():
    """Records the origin of every variable that this thread creates from now on.

    Importing the package calls it: it registers TensorFlow's public hook for variable creators and
    patches nothing. Inside somebody else's open creator scope it does nothing, because closing
    that scope would fail.
    """
    if internals.creator_stack_is_empty():
        scope = tf.variable_creator_scope(recording_creator)
        scope.__enter__()
        _open_scopes.append(scope)  # dropping it would close it


def origin_of(variable):
    """The `Origin` of a variable, or None when nothing is known.

    Variables made before this package was imported, or in another thread, are looked up by name:
    a module's global or a function's local whose value is the variable, and the line in the
    source that assigns it.

    Args:
        variable: A `keras.Variable` or `tf.Variable`.
    """
    value = getattr(variable, "value", variable)
    value = value if isinstance(value, tf.Variable) else variable
    origin = getattr(value, _ORIGIN, None) or getattr(internals.container_of(value), _ORIGIN, None)
    return origin or _found_by_name(value, variable)


def _found_by_name(*objects):
    for target in objects:
        for referrer in gc.get_referrers(target):
            if isinstance(referrer, dict) and "__name__" in referrer and referrer.get("__file__"):
                names = [name for name, value in referrer.items() if value is target]
                line = _assignment(referrer["__file__"], names)
                if line:
                    return Origin(referrer["__file__"], line, "<module>", "unknown")
            elif isinstance(referrer, types.CellType):
                for function in gc.get_referrers(*[t for t in gc.get_referrers(referrer) if isinstance(t, tuple)]):
                    if isinstance(function, types.FunctionType) and referrer in (function.__closure__ or ()):
                        name = function.__code__.co_freevars[function.__closure__.index(referrer)]
                        line = _assignment(function.__code__.co_filename, [name], function.__code__.co_firstlineno)
                        if line:
                            return Origin(function.__code__.co_filename, line, function.__qualname__, "unknown")
    return None


def _assignment(file, names, before=None):
    """The last line (before line `before`) of `file` that assigns one of `names`."""
    try:
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return None
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in names
    ]
    lines = [line for line in lines if before is None or line < before] or lines
    return max(lines, default=None)
