"""The strategy for the devices of several machines."""

import contextlib
import os
import platform
import sys

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import agreement, internals
from keras_mirror.batches import split_bounds
from keras_mirror.cluster import cluster_of, from_environment, meet
from keras_mirror.distribution import ReplicaDataset, per_replica_spec, regroup, split, split_dataset
from keras_mirror.global_batches import GlobalBatchStrategy
from keras_mirror.messages import Messages
from keras_mirror.own_rows import READ_BY, OwnRows, policy_of
from keras_mirror.readings import Readings
from keras_mirror.rows import rows_of, rows_per_replica
from keras_mirror.watchdog import watched

TIMEOUT_SECONDS = 300
_ROWS = "_keras_mirror_rows"

_made = []  # the strategies of this process: at most one


def current_strategy():
    """The `MultiWorkerMirroredStrategy` that this process made, or None."""
    return _made[0] if _made else None


class MultiWorkerMirroredStrategy(Messages, GlobalBatchStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` whose workers together do what one device would.

    A drop-in subclass; make it at the top of the script, before anything runs, on every worker.
    Each global batch is split over all replicas of all workers, as `MirroredStrategy` does over
    those of one machine: on two workers with two devices each, 5 rows are 2, 1, 1, 1. For that
    **every worker reads all of the data**, in the same order, and keeps the rows of its own
    replicas. That is what makes the result one device's, lets no worker run out of data before
    the others, and costs each worker the reading (not the computing) of the others' rows. Where
    that is too much, `tf.data.experimental.AutoShardPolicy.FILE` or `OFF` in a dataset's options
    makes each worker read rows of its own; one whose rows are used up goes on without any.

    Before TensorFlow starts, the workers greet each other at the addresses in `TF_CONFIG` and
    compare versions, addresses and numbers of devices. Where nobody has set a random seed, all
    take one that the chief draws (`keras.utils.set_random_seed`), so that all shuffle alike.

    A worker that dies is noticed by TensorFlow within about 10 seconds, one that is stuck within
    `timeout_seconds`; the others then raise an error.

    Args:
        cluster_resolver: `tf.distribute.cluster_resolver.ClusterResolver`; None for `TF_CONFIG`.
        communication_options: `tf.distribute.experimental.CommunicationOptions`. A `timeout_seconds`
            in it takes the place of the argument for what runs after the start.
        timeout_seconds: Seconds to wait for workers to arrive, and in training for one that does not
            answer; None for the environment variable `KERAS_MIRROR_TIMEOUT_SECONDS`, or 300.

    Attributes:
        cluster: The workers, and which of them this process is.
        is_chief: Whether this is the worker that writes the files.

    Raises:
        RuntimeError: If TensorFlow ran something before, or this process has such a strategy already.
        WorkersMissingError: With the names of those who did not arrive in time.
        WorkersDifferError: If versions, addresses or numbers of devices differ.
        ValueError: If `TF_CONFIG` is missing or malformed.

    Example:

    >>> import keras_mirror as km                        # TF_CONFIG is set, and differs on each worker
    >>> strategy = km.MultiWorkerMirroredStrategy()
    >>> model = km.mirrored_model(build_fn, strategy=strategy)
    >>> model.fit(dataset, epochs=5)                     # the same line on every worker
    """

    def __init__(self, cluster_resolver=None, communication_options=None, *, timeout_seconds=None):
        self.cluster = _cluster(cluster_resolver)
        _check_first()
        if timeout_seconds is None:
            timeout_seconds = float(os.environ.get("KERAS_MIRROR_TIMEOUT_SECONDS", TIMEOUT_SECONDS))
        self.worker, self.workers = self.cluster.me, len(self.cluster.workers)
        self.is_chief = self.cluster.me == 0
        cpus = len(tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0]) or [None])
        names = [worker.name for worker in self.cluster.workers]
        if self.workers > 1:
            agreement.check("MultiWorkerMirroredStrategy", names, meet(self.cluster, self._about_itself(cpus), timeout_seconds))
        resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        options = _with_timeout(communication_options, timeout_seconds)
        self.timeout_seconds = options.timeout_seconds
        with watched(self.cluster, timeout_seconds):
            tf.distribute.Strategy.__init__(self, internals.collective_extended(self, resolver, options, cpus))
        local = self.extended.worker_devices
        first = self.cluster.me * len(local)
        self._prepare([_short(device) for device in local], range(first, first + len(local)))
        self._having = internals.single_variable(np.ones(self.workers, np.int32), "having_data")  # rows, or 1 and 0
        self._own_rows = OwnRows(self.worker, self.workers)
        self._readings = Readings(self)
        self._open()
        self._told_rows = set()
        _made.append(self)
        self._share_seed()

    def _about_itself(self, cpus):
        gpus = len(tf.config.list_physical_devices("GPU"))
        return {
            "TF_CONFIG's worker": [[worker.name, worker.address] for worker in self.cluster.workers],
            "number of replicas": gpus or cpus,
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "keras_mirror": sys.modules["keras_mirror"].__version__,
            "Python": platform.python_version(),
        }

    def _share_seed(self):
        drawn = int.from_bytes(os.urandom(3), "little")
        said = self.exchange({"seed": internals.global_seed(), "drawn": drawn}, "start")
        if all(each["seed"] is None for each in said):
            keras.utils.set_random_seed(said[0]["drawn"])

    # --- data -----------------------------------------------------------------------------------

    def undistributed(self, data):
        """As on one machine; of a dataset whose options say that each worker reads rows of its own, these in an endless dataset."""
        data = super().undistributed(data)
        if not isinstance(data, tf.data.Dataset) or not self._own_rows.wanted(data) or self._own_rows.holds(data):
            return data
        return self._own_rows.parts(data)

    def reads_own_rows(self, dataset):
        """Whether each worker reads rows of its own of a dataset, instead of all."""
        return self._own_rows.wanted(dataset) or self._own_rows.holds(dataset)

    def _distribute(self, dataset, options):
        dataset = self.undistributed(dataset)
        own, unknown = self._own_rows.holds(dataset), True
        if not tf.inside_function():
            size = int(dataset.cardinality().numpy())
            unknown = size == tf.data.UNKNOWN_CARDINALITY
            batches = {-1: "infinite", -2: "unknown"}.get(size, size)
            spec = keras.tree.map_structure(str, dataset.element_spec)
            facts = {"AutoShardPolicy": policy_of(dataset).name, "number of batches": batches, "type of a batch": str(spec)}
            self.check("distributing a dataset", facts)
            self._tell_rows(dataset, READ_BY[policy_of(dataset)] if own else None)
        if own:
            return ReplicaDataset(self, dataset, asks="rows")
        in_order = tf.data.Options()
        in_order.deterministic = True  # the workers' parts belong together only if all read in one order
        return ReplicaDataset(self, dataset.with_options(in_order), asks="end" if unknown else "nothing")

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """As `tf.distribute.Strategy.distribute_datasets_from_function`; workers whose data ends earlier go on without rows.

        Args:
            dataset_fn: Function of a `tf.distribute.InputContext` that returns this worker's dataset, batched by
                `context.get_per_replica_batch_size(global_batch_size)`.
            options: `tf.distribute.InputOptions`; they change nothing here.

        Returns:
            A `tf.distribute.DistributedDataset`. Each step takes one batch for each replica of this worker, and
            splits their rows evenly over them.
        """
        dataset = dataset_fn(tf.distribute.InputContext(self.workers, self.worker, self.num_replicas_in_sync))
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"distribute_datasets_from_function: the function returned a {type(dataset).__name__}; it has to return a "
                "tf.data.Dataset of batches for one replica."
            )
        own = self._own_rows.parts_of_replicas(dataset, len(self.replica_ids))
        self._tell_rows(own, "the dataset that its function made")
        return ReplicaDataset(self, own, asks="rows")

    def _tell_rows(self, dataset, own):
        if bool(own) in self._told_rows:
            return
        self._told_rows.add(bool(own))
        replicas = f"replica {self.replica_ids[0]}" + (f" to {self.replica_ids[-1]}" if len(self.replica_ids) > 1 else "")
        text = f"keras_mirror: {self.cluster.this.name} reads {own or 'all of the data'} and trains on "
        if own:
            text += f"its rows with {replicas}"
        else:
            text += f"the rows of {replicas}"
            rows = [leaf.shape[0] for leaf in tf.nest.flatten(dataset.element_spec) if getattr(leaf, "shape", None)]
            if rows and rows[0]:
                start = split_bounds(rows[0], self.num_replicas_in_sync, self.replica_ids[0])[0]
                stop = split_bounds(rows[0], self.num_replicas_in_sync, self.replica_ids[-1])[1]
                text += f", rows {start} to {stop - 1} of each {rows[0]}" if stop > start else f", no row of each {rows[0]}"
        print(f"{text} ({self.num_replicas_in_sync} replicas on {self.workers} workers).", flush=True)

    def split_dataset(self, dataset):
        """The dataset with each batch replaced by this worker's parts and the rows of the whole batch."""
        if self._own_rows.holds(dataset):
            here = len(self.replica_ids)
            return split_dataset(dataset, here, range(here), may_be_empty=True)
        return split_dataset(dataset, self.num_replicas_in_sync, self.replica_ids)

    def assemble(self, parts):
        """A distributed batch from an element of `split_dataset`, of a dataset that all workers read alike."""
        parts, total = parts
        replicas = self.num_replicas_in_sync
        return self._assembled(parts, [_size(split_bounds(total, replicas, index)) for index in range(replicas)], total)

    def assemble_own(self, parts):
        """The same where each worker read rows of its own; `any_has` was asked just before."""
        here, everywhere = len(self.replica_ids), tf.cast(self._having.read_value(), tf.int64)
        rows = [_size(split_bounds(own, here, index)) for own in tf.unstack(everywhere) for index in range(here)]
        return self._assembled(parts[0], rows, tf.reduce_sum(everywhere))

    def _assembled(self, parts, rows, total):
        batch = regroup(self, parts)
        for leaf in tf.nest.flatten(batch):
            if leaf is not None and internals.is_per_replica(leaf):
                setattr(leaf, _ROWS, (rows, total))
        return batch

    def assembled_spec(self, spec):
        """The element spec of assembled batches, from that of `split_dataset`."""
        return per_replica_spec(spec[0], self.num_replicas_in_sync)

    def distribute_batch(self, batch):
        """A global batch of tensors, which every worker passes whole, split over the replicas."""
        rows = next(rows for rows in map(rows_of, tf.nest.flatten(batch)) if rows is not None)
        return self.assemble((split(batch, self.num_replicas_in_sync, self.replica_ids), rows))

    def all_have(self, has_value):
        """Whether every worker has another batch; costs one small all-reduce."""
        return tf.reduce_all(self._tell_others(has_value) > 0)

    def any_has(self, rows):
        """Whether some worker has rows for another batch; costs one small all-reduce, which tells all the others' `rows`."""
        return tf.reduce_any(self._tell_others(rows) > 0)

    def _tell_others(self, number):
        mine = tf.one_hot(self.cluster.me, self.workers, dtype=tf.int32) * tf.cast(number, tf.int32)
        with tf.device("CPU:0"):
            having = tf.identity(self._sum_of_workers(mine))
        self._having.assign(having)
        return having

    def data_ended(self):
        """Refuses, on all workers alike, data that ended on some of them only."""
        having = self._having.numpy()
        if having.any() and not having.all():
            ended = [name for name, has in zip(self.names, having) if not has]
            more = [name for name, has in zip(self.names, having) if has]
            raise agreement.WorkersDifferError(
                f"the data ended on {', '.join(ended)} while there was more on {', '.join(more)}; every worker has to "
                "read the same batches, of which it is given the rows of its replicas; where each reads rows of its own, say so "
                "with options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF."
            )

    def _count_rows(self, given):
        here = rows_per_replica(self, given)
        if here is None:
            return None, None
        replicas = self.num_replicas_in_sync
        told = next((getattr(leaf, _ROWS) for leaf in tf.nest.flatten(given) if hasattr(leaf, _ROWS)), None)
        if told is not None:
            rows, total = list(told[0]), told[1]
        else:  # the batch came through an argument of a tf.function
            with tf.device("CPU:0"):
                mine = [tf.one_hot(i, replicas, dtype=tf.int64) * tf.cast(r, tf.int64) for i, r in zip(self.replica_ids, here)]
                everywhere = tf.identity(self.sum_over_replicas(mine))
                rows, total = tf.unstack(everywhere), tf.reduce_sum(everywhere)
        for index, own in zip(self.replica_ids, here):
            rows[index] = own
        return rows, total

    # --- overridden ------------------------------------------------------------------------------

    def run(self, fn, args=(), kwargs=None, options=None):
        """As `MirroredStrategy.run`, on every worker."""
        if not internals.is_tf_function(fn):
            self._readings.a_step_runs()
        return super().run(fn, args, kwargs, options)

    def reading_together(self, variables):
        """While entered in a graph, variables of metrics are read in one message."""
        return self._readings.together(variables)

    def _reduce_leaf(self, reduce_op, leaf, axis):
        if internals.is_read_together(leaf) and axis is None:
            return self._readings.read(leaf, reduce_op)
        if (
            not internals.is_per_replica(leaf)
            and len(self.replica_ids) == 1
            and isinstance(leaf, (tf.Tensor, np.ndarray, int, float))
        ):
            leaf = self._values([tf.convert_to_tensor(leaf)])
        return super()._reduce_leaf(reduce_op, leaf, axis)

    def _reduce_parts(self, reduce_op, leaf, parts, axis, mean):
        if axis is not None or not all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
            return tf.distribute.Strategy.reduce(self, reduce_op, leaf, axis)
        lengths = self.gather(self._values([tf.shape(part)[:1] for part in parts]), axis=0)
        longest = tf.reduce_max(lengths)
        rest = [[0, 0]] * (parts[0].shape.rank - 1)
        total = self.sum_over_replicas([tf.pad(part, [[0, longest - tf.shape(part)[0]]] + rest) for part in parts])
        if not mean:
            return total
        having = tf.reduce_sum(tf.cast(tf.range(longest)[None] < lengths[:, None], total.dtype), 0)
        return total / tf.reshape(having, [-1] + [1] * len(rest))

    @contextlib.contextmanager
    def building(self):
        """While entered, variables start from this worker's own values; `broadcast` gives all the chief's."""
        with internals.made_alone(self.extended):
            yield


def _size(bounds):
    return bounds[1] - bounds[0]


def _check_first():
    if _made:
        raise RuntimeError(
            "MultiWorkerMirroredStrategy: this process has made one already, and TensorFlow connects the workers only once; "
            "share it: mirrored_model(build_fn, strategy=strategy)."
        )
    if internals.tensorflow_started():
        raise RuntimeError(
            "MultiWorkerMirroredStrategy: TensorFlow has run something already, and the workers can only be connected before; "
            "make the strategy (or call mirrored_model) at the top of the script, before any tensor, variable, layer or list of "
            "logical devices."
        )


def _cluster(resolver):
    if resolver is None:
        cluster = from_environment()
        if cluster is None:
            raise ValueError(
                "MultiWorkerMirroredStrategy: the environment variable TF_CONFIG does not say which workers there are; "
                "set it on each worker "
                "(docs/multiworker.md shows how), pass cluster_resolver=, or use keras_mirror.MirroredStrategy on one machine."
            )
        return cluster
    spec = resolver.cluster_spec().as_dict()
    return cluster_of(spec, resolver.task_type, resolver.task_id)


def _with_timeout(options, timeout):
    options = options or tf.distribute.experimental.CommunicationOptions()
    if options.timeout_seconds:
        return options
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack, timeout_seconds=timeout, implementation=options.implementation
    )


def _short(device):
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"
