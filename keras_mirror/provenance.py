"""Where a variable came from: file, line and function of the code that created it."""

import dataclasses
import sys
import threading

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.places import KIND_OF, LIBRARY, NAMED_MAKER, USER, place
from keras_mirror.searching import assignment_of

_ORIGIN = "_keras_mirror_origin"


@dataclasses.dataclass(frozen=True, repr=False)
class Origin:
    """Where a variable was created; what `origin` returns.

    Attributes:
        file: Path, or the name that Python has for a notebook cell.
        line: int.
        function: Name of the function, `"<module>"` at top level.
        layer: Name of the layer, optimizer or metric that made it for that line, None where the
            line made it by hand.
        in_scope: Whether it was made in the scope of a strategy.
        thread: Name of the thread, None where the line was looked up by name afterwards.
        by_keras: Whether a layer, an optimizer, a metric, a random generator or a trainer of Keras
            made it for that line.
    """

    file: str
    line: int
    function: str
    layer: str | None = None
    in_scope: bool = False
    thread: str | None = None
    by_keras: bool = False

    @property
    def place(self):
        """File and line in short, `In[3], line 2` for a notebook cell."""
        return place(self.file, self.line)

    def __str__(self):
        details = [f"in {self.function}"] if not self.function.startswith("<") else []
        details += [f"by {self.layer!r}"] if self.layer else []
        details += ["in scope" if self.in_scope else "out of scope"]
        details += [f"thread {self.thread!r}"] if self.thread else []
        return f"{self.place} ({', '.join(details)})"

    def __repr__(self):
        return f"<Origin {self}>"


def origin(variable):
    """Tells which line created a variable.

    Every variable created after `import keras_mirror` is remembered with its line, in every thread
    and after `keras.backend.clear_session` too. That costs about one percent of the time in which
    a layer makes its variables, and about five of that of a bare `tf.Variable(0.0)`, more than half
    of which is TensorFlow's for calling any creator at all (`docs/speed.md`). Only names and numbers
    are kept, on the variable itself, so nothing is kept alive. A variable from before the import is
    looked up by name, which finds those assigned to a plain name.

    Args:
        variable: A `keras.Variable` or `tf.Variable`: plain, distributed, or one replica's copy.

    Returns:
        An `Origin`, or None if nothing is known.

    Raises:
        TypeError: If `variable` is something else.

    Example:

    >>> counter = tf.Variable(0)
    >>> print(km.origin(counter))
    train.py:12 (out of scope, thread 'MainThread')
    """
    if not isinstance(variable, (keras.Variable, tf.Variable)):
        raise TypeError(
            f"origin: expected a keras.Variable or tf.Variable, and got {type(variable).__name__}; "
            "ask for one variable, for example keras_mirror.origin(layer.variables[0])."
        )
    return origin_of(variable)


def origin_of(variable, *holders):
    """As `origin`, of a variable that the objects `holders` hold, which are looked up by name as well."""
    value = getattr(variable, "value", variable)
    value = value if isinstance(value, tf.Variable) else variable
    container = internals.container_of(value)
    in_scope = internals.is_made_in_a_scope(container)
    for each in (value, container, *_copies(container)):
        found = _own_attributes(each).get(_ORIGIN)
        if found is not None:
            file, line, function, layer, thread, by_keras = found
            return Origin(file, line, function, layer, in_scope, thread, by_keras)
    found = assignment_of([value, variable, *holders])
    return None if found is None else Origin(*found, in_scope=in_scope)


def _own_attributes(variable):
    """The attributes as a dict, empty for a type with slots; `getattr` by name would read, and reduce, a metric's variable."""
    return getattr(variable, "__dict__", {})


def _copies(container):
    return container.values if isinstance(container, tf.distribute.DistributedValues) else ()


def watch():
    """Records the origin of every variable that is created from now on, in every thread.

    Importing the package calls it. A thread that had used TensorFlow before is watched from its
    next call of `mirrored_model`, `MirroredStrategy` or `keras.backend.clear_session`.
    """
    internals.see_every_variable(recording_creator)


def recording_creator(next_creator, **kwargs):
    """A `tf.variable_creator_scope` creator that records the origin of what is created."""
    return record(next_creator(**kwargs))


def record(variable):
    """Remembers on the variable itself which of the user's lines is creating it right now."""
    attributes = _own_attributes(variable)
    if _ORIGIN in attributes:
        return variable
    frame, maker, by_keras = sys._getframe(1), None, False
    while frame is not None:
        kind = KIND_OF[frame.f_code.co_filename]
        if kind != LIBRARY:
            if kind == USER:
                break
            by_keras = True
            if kind == NAMED_MAKER and maker is None:
                maker = frame
        frame = frame.f_back
    if frame is not None:
        attributes[_ORIGIN] = (*_line_of(frame), _name_of_self(maker), threading.current_thread().name, by_keras)
    return variable


def _line_of(frame):
    code = frame.f_code
    written = internals.before_autograph(frame) if "__autograph_generated_file" in code.co_filename else None
    return written or (code.co_filename, frame.f_lineno, code.co_name)


def _name_of_self(frame):
    """The name of the layer, optimizer or metric one of whose methods the frame runs.

    Of library frames only: asking a frame for its locals keeps them until its function returns.
    """
    if frame is None or not frame.f_code.co_argcount:
        return None
    name = getattr(frame.f_locals.get(frame.f_code.co_varnames[0]), "name", None)
    return name if isinstance(name, str) else None
