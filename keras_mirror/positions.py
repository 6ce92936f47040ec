"""Where in its data a run is, and how another process gets back there."""

import os

import tensorflow as tf

from keras_mirror import internals
from keras_mirror.errors import warn_once
from keras_mirror.pipeline_order import inspect_pipeline
from keras_mirror.random_states import host_state, same_host_state, set_host_state


class Position:
    """Where in its data a run is.

    The order of the rows is a function of the dataset, its seeds and the number of passes so far. So a
    position is a handful of numbers: passes begun, batches taken from the last one. To go back, the
    passes before are begun again (which draws their seeds, and reads nothing), and the batches of the
    last one are read and dropped.

    Python code in the data (a `PyDataset`, a generator, `tf.py_function`) may also draw from Python's and
    NumPy's global random numbers. Their states at the beginning of the last pass, and at each
    `on_epoch_begin` and `on_epoch_end` that drew from them, belong to the position.

    Args:
        iterator: Keras' epoch iterator over the training data, from which nothing was taken yet.
        strategy: The strategy that distributes it.

    Attributes:
        step: Batches taken in the present epoch.

    Raises:
        ValueError: If the order of the rows cannot be had again: a shuffle without a seed.
    """

    def __init__(self, iterator, strategy):
        self._iterator = iterator
        self._strategy = strategy
        self._adapter = iterator.data_adapter
        self._distributed = internals.dataset_of(iterator)
        self._kind = type(self._adapter).__name__.removesuffix("Adapter").removesuffix("Data")
        self._pipeline = inspect_pipeline(self._source()) if self._source() is not None else None
        self._seed = None  # of arrays that are shuffled without a seed
        self._taken = []  # of each pass but the last, batches
        self._passes = 0
        self._at_start = None  # a function that goes to a saved position, when the next epoch begins
        self._waiting = None  # a function that makes the iterator to go on with
        self._before = None  # Python's random state when the last pass began
        self._hooks = []  # the data's on_epoch_begin and on_epoch_end: name, random state before if it drew from it
        self._hook_in_epoch = None  # the one of them with which the epoch to go on with began
        self._hooks_before_pass = 0
        self._ended = False
        self.step = 0
        self._check()
        self._install()

    # --- what kind of data ------------------------------------------------------------------

    def _source(self):
        return getattr(self._distributed, "source", None)

    def _check(self):
        pipeline = self._pipeline
        if pipeline is None:
            raise ValueError(
                "Resume: the training data was distributed beforehand in a way that hides its order; pass the tf.data.Dataset of "
                "global batches itself."
            )
        if pipeline.unseeded_shuffle and self._kind == "Array":
            self._seed = int.from_bytes(os.urandom(4), "little") >> 1
        elif pipeline.unseeded_shuffle:
            raise ValueError(
                "Resume: the training dataset is shuffled without a seed, so a resumed run would see some rows twice and others "
                "never; write dataset.shuffle(buffer_size, seed=...), for list_files and interleave too, or call "
                "keras.utils.set_random_seed(...) before the dataset is made."
            )
        if pipeline.unseeded_numbers or pipeline.unordered:
            cause = "draws random numbers without a seed" if pipeline.unseeded_numbers else "works in an order that threads decide"
            warn_once(
                ("resume data", id(self._source())),
                f"Resume: the training dataset {cause}, so two runs differ and so does a resumed one; each row is still seen once. "
                "Use keras.utils.set_random_seed(...), and map(...) without num_parallel_calls around random operations.",
                code="KM602",
            )

    @property
    def _python(self):
        return self._pipeline.python

    @property
    def _shuffles_in_thread(self):
        return getattr(self._adapter, "enqueuer", None) is not None

    def description(self):
        """What the data is like, to be compared with a saved run's: a dict of plain values by what they are."""
        rows, batch_size = internals.rows_and_batch_size(self._adapter)
        spec = tf.nest.map_structure(_described, self._source().element_spec)
        return {
            "kind of data": self._kind,
            "types of a batch": str(spec),
            "batch size": batch_size or self._pipeline.batch_size,
            "number of rows": rows,
            "steps_per_epoch": self._iterator.steps_per_epoch,
            "number of batches": int(self._source().cardinality()),
            "seeds of the shuffling (shuffle=... or shuffle(seed=...))": [list(each) for each in self._pipeline.seeds],
        }

    # --- following --------------------------------------------------------------------------

    def _install(self):
        internals.set_dataset_of(self._iterator, self)
        internals.replace_enumeration(self._iterator, self._counted)
        for hook in ("on_epoch_begin", "on_epoch_end"):
            internals.set_attribute(self._adapter, hook, self._followed(hook, getattr(self._adapter, hook)))

    def _followed(self, name, hook):
        """`hook` of the data, which may shuffle: the random state before it is noted, or set when resuming."""

        def follow():
            if self._hook_in_epoch is not None:
                set_host_state(self._hook_in_epoch)
            self._hook_in_epoch, before = None, host_state()
            hook()
            drew = self._shuffles_in_thread or not same_host_state(before, host_state())
            self._hooks.append((name, before if drew else None))

        return follow if self._has_hooks else hook

    @property
    def _has_hooks(self):
        return self._kind == "PyDataset"

    def __iter__(self):
        """The iterator of a new pass: what Keras' trainer calls."""
        if self._waiting is not None:
            make, self._waiting = self._waiting, None
            return make()
        if self._passes:
            self._taken.append(internals.steps_taken(self._iterator))
        return self._begin_pass()

    def _begin_pass(self):
        self._passes += 1
        if self._seed is not None:
            self._distributed = self._shuffled_arrays()
        self._hooks_before_pass = len(self._hooks)
        self._before = host_state() if self._python and not self._shuffles_in_thread else None
        return iter(self._distributed)

    def _shuffled_arrays(self):
        """Keras' pipeline again, seeded: it would take the seed of the operating system."""
        tf.random.set_seed(self._seed ^ (self._passes * 0x9E3779B1 & 0x7FFFFFFF))
        try:
            return self._strategy.experimental_distribute_dataset(self._adapter.get_tf_dataset())
        finally:
            tf.random.set_seed(None)

    def _counted(self, steps):
        """Keras' steps of an epoch, without those that were done before a stop."""
        start, self._at_start = self._at_start, None
        if start is not None:
            start()
        done, self.step = self.step, 0
        while self.step < done and (skipped := next(steps, None)) is not None:
            self.step = self._after(skipped)
        ended, self._ended = self._ended, False
        for step in () if ended else steps:
            self.step = self._after(step)
            yield step

    def _after(self, step):
        """Steps of the epoch done after `(first, last, iterator)`; older releases of Keras leave out the last."""
        first, *last, _ = step
        return (last[0] if last else first + self._iterator.steps_per_execution - 1) + 1

    def end_epoch(self):
        """The next epoch begins with its first step."""
        self.step = 0

    # --- saving and going back --------------------------------------------------------------

    def state(self):
        """The position, as plain values."""
        return {
            "step": self.step,
            "passes": self._passes,
            "taken": [*self._taken, internals.steps_taken(self._iterator)] if self._passes else [],
            "goes on": self.step > 0 or self._goes_on_after_epoch(),
            "seed": self._seed,
            "before": self._before,
            "hooks": list(self._hooks),
            "hooks before pass": self._hooks_before_pass,
            "data": self._adapter.py_dataset.get_state() if self._keeps_own_state else None,
        }

    def _goes_on_after_epoch(self):
        return self._iterator.steps_per_epoch is not None and internals.present_iterator(self._iterator) is not None

    @property
    def _keeps_own_state(self):
        return self._has_hooks and hasattr(self._adapter.py_dataset, "get_state")

    def go_to(self, state, ended=False):
        """Goes to a saved position; batches are read, where they have to be, when the next epoch begins.

        Args:
            state: As of `state()`.
            ended: Whether the epoch was about to be left early.
        """
        self.step, self._seed, self._ended = state["step"], state["seed"], ended and state["step"] > 0
        if state["passes"] and self._pipeline.passes_matter and not self._reads_passes:
            for _ in range(state["passes"] - state["goes on"]):
                iter(self._source())  # draws the seeds of a pass
        self._at_start = lambda: self._go_to_now(state) if state["passes"] else None

    @property
    def _reads_passes(self):
        return self._pipeline.exactly_read or self._kind == "Generator"

    def _go_to_now(self, state):
        taken, hooks, goes_on = state["taken"], state["hooks"], state["goes on"]
        ended = taken[:-1] if goes_on else taken
        if self._reads_passes:
            for count in ended:
                _read(iter(self._distributed), count)
        self._passes, self._taken = len(ended), ended[: len(taken) - 1]
        if self.step and self._has_hooks:
            *hooks, (_, self._hook_in_epoch) = hooks  # Keras calls this one again
        if goes_on and self._iterator.steps_per_epoch is not None:
            self._repeat_hooks(hooks[: state["hooks before pass"]])
            internals.set_present_iterator(self._iterator, self._begin_again(state))
            self._repeat_hooks(hooks[state["hooks before pass"] :])
        else:
            self._repeat_hooks(hooks)
            self._waiting = (lambda: self._begin_again(state)) if goes_on else None
        internals.set_steps_taken(self._iterator, taken[-1] - self.step)

    def _begin_again(self, state):
        if state["before"] is not None:
            set_host_state(state["before"])
        iterator = self._begin_pass()
        if state["data"] is not None:
            self._adapter.py_dataset.set_state(state["data"])
        _read(iterator, state["taken"][-1])
        return iterator

    def _repeat_hooks(self, hooks):
        """What a `PyDataset` did between epochs, with the random numbers that it drew then."""
        for name, before in hooks:
            if before is not None:
                set_host_state(before)
            getattr(self._adapter.py_dataset, name)()
            self._hooks.append((name, before))


def _described(spec):
    shape = getattr(spec, "shape", None)
    return str(spec) if shape is None or shape.rank is None else f"{spec.dtype.name} {shape[1:]}"


def _read(iterator, batches):
    """Reads and drops batches, the last as exactly as the first: what draws random numbers has drawn them."""
    for _ in range(batches):
        if not bool(iterator.get_next_as_optional().has_value()):
            return
