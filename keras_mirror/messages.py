"""What workers tell each other: facts, the chief's values, and who does not answer."""

import json

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import agreement
from keras_mirror.cluster import answers

_MOST_AT_ONCE = 1 << 22  # entries of weights in one message

LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, tf.errors.CancelledError)


class WorkerLostError(RuntimeError):
    """Another worker died, left, or did not answer in time; all have to be started again."""


class Messages:
    """Mixin for a strategy with a `cluster`: small collectives outside of the steps, called on all workers alike."""

    def _open(self):
        rest = [tf.zeros([1], tf.int32)] * (len(self.replica_ids) - 1)
        text = tf.TensorSpec([None], tf.int32)
        self._gather_text = tf.function(lambda text: self.gather(self._values([text, *rest]), axis=0), input_signature=[text])

    def exchange(self, facts, what="exchange"):
        """What every worker says, in the order of `cluster.workers`; all have to call it alike.

        Args:
            facts: Something that JSON can hold.
            what: Name of the occasion, which has to be the same everywhere.

        Raises:
            WorkerLostError: If a worker does not answer.
            WorkersDifferError: If the workers are at different points of their scripts.
        """
        text = np.frombuffer(json.dumps([what, facts]).encode(), np.uint8).astype(np.int32)
        try:
            gathered = self._gather_text(np.concatenate([[len(text)], text]).astype(np.int32)).numpy()
        except LOST as error:
            raise self.lost(what, error) from error
        said = _unpacked(gathered)
        agreement.check(what, self.names, [{"what comes next": occasion} for occasion, _ in said])
        return [facts for _, facts in said]

    @property
    def names(self):
        """Names of the workers, the chief's first."""
        return [worker.name for worker in self.cluster.workers]

    def check(self, what, facts):
        """Refuses, on all workers alike, to go on with `facts` that are not the same everywhere."""
        agreement.check(what, self.names, self.exchange(facts, what))

    def chiefs(self, value, what="the chief's value"):
        """The chief's `value`, on every worker."""
        return self.exchange(value, what)[0]

    def raise_if_lost(self, what, error):
        """Raises a `WorkerLostError` that names who is lost, if `error` is one that comes of that."""
        if isinstance(error, LOST):
            raise self.lost(what, error) from error

    def lost(self, what, error):
        """The error to raise when `error` came instead of an answer from the other workers."""
        silent = [worker for place, worker in enumerate(self.cluster.workers) if place != self.cluster.me and not answers(worker)]
        if silent:
            who = f"{', '.join(map(str, silent))} does not answer any more: that process has ended"
        else:
            who = (
                f"a worker did not take part within {self.timeout_seconds:g} seconds, though every address still answers: one is "
                "stuck, or runs another line than the others (what involves all workers has to be called on all)"
            )
        reason = str(error).strip().splitlines()
        return WorkerLostError(
            f"{what} on {self.cluster.this.name}: {who}. Start all workers again; BackupAndRestore goes on from the last epoch. "
            f"[{type(error).__name__}: {next((line for line in reason if 'ollective' in line), reason[0] if reason else '')}]"
        )

    def _values(self, parts):
        first = self.replica_ids[0]
        return self.experimental_distribute_values_from_function(lambda context: parts[context.replica_id_in_sync_group - first])

    def sum_over_replicas(self, parts):
        """The sum over all replicas of all workers of tensors of one shape, one for each replica here."""
        return tf.distribute.Strategy.reduce(self, "SUM", self._values(parts), axis=None)

    def _sum_of_workers(self, value):
        """The sum of one tensor a worker."""
        return self.sum_over_replicas([value] + [tf.zeros_like(value)] * (len(self.replica_ids) - 1))

    def broadcast(self, variables):
        """Gives every worker the chief's values of variables that all have alike.

        Costs one message of all their entries, in parts of at most 4 million.
        """
        batch, entries = [], 0
        for variable in variables:
            batch.append(variable)
            entries += int(np.prod(variable.shape))
            if entries >= _MOST_AT_ONCE:
                self._broadcast(batch)
                batch, entries = [], 0
        self._broadcast(batch)

    def _broadcast(self, variables):
        groups = {}
        for variable in variables:
            groups.setdefault(_carrier(variable.dtype), []).append(variable)
        for carrier, group in groups.items():
            flat = np.concatenate([keras.ops.convert_to_numpy(v).astype(carrier).reshape(-1) for v in group])
            flat = self._sum_of_workers(tf.constant(flat if self.is_chief else np.zeros_like(flat))).numpy()
            for variable in group:
                size = int(np.prod(variable.shape))
                variable.assign(flat[:size].reshape(variable.shape).astype(keras.backend.standardize_dtype(variable.dtype)))
                flat = flat[size:]


def _carrier(dtype):
    """A NumPy type that collectives carry and that holds the values of `dtype` exactly."""
    name = keras.backend.standardize_dtype(dtype)
    if name in ("float16", "bfloat16"):
        return "float32"
    return name if name in ("float32", "float64") else "int64"


def _unpacked(gathered):
    said, place = [], 0
    while place < len(gathered):
        length = int(gathered[place])
        if length:
            said.append(json.loads(gathered[place + 1 : place + 1 + length].astype(np.uint8).tobytes()))
        place += 1 + length
    return said
