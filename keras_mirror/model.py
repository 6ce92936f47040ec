"""`mirrored_model`: the user's own Keras model, trained by all replicas as by one device."""

import keras
import tensorflow as tf

from keras_mirror.cluster import from_environment
from keras_mirror.cluster_engine import ClusterEngine
from keras_mirror.engine import Engine, engine_of
from keras_mirror.global_batches import GlobalBatchStrategy
from keras_mirror.late_weights import warn_of_strangers
from keras_mirror.multiworker import MultiWorkerMirroredStrategy, current_strategy
from keras_mirror.normalization import MODES
from keras_mirror.provenance import watch
from keras_mirror.strategy import MirroredStrategy


def mirrored_model(build_fn, *, devices=None, strategy=None, compile=None, step=None, batch_norm="sync", view="global"):
    """Builds a Keras model that trains on several devices with the result of one.

    The model is the one that `build_fn` returns: `summary`, `save`, `clone_model`, callbacks go on
    working, and a saved file loads where this package is not installed. N replicas give the
    weights and logs of one device, for every batch size, tail and optimizer option, to rounding.

    Each step costs one all-reduce of the gradients, one scalar a loss where rows or weights are
    uneven, and a small one per batch normalisation.

    Args:
        build_fn: Function without arguments that returns a `keras.Model`: functional, Sequential
            or subclassed, compiled or not. It runs in the strategy's scope.
        devices: `None` for every visible GPU, else one CPU; an int for so many GPUs, or so many
            virtual CPU replicas where there is no GPU; a list of device names; `"idle"` for the GPUs
            that no other process uses.
        strategy: A `keras_mirror.MirroredStrategy` or `MultiWorkerMirroredStrategy` to share with other
            models, instead of `devices`. With neither, a `TF_CONFIG` of several workers chooses
            `MultiWorkerMirroredStrategy`, and a line on the screen says so.
        compile: Dict of `keras.Model.compile` arguments, if `build_fn` does not compile. Optimizers,
            losses and metrics made outside of the scope are made again inside, from their config,
            and a `MirrorWarning` says so.
        step: `step(model, data) -> logs`, in place of the model's `train_step`, in `fit` and in
            loops alike.
        batch_norm: `"sync"`: batch normalisation over the global batch, as one device has it.
            `"local"`: over each replica's own rows, with moving statistics averaged over replicas.
        view: What code of your own sees: a `train_step`, `test_step`, `compute_loss`, `compute_metrics` or
            `step`, and losses and metrics that are not known to be a number per row. `"global"`: the whole
            batch, as on one device, and one replica; the Keras layers that it calls run on each replica's
            rows, and what they return is gathered. `"replica"`: each replica's own rows, whose gradients are
            added up. See `docs/view.md`.

    Returns:
        The `keras.Model`.

    Raises:
        TypeError: If `build_fn` is not callable or returns no Keras 3 model, or `strategy` is not a
            `keras_mirror` strategy.
        ValueError: If a device does not exist, both `devices` and `strategy` are given, the model
            is not compiled and `compile` is missing (or both), `batch_norm` or `view` is unknown, or the
            model asks for `jit_compile=True`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_mirror as km
    >>> def build_fn():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> model = km.mirrored_model(build_fn, devices=2)
    >>> history = model.fit(np.ones((5, 3)), np.ones((5, 1)), batch_size=5, verbose=0)
    """
    if not callable(build_fn):
        raise TypeError(
            f"mirrored_model: build_fn must be a function that builds the model, and got {_kind(build_fn)}; "
            "write mirrored_model(lambda: ...) or pass the function without calling it."
        )
    if step is not None and not callable(step):
        raise TypeError(f"mirrored_model: step must be a function step(model, data) -> logs, and got {_kind(step)}.")
    if batch_norm not in MODES:
        raise ValueError(f"mirrored_model: batch_norm must be one of {MODES}, and got {batch_norm!r}.")
    if view not in ("global", "replica"):
        raise ValueError(f"mirrored_model: view must be 'global' or 'replica', and got {view!r}.")
    if compile is not None and not isinstance(compile, dict):
        raise TypeError(
            f"mirrored_model: compile must be a dict of Model.compile arguments such as dict(optimizer='adam', loss='mse'), "
            f"and got {_kind(compile)}."
        )
    watch()
    strategy = _strategy(devices, strategy)
    with strategy.building():
        with strategy.scope():
            model = build_fn()
        _check_model(model, compile)
        kind = ClusterEngine if isinstance(strategy, MultiWorkerMirroredStrategy) else Engine
        engine = kind(model, strategy, step, batch_norm, view)
        engine.install()
        if compile is not None:
            model.compile(**compile)
        else:
            engine.recompile_in_scope()
    engine.synchronize()
    warn_of_strangers(model, strategy)
    return model


def _kind(thing):
    return f"{type(thing).__module__.split('.')[0]} {type(thing).__name__}" if thing is not None else "None"


def _strategy(devices, strategy):
    if strategy is None:
        cluster = from_environment()
        if cluster is not None and len(cluster.workers) > 1:
            return _of_several_workers(cluster, devices)
        return MirroredStrategy(devices)
    if devices is not None:
        raise ValueError("mirrored_model: devices and strategy both say where to train; pass only one of them.")
    if isinstance(strategy, GlobalBatchStrategy):
        return strategy
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise TypeError(
            "mirrored_model: Keras 3 cannot fit under a plain tf.distribute.MultiWorkerMirroredStrategy; "
            "write strategy=keras_mirror.MultiWorkerMirroredStrategy(), at the top of the script, instead."
        )
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        names = [tf.DeviceSpec.from_string(d) for d in strategy.extended.worker_devices]
        names = [f"{d.device_type}:{d.device_index}" for d in names]
        raise TypeError(
            "mirrored_model: a plain tf.distribute.MirroredStrategy cannot split uneven batches; "
            f"write strategy=keras_mirror.MirroredStrategy({names}) instead."
        )
    raise TypeError(
        f"mirrored_model: strategy must be a keras_mirror.MirroredStrategy, and got {_kind(strategy)}; "
        "write strategy=keras_mirror.MirroredStrategy(devices), or pass devices= alone."
    )


def _of_several_workers(cluster, devices):
    if devices is not None:
        raise ValueError(
            f"mirrored_model: TF_CONFIG names {len(cluster.workers)} workers, and each trains on all devices that it sees, "
            f"so devices={devices!r} has no place; hide GPUs with CUDA_VISIBLE_DEVICES, or call keras_mirror.virtual_cpus(n) "
            "first for several CPU replicas. To train on this machine alone, unset TF_CONFIG."
        )
    strategy = current_strategy()
    if strategy is None:
        strategy = MultiWorkerMirroredStrategy()
        print(
            f"keras_mirror: training with MultiWorkerMirroredStrategy, because TF_CONFIG names {len(cluster.workers)} workers; "
            f"this is {cluster.this}{', the chief' if strategy.is_chief else ''}.",
            flush=True,
        )
    return strategy


def _check_model(model, compile):
    if not isinstance(model, keras.Model):
        classes = {base.__module__.split(".")[0] for base in type(model).__mro__}
        if "tf_keras" in classes:
            raise TypeError(
                "mirrored_model: build_fn returned a tf_keras (Keras 2) model, and keras_mirror works with Keras 3; "
                "build it with `import keras`, and unset TF_USE_LEGACY_KERAS."
            )
        raise TypeError(
            f"mirrored_model: build_fn must return a keras.Model, and returned {_kind(model)}"
            + ("; does it end with `return model`?" if model is None else ".")
        )
    if engine_of(model) is not None:
        raise ValueError("mirrored_model: build_fn returned a model that mirrored_model made before; build a new one in build_fn.")
    if compile is None and not model.compiled:
        raise ValueError(
            "mirrored_model: the model is not compiled; call model.compile(...) in build_fn, "
            "or pass compile=dict(optimizer=..., loss=...)."
        )
    if compile is not None and model.compiled:
        raise ValueError("mirrored_model: build_fn compiled the model already; drop compile=, or the compile in build_fn.")
