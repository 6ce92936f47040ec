"""What can be read from the source of a user's method without running it."""

import ast
import inspect
import textwrap

from keras_mirror.places import is_library
from keras_mirror.provenance import Origin

_MEANS = ("mean", "reduce_mean")
_GLOBAL = ("global_mean", "compute_loss", "compute_average_loss", "num_replicas_in_sync")
_SCALED = ("num_replicas_in_sync", "scale_regularization_loss")
_SUMS = ("sum", "add_n", "reduce_sum")


class Source:
    """The parsed source of a function of the user's.

    Attributes:
        function: The function.
        tree: Its `ast.FunctionDef`.
    """

    def __init__(self, function, tree):
        self.function = function
        self.tree = tree

    def origin(self, node):
        """`Origin` of one of the tree's nodes."""
        code = inspect.unwrap(self.function).__code__
        return Origin(code.co_filename, code.co_firstlineno + node.lineno - 1, code.co_name)

    def names(self):
        """Every name and attribute that the source mentions."""
        return {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(self.tree)}

    def calls(self, *names):
        """Calls of functions or methods of these names."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _name(node.func) in names]

    @property
    def me(self):
        """What the source calls its first argument, `self` in a method."""
        return next((each.arg for each in [*self.tree.args.posonlyargs, *self.tree.args.args]), None)


def source_of(function):
    """The `Source` of a function, or None for a library's, a lambda, or one whose source nobody has."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function) or is_library(function.__code__.co_filename):
        return None
    if "__autograph_generated_file" in function.__code__.co_filename:
        return None  # what AutoGraph wrote of it
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return Source(function, tree) if isinstance(tree, ast.FunctionDef) else None


def own_methods(cls, start):
    """The `Source`s of the user's method `start` and of the user's methods that it calls on itself."""
    pending, found = [start], {}
    while pending:
        name = pending.pop()
        source = source_of(getattr(cls, name, None)) if name not in found else None
        if source is not None:
            found[name] = source
            pending += [call.func.attr for call in source.calls(*dir(cls)) if _is_on(call.func, source.me)]
    return list(found.values())


def local_mean(source):
    """The node of a mean over a replica's own rows whose gradients are applied, or None.

    Only where it is plain to see: what `tape.gradient` is given is, through plain assignments, the
    result of `mean` or `reduce_mean` over all axes, in a function that applies gradients and
    mentions none of the ways to take a loss over the global batch.
    """
    if set(_GLOBAL) & source.names() or not source.calls("apply", "apply_gradients"):
        return None
    losses = [call.args[0] for call in source.calls("gradient") if call.args]
    return next((mean for mean in (_mean_in(source, loss, set()) for loss in losses) if mean is not None), None)


def _mean_in(source, node, seen):
    if isinstance(node, ast.Call) and _name(node.func) in _MEANS:
        return node if len(node.args) == 1 and not node.keywords else None
    if isinstance(node, ast.Call) and _name(node.func) == "scale_loss" and node.args:
        return _mean_in(source, node.args[0], seen)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _mean_in(source, node.left, seen) or _mean_in(source, node.right, seen)
    if isinstance(node, ast.Name) and node.id not in seen:
        values = [each.value for each in ast.walk(source.tree) if isinstance(each, ast.Assign) and _assigns(each, node.id)]
        return _mean_in(source, values[-1], seen | {node.id}) if len(values) == 1 else None
    return None


def _assigns(node, name):
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def summed_losses(source):
    """The node of a plain sum over `model.losses`, in one call or in a loop, or None."""
    if set(_SCALED) & source.names():
        return None
    called = [call for call in source.calls(*_SUMS) if call.args and _is_losses(source, call.args[0])]
    called += [call for call in source.calls("reduce") if any(_is_losses(source, each) for each in call.args)]
    loops = [loop for loop in ast.walk(source.tree) if isinstance(loop, ast.For) and _is_losses(source, loop.iter)]
    added = [node for loop in loops for node in ast.walk(loop) if _adds(node, _names_in(loop.target))]
    return next(iter([*called, *added]), None)


def _is_losses(source, node):
    """Whether it is `model.losses`: a list of them, a name for them, or all of them one by one."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return any(isinstance(each, ast.Starred) and _is_losses(source, each.value) for each in node.elts)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return _is_losses(source, node.generators[0].iter)
    if isinstance(node, ast.Call) and _name(node.func) in ("list", "tuple", "enumerate") and node.args:
        return _is_losses(source, node.args[0])
    if isinstance(node, ast.Name):
        values = [each.value for each in ast.walk(source.tree) if isinstance(each, ast.Assign) and _assigns(each, node.id)]
        return bool(values) and all(isinstance(value, ast.Attribute) and value.attr == "losses" for value in values)
    return isinstance(node, ast.Attribute) and node.attr == "losses"


def _adds(node, names):
    """Whether a statement adds something with one of `names` to a name."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return bool(names & _names_in(node.value))
    adds = isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add)
    return adds and bool(names & _names_in(node.value)) and bool(_names_in(node.value) & _names_in(node.targets[0]))


def _names_in(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _name(node):
    return getattr(node, "attr", getattr(node, "id", None))


def _is_on(node, me):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me
