"""Follows the rows of a replica through the assignments of a function's source."""

import ast
import dataclasses
import inspect

import keras

from keras_mirror.row_objects import attribute_of, constant, looked_up, value_of
from keras_mirror.row_values import REDUCED, ROWS, SHAPE, Value, combined, either, is_variable, known_call, together

_CHANGES = ("assign", "assign_add", "assign_sub")
_REDUCTIONS = ("all_reduce", "merge_call", "all_gather")
_OF_TENSORS = ("dtype", "ndim", "rank", "name", "device")  # the same for any rows


class Frame:
    """One run of a function of the source: its names, and what it returns."""

    def __init__(self, flow, tree, source, names):
        self.flow, self.tree, self.source, self.names = flow, tree, source, names
        self.returned = []
        self.by_rows = False  # whether rows decide if the line runs

    def run(self, given, named, rows=False):
        """Binds the arguments and runs the body; with `rows`, arguments that are not given are rows."""
        arguments = self.tree.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = dict(zip([each.arg for each in positional[::-1]], arguments.defaults[::-1]))
        defaults.update({a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults) if d is not None})
        rest = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
        for each in [*positional, *arguments.kwonlyargs, *rest]:
            flag = each.arg == "training" or getattr(defaults.get(each.arg), "value", None) is not None
            self.names[each.arg] = Value(ROWS) if rows and not flag else Value()
        self.names.update(zip([each.arg for each in positional], given))
        if arguments.vararg is not None and len(given) > len(positional):
            self.names[arguments.vararg.arg] = Value(parts=tuple(given[len(positional) :]), how=together(*given).how)
        self.names.update(named)
        if isinstance(self.tree, ast.Lambda):
            return self.value(self.tree.body)
        self.block(self.tree.body)
        return either(*self.returned) if self.returned else Value()

    # --- statements ---------------------------------------------------------------------------

    def block(self, statements):
        for statement in statements:
            getattr(self, f"_{type(statement).__name__}", self._other)(statement)

    def _other(self, node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.block([child])
            elif isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                self.block(child.body)

    def _FunctionDef(self, node):
        self.names[node.name] = Value(functions=((node, self),))

    def _ClassDef(self, node):
        pass

    def _Return(self, node):
        if node.value is not None:
            value = self.value(node.value)
            self.returned.append(together(value, Value(ROWS)) if self.by_rows else value)

    def _Assign(self, node):
        value = self.value(node.value)
        for target in node.targets:
            self.bind(target, value)

    def _AnnAssign(self, node):
        if node.value is not None:
            self.bind(node.target, self.value(node.value))

    def _AugAssign(self, node):
        self.bind(node.target, combined(node.op, self.value(node.target), self.value(node.value)))

    def _If(self, node):
        decides = self.value(node.test).by_rows
        ends = [self._branch(block, decides) for block in (node.body, node.orelse)]
        for name in {*ends[0], *ends[1]}:
            self.names[name] = either(*[end[name] for end in ends if name in end])

    def _branch(self, block, decides):
        before, was = self.names, self.by_rows
        self.names, self.by_rows = dict(before), was or decides
        self.block(block)
        after, self.names, self.by_rows = self.names, before, was
        return after

    def _For(self, node):
        counts = isinstance(node.iter, ast.Call) and getattr(node.iter.func, "id", None) == "range"
        for _ in range(2):  # what an earlier turn assigned
            many = self.value(node.iter)
            self.bind(node.target, many.element())
            self.names.update(self._branch(node.body, counts and many.by_rows))
        self.block(node.orelse)

    def _While(self, node):
        for _ in range(2):
            self.names.update(self._branch(node.body, self.value(node.test).by_rows))

    def _With(self, node):
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value)
        self.block(node.body)

    def bind(self, target, value):
        """Assigns to a name, a tuple of them, or an attribute."""
        if self.by_rows and not value.by_rows and value.how != REDUCED:
            value = dataclasses.replace(value, how=ROWS)
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each, part in zip(target.elts, value.unpacked(len(target.elts))):
                self.bind(each, part)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value)
        elif isinstance(target, ast.Attribute):
            for each in self.value(target.value).objects:
                self.flow.attributes[id(each), target.attr] = value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.names[target.value.id] = either(self.value(target.value), Value(value.how, reads=value.reads))

    # --- expressions --------------------------------------------------------------------------

    def value(self, node):
        """The `Value` of an expression."""
        return getattr(self, f"_{type(node).__name__}", self._any)(node)

    def _any(self, node):
        return together(*[self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)])

    def _Name(self, node):
        if node.id in self.names:
            return self.names[node.id]
        kind, found = looked_up(self.source.function, node.id)
        value = value_of(found)
        self.flow.note(value, node, kind)
        return value

    def _Lambda(self, node):
        return Value(functions=((node, self),))

    def _Starred(self, node):
        return self.value(node.value)

    def _Tuple(self, node):
        parts = tuple(self.value(each) for each in node.elts)
        return Value(together(*parts).how, parts=parts, reads=together(*parts).reads)

    _List = _Set = _Tuple

    def _Dict(self, node):
        parts = tuple(self.value(each) for each in node.values)
        return Value(together(*parts).how, parts=parts, reads=together(*parts).reads)

    def _NamedExpr(self, node):
        value = self.value(node.value)
        self.bind(node.target, value)
        return value

    def _UnaryOp(self, node):
        value = self.value(node.operand)
        return Value(value.how if isinstance(node.op, ast.USub) else together(value).how, reads=value.reads)

    def _BinOp(self, node):
        return combined(node.op, self.value(node.left), self.value(node.right))

    def _Compare(self, node):
        value = self._any(node)
        return Value() if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops) else value

    def _IfExp(self, node):
        result = either(self.value(node.body), self.value(node.orelse))
        decides = self.value(node.test).by_rows and result.how != REDUCED
        return dataclasses.replace(result, how=ROWS) if decides else result

    def _ListComp(self, node):
        inner = Frame(self.flow, self.tree, self.source, dict(self.names))
        inner.by_rows = self.by_rows
        for each in node.generators:
            inner.bind(each.target, inner.value(each.iter).element())
        value = inner.value(getattr(node, "elt", getattr(node, "value", None)))
        return Value(value.how, parts=(value,), reads=value.reads)

    _SetComp = _GeneratorExp = _DictComp = _ListComp

    def _Attribute(self, node):
        base = self.value(node.value)
        return self._attribute(base, node.attr, node)

    def _attribute(self, base, name, node):
        if name == "shape":
            return Value(SHAPE if base.by_rows else base.how)
        if name == "value" and any(is_variable(each) for each in base.objects):
            objects = tuple(each.value if isinstance(each, keras.Variable) else each for each in base.objects)
            return dataclasses.replace(base, objects=objects)
        if name in _OF_TENSORS and base.by_rows:
            return Value()
        found = [self.flow.attributes.get((id(each), name)) or value_of(attribute_of(each, name), each) for each in base.objects]
        if not found:
            return Value(base.how, reads=base.reads)
        value = either(*found)
        self.flow.note(value, node, "attribute")
        return value

    def _Subscript(self, node):
        base = self.value(node.value)
        value = base.item(constant(node.slice), self.value(node.slice))
        self.flow.note(value, node, "attribute")
        return value

    # --- calls --------------------------------------------------------------------------------

    def _Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        base = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        given = [self.value(each) for each in node.args]
        named = {each.arg: self.value(each.value) for each in node.keywords}
        variables = [each for each in base.objects if is_variable(each)] if base is not None else []
        if variables and (name in _CHANGES or str(name).startswith("scatter_")):
            return self._change(variables, node, together(*given, *named.values()), [*given, *named.values()])
        if name in _REDUCTIONS:
            return Value(REDUCED)
        of_python = self._of_python(name, node, base, given)
        if of_python is not None:
            return of_python
        functions = self.value(node.func).functions
        results = [self._called(each, given, named) for each in functions]
        if results and all(result is not None for result in results):
            return either(*results)
        self_given = [base] if base is not None and base.by_rows else []
        known = known_call(name, [*self_given, *given], self._axis(node, 0 if self_given else 1))
        return known or self._unknown([*([base] if base is not None else []), *given, *named.values()])

    def _change(self, variables, node, value, given):
        how = given[0].how if len(given) == 1 and given[0].by_rows and given[0].how != SHAPE else value.how
        if value.by_rows or self.by_rows or value.how == REDUCED:
            how = how if value.by_rows else ROWS if self.by_rows else REDUCED
            for each in variables:
                self.flow.change(each, node, Value(how, reads=value.reads), self.source.origin(node))
        return Value()

    def _called(self, function, given, named):
        """What a function returns for these arguments; None for a library's, or too deep a call."""
        function, holder = function
        if self.flow.is_running(function):
            return None
        if isinstance(holder, Frame):  # the source itself defines it
            frame = Frame(self.flow, function, holder.source, dict(holder.names))
        else:
            source = self.flow.source_of(function)
            if source is None:
                return None
            frame = Frame(self.flow, source.tree, source, {})
            given = given if holder is None else [Value(objects=(holder,)), *given]
        frame.by_rows = self.by_rows
        with self.flow.running(function):
            return frame.run(given, {name: value for name, value in named.items() if name is not None})

    def _unknown(self, given):
        """Some function of a library's: it may call the functions that it is given, as `tf.cond` does."""
        result, was = together(*given), self.by_rows
        self.by_rows = was or result.by_rows
        results = [self._called(each, [Value(result.how)] * 4, {}) for value in given for each in value.functions]
        self.by_rows = was
        return either(result, *[each for each in results if each is not None])

    def _of_python(self, name, node, base, given):
        """Functions of Python that hand on what they are given."""
        if base is not None and name in ("values", "items") and base.objects:
            element = base.element()
            return Value(parts=(element if name == "values" else Value(parts=(Value(), element)),))
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value):
            function, holder = self._next(name), self._me()
            return None if function is None else self._called((function, holder), given, {})
        if base is not None or not given:
            return None
        if name == "zip":
            return Value(parts=(Value(parts=tuple(each.element() for each in given)),))
        if name == "enumerate":
            return Value(parts=(Value(parts=(Value(), given[0].element())),))
        if name in ("list", "tuple", "reversed", "sorted", "iter"):
            return given[0]
        if name == "getattr" and len(node.args) > 1 and isinstance(constant(node.args[1]), str):
            return self._attribute(given[0], constant(node.args[1]), node)
        return None

    def _me(self):
        first = [*self.tree.args.posonlyargs, *self.tree.args.args][:1]
        objects = self.names[first[0].arg].objects if first else ()
        return objects[0] if objects else None

    def _next(self, name):
        """The method of this name that `super()` finds."""
        code, classes = inspect.unwrap(self.source.function).__code__, type(self._me()).__mro__
        for number, cls in enumerate(classes):
            own = inspect.unwrap(vars(cls).get(self.tree.name, code))
            if getattr(own, "__code__", None) is code:
                return next((vars(each)[name] for each in classes[number + 1 :] if name in vars(each)), None)
        return None

    def _axis(self, node, position):
        """The constant axes of a call, `()` for all, None for those that are not known."""
        axis = next((each.value for each in node.keywords if each.arg in ("axis", "axes")), None)
        axis = node.args[position] if axis is None and len(node.args) > position else axis
        if axis is None or isinstance(axis, ast.Constant) and axis.value is None:
            return ()
        axis = constant(axis)
        return (axis,) if isinstance(axis, int) else tuple(axis) if isinstance(axis, (list, tuple)) else None


def _is_super(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
