"""What an audit says about a model's code and settings, beside its variables."""

import keras

from keras_mirror import internals
from keras_mirror.engine import engine_of
from keras_mirror.findings import Finding
from keras_mirror.reading import local_mean, own_methods, source_of, summed_losses


def code_findings(model, strategy):
    """Findings on the model's own steps, read from their source."""
    engine = engine_of(model)
    if strategy.num_replicas_in_sync == 1 or (engine is not None and engine.shows_whole("train_step")):
        return
    for source, name in _steps(model):
        mean = local_mean(source)
        if mean is not None:
            yield _local_mean(source, mean, name, model, strategy)
        total = summed_losses(source)
        if total is not None and _has_losses(model):
            yield _summed_losses(source, total, name, model, strategy)


def _steps(model):
    engine = engine_of(model)
    if engine is not None and engine.step is not None:
        source = source_of(engine.step)
        yield from [(source, source.function.__name__)] if source is not None else []
    else:
        for source in own_methods(type(model), "train_step"):
            yield source, f"{type(model).__name__}.{source.function.__name__}"


def _local_mean(source, mean, name, model, strategy):
    return Finding(
        "KM201",
        "warning",
        name,
        f"model {model.name}",
        source.origin(mean),
        "it takes a mean over the replica's own rows, and the gradients of the replicas are added up, so the update is "
        f"{strategy.num_replicas_in_sync}.00 times too large",
        "Use loss = keras_mirror.global_mean(loss_per_row), or self.compute_loss(...)",
    )


def _summed_losses(source, total, name, model, strategy):
    return Finding(
        "KM209",
        "warning",
        name,
        f"model {model.name}",
        source.origin(total),
        f"it adds up model.losses on every replica, so regularisers count {strategy.num_replicas_in_sync} times",
        "Use self.compute_loss(...), which counts them once, or tf.nn.scale_regularization_loss(tf.add_n(model.losses))",
    )


def _has_losses(model):
    return any(getattr(layer, "activity_regularizer", None) for layer in internals.layers_of(model)) or bool(model.losses)


def setting_findings(model, strategy):
    """Findings on what the model was compiled with."""
    engine, owner = engine_of(model), f"model {model.name}"
    for rebuilt in engine.rebuilt if engine else ():
        remedy = rebuilt.remedy[0].upper() + rebuilt.remedy[1:]
        yield Finding("KM108", "note", rebuilt.name, rebuilt.role, rebuilt.origin, f"it {rebuilt.effect}", remedy)
    many = strategy.num_replicas_in_sync > 1
    if many and engine is None and (internals.compile_arguments(model) or {}).get("jit_compile") is True:
        effect = "it compiles a step for one device, and the variables live on several"
        yield Finding("KM112", "error", "jit_compile=True", owner, None, effect, "Compile with jit_compile=False")
    if model.compiled and model.run_eagerly:
        effect = "every operation is started from Python on every replica in turn, which is many times slower than a graph"
        yield Finding("KM113", "note", "run_eagerly=True", owner, None, effect, "Leave it out once the step is debugged")
    if engine is not None and engine.batch_norm == "local" and many and _normalizes(model):
        effect = "each replica normalises with its own rows, which is another training than one device's"
        yield Finding("KM114", "note", 'batch_norm="local"', owner, None, effect, 'Use batch_norm="sync" to have the result of one')


def _normalizes(model):
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in internals.layers_of(model))
