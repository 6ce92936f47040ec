"""Private names of TensorFlow that only several workers need, one small function each."""

import contextlib

from tensorflow.python.distribute import collective_all_reduce_strategy, values
from tensorflow.python.eager import context


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
