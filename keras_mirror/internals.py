"""Every private name of Keras and TensorFlow that this package touches, one small function each.

Checked on Keras 3.10.0 with TensorFlow 2.18.0 and Keras 3.15.1 with TensorFlow 2.21.0. Each
function is pinned by a test in `tests/test_internals.py` that says what may be deleted here once
upstream changes. `docs/internals.md` says why each is needed.
"""

import collections
import contextlib
import threading

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from tensorflow.python.distribute import collective_all_reduce_strategy, values
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import stateful_random_ops

# --- TensorFlow -----------------------------------------------------------------------------


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
def local_updates(extended):
    """While entered in a replica's thread, that thread updates its own copies, without a merge.

    Right only when every replica holds the same numbers, as after an all-reduce.
    """
    flag = extended._keras_mirror_local
    before, flag.on = flag.on, True
    try:
        yield
    finally:
        flag.on = before


def is_per_replica(value):
    """Whether `value` is the `PerReplica` that `strategy.run` hands out piece by piece."""
    return isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable)


def per_replica_spec(specs):
    """The type of a value with one part per replica, of the parts' types `specs`."""
    return values.PerReplicaSpec(*specs)


def is_tf_function(fn):
    """Whether `fn` is what `tf.function` returns."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction)


def clone_tf_function(function, python_function):
    """A `tf.function` with the options of `function` around another Python function."""
    return function._clone(python_function=python_function)


def autograph(fn):
    """`fn` converted by AutoGraph if the code that asks for it is, else `fn` as it is."""
    status = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, status, convert_by_default=False)


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
    """The distributed variable that a replica's copy belongs to, or the variable itself."""
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


# --- Keras ----------------------------------------------------------------------------------


def forget_global_seed():
    """Removes that generator, so that the next draw makes it anew."""
    global_state.set_global_attribute("global_seed_generator", None)


def global_seed_generator():
    """The seed generator behind `keras.random` functions without a seed, or None while none was needed."""
    return global_state.get_global_attribute("global_seed_generator")


def layers_of(model):
    """Every layer below `model`, nested models and layers in layers too, `model` first."""
    return model._flatten_layers()


def symbolic_build(model, batch):
    """Builds model, losses, metrics and optimizer from anything with a shape and a dtype."""
    model._symbolic_build(data_batch=batch)


def training_strategy(model):
    """The strategy in whose scope the model was made, or None."""
    return model._distribute_strategy


def loss_tracker(model):
    """The `Mean` behind the log `loss`."""
    return model._loss_tracker


def compile_loss(model):
    """Keras' container of the compiled losses, or None."""
    return model._compile_loss


def compile_metrics(model):
    """Keras' container of the compiled metrics, or None."""
    return model._compile_metrics


def single_metrics(model):
    """Every metric of the model on its own, where Keras keeps the compiled ones in a container."""
    return [single for metric in model.metrics for single in getattr(metric, "metrics", [metric])]


def is_keras_tracker(model, metric):
    """Whether Keras itself updates the metric: with the loss, or with one of several losses."""
    trackers = [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss is not None else ())]
    return any(metric is tracker for tracker in trackers)


def metric_values(metric, y_true, y_pred):
    """What the function of a `MeanMetricWrapper` returns."""
    return metric._fn(y_true, y_pred, **metric._fn_kwargs)


def compiled_losses(model):
    """The `keras.losses.Loss` objects that the compiled loss calls, once it is built."""
    container = model._compile_loss
    return [] if container is None or not container.built else [entry.loss for entry in container._flat_losses]


def replace_compiled_losses(model, make):
    """Replaces each loss `l` that the compiled loss calls by `make(l)`; what is saved stays."""
    container = model._compile_loss
    if container is not None and container.built:
        container._flat_losses = [entry._replace(loss=make(entry.loss)) for entry in container._flat_losses]


def call_with_training(model, inputs, training):
    """Calls the model, passing `training` only if its `call` takes it, as Keras' steps do."""
    return model(inputs, training=training) if model._call_has_training_arg else model(inputs)


def model_loss(model, **arguments):
    """`model.compute_loss`, without `training` where an override does not take it."""
    return model._compute_loss(**arguments)


def own_losses(layer):
    """Loss tensors that the last call of this layer alone added."""
    return layer._get_own_losses()


def set_batch_moments(layer, moments):
    """Replaces how a `BatchNormalization` layer computes mean and variance while training."""
    set_attribute(layer, "_moments", moments)


def seed_generators_of(layer):
    """The `keras.random.SeedGenerator`s that a layer holds itself."""
    return list(layer._seed_generators)


def mask_of(tensor):
    """The mask that a layer attached to its output, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_attribute(holder, name, value):
    """Sets an attribute that Keras neither tracks nor saves."""
    object.__setattr__(holder, name, value)


def unset_attribute(holder, name):
    """Takes back `set_attribute`."""
    object.__delattr__(holder, name)


def set_training_strategy(model, strategy):
    """Makes Keras' trainer distribute data and run steps with `strategy`."""
    model._distribute_strategy = strategy


def compile_arguments(model):
    """The arguments of the last `compile` as a dict of live objects, or None where it was overridden."""
    stored = getattr(model, "_compile_config", None)
    return None if stored is None else dict(stored.config)


def dataset_of(epoch_iterator):
    """The distributed dataset that Keras' trainer iterates over."""
    return epoch_iterator._distributed_dataset


def epoch_iterator(model, x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight):
    """Keras' own iterator over anything that `fit` takes, distributed by the model's strategy."""
    return TFEpochIterator(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
        distribute_strategy=model.distribute_strategy,
        steps_per_execution=1,
    )


def set_dataset_of(epoch_iterator, dataset):
    """Makes Keras' trainer iterate over `dataset`: anything whose `iter` is a distributed iterator."""
    epoch_iterator._distributed_dataset = dataset


def replace_enumeration(epoch_iterator, make):
    """Replaces the generator of one epoch's `(first step, last step, iterator)` (3.10: without the last) by `make(generator)`."""
    original = epoch_iterator._enumerate_iterator
    epoch_iterator._enumerate_iterator = lambda: make(original())


def steps_taken(epoch_iterator):
    """Batches that Keras' trainer has taken from its present iterator."""
    return epoch_iterator._steps_seen


def set_steps_taken(epoch_iterator, steps):
    """Sets what `steps_taken` returns."""
    epoch_iterator._steps_seen = steps


def present_iterator(epoch_iterator):
    """The iterator with which Keras' trainer goes on in the next epoch, or None."""
    return epoch_iterator._current_iterator


def set_present_iterator(epoch_iterator, iterator):
    """Sets what `present_iterator` returns."""
    epoch_iterator._current_iterator = iterator


def rows_and_batch_size(data_adapter):
    """Rows in all and rows of a global batch, for arrays; else None and None."""
    return getattr(data_adapter, "_num_samples", None), getattr(data_adapter, "_batch_size", None)


def restored_epoch(model):
    """The epoch at which a restored backup says to go on, or None."""
    return model._initial_epoch


def set_restored_epoch(model, epoch):
    """Makes `fit` and `TrainingLoop`, which ask after `on_train_begin`, start at `epoch`; None for their own start."""
    model._initial_epoch = epoch


def metrics_or_logs(model, logs):
    """What `fit` hands to `on_epoch_end`: results of the metrics, if the step logs just those."""
    return model._get_metrics_result_or_logs(logs)


def is_built(model):
    """Whether layers, losses, metrics and optimizer have all their variables."""
    parts = [model._compile_metrics, model._compile_loss, model.optimizer, *model._flatten_layers()]
    return all(part.built for part in parts if part is not None)


def skip_all_reduce(optimizer):
    """Makes the optimizer take its gradients as already summed over the replicas."""
    set_attribute(optimizer, "_all_reduce_sum_gradients", lambda grads_and_vars: grads_and_vars)


def learning_rate_schedule(optimizer):
    """The schedule that an optimizer takes its learning rate from, or None where it is a number."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def variables_updated_by(optimizer):
    """The variables that the optimizer was built for."""
    return optimizer._trainable_variables


def own_trainable_variables(layer):
    """Trainable variables that a layer holds itself, without those of its sublayers."""
    return list(layer._trainable_variables)


def own_non_trainable_variables(layer):
    """Variables that a layer holds itself and that no gradient updates, without those of its sublayers."""
    return list(layer._non_trainable_variables)


def own_variables(layer):
    """Variables that a layer holds itself, without those of its sublayers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_autocast(variable):
    """Whether layers of lower precision use the variable in their precision."""
    return variable._autocast


def counters_of_names():
    """How many layers and other objects of each kind were named by number so far: a dict."""
    return dict(global_state.get_global_attribute("object_name_uids", {}))


def set_counters_of_names(counters):
    """Sets what `counters_of_names` returned, so that the next objects get the names they would have got then."""
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int, counters))


# --- several workers ------------------------------------------------------------------------


def tensorflow_started():
    """Whether an operation ran already, after which no more workers can be connected."""
    return context.context()._initialized


def global_seed():
    """What `tf.random.set_seed` set, or None."""
    return context.global_seed()


def is_read_together(value):
    """Whether `value` is a variable whose copies are put together when it is read, such as a metric's state."""
    return isinstance(value, values.SyncOnReadVariable)


class _CollectiveExtended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """TensorFlow's, with several CPUs a worker where asked, and weights that can be made without a word to the others."""

    keras_mirror_cpus = 1
    keras_mirror_alone = False

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        devices, kind = super()._initialize_local_devices(cluster_resolver, worker_device)
        if kind == "CPU":
            devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(self.keras_mirror_cpus))
        return devices, kind

    def _get_variable_creator_initial_value(self, replica_id, device, primary_var, **kwargs):
        overridden = (
            super() if not self.keras_mirror_alone else super(collective_all_reduce_strategy.CollectiveAllReduceExtended, self)
        )
        return overridden._get_variable_creator_initial_value(
            replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
        )


def collective_extended(strategy, cluster_resolver, communication_options, cpus):
    """What stands behind a `tf.distribute.MultiWorkerMirroredStrategy`, with `cpus` replicas a worker where there is no GPU."""
    kind = type("_CollectiveExtended", (_CollectiveExtended,), {"keras_mirror_cpus": cpus})
    return kind(strategy, cluster_resolver=cluster_resolver, communication_options=communication_options)


@contextlib.contextmanager
def made_alone(extended):
    """While entered, variables start from this worker's own values instead of the chief's, without communication."""
    before, extended.keras_mirror_alone = extended.keras_mirror_alone, True
    try:
        yield
    finally:
        extended.keras_mirror_alone = before


def set_initial_epoch(model, epoch):
    """Makes `fit` begin with `epoch`, as after a backup was restored."""
    model._initial_epoch = epoch
