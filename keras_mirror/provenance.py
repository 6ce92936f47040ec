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
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(sys.modules[name].__file__)) + os.sep for name in ("keras", "tensorflow")) + (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)


_MAKERS = tuple(os.path.join(_LIBRARIES[0], "src", part) for part in ("layers", "optimizers", "metrics", "random", "trainers"))
_open_scopes = []


def is_library(file):
    """Whether a file belongs to Keras, TensorFlow or this package."""
    return file.startswith(_LIBRARIES)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a variable was created.

    Attributes:
        file: Path, or the name of the notebook cell.
        line: int.
        function: Name of the function, `"<module>"` at top level.
        thread: Name of the thread.
        by_keras: Whether a layer, an optimizer, a metric or a random generator of Keras made it for
            that line.
    """

    file: str
    line: int
    function: str
    thread: str
    by_keras: bool = False

    def __str__(self):
        return f"{self.file}:{self.line}"


def record(variable):
    """Remembers on the variable itself which of the user's lines is creating it right now."""
    frame, by_keras = sys._getframe(1), False
    while frame is not None and is_library(frame.f_code.co_filename):
        by_keras = by_keras or frame.f_code.co_filename.startswith(_MAKERS)
        frame = frame.f_back
    if frame is not None and _ORIGIN not in vars(variable):
        code = frame.f_code
        origin = Origin(code.co_filename, frame.f_lineno, code.co_name, threading.current_thread().name, by_keras)
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


def origin_of(variable, *holders):
    """The `Origin` of a variable, or None when nothing is known.

    What was made before this package was imported, after `keras.backend.clear_session` or in
    another thread was not recorded; it is looked up by name: a global, a local of a function that
    is running or a closure whose value it is, and the line of the source that assigns it.

    Args:
        variable: A `keras.Variable` or `tf.Variable`.
        *holders: Objects that hold it, such as its layer or optimizer, looked up by name as well.
    """
    value = getattr(variable, "value", variable)
    value = value if isinstance(value, tf.Variable) else variable
    origin = getattr(value, _ORIGIN, None) or getattr(internals.container_of(value), _ORIGIN, None)
    if origin is not None:
        return origin
    targets = [value, variable, *holders]
    return next((found for search in (_among_locals, _among_globals, _among_closures) for found in search(targets)), None)


def _is_any(value, targets):
    return any(value is target for target in targets)


def _among_locals(targets):
    for frame in sys._current_frames().values():
        while frame is not None:
            code = frame.f_code
            if not is_library(code.co_filename):
                names = [name for name, value in frame.f_locals.items() if _is_any(value, targets)]
                line = _assignment(code.co_filename, names, code.co_firstlineno, frame.f_lineno)
                if line:
                    yield Origin(code.co_filename, line, code.co_name, "unknown")
            frame = frame.f_back


def _among_globals(targets):
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not is_library(file) and isinstance(module, types.ModuleType):
            names = [name for name, value in list(vars(module).items()) if _is_any(value, targets)]
            line = _assignment(file, names)
            if line:
                yield Origin(file, line, "<module>", "unknown")


def _among_closures(targets):
    cells = [cell for cell in gc.get_referrers(*targets) if isinstance(cell, types.CellType)]
    closures = [t for t in gc.get_referrers(*cells) if isinstance(t, tuple)] if cells else []
    for function in gc.get_referrers(*closures) if closures else ():
        if isinstance(function, types.FunctionType) and function.__closure__:
            code = function.__code__
            names = [name for name, cell in zip(code.co_freevars, function.__closure__) if any(cell is c for c in cells)]
            line = _assignment(code.co_filename, names, last=code.co_firstlineno)
            if line:
                yield Origin(code.co_filename, line, function.__qualname__.split(".<locals>")[0], "unknown")


def _assignment(file, names, first=0, last=None):
    """The last line of `file` (between two lines) that assigns one of `names`, or None."""
    if not names:
        return None
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
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and name.id in names
    ]
    return max((line for line in lines if first <= line <= (last or line)), default=None)
