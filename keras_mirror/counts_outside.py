"""The number of replicas that code of the user's read before a step, and uses in it."""

from keras_mirror.places import place
from keras_mirror.user_code import is_filled


class ReplicaCount(int):
    """A number of replicas that remembers which line asked for it.

    Attributes:
        place: The line, as a person calls it.
    """

    @classmethod
    def asked_by(cls, frame, count):
        """The count, as asked for in a frame of the user's."""
        made = cls(count)
        made.place = place(frame.f_code.co_filename, frame.f_lineno)
        return made


def counts_in(function, holder=None):
    """`(name, ReplicaCount)` of those that a function can reach: in closures, defaults, globals and attributes that it names.

    Args:
        function: A Python function, or a method.
        holder: The object whose attributes it may name, or None.
    """
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    names = set(code.co_names)
    named = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or () if is_filled(cell))))
    named |= {name: value for name, value in function.__globals__.items() if name in names}
    named |= {name: value for name, value in getattr(holder, "__dict__", {}).items() if name in names}
    named |= dict(enumerate(function.__defaults__ or ()))
    return [(name, value) for name, value in named.items() if isinstance(value, ReplicaCount)]
