"""Train Keras models on several devices with the result of one."""

import keras
import tensorflow as tf

from keras_mirror import errors

errors.check_versions(keras.__version__, tf.__version__, keras.backend.backend())

from keras_mirror.agreement import WorkersDifferError  # noqa: E402
from keras_mirror.auditing import audit  # noqa: E402
from keras_mirror.callbacks import ReplicaBatchLogger, ReplicaConsistency, Resume, ScopeAuditor, Throughput, scale_learning_rate  # noqa: E402
from keras_mirror.checking import check  # noqa: E402
from keras_mirror.cluster import WorkersMissingError  # noqa: E402
from keras_mirror.consistency import compare_replicas  # noqa: E402
from keras_mirror.data_audit import audit_data  # noqa: E402
from keras_mirror.errors import MirrorWarning, OutOfScopeError, ReplicasDifferError, silence  # noqa: E402
from keras_mirror.gather import gather  # noqa: E402
from keras_mirror.hardware import devices, virtual_cpus  # noqa: E402
from keras_mirror.loop import TrainingLoop  # noqa: E402
from keras_mirror.losses import global_mean  # noqa: E402
from keras_mirror.messages import WorkerLostError  # noqa: E402
from keras_mirror.model import mirrored_model  # noqa: E402
from keras_mirror.multiworker import MultiWorkerMirroredStrategy  # noqa: E402
from keras_mirror.observing import observe  # noqa: E402
from keras_mirror.planning import plan  # noqa: E402
from keras_mirror.provenance import Origin, origin  # noqa: E402
from keras_mirror.provenance import watch as _watch  # noqa: E402
from keras_mirror.scaling_runs import scaling  # noqa: E402
from keras_mirror.strategy import MirroredStrategy  # noqa: E402

__all__ = [
    "MirrorWarning",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "Origin",
    "OutOfScopeError",
    "ReplicaBatchLogger",
    "ReplicaConsistency",
    "ReplicasDifferError",
    "Resume",
    "ScopeAuditor",
    "Throughput",
    "TrainingLoop",
    "WorkerLostError",
    "WorkersDifferError",
    "WorkersMissingError",
    "audit",
    "audit_data",
    "check",
    "compare_replicas",
    "devices",
    "gather",
    "global_mean",
    "mirrored_model",
    "observe",
    "origin",
    "plan",
    "scale_learning_rate",
    "scaling",
    "silence",
    "virtual_cpus",
]
__version__ = "0.1.0"

_watch()
