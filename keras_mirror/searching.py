"""Where a variable that nobody saw being created is assigned: looked up by name."""

import ast
import gc
import linecache
import sys
import types

from keras_mirror.places import is_library


def assignment_of(targets):
    """`(file, line, function)` of the source that assigns one of `targets`, or None.

    Looks for a local of a function that is running, a global or a closure whose value it is, and
    takes the last line of the source that assigns to this name.

    Args:
        targets: List of objects; the variable and what holds it.
    """
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
                    yield code.co_filename, line, code.co_name
            frame = frame.f_back


def _among_globals(targets):
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not is_library(file) and isinstance(module, types.ModuleType):
            names = [name for name, value in list(vars(module).items()) if _is_any(value, targets)]
            line = _assignment(file, names)
            if line:
                yield file, line, "<module>"


def _among_closures(targets):
    cells = [cell for cell in gc.get_referrers(*targets) if isinstance(cell, types.CellType)]
    closures = [t for t in gc.get_referrers(*cells) if isinstance(t, tuple)] if cells else []
    for function in gc.get_referrers(*closures) if closures else ():
        if isinstance(function, types.FunctionType) and function.__closure__:
            code = function.__code__
            names = [name for name, cell in zip(code.co_freevars, function.__closure__) if any(cell is c for c in cells)]
            line = _assignment(code.co_filename, names, last=code.co_firstlineno)
            if line:
                yield code.co_filename, line, function.__qualname__.split(".<locals>")[0]


def _assignment(file, names, first=0, last=None):
    """The last line of `file` (between two lines) that assigns one of `names`, or None."""
    if not names:
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(file)))  # knows the cells of a notebook, too
    except (SyntaxError, ValueError):
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
