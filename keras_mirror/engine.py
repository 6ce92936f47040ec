"""What makes one model train on all replicas: methods that shadow those of its class."""

import contextlib
import inspect
import threading
import types

import keras
import tensorflow as tf

from keras_mirror import internals, steps
from keras_mirror.distribution import NO_ROWS, ReplicaDataset
from keras_mirror.empty_parts import operations_of, run_on_a_row
from keras_mirror.errors import warn_once
from keras_mirror.executor import Executor, values_of
from keras_mirror.holdings import held, models_of, optimizers_of
from keras_mirror.inlining import inlined, run_inlined
from keras_mirror.late_weights import explaining_strangers, make_weights_in, warn_of_strangers
from keras_mirror.layer_losses import keep_losses_apart
from keras_mirror.losses import GlobalLoss
from keras_mirror.normalization import normalize_globally
from keras_mirror.optimizers import half_variables, share_updates
from keras_mirror.own_layers import show_whole
from keras_mirror.pacing import with_pace
from keras_mirror.progress import arrange
from keras_mirror.randomness import draw_differently, generators_of
from keras_mirror.rebuilding import rebuild_in_scope
from keras_mirror.replica_steps import ReplicaSteps
from keras_mirror.rows import RowCounter
from keras_mirror.shares import LossShares
from keras_mirror.stateful_layers import refuse_stateful
from keras_mirror.timing import Timers

_ENGINE = "_keras_mirror_engine"


def engine_of(model):
    """The `Engine` of a model of `mirrored_model`, or None."""
    return getattr(model, _ENGINE, None)


class Engine(ReplicaSteps):
    """What makes one model train on all replicas; `install` puts its methods onto the model.

    The methods of the same name shadow those of the model's class on this one object. The class,
    its config and what is saved stay the user's.

    Attributes:
        model: The model.
        strategy: The strategy it trains with.
        counters: `RowCounter`s of `"train"` and `"test"` steps.
        timers: `Timers` of `"train"` and `"test"` steps.
        captured: Variables that the steps traced so far read or write.
        listeners: Functions called with `captured` after a trace, before the traced steps run.
        rebuilt: `Rebuilt` of each object that was made again inside the scope.
        step: The step in place of the model's `train_step`, or None.
        batch_norm: The mode of batch normalisation.
        sees_whole: Whether code of the user's own sees the whole batch, or the replica's rows.
        thread: Name of the thread that made the model.
        epoch_iterator: Keras' iterator over the data that was built from last.
        data_listener: Function called with Keras' iterator over training data that a `TrainingLoop` begins to use.
        resumed_logs: Logs of the step before a resumed run stopped, for an epoch that has no step left.
    """

    SHADOWS = (
        "compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
        "make_train_function", "make_test_function", "train_step", "test_step", "predict_step", "_maybe_symbolic_build",
        "_get_metrics_result_or_logs",
    )  # fmt: skip

    def __init__(self, model, strategy, step, batch_norm, view="global"):
        self.model = model
        self.strategy = strategy
        self.counters = {kind: RowCounter(strategy.num_replicas_in_sync) for kind in ("train", "test")}
        self.timers = {kind: Timers() for kind in self.counters}
        self.captured = []
        self.listeners = []
        self.rebuilt = []
        self.epoch_iterator = None
        self.step = step
        own = {"step": step, "train_step": type(model).train_step, "test_step": type(model).test_step}
        self._own_steps = {name: inlined(each) for name, each in own.items()}
        self.batch_norm = batch_norm
        self.sees_whole = view == "global"
        self.thread = threading.current_thread().name
        self.data_listener = None
        self.resumed_logs = {}
        self._prepared = {}
        self._tried_to_build = False

    def install(self):
        """Puts the methods onto the model."""
        internals.set_attribute(self.model, _ENGINE, self)
        internals.set_training_strategy(self.model, self.strategy)
        for name in self.SHADOWS:
            internals.set_attribute(self.model, name, getattr(self, name))

    def callbacks_here(self, callbacks):
        """Those of the callbacks that this worker calls."""
        return callbacks

    def synchronize(self):
        """Makes the weights of several workers equal; one worker has nothing to do."""

    # --- compiling --------------------------------------------------------------------------

    def compile(self, *args, **kwargs):
        """`keras.Model.compile`, in the scope, with what was made outside made again inside."""
        with self.strategy.scope():
            args, kwargs = self._rebuild((args, kwargs))
            type(self.model).compile(self.model, *args, **kwargs)
        self._after_compile()

    def recompile_in_scope(self):
        """Makes again what `build_fn` compiled with but had not made in the scope."""
        arguments = internals.compile_arguments(self.model)
        if arguments is None:
            self._after_compile()
            return
        with self.strategy.scope():
            again = self._rebuild(arguments)
            if any(again[name] is not arguments[name] for name in arguments):
                wrapped = isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer)
                keras.Model.compile(self.model, **again, auto_scale_loss=wrapped)
        self._after_compile()

    def _rebuild(self, arguments):
        arguments, made_again = rebuild_in_scope(arguments, self.strategy)
        for each in made_again:
            self.rebuilt.append(each)
            warn_once(("rebuilt", id(self), each), f"mirrored_model: {each}", code="KM108")
        return arguments

    def _after_compile(self):
        if self.model.jit_compile:
            if self._asked_for_jit():
                raise ValueError(
                    "mirrored_model: jit_compile=True compiles a step for one device, and its variables live on several; "
                    "compile with jit_compile=False."
                )
            self.model.jit_compile = False
        with self.strategy.scope():
            self._rebuild_optimizers()
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built and self._is_built() and not self._has_own_step():
                with explaining_strangers(self.model, self.strategy):
                    optimizer.build(self.model.trainable_variables)
        self.prepare()
        warn_of_strangers(self.model, self.strategy)

    def _rebuild_optimizers(self):
        for _, optimizer, put in list(held(self.model, keras.optimizers.Optimizer)):
            again = self._rebuild(optimizer)
            if again is not optimizer:
                put(again)

    def _is_built(self):
        return bool(self.model.trainable_variables) and all(layer.built for layer in internals.layers_of(self.model))

    def _asked_for_jit(self):
        return (internals.compile_arguments(self.model) or {}).get("jit_compile") is True

    def prepare(self):
        """Changes losses, optimizers, batch normalisations, random generators that exist by now."""
        half = half_variables(self.model)
        for optimizer in optimizers_of(self.model).values():
            share_updates(optimizer, half)
        for layer in internals.layers_of(self.model):
            self._prepare_layer(layer)
        for _, loss, put in list(held(self.model, keras.losses.Loss)):
            if not isinstance(loss, GlobalLoss):
                put(GlobalLoss(loss, self.sees_whole))  # for a train step that calls it by hand
        for generator in generators_of(self.model):
            draw_differently(generator)
        for _, model in models_of(self.model):
            if model.compiled:
                self._prepare_compiled(model)

    def _prepare_layer(self, layer):
        if internals.list_of_losses(layer) is not None and not self._is_prepared(layer):
            refuse_stateful(layer, self.strategy.num_replicas_in_sync)
            keep_losses_apart(layer)
            make_weights_in(self.strategy, layer)
            run_inlined(layer)
            normalize_globally(layer, self.batch_norm)
            for each in (layer, *operations_of(layer)):
                run_on_a_row(each)
            if self.sees_whole:  # last, as the row that stands in for none is none of the whole batch's
                show_whole(layer, self._prepare_layer)

    def _is_prepared(self, layer):
        known = id(layer) in self._prepared
        self._prepared[id(layer)] = layer
        return known

    def _prepare_compiled(self, model):
        LossShares.of(model, self.prepare, nested=model is not self.model)
        internals.replace_compiled_losses(model, self._as_global)
        steps.weigh_by_global_rows(internals.loss_tracker(model), "loss recorded" if model is self.model else None)
        steps.build_when_updated(internals.compile_metrics(model), self.prepare)
        for metric in internals.single_metrics(model):
            steps.weigh_wholes_by_rows(metric, self.sees_whole)
            if internals.is_keras_tracker(model, metric):
                steps.weigh_outputs_by_global_rows(metric)
            elif type(metric) is keras.metrics.Mean:
                steps.track_shares_as_losses(metric)
            else:
                steps.keep_without_rows(metric, self.sees_whole)

    def _as_global(self, loss):
        return loss if isinstance(loss, GlobalLoss) else GlobalLoss(loss, self.sees_whole)

    # --- building ---------------------------------------------------------------------------

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds from the types of the data, so that no batch is used up and any dtype will do."""
        if iterator is not None:
            self.epoch_iterator = iterator
            dataset = internals.dataset_of(iterator)
            data_batch = dataset.global_spec if isinstance(dataset, ReplicaDataset) else dataset.element_spec
        batch = keras.tree.map_structure(_symbolic, data_batch)
        own_step = self._has_own_step()
        targets = not own_step or keras.utils.unpack_x_y_sample_weight(batch)[1] is not None  # an autoencoder's step knows them
        with self.strategy.scope():
            with explaining_strangers(self.model, self.strategy):
                self._build_symbolically(batch, targets, own_step)
        self.prepare()
        warn_of_strangers(self.model, self.strategy)

    def _build_symbolically(self, batch, targets, own_step):
        if not own_step:
            internals.symbolic_build(self.model, batch, targets)
            return
        self._tried_to_build = True
        with contextlib.suppress(Exception):  # adversarial pairs need not be callable, nor need what is called take such a batch
            internals.symbolic_build(self.model, batch, targets, optimizer=False)  # the step knows what its optimizers update

    def _has_own_step(self):
        return self.step is not None or not self._has_default("train_step")

    def build_from(self, batch):
        """Builds from a batch, distributed or not, what is not built yet."""
        if not internals.is_built(self.model):
            local = tf.nest.map_structure(lambda leaf: self.strategy.experimental_local_results(leaf)[0], batch)
            self._maybe_symbolic_build(data_batch=local)

    def _build_on_replica(self, data):
        """Builds in the middle of a loop of the user's own, where no `fit` has built before."""
        if not internals.is_built(self.model) and self.step is None and not self._tried_to_build:
            tf.distribute.get_replica_context().merge_call(lambda strategy, data: self._build_outside(data), (data,))

    def _build_outside(self, data):
        with tf.init_scope():
            self.build_from(data)

    # --- running ----------------------------------------------------------------------------

    def make_train_function(self, force=False):
        """What `fit` calls for every batch."""
        if self.model.train_function is None or force:
            default = self.step is None and self._has_default("train_step") and not self.shows_whole("train_step")
            step = (lambda data: steps.default_train_step(self.model, data)) if default else self.model.train_step
            self.model.train_function = self._executor(step, "train", default)

    def _get_metrics_result_or_logs(self, logs):
        """What `fit` logs at the end of an epoch; of a `step` that logs its own loss, that one.

        Keras would take the result of its tracker of the loss, which such a step never updated.
        """
        logs = logs or self.resumed_logs
        if self.step is not None and isinstance(logs, dict) and "loss" in logs:
            return logs
        return values_of(type(self.model)._get_metrics_result_or_logs(self.model, logs))

    def make_test_function(self, force=False):
        """What `evaluate` calls for every batch."""
        if self.model.test_function is None or force:
            default = self._has_default("test_step") and not self.shows_whole("test_step")
            step = (lambda data: steps.default_test_step(self.model, data)) if default else self.model.test_step
            self.model.test_function = self._executor(step, "test", default)

    def _executor(self, step, kind, default):
        only_metrics = default and self._has_default("compute_metrics")
        counter, timers, method = self.counters[kind], self.timers[kind], f"{kind}_step"
        name, function = self.name_of_step(method), self.function_of_step(method)
        return Executor(self.model, self.strategy, step, name, function, counter, only_metrics, timers, self._traced)

    def name_of_step(self, method):
        """What a person calls the step that a method runs on the replicas."""
        if method == "train_step" and self.step is not None:
            return getattr(self.step, "__name__", repr(self.step))
        return f"{type(self.model).__name__}.{method}"

    def function_of_step(self, method):
        """The function of the user's that a method runs on the replicas, or Keras' own."""
        own = self.step if method == "train_step" else None
        return own or types.MethodType(getattr(type(self.model), method), self.model)

    def _traced(self, variables):
        known = {id(v) for v in self.captured}
        self.captured += [v for v in variables if id(v) not in known]
        for listener in list(self.listeners):
            listener(self.captured)

    def fit(self, *args, callbacks=None, **kwargs):
        """`keras.Model.fit`."""
        self.resumed_logs = {}
        verbose = kwargs.get("verbose", "auto")
        callbacks = self._with_pace(arrange(callbacks, verbose), verbose)
        return self._called("fit", *args, callbacks=callbacks, **kwargs)

    def _with_pace(self, callbacks, verbose):
        """The callbacks, and what lets many steps run in one call, where none of them looks at batches."""
        return with_pace(self, callbacks, verbose)

    def evaluate(self, *args, **kwargs):
        """`keras.Model.evaluate`."""
        return self._called("evaluate", *args, **kwargs)

    def predict(self, *args, **kwargs):
        """`keras.Model.predict`."""
        return self._called("predict", *args, **kwargs)

    def train_on_batch(self, *args, **kwargs):
        """`keras.Model.train_on_batch`; the batch is split over the replicas."""
        return self._called("train_on_batch", *args, **kwargs)

    def test_on_batch(self, *args, **kwargs):
        """`keras.Model.test_on_batch`; the batch is split over the replicas."""
        return self._called("test_on_batch", *args, **kwargs)

    def predict_on_batch(self, x):
        """`keras.Model.predict_on_batch`; the batch is split over the replicas."""
        batch = self.strategy.distribute_batch(tf.nest.map_structure(tf.convert_to_tensor, x))
        return type(self.model).predict_on_batch(self.model, batch)

    def _given(self, method, *args, **kwargs):
        """The arguments of a method of Keras', with datasets that Keras can count the batches of."""
        given = inspect.signature(getattr(type(self.model), method)).bind(self.model, *args, **kwargs)
        for name in {"x", "validation_data"} & set(given.arguments):
            given.arguments[name] = self.strategy.undistributed(given.arguments[name])
        return given

    def _called(self, method, *args, **kwargs):
        try:
            given = self._given(method, *args, **kwargs)
            return getattr(type(self.model), method)(*given.args, **given.kwargs)
        except tf.errors.InvalidArgumentError as error:
            if NO_ROWS in str(error):
                raise ValueError(f"{method}: {NO_ROWS}") from None
            raise


class _Symbolic:
    """Anything with a shape and a dtype is enough for Keras to build from."""

    def __init__(self, shape, dtype):
        self.shape = shape
        self.dtype = dtype


def _symbolic(leaf):
    """Anything with a shape and a dtype is enough for Keras to build from."""
    leaf = internals.spec_of_a_part(leaf)
    if leaf is None or isinstance(leaf, (tf.OptionalSpec, tf.experimental.Optional)) or not hasattr(leaf, "dtype"):
        return None
    shape = tuple(leaf.shape)
    return types.SimpleNamespace(shape=(None, *shape[1:]) if shape else shape, dtype=leaf.dtype)
