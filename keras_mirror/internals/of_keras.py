"""Private names of Keras, one small function each."""

import collections

import keras
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.trainer import TFEpochIterator


def set_global_seed_generator(generator):
    """Makes the next draws without a seed in this thread come from `generator`; with None, from one made anew."""
    global_state.set_global_attribute("global_seed_generator", generator)


def global_seed_generator():
    """The seed generator behind `keras.random` functions without a seed, or None while none was needed."""
    return global_state.get_global_attribute("global_seed_generator")


def layers_of(model):
    """Every layer below `model`, nested models and layers in layers too, `model` first."""
    return model._flatten_layers()


def symbolic_build(model, batch, targets=True, optimizer=True):
    """Builds the model and, as asked for, losses, metrics and optimizer from anything with a shape and a dtype.

    Args:
        model: A Keras model.
        batch: The batch, a structure.
        targets: Whether it has targets, so that losses and metrics can be built.
        optimizer: Whether to build the optimizer, which has to know all weights.
    """
    names = [*(() if targets else ("_compile_loss", "_compile_metrics")), *(() if optimizer else ("optimizer",))]
    compiled = {name: getattr(model, name) for name in names}
    for name in compiled:
        set_attribute(model, name, None)
    try:
        model._symbolic_build(data_batch=batch)
    finally:
        for name, container in compiled.items():
            set_attribute(model, name, container)


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


def function_of_metric(metric):
    """The function of a `MeanMetricWrapper`."""
    return metric._fn


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


def trainable_flags(layers):
    """`(holder, flag)` of layers and the variables that they hold themselves: whether they are trained."""
    flags = []
    for layer in layers:
        flags.append((layer, layer._trainable))
        flags += [(variable, variable._trainable) for variable in layer._trainable_variables]
    return flags


def set_trainable_flags(flags):
    """Sets what `trainable_flags` returned; Keras' own setter would change all that is in a layer."""
    for holder, flag in flags:
        if holder._trainable != flag:
            set_attribute(holder, "_trainable", flag)


def metrics_of(layer):
    """The metrics that a layer holds itself."""
    return list(layer._metrics)


def takes_training(layer):
    """Whether a layer's `call` has an argument `training`."""
    return layer._call_has_training_arg


def model_loss(model, **arguments):
    """`model.compute_loss`, without `training` where an override does not take it."""
    return model._compute_loss(**arguments)


def list_of_losses(layer):
    """The list in which a layer keeps what its last call added."""
    return layer._losses


def set_list_of_losses(layer, losses):
    """Makes a layer keep it in another list."""
    set_attribute(layer, "_losses", losses)


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


def set_mask(tensor, mask):
    """Attaches a mask as a layer would."""
    tensor._keras_mask = mask


def logits_of(tensor):
    """What a sigmoid or a softmax of Keras' was made of, or None; its crossentropies are computed from that."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor, logits):
    """Notes what a sigmoid or a softmax was made of."""
    tensor._keras_logits = logits


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
