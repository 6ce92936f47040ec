"""The gradients of one step, on one device and on replicas, without a trace of the step left behind."""

import contextlib
import contextvars
import dataclasses
import functools

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.auditing import held_variables
from keras_mirror.distribution import regroup, split
from keras_mirror.holdings import optimizers_of
from keras_mirror.one_device import as_one_device
from keras_mirror.provenance import origin_of
from keras_mirror.rows import current_part
from keras_mirror.shadowing import shadowed
from keras_mirror.snapshot import Snapshot, copies_of
from keras_mirror.whole_view import current_view

ONE_DEVICE, PARTS, COPIES = "one device", "parts", "copies"


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step did, per replica (one device: a single entry in each list).

    Attributes:
        handed: Dict of a variable's name to the list of gradients that the optimizer was given.
        raw: The same for the gradients as `tf.GradientTape.gradient` returned them.
        state: Dict of a variable's name to its values after the step, for layers' own state and what else the step keeps.
    """

    handed: dict
    raw: dict
    state: dict


class StepProbe:
    """Runs a model's training step without training: gradients are recorded in place of being applied.

    Every run starts from the same weights, state and random numbers, and puts them back.

    Args:
        model: A model made in the scope of `strategy`.
        strategy: A `keras_mirror.MirroredStrategy`.
        step: `step(model, data)`, or None for the model's own training step.
        variables: Variables to put back after each run, besides those that the step uses.
    """

    def __init__(self, model, strategy, step, variables):
        self.model = model
        self.strategy = strategy
        step = step.python_function if internals.is_tf_function(step) else step
        step = None if step is None else internals.autograph(step, by_default=True)  # as the `tf.function` around a loop would
        self._step = (lambda data: step(model, data)) if step is not None else model.train_step
        self._snapshot = Snapshot(variables)
        self._state = own_state(model)
        self._functions = {}

    def run(self, batch, how):
        """One step on a global batch.

        Args:
            batch: Structure of tensors.
            how: `ONE_DEVICE`; `PARTS` for a step of all replicas, each on its part; or `COPIES` for a
                step of all replicas, each on the whole batch.

        Returns:
            A `StepResult`.
        """
        replicas = self.strategy.num_replicas_in_sync
        parts = split(batch, replicas) if how == PARTS else (batch,) * replicas
        arguments = batch if how == ONE_DEVICE else regroup(self.strategy, parts)
        function = self._function(how)
        with self.restored():
            captured = internals.captured_variables(function.get_concrete_function(arguments).graph)
            self._snapshot.add(captured)
            self._add_state(captured)
            recorded = function(arguments)
            local = self.strategy.experimental_local_results
            handed, raw = ({name: [_numpy(g) for g in local(value)] for name, value in each.items()} for each in recorded)
            state = {name: [copy.numpy() for copy in copies_of(v)] for name, v in self._state.items()}
        if how == ONE_DEVICE:
            state = {name: copies[:1] for name, copies in state.items()}
        return StepResult(handed, raw, state)

    def run_eagerly(self, batch):
        """One step of one device, in eager execution and without gradients; the caller puts back what it changes."""
        with self._taps(), self.strategy.counting(None), as_one_device(self.strategy, batch), recording():
            self._step(batch)

    @contextlib.contextmanager
    def restored(self):
        """Puts back afterwards what a body changes."""
        try:
            yield
        finally:
            self._snapshot.restore()

    def changed(self):
        """Forgets the traces, after something about the model was changed."""
        self._functions = {}

    def _add_state(self, captured):
        """Adds what a step keeps in variables that belong to no weight, metric, optimizer or generator."""
        known = {id(internals.container_of(variable)) for kind, _, variable in held_variables(self.model) if kind != "step"}
        known |= {id(internals.container_of(variable)) for variable in self._state.values()}
        for variable in map(internals.container_of, captured):
            on_read = getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ
            if id(variable) not in known and not on_read and "keras_mirror_own" not in vars(variable):
                known.add(id(variable))
                origin = origin_of(variable)
                name = variable.name.split(":")[0] + (f" ({origin.place})" if origin else "")
                self._state[_free(self._state, name)] = variable

    def _function(self, how):
        if how not in self._functions:

            @tf.autograph.experimental.do_not_convert
            def on_replica(data):
                with recording() as tape:
                    self._step(data)
                return tape.handed or tape.raw, tape.raw

            def run(arguments):
                with self._taps(), self.strategy.counting(None):
                    if how != ONE_DEVICE:
                        return self.strategy.run(on_replica, (arguments,))
                    with as_one_device(self.strategy, arguments):
                        return on_replica(arguments)

            self._functions[how] = tf.function(run, autograph=False)
        return self._functions[how]

    @contextlib.contextmanager
    def _taps(self):
        """While entered, `optimizer.apply` and `tf.GradientTape.gradient` record on a replica's tape."""
        own_gradient = tf.GradientTape.gradient

        def gradient(tape, target, sources, *args, **kwargs):
            gradients = own_gradient(tape, target, sources, *args, **kwargs)
            _record_raw(sources, gradients)
            return gradients

        with contextlib.ExitStack() as undo:
            for optimizer in optimizers_of(self.model).values():
                apply = functools.partial(_record_handed, optimizer)
                undo.enter_context(shadowed(optimizer, apply=apply, apply_gradients=functools.partial(_record_pairs, apply)))
            undo.callback(setattr, tf.GradientTape, "gradient", own_gradient)
            tf.GradientTape.gradient = gradient
            yield


@dataclasses.dataclass
class _Tape:
    handed: dict = dataclasses.field(default_factory=dict)
    raw: dict = dataclasses.field(default_factory=dict)


_tape = contextvars.ContextVar("keras_mirror_tape", default=None)


@contextlib.contextmanager
def recording():
    """Makes a new tape the one that this thread's gradients are recorded on."""
    token = _tape.set(_Tape())
    try:
        yield _tape.get()
    finally:
        _tape.reset(token)


def _record_handed(optimizer, grads, trainable_variables=None):
    variables = internals.variables_updated_by(optimizer) if trainable_variables is None else trainable_variables
    _record(_tape.get().handed, variables, grads)


def _record_pairs(record, grads_and_vars, *args, **kwargs):
    record(*zip(*grads_and_vars))


def _record_raw(sources, gradients):
    if _tape.get() is not None:
        _record(_tape.get().raw, tf.nest.flatten(sources), tf.nest.flatten(gradients))


def _record(tape, variables, gradients):
    part = current_part()
    of_all = part is not None and part.thread is not None  # a step that sees the whole batch has the gradient of all replicas
    replicas = current_view().replicas if of_all else 1
    for variable, gradient in zip(variables, gradients):
        if gradient is not None and isinstance(variable, (keras.Variable, tf.Variable)):
            tape[_free(tape, getattr(variable, "path", None) or variable.name.split(":")[0])] = (
                tf.convert_to_tensor(gradient) / replicas
            )


def _free(names, name):
    """`name`, or with a number behind it if it is taken."""
    taken, number = name, 1
    while name in names:
        number += 1
        name = f"{taken} ({number})"
    return name


def regularizer_gradients(model):
    """What the regularisers of the model's weights add to their gradients, by name."""
    gradients = {}
    for variable in model.trainable_variables:
        if getattr(variable, "regularizer", None) is not None:
            value = copies_of(variable)[0].read_value()
            with tf.GradientTape() as tape:
                tape.watch(value)
                loss = variable.regularizer(value)
            gradients[_free(gradients, variable.path)] = _numpy(tape.gradient(loss, value))
    return gradients


def own_state(model):
    """Layers' own variables that no gradient updates, without the states of seed generators, by path."""
    return {
        variable.path: variable
        for layer in internals.layers_of(model)
        for variable in internals.own_non_trainable_variables(layer)
        if "seed_generator" not in variable.path
    }


def _numpy(gradient):
    return np.asarray(gradient.numpy(), "float64")
