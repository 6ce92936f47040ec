"""Callbacks for `fit`, `evaluate` and the loops of this package."""

from keras_mirror.callbacks.replica_batch_logger import ReplicaBatchLogger
from keras_mirror.callbacks.replica_consistency import ReplicaConsistency
from keras_mirror.callbacks.resume import Resume
from keras_mirror.callbacks.scale_learning_rate import scale_learning_rate
from keras_mirror.callbacks.scope_auditor import ScopeAuditor
from keras_mirror.callbacks.throughput import Throughput

__all__ = [
    "ReplicaBatchLogger",
    "ReplicaConsistency",
    "Resume",
    "ScopeAuditor",
    "Throughput",
    "scale_learning_rate",
]
