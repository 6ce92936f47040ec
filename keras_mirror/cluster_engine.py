"""What a model needs besides, to train on several workers as on one."""

import random
import types
import zlib

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.chief_files import on_this_worker
from keras_mirror.engine import Engine
from keras_mirror.messages import LOST
from keras_mirror.own_rows import policy_of

_COMPARED = (
    "batch_size", "epochs", "initial_epoch", "steps", "steps_per_epoch", "shuffle", "validation_split", "validation_batch_size",
    "validation_steps", "validation_freq", "class_weight",
)  # fmt: skip


class ClusterEngine(Engine):
    """The engine of a model under a `MultiWorkerMirroredStrategy`.

    Before `fit`, `evaluate` and `predict` the workers compare what they were given and refuse,
    all with one sentence, what differs. The chief alone writes files.
    """

    SHADOWS = (*Engine.SHADOWS, "make_predict_function", "get_metrics_result")
    CHIEF_ONLY = ("save", "save_weights", "export")

    def __init__(self, *args):
        super().__init__(*args)
        self._alike = set()

    def install(self):
        """Puts the methods onto the model."""
        super().install()
        if not self.strategy.is_chief:
            for name in self.CHIEF_ONLY:
                internals.set_attribute(self.model, name, _left_to_the_chief)

    # --- equal weights ------------------------------------------------------------------------

    def weights(self):
        """Variables of the model that all replicas hold alike: weights, statistics, random streams; no metrics."""
        return [v for v in self.model.variables if not internals.is_read_together(v.value)]

    def synchronize(self):
        """Gives every worker the chief's values of what was built since the last time."""
        new = [v for v in self.weights() if id(v) not in self._alike]
        if new:
            self.strategy.check("building the model", {"weight": _shapes(new)})
            self.strategy.broadcast(new)
            self._alike |= {id(v) for v in new}

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        with self.strategy.building():
            super()._maybe_symbolic_build(iterator, data_batch)
        self.synchronize()

    # --- calling ------------------------------------------------------------------------------

    def callbacks_here(self, callbacks):
        """The callbacks without those that only the chief calls."""
        return on_this_worker(callbacks, self)

    def fit(self, *args, callbacks=None, **kwargs):
        """`keras.Model.fit`, on every worker."""
        return super().fit(*args, callbacks=self.callbacks_here(callbacks), **kwargs)

    def evaluate(self, *args, callbacks=None, **kwargs):
        """`keras.Model.evaluate`, on every worker."""
        inside_fit = isinstance(callbacks, keras.callbacks.CallbackList)
        return super().evaluate(*args, callbacks=callbacks if inside_fit else self.callbacks_here(callbacks), **kwargs)

    def _with_pace(self, callbacks, verbose):
        paced = super()._with_pace(callbacks, verbose)
        all_are = all(self.strategy.exchange(paced is not callbacks, "steps between callbacks"))
        return paced if all_are else callbacks

    def _called(self, method, *args, **kwargs):
        try:
            return super()._called(method, *args, **kwargs)
        except LOST as error:
            raise self.strategy.lost(method, error) from error

    def _given(self, method, *args, **kwargs):
        given = super()._given(method, *args, **kwargs)
        if "_use_cached_eval_dataset" not in kwargs:
            self._compare(method, given.arguments)
        return given

    def _compare(self, method, given):
        """Refuses what would make the workers train different models or wait for each other for ever."""
        data = [given.get(name) for name in ("x", "y", "sample_weight")]
        facts = {name: _plain(given[name]) for name in _COMPARED if name in given}
        facts["kind of data"] = "tf.data.Dataset" if isinstance(data[0], tf.data.Dataset) else type(data[0]).__name__
        facts["AutoShardPolicy"] = policy_of(data[0]).name if isinstance(data[0], tf.data.Dataset) else None
        facts["array"] = [list(leaf.shape) for leaf in keras.tree.flatten(data) if hasattr(leaf, "shape")]
        if method == "fit" and given.get("shuffle", True) and not isinstance(data[0], (tf.data.Dataset, types.GeneratorType)):
            facts["state of the random numbers that shuffle (keras.utils.set_random_seed)"] = _random_state()
        model = self.model
        facts["model"] = type(model).__name__
        facts["optimizer"] = (
            None if model.optimizer is None else f"{type(model.optimizer).__name__} {_plain(model.optimizer.get_config())}"
        )
        facts["weight"] = _shapes(self.weights())
        self.strategy.check(method, facts)
        self.strategy.check(method, {"checksum of weight": [[v.path, _checksum(v)] for v in self.weights()]})

    @tf.autograph.experimental.do_not_convert
    def get_metrics_result(self):
        """`keras.Model.get_metrics_result`, with one message for all metrics."""
        with self.strategy.reading_together([v.value for metric in self.model.metrics for v in metric.variables]):
            return type(self.model).get_metrics_result(self.model)

    # --- predicting ---------------------------------------------------------------------------

    def make_predict_function(self, force=False):
        """What `predict` calls with a list of batches; Keras' own puts the workers' rows in another order."""
        if self.model.predict_function is not None and not force:
            return self.model.predict_function

        def on_batch(batch):
            outputs = self.strategy.run(self.model.predict_step, args=(batch,))
            return tf.nest.map_structure(lambda leaf: gather_rows(self.strategy, leaf), outputs)

        def on_batches(batches):
            outputs = [on_batch(batch) for batch in batches]
            return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *outputs) if len(outputs) > 1 else outputs[0]

        on_batches = tf.autograph.experimental.do_not_convert(on_batches)
        eager = self.model.run_eagerly
        self.model.predict_function = on_batches if eager else tf.function(on_batches, reduce_retracing=True)
        return self.model.predict_function


def gather_rows(strategy, leaf):
    """The rows of all replicas of all workers, in the order of the global batch."""
    parts = strategy.experimental_local_results(leaf)
    dtype = parts[0].dtype
    if dtype == tf.bool:
        parts = [tf.cast(part, tf.int32) for part in parts]
    first = strategy.replica_ids[0]
    values = strategy.experimental_distribute_values_from_function(lambda context: parts[context.replica_id_in_sync_group - first])
    return tf.cast(strategy.gather(values, axis=0), dtype)


def _left_to_the_chief(filepath, *args, **kwargs):
    """In place of `model.save`, `save_weights` and `export` where this worker is not the chief: writes nothing."""


def _shapes(variables):
    return [[v.path.rsplit("/", 1)[-1], f"{tuple(v.shape)} {keras.backend.standardize_dtype(v.dtype)}"] for v in variables]


def _checksum(variable):
    return zlib.crc32(keras.ops.convert_to_numpy(variable).tobytes())


def _random_state():
    return zlib.crc32(repr((internals.global_seed(), random.getstate())).encode())


def _plain(value):
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
