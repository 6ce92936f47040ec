"""Private names of TensorFlow, one small function each."""

import contextlib
import random
import threading
import types

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, values
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import func_graph, op_def_registry, ops, random_seed
from tensorflow.python.ops import resource_variable_ops, stateful_random_ops


class _LocalFlag(threading.local):
    on = False


def allow_local_updates(extended):
    """Lets `local_updates(extended)` switch a strategy to updates without a merge over replicas.

    TensorFlow asks `extended._use_merge_call()` whether a replica may update its own copy of a
    variable directly. Keras' optimizers ask the same through `maybe_merge_call`.
    """
    flag, original = _LocalFlag(), extended._use_merge_call
    extended._use_merge_call = lambda: not flag.on and original()
    extended._keras_mirror_local = flag


@contextlib.contextmanager
def local_updates(extended, local=True):
    """While entered in a replica's thread, that thread updates its own copies, without a merge; or else, with one.

    Right only when every replica holds the same numbers, as after an all-reduce.
    """
    flag = extended._keras_mirror_local
    before, flag.on = flag.on, local
    try:
        yield
    finally:
        flag.on = before


def merging_updates(extended):
    """Takes back `local_updates` for the length of its body."""
    return local_updates(extended, local=False)


def regrouped(parts):
    """One value with a part for each replica of this process, for `merge_call` to hand out."""
    return distribute_utils.regroup(tuple(parts), always_wrap=True)


def seeds_of_operations():
    """`(module, name)` of the function from which TensorFlow's random operations take their two seeds."""
    return random_seed, "get_seed"


def seeds_by_chance():
    """A pair for a random operation that nobody gave a seed, not out of the user's random numbers."""
    return tuple(random.SystemRandom().randrange(1, 2**31) for _ in range(2))


def definition_of_operation(name):
    """The definition of an operation, e.g. whether it is stateful; None for the name of a function."""
    return op_def_registry.get(name)


def class_of_tf_functions():
    """The class of what `tf.function` returns."""
    return polymorphic_function.Function


def reads_of_variables():
    """`(class, name)` of the methods that read a variable on one device, whole or some rows of it."""
    return [(resource_variable_ops.BaseResourceVariable, name) for name in ("_read_variable_op", "sparse_read")]


def is_per_replica(value):
    """Whether `value` is the `PerReplica` that `strategy.run` hands out piece by piece."""
    return isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable)


def per_replica_spec(specs):
    """The type of a value with one part per replica, of the parts' types `specs`."""
    return values.PerReplicaSpec(*specs)


def spec_of_a_part(spec):
    """The type of one replica's part, of the type of a distributed value; any other type as it is."""
    return spec._value_specs[0] if isinstance(spec, values.PerReplicaSpec) else spec


def single_variable(value, name, dtype=None):
    """An untrained `tf.Variable` on the host, without copies even in the scope of a strategy."""
    with tf.init_scope(), tf.device("CPU:0"):
        made = resource_variable_ops.ResourceVariable(value, trainable=False, dtype=dtype, name=name)
    made.keras_mirror_own = True
    return made


def is_tf_function(fn):
    """Whether `fn` is what `tf.function` returns."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction)


def python_function_of(function):
    """What a `tf.function` was made of, converted by AutoGraph unless it was made with `autograph=False`."""
    fn = function.python_function
    bound = getattr(fn, "__wrapped__", None)
    if isinstance(bound, types.MethodType) and hasattr(bound.__self__, "target"):  # a method, which TensorFlow binds weakly
        fn = types.MethodType(bound.__func__, bound.__self__.target)
    return autograph(fn, by_default=True) if function._autograph else tf.autograph.experimental.do_not_convert(fn)


def clone_tf_function(function, python_function):
    """A `tf.function` with the options of `function` around another Python function."""
    return function._clone(python_function=python_function)


def autograph(fn, by_default=False):
    """`fn` converted by AutoGraph if the code that asks for it is (`by_default`: if it is not told otherwise), else as it is."""
    status = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, status, convert_by_default=by_default)


def before_autograph(frame):
    """`(file, line, function)` of the user's source behind a frame of code that AutoGraph wrote, or None."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    while frame is not None:
        converted = frame.f_locals.get("converted_f") if frame.f_code.co_name == "converted_call" else None
        for place, written in getattr(converted, "ag_source_map", {}).items():
            if (place.filename, place.lineno) == (file, line):
                return written.loc.filename, written.loc.lineno, written.function_name
        frame = frame.f_back
    return None


def container_of(variable):
    """The TensorFlow variable, with all of its copies, of a variable of Keras' or TensorFlow's or of one replica's copy."""
    variable = variable.value if isinstance(variable, keras.Variable) else variable
    if is_distributed(variable):
        return variable  # which has no handle to ask for inside of a scope
    for place in (variable, getattr(variable, "handle", None)):
        find = getattr(place, "_distributed_container", None)
        if find is not None and find() is not None:
            return find()
    return variable


def is_distributed(value):
    """Whether `value` is a variable with a copy on each replica."""
    return isinstance(value, values.DistributedVariable)


def eager_seeds():
    """The state of the generator that seeds TensorFlow's eager random operations."""
    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def set_eager_seeds(state):
    """Puts the state of `eager_seeds` back."""
    if state is not None:
        context.context()._rng.setstate(state)


def current_graph():
    """The graph that is being traced, or None in eager execution."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, func_graph.FuncGraph) else None


def scratch_graph():
    """A graph to trace something in that will not be run."""
    return func_graph.FuncGraph("scratch")


def inside_tf_function():
    """Whether a `tf.function` is being traced."""
    return current_graph() is not None


def captured_variables(graph):
    """Variables that a graph (while it is being traced, or afterwards) reads or writes."""
    watched = getattr(graph, "_watched_variables", None)
    return list(watched) if watched else list(graph.variables)


class _WatchedGraphs(type(ops._default_graph_stack)):
    """TensorFlow's own store of each thread's default graph; a new one starts with `creators`."""

    creators = []

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "_global_default_graph" and value is not None:
            self.begin(value)

    def begin(self, graph):
        stack = graph._variable_creator_stack
        stack[:0] = [(100, creator) for creator in self.creators if all(creator is not open for _, open in stack)]


def see_every_variable(creator):
    """Opens a `tf.variable_creator_scope` with `creator` in this thread and in every one to come, for good.

    TensorFlow has a default graph per thread, made when it is first needed and again after
    `clear_session`, and asks it for the creators. This changes the class of the one object that
    keeps those graphs; no class and no function is replaced.
    """
    if not isinstance(ops._default_graph_stack, _WatchedGraphs):
        ops._default_graph_stack.__class__ = _WatchedGraphs
    if creator not in _WatchedGraphs.creators:
        _WatchedGraphs.creators.append(creator)
    ops._default_graph_stack.begin(tf.compat.v1.get_default_graph())


@contextlib.contextmanager
def without_creators():
    """While entered, this thread creates variables with nobody watching; for measuring what watching costs."""
    stack = tf.compat.v1.get_default_graph()._variable_creator_stack
    creators, stack[:] = list(stack), []
    try:
        yield
    finally:
        stack[:] = creators


def is_made_in_a_scope(variable):
    """Whether a variable (not a replica's copy, but what holds it) was made in the scope of a strategy."""
    return getattr(variable, "_distribute_strategy", None) is not None


def kinds_of_datasets(dataset):
    """What a `tf.data.Dataset` is made of, e.g. `{"Batch", "Shard", "TensorSlice"}`."""
    kinds, pending = set(), [dataset]
    while pending:
        each = pending.pop()
        kinds.add(kind_of_dataset(each))
        pending += inputs_of_dataset(each)
    return kinds


def kind_of_dataset(dataset):
    """What the last stage of a `tf.data.Dataset` is, e.g. `"Batch"`, `"Shard"` or `"TensorSlice"`."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def inputs_of_dataset(dataset):
    """The datasets that the last stage of a `tf.data.Dataset` takes."""
    return list(dataset._inputs())


def setting_of_dataset(dataset, name):
    """What the last stage of a dataset was made with, e.g. `"buffer_size"`, or None if it has no such setting."""
    value = getattr(dataset, f"_{name}", None)
    value = tf.get_static_value(value) if isinstance(value, tf.Tensor) else value
    return value.item() if hasattr(value, "item") else value


def datasets_below(dataset):
    """`dataset` and every dataset that it is made from, itself first, each with the names of those that read from it."""
    pending = [(dataset, ())]
    while pending:
        each, above = pending.pop()
        yield each, above
        pending += [(below, (*above, kind_of_dataset(each))) for below in inputs_of_dataset(each)]


def functions_of_dataset(dataset):
    """The graphs of the functions that a `tf.data.Dataset` itself calls, as `GraphDef`s."""
    return [function.function.graph.as_graph_def() for function in dataset._functions()]


def shuffle_seeds(dataset):
    """The two seeds of a dataset made by `shuffle`, both 0 if it was given none; None for another dataset."""
    seeds = getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None)
    return None if seeds[0] is None or seeds[1] is None else tuple(int(tf.get_static_value(seed)) for seed in seeds)


def batch_size_of(dataset):
    """Rows of a batch of a dataset made by `batch` or `padded_batch`; None for another dataset."""
    size = getattr(dataset, "_batch_size", None)
    return None if size is None or tf.get_static_value(size) is None else int(tf.get_static_value(size))


def global_tf_generator():
    """The generator of `tf.random.get_global_generator()`, or None while nobody has asked for it."""
    return stateful_random_ops.global_generator
