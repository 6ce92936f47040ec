"""What is known of a value in a function's source: whether the rows of a replica decide it, and how."""

import ast
import dataclasses

import keras
import tensorflow as tf

# How a value depends on the replica's own rows: not at all; not any more, as it was reduced over the replicas; as the shape
# of a tensor of rows, whose first entry alone differs; as a mean over rows, a sum over rows (or their number), or otherwise.
SAME, REDUCED, SHAPE, MEAN, SUM, ROWS = "same", "reduced", "shape", "mean", "sum", "rows"

_MEANS = ("mean", "reduce_mean", "average")
_SUMS = ("sum", "reduce_sum", "count_nonzero")
_CASTS = ("cast", "convert_to_tensor", "stop_gradient", "identity", "float", "int")
_OF_SHAPES = ("len", "rank", "ndim")
_FLAGS = ("isinstance", "hasattr", "callable", "type", "is_tensor")


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the source.

    Attributes:
        how: One of the constants above.
        objects: Python objects that it may be, where they are known.
        parts: `Value`s of its elements, for a tuple or list that the source writes out; or None.
        functions: Functions that it may be, as `(function, holder)`, or `(node, frame)` for those the source defines.
        reads: Ids of the variables that it is made of.
    """

    how: str = SAME
    objects: tuple = ()
    parts: tuple | None = None
    functions: tuple = ()
    reads: frozenset = frozenset()

    @property
    def by_rows(self):
        """Whether the rows of a replica decide it."""
        return self.how in (SHAPE, MEAN, SUM, ROWS)

    def element(self):
        """What a loop over it yields."""
        if self.parts is not None:
            return either(*self.parts)
        children = tuple(child for each in self.objects for child in children_of(each))
        return Value(_whole(SUM if self.how == SHAPE else self.how), children, reads=self.reads)

    def item(self, index, index_value):
        """What `value[index]` is, for a constant `index` or None."""
        if self.how == SHAPE:
            ahead = index.start if isinstance(index, slice) else index
            keeps = SHAPE if isinstance(index, slice) else SUM
            return Value(SAME if isinstance(ahead, int) and ahead else keeps)
        if isinstance(index, int) and self.parts is not None and -len(self.parts) <= index < len(self.parts):
            return self.parts[index]
        if self.objects:
            found = [child for each in self.objects for child in _items(each, index)]
            return Value(self.how, tuple(found), reads=self.reads)
        return together(self, index_value) if index_value.by_rows else Value(self.how, reads=self.reads)

    def unpacked(self, number):
        """The `number` values of a tuple assignment."""
        if self.parts is not None and len(self.parts) == number:
            return list(self.parts)
        if self.how == SHAPE:
            return [Value(SUM), *[Value()] * (number - 1)]
        lists = [each for each in self.objects if isinstance(each, (list, tuple)) and len(each) == number]
        if lists:
            return [Value(self.how, tuple(each[i] for each in lists), reads=self.reads) for i in range(number)]
        return [self.element()] * number


def either(*values):
    """One of several values, as after the branches of an `if`; reduced in one of them is reduced."""
    hows = {value.how for value in values} - {SAME}
    how = REDUCED if REDUCED in hows else (hows.pop() if len(hows) == 1 else ROWS) if hows else SAME
    objects = tuple({id(each): each for value in values for each in value.objects}.values())
    functions = tuple(each for value in values for each in value.functions)
    longs = {len(value.parts) for value in values if value.parts is not None}
    parts = None
    if len(longs) == 1 and all(value.parts is not None for value in values):
        parts = tuple(either(*each) for each in zip(*(value.parts for value in values)))
    return Value(how, objects, parts, functions, _reads(values))


def together(*values):
    """What some function makes of several values."""
    hows = {value.how for value in values} - {SAME}
    how = ROWS if hows - {REDUCED} else (REDUCED if hows else SAME)
    return Value(how, reads=_reads(values))


def combined(op, left, right):
    """The result of an operator."""
    reads = _reads((left, right))
    if not left.by_rows and not right.by_rows:
        lists = [
            (*a, *b) for a in left.objects for b in right.objects if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple))
        ]
        return Value(REDUCED if REDUCED in (left.how, right.how) else SAME, tuple(lists), reads=reads)
    a, b = _whole(left.how), _whole(right.how)
    adds, multiplies, divides = isinstance(op, (ast.Add, ast.Sub)), isinstance(op, ast.Mult), isinstance(op, ast.Div)
    if left.by_rows and right.by_rows:
        if adds and a == b or divides and a == b == SUM:
            return Value(MEAN if divides else a, reads=reads)
        return Value(SUM if multiplies and {a, b} == {MEAN, SUM} else ROWS, reads=reads)
    how, other = (a, right) if left.by_rows else (b, left)
    if multiplies or divides and left.by_rows or adds and (how == MEAN or how == SUM and other.reads):
        return Value(how, reads=reads)
    return Value(ROWS, reads=reads)


def known_call(name, arguments, axis):
    """The result of a function that is known by its name, or None. `axis` is `()` for all axes, None if it is not known."""
    if not arguments:
        return None
    first, reads = arguments[0], _reads(arguments)
    if name in _FLAGS:
        return Value()
    if name == "shape":
        return Value(SHAPE if first.by_rows else SAME)
    if name in _OF_SHAPES:
        return Value(SUM if name == "len" and first.how == ROWS else SAME)
    if name == "size":
        return Value(SUM if first.by_rows else SAME)
    if name == "moments":
        return Value(ROWS, parts=(_reduced(MEAN, first, axis), together(first)), reads=reads)
    if name in _MEANS + _SUMS:
        return _reduced(MEAN if name in _MEANS else SUM, first, axis)
    return Value(first.how, reads=reads) if name in _CASTS else None


def _reduced(how, value, axis):
    """A mean or a sum of `value` over axes."""
    if not value.by_rows or value.how in (MEAN, SUM):
        return Value(value.how, reads=value.reads)
    return Value(how if axis is not None and (axis == () or 0 in axis) else ROWS, reads=value.reads)


def is_variable(thing):
    return isinstance(thing, (keras.Variable, tf.Variable))


def children_of(thing):
    """The elements of a list, a tuple or the values of a dict."""
    if isinstance(thing, dict):
        return list(thing.values())
    return list(thing) if isinstance(thing, (list, tuple)) else []


def _items(thing, index):
    """The element of a list or dict, all of them for an index that is not known."""
    if isinstance(index, slice) and isinstance(thing, (list, tuple)):
        return [thing[index]]
    try:
        return [thing[index]] if index is not None and isinstance(thing, (list, tuple, dict)) else children_of(thing)
    except (LookupError, TypeError):
        return []


def _whole(how):
    return ROWS if how == SHAPE else how


def _reads(values):
    return frozenset().union(*(value.reads for value in values))
