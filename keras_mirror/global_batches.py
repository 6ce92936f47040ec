"""The one path through which `fit` and hand-written loops both go: what the strategies of this package share."""

import collections
import contextlib
import sys
import weakref

import tensorflow as tf

from keras_mirror import internals
from keras_mirror.clearing import explaining_clear_session
from keras_mirror.counts_outside import ReplicaCount
from keras_mirror.distribution import ReplicaDataset, one_after_another, per_replica_spec, regroup, split, split_dataset
from keras_mirror.errors import warn_once
from keras_mirror.places import is_library
from keras_mirror.provenance import recording_creator
from keras_mirror.rows import Part, RowCounter, current_part, lengths_may_differ, rows_per_replica, sum_rows, working_on
from keras_mirror.shared_seeds import sharing_seeds
from keras_mirror.user_code import code_of

TRACES_BEFORE_WARNING = 5

_BY_NAME = object()
# Keras' own functions around a step; whatever else is run counts as training.
_KINDS = {"test_step": "test", "predict_step": "predict", "one_step_on_data": "predict"}


class GlobalBatchStrategy:
    """Mixin for a `tf.distribute.Strategy` whose replicas together do with a global batch what one device would.

    It overrides the public methods through which `fit` and every hand-written loop pass; a
    subclass calls `_prepare` at the end of its constructor.

    Attributes:
        devices: Names of the devices of this process.
        replica_ids: range, which of all replicas are this process's.
        is_chief: Whether this process writes the files.
        worker: int, which of the `workers` this process is.
        row_counters: `RowCounter`s of the `"train"` and `"test"` steps of loops over `run`.
        listeners: Functions called with the variables of each graph in which `run` is traced.
        captured: Those variables.
        stepped: The functions of the user's that were traced there.
        gathers_over_workers: Whether some step gathers rows from several workers, which may be another number each time.
        begun_views: Of each view of the whole batch that the first replica opened in the running step, the seeds that
            random operations took in it, and the state of Python's and NumPy's random numbers with which it began.
    """

    is_chief = True
    worker, workers = 0, 1

    def _prepare(self, devices, replica_ids):
        internals.allow_local_updates(self.extended)
        self.devices = tuple(devices)
        self.replica_ids = replica_ids
        self.row_counters = {kind: RowCounter(self.num_replicas_in_sync) for kind in ("train", "test")}
        self._counter = _BY_NAME
        self._lifted = weakref.WeakKeyDictionary()
        self._traces = collections.Counter()
        self.listeners = []
        self.captured = []
        self.stepped = []
        self.runs = 0
        self.gathers_over_workers = False
        self.begun_views = []

    @property
    def num_replicas_in_sync(self):
        """Number of replicas; 1 while a replica stands for one device in `keras_mirror.check`."""
        part = current_part()
        if part is not None and part.alone:
            return 1
        frame, count = sys._getframe(1), super().num_replicas_in_sync
        if is_library(frame.f_code.co_filename):
            return count
        if part is not None:
            part.marks.add("asked for replicas")
            return count
        return ReplicaCount.asked_by(frame, count) if count > 1 else count

    @contextlib.contextmanager
    def scope(self):
        """As `tf.distribute.Strategy.scope`; also remembers which line creates a variable.

        An optimizer's step counter and learning rate, which every replica changes alike, are kept
        as copies that each replica updates itself.
        """
        with explaining_clear_session(), super().scope(), tf.variable_creator_scope(_create):
            yield

    @contextlib.contextmanager
    def counting(self, counter):
        """While entered, `run` counts in `counter` instead of `row_counters`; None counts nowhere."""
        before, self._counter = self._counter, counter
        try:
            yield
        finally:
            self._counter = before

    def experimental_distribute_dataset(self, dataset, options=None):
        """Distributes a dataset of global batches, each split evenly over the replicas.

        Args:
            dataset: A batched `tf.data.Dataset`; its batches are global batches. Dense, ragged and
                sparse components of any dtype.
            options: `tf.distribute.InputOptions`. On CPU replicas there is no device to prefetch to
                and they change nothing.

        Returns:
            A `tf.distribute.DistributedDataset`.

        Raises:
            TypeError: If `dataset` is no `tf.data.Dataset`.
            ValueError: If it is empty or its elements are not batches.
        """
        if isinstance(dataset, tf.distribute.DistributedDataset):
            return dataset
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"experimental_distribute_dataset takes a tf.data.Dataset of global batches and got {type(dataset).__name__}; "
                "for arrays write tf.data.Dataset.from_tensor_slices((x, y)).batch(n)."
            )
        if not tf.inside_function() and dataset.cardinality().numpy() == 0:
            raise ValueError("the dataset is empty: it yields no batch, so there is nothing to train on or to evaluate.")
        if "Shard" in internals.kinds_of_datasets(dataset) and not self.reads_own_rows(dataset):
            warn_once(
                ("shard", id(self)),
                "the dataset was sharded by hand before it is distributed, so each replica's rows are taken from one shard and the "
                "others are never seen; leave out dataset.shard(...), the strategy hands every row to exactly one replica.",
                code="KM207",
            )
        return self._distribute(dataset, options)

    def _distribute(self, dataset, options):
        if all(name.startswith("CPU") for name in self.devices):
            return ReplicaDataset(self, dataset)
        parts = self.split_dataset(dataset)
        distributed = self.distribute_datasets_from_function(lambda context: one_after_another(parts), options)
        internals.set_attribute(distributed, "source", dataset)
        return distributed

    def undistributed(self, data):
        """What `fit` distributes of what it is given: of a dataset that was distributed already, what that was made from."""
        return data.source if isinstance(data, ReplicaDataset) else data

    def reads_own_rows(self, dataset):
        """Whether each worker reads rows of its own of a dataset, instead of all."""
        return False

    def split_dataset(self, dataset):
        """The dataset with each global batch replaced by what `assemble` takes."""
        return split_dataset(dataset, self.num_replicas_in_sync)

    def assemble(self, parts):
        """A distributed batch from an element of `split_dataset`."""
        return regroup(self, parts)

    def assembled_spec(self, spec):
        """The element spec of assembled batches, from that of `split_dataset`."""
        return per_replica_spec(spec)

    def distribute_batch(self, batch):
        """A global batch of tensors, split over the replicas; on several workers each passes the whole of it."""
        return self.assemble(split(batch, self.num_replicas_in_sync))

    def all_have(self, has_value):
        """Whether there is another batch; on several workers, whether there is for all of them."""
        return has_value

    def data_ended(self):
        """Called when an iterator that asks all workers found no other batch."""

    def raise_if_lost(self, what, error):
        """Raises an error that says which worker is lost, if `error` is one that comes of that."""

    def exchange(self, facts, what=""):
        """What every worker says, the chief first; on one worker, what it says itself."""
        return [facts]

    def chiefs(self, value, what=""):
        """`value`; on several workers, the chief's."""
        return value

    @contextlib.contextmanager
    def building(self):
        """While entered, a model is built whose weights are made equal on all workers afterwards."""
        yield

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on every replica, each with its part of the distributed `args`, and counts the rows.

        Args:
            fn: As in `tf.distribute.Strategy.run`.
            args: Positional arguments; distributed values are handed out part by part.
            kwargs: Keyword arguments, likewise.
            options: `tf.distribute.RunOptions`.

        Returns:
            What the replicas returned, as in `tf.distribute.Strategy.run`.
        """
        kwargs = kwargs or {}
        if internals.is_tf_function(fn):
            return self._lift(fn)(*args, **kwargs)
        rows, global_rows = self._count_rows((args, kwargs))
        if rows is None:
            self._warn_if_not_distributed(fn, (args, kwargs))
            return self._run(fn, None, None, args, kwargs, options)
        counter = self._counter
        if counter is _BY_NAME:
            counter = self.row_counters.get(_KINDS.get(getattr(fn, "__name__", None), "train"))
        if counter is not None:
            counter.add(rows)
        result = self._run(fn, rows, global_rows, args, kwargs, options)
        if counter is self.row_counters.get("train"):
            self._watch(fn, args, kwargs, rows, global_rows)
        return result

    def _watch(self, fn, args, kwargs, rows, global_rows):
        """Tells listeners of a loop of the user's what it uses, and the user if it is traced again and again."""
        self.runs += 1
        if internals.inside_tf_function():
            step, name = identity_of(fn), name_of(fn)
            self._traces[step] += 1
            if self._traces[step] > TRACES_BEFORE_WARNING:
                warn_once(
                    ("traced", id(self), step),
                    f"strategy.run({name}) was traced {self._traces[step]} times, which costs more than the steps; a Python number "
                    "among the arguments of the tf.function around it is traced for every value: pass tf.constant(value), or "
                    "keep it in a variable.",
                    code="KM205",
                )
            captured = internals.captured_variables(internals.current_graph())
        elif self.listeners and not self._traces[identity_of(fn)]:
            self._traces[identity_of(fn)] += 1  # eager: one trace, never run, tells which variables the step uses
            trace = tf.function(lambda: self._run(fn, rows, global_rows, args, kwargs, None))
            captured = internals.captured_variables(trace.get_concrete_function().graph)
        else:
            return
        self.stepped += [fn] if fn not in self.stepped else []
        known = {id(variable) for variable in self.captured}
        self.captured += [variable for variable in captured if id(variable) not in known]
        for listener in list(self.listeners):
            listener(self.captured)

    def _lift(self, function):
        """A `tf.function` around the replicas, in place of one inside each of them."""
        if function not in self._lifted:
            python_function = function.python_function
            self._lifted[function] = internals.clone_tf_function(
                function, lambda *args, **kwargs: self.run(python_function, args, kwargs)
            )
        return self._lifted[function]

    def _count_rows(self, given):
        """Rows of every replica in what a step is given, and of all together; None and None without rows."""
        rows = rows_per_replica(self, given)
        return rows, None if rows is None else total_of(rows)

    def _run(self, fn, rows, global_rows, args, kwargs, options):
        with sharing_seeds(self) as share_seeds:
            return super().run(self._on_part(fn, rows, global_rows, share_seeds), args, kwargs, options)

    def _on_part(self, fn, rows, global_rows, share_seeds):
        even = rows is not None and all(isinstance(r, int) for r in rows) and len(set(rows)) == 1
        converted = internals.autograph(fn)

        def on_replica(*args, **kwargs):
            share_seeds()
            if rows is None:
                return converted(*args, **kwargs)
            replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            with working_on(Part(self, replica, rows[replica], global_rows, even)) as part:
                result = converted(*args, **kwargs)
            _warn_of_wrong_factors(fn, part)
            return result

        return tf.autograph.experimental.do_not_convert(on_replica)

    def _warn_if_not_distributed(self, fn, given):
        batches = [leaf for leaf in tf.nest.flatten(given) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
        if batches and self.num_replicas_in_sync > 1:
            name = name_of(fn)
            warn_once(
                ("not distributed", identity_of(fn)),
                f"strategy.run({name}) was given a tensor of shape {batches[0].shape} that is not distributed, so each of the "
                f"{self.num_replicas_in_sync} replicas works on all of it; iterate over "
                "strategy.experimental_distribute_dataset(dataset) instead.",
                code="KM206",
            )

    def reduce(self, reduce_op, value, axis=None):
        """Reduces the replicas' values to one, as `tf.distribute.Strategy.reduce`, and more kinds of them.

        Without `axis`, values whose first dimensions differ are added row by row, and a mean is
        over the replicas that have the row. Bools count as 0 and 1. Strings have no sum; their
        mean is the first replica's value.

        Args:
            reduce_op: `"SUM"`, `"MEAN"` or a `tf.distribute.ReduceOp`.
            value: Structure of values with one part per replica.
            axis: int to reduce over that dimension too, e.g. 0 for the rows.

        Returns:
            A structure of tensors.

        Raises:
            TypeError: For a sum of strings.
        """
        return tf.nest.map_structure(lambda leaf: self._reduce_leaf(reduce_op, leaf, axis), value)

    def _reduce_leaf(self, reduce_op, leaf, axis):
        if not internals.is_per_replica(leaf):
            return super().reduce(reduce_op, leaf, axis)
        parts = self.experimental_local_results(leaf)
        first = self.replica_ids[0]
        mean = reduce_op in ("MEAN", "mean", tf.distribute.ReduceOp.MEAN)
        if parts[0].dtype == tf.string:
            if not mean:
                raise TypeError("strategy.reduce: strings have no sum; use strategy.gather(value, axis=0) to have all of them.")
            return parts[0]
        if parts[0].dtype == tf.bool:
            number = tf.float32 if mean else tf.int64
            leaf = self.experimental_distribute_values_from_function(
                lambda context: tf.cast(parts[context.replica_id_in_sync_group - first], number)
            )
            parts = self.experimental_local_results(leaf)
        return self._reduce_parts(reduce_op, leaf, parts, axis, mean)

    def _reduce_parts(self, reduce_op, leaf, parts, axis, mean):
        if axis is None and lengths_may_differ(parts):
            return sum_rows(parts, mean)
        return super().reduce(reduce_op, leaf, axis)


def _warn_of_wrong_factors(fn, part):
    replicas, name = part.strategy.num_replicas_in_sync, name_of(fn)
    if replicas == 1 or part.replica or "update" not in part.marks:
        return
    if "global loss" not in part.marks:
        warn_once(
            local_loss(fn),
            f"{name} makes its own loss, and the gradients of the {replicas} replicas are added up: a mean over its rows makes "
            f"the update {replicas}.00 times too large, and a mean divided by the number of replicas is off for uneven batches. "
            "Use loss = keras_mirror.global_mean(loss_per_row), or model.compute_loss(...).",
            code="KM201",
        )
    elif "asked for replicas" in part.marks:
        warn_once(
            ("divided twice", identity_of(fn)),
            f"{name} reads strategy.num_replicas_in_sync and its loss is a share of the global loss already; dividing it by the "
            f"number of replicas again makes the update {replicas}.00 times too small. Drop the division.",
            code="KM202",
        )


def name_of(fn):
    """What a person calls a function that runs on the replicas; methods of this package say whose step they run."""
    named = getattr(getattr(fn, "__self__", None), "name_of_step", None)
    return getattr(fn, "__qualname__", repr(fn)) if named is None else named(fn.__name__)


def identity_of(fn):
    """What tells a function that runs on the replicas from others, those of its name too: its name and its code."""
    function = getattr(getattr(fn, "__self__", None), "function_of_step", None)
    return name_of(fn), code_of(fn if function is None else function(fn.__name__))


def local_loss(fn):
    """The key of the warning that a step makes a loss of its own rows alone."""
    return "local loss", *identity_of(fn)


def total_of(rows):
    """The sum of ints and scalar integer tensors; an int if all are."""
    if all(isinstance(r, int) for r in rows):
        return sum(rows)
    with tf.device("CPU:0"):
        return tf.add_n([tf.cast(r, tf.int64) for r in rows])


def _create(next_creator, **kwargs):
    first_only = kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA
    if first_only and kwargs.get("name") in ("iteration", "learning_rate"):
        kwargs["aggregation"] = tf.VariableAggregation.NONE
    return recording_creator(next_creator, **kwargs)
