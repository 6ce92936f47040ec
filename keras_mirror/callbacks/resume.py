"""Saves a run so that, killed at any step and started again, it ends as if it had never stopped."""

import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals, saves
from keras_mirror.counters import Counters
from keras_mirror.engine import engine_of
from keras_mirror.errors import warn_once
from keras_mirror.holdings import optimizers_of
from keras_mirror.positions import Position
from keras_mirror.random_states import generator_states, host_state, set_generator_states, set_host_state
from keras_mirror.variables_state import first_difference, give_back, known_variables, values_of


class Resume(keras.callbacks.Callback):
    """Saves a run, so that the same script, killed at any step and started again, ends with the same weights.

    On the same devices they are the same bit for bit; on another number of replicas to rounding. Saved
    are the weights, the state of every optimizer with loss scale and averages, metrics, random states,
    epoch and step, the position in the data, and what other callbacks count (best value, patience, history).

    When training begins, the newest save in `directory` is gone on from, with one line that says so
    (none with `verbose=0`). Started again after its end, a run does not train further; with more `epochs`
    it goes on. Delete the directory to start over.

    A save is a directory with an `.npz`, a `.json` and checksums. It is written under another name, flushed
    to disk and renamed, and the one before is kept: killed in the middle of a save, the saves before are
    intact, and where the newest is damaged, the one before is used, with a warning (`KM601`). A save costs
    about the time that it takes to write all variables to disk twice; steps in between cost nothing.
    On resuming, the batches of the present epoch are read and dropped; `docs/resume.md` says what that costs for which data.

    On several workers each keeps its own saves, in `directory/worker-0` and so on (on a shared disk or its own), and all go on
    from the newest save that every one of them has.

    Works with `fit` and `TrainingLoop`, for models of `mirrored_model`. An attribute `get_state()` and
    `set_state(state)` of a callback or a `PyDataset` takes the place of what is saved of it by itself.

    Args:
        directory: Path for the saves of this run alone; made if missing.
        save_freq: `"epoch"` to save at the end of each epoch, or an int n to save after every n-th
            step of an epoch as well. Steps between two saves still run many in one graph call.

    Raises:
        ValueError: If `save_freq` is something else; in `fit`, before anything is trained: if the save is of another model,
            optimizer, data or version, if the data is shuffled without a seed, or together with `BackupAndRestore`; in a
            loop by hand, if an epoch after the first trains on another data object.
        OSError: If there are saves and all are damaged.

    Example:

    >>> keras.utils.set_random_seed(1)
    >>> model = km.mirrored_model(build_fn)
    >>> history = model.fit(x, y, epochs=5, callbacks=[km.Resume("run1", save_freq=100)])
    """

    async_safe = True
    every_batch = False
    comes_last = True  # so that the other callbacks have counted when it saves

    def __init__(self, directory, save_freq="epoch"):
        super().__init__()
        whole = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
        if save_freq != "epoch" and not whole:
            raise ValueError(f"Resume: save_freq must be 'epoch' or a positive number of steps, and got {save_freq!r}.")
        self.save_freq = save_freq
        self.every_steps = 0 if save_freq == "epoch" else save_freq
        self.others = []  # the other callbacks, told by `fit`
        self.directory = pathlib.Path(directory)
        self._saves = None  # of this worker, once it is known
        self._saved = None  # the state that this run goes on from
        self._positions = []
        self._epochs_begun = 0

    # --- beginning --------------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        engine = engine_of(self.model)
        self._check_company(engine)
        self._engine, self._positions, self._within, self._epochs_begun = engine, [], None, 0
        self._counters = Counters(self.others)
        several = engine.strategy.workers > 1
        self._saves = saves.Saves(self.directory / f"worker-{engine.strategy.worker}" if several else self.directory)
        self._path, self._saved = self._newest_of_all(engine.strategy)
        if self._saved is not None:
            self._check_versions()
        engine.data_listener = self._follow
        self._in_fit = engine.epoch_iterator is not None
        if self._in_fit:
            self._follow(engine.epoch_iterator)
        if self._saved is not None:
            self._give_back_variables()
            self._go_on()
        self._warn_of_unsaved(engine.captured)
        engine.listeners.append(self._warn_of_unsaved)

    def _check_company(self, engine):
        if engine is None:
            raise TypeError(
                "Resume: the model was not built by keras_mirror, so its steps and data cannot be followed; build it with "
                "keras_mirror.mirrored_model(build_fn)."
            )
        if any(isinstance(callback, (keras.callbacks.BackupAndRestore, Resume)) for callback in self.others):
            raise ValueError("Resume: it takes the place of BackupAndRestore, and of another Resume; leave the others out.")

    def _newest_of_all(self, strategy):
        """The newest save that this worker and all others have, or None and None where no worker has any."""
        if strategy.workers == 1:
            return next(self._readable(), (None, None))
        mine = {(state["epoch"], state["step"]): (path, state) for path, state in reversed(list(self._readable()))}
        theirs = [{tuple(at) for at in each} for each in strategy.exchange([list(at) for at in mine], "Resume")]
        common = set.intersection(*theirs)
        if not common and any(theirs):
            without = [f"worker:{index}" for index, each in enumerate(theirs) if not each] or ["no two workers' newest saves"]
            raise ValueError(
                f"Resume: the workers have no save in common in {self.directory} ({', '.join(without)} without one of the "
                "others'); give every worker the directory that it had, or delete all of them to start over."
            )
        if not common:
            return None, None
        path, state = mine[max(common)]
        self._saves.go_back_to(path)
        return path, state

    def _readable(self):
        """Yields the saves that are as they were written, newest first, and warns of those that are not."""
        damage, found = [], False
        for path in self._saves:
            try:
                save = path, self._saves.read(path)
            except saves.Damaged as error:
                damage.append(str(error))
                continue
            if damage and not found:
                warn_once(
                    ("damaged", str(path), *damage),
                    f"Resume: {'; '.join(damage)}, so training goes on from the save before, {path}.",
                    code="KM601",
                )
            found = True
            yield save
        if damage and not found:
            raise OSError(
                f"Resume: every save in {self._saves.directory} is damaged ({'; '.join(damage)}); delete it to start over."
            )

    def _check_versions(self):
        there, here = self._saved.get("workers", 1), self._engine.strategy.workers
        if there != here:
            self._refuse(f"it was saved by {there} worker{'s' * (there > 1)} and this run has {here}")
        for name, here in _versions().items():
            there = self._saved["versions"].get(name)
            if there != here:
                self._refuse(f"it was saved with {name} {there} and this is {name} {here}")

    def _refuse(self, difference):
        raise ValueError(
            f"Resume: {self._path} is of another run: {difference}. Start the script that saved it, or give this one a directory "
            "of its own."
        )

    def _go_on(self):
        """Takes up epoch, callbacks and random states."""
        saved = self._saved
        self._counters.give_back(saved["callbacks"])
        set_host_state(saved["random"]["host"])
        set_generator_states(saved["random"]["generators"])
        self._within = saved["epoch"] if saved["step"] else None
        stopped = saved["stop_training"] and not saved["step"]
        internals.set_restored_epoch(self.model, self.params["epochs"] if stopped else saved["epoch"])
        if self.params.get("verbose", 1) and self._engine.strategy.is_chief:
            step = f", step {saved['step'] + 1}" if saved["step"] else ""
            ended = stopped or saved["epoch"] >= self.params["epochs"]
            going = "the run had ended" if ended else f"going on with epoch {saved['epoch'] + 1}{step}"
            print(f"Resume: {going} ({self._path}, saved {saved['time']})", flush=True)

    def _follow(self, iterator):
        """Follows the training data from here, or from where the saved run was in it."""
        if self._epochs_begun > 1:
            raise ValueError(
                f"Resume: epoch {self._epoch + 1} trains on data that is another object than in the epochs before, so a resumed "
                "run could not tell how far it was; make the data once, before `for epoch in loop.epochs(n)`, and give "
                "loop.batches the same dataset (or the same arrays) in every epoch."
            )
        position = Position(iterator, self.model.distribute_strategy)
        index = len(self._positions)
        self._positions.append(position)
        if self._saved is not None and index < len(self._saved["data"]):
            self._check_data(position, self._saved["data"][index]["description"])
            self._give_back_variables()
            position.go_to(self._saved["data"][index]["position"], ended=self._saved["stop_training"])

    def _check_data(self, position, there):
        for name, here in position.description().items():
            if here != there[name]:
                self._refuse(f"the {name} of its data was {there[name]!r} and is {here!r}")

    def _give_back_variables(self):
        """Gives the model its variables back, once it is built."""
        saved = self._saved
        if not internals.is_built(self.model):
            return
        difference = first_difference(self.model, saved["variables"]) or _other_optimizer(self.model, saved["optimizers"])
        if difference:
            self._refuse(difference)
        give_back(self.model, saved["variables"])

    def _warn_of_unsaved(self, captured):
        """A variable that the step uses and no part of the model holds begins anew in a resumed run."""
        known = {id(internals.container_of(variable)) for variable in known_variables(self.model)}
        for variable in captured:
            holder = internals.container_of(variable)
            if id(holder) not in known and not getattr(holder, "keras_mirror_own", False):
                warn_once(
                    ("unsaved", id(holder)),
                    f"Resume: the step uses the variable {holder.name}, which belongs to no layer, metric or optimizer of the "
                    "model, so it is not saved, and begins anew in a resumed run; make it with add_weight in a layer.",
                    code="KM603",
                )

    # --- training ---------------------------------------------------------------------------

    def on_epoch_begin(self, epoch, logs=None):
        internals.set_restored_epoch(self.model, None)  # `fit` has asked by now, and the next one shall not find it
        self._epoch = epoch
        self._epochs_begun += 1
        self._saved_at = 0
        if self._within == epoch:
            self._go_on_within()
        self._within = None

    def _go_on_within(self):
        """The other callbacks have begun the epoch once more: what that changed is put right."""
        saved = self._saved
        self._counters.give_back(saved["callbacks"])
        self._give_back_variables()
        set_host_state(saved["random"]["host"])
        self._engine.resumed_logs = saved["logs"]
        self.model.stop_training = saved["stop_training"]
        self._saved_at = saved["step"]
        if self.model.steps_per_execution == 1 and self.model.train_function.steps:
            self._engine.epoch_iterator.steps_per_execution = self.model.train_function.steps = 1

    def on_train_batch_end(self, batch, logs=None):
        total = self.params.get("steps")
        done = self._positions[0].step if self._in_fit else batch + 1
        step = done if total is None else min(done, total)  # a call of many steps ends with the epoch
        if self.every_steps and step // self.every_steps > self._saved_at // self.every_steps:
            self._saved_at = step
            self._save(self._epoch, step, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._engine.resumed_logs = {}
        for position in self._positions:
            position.end_epoch()
        self._save(epoch + 1, 0, {})

    def on_train_end(self, logs=None):
        internals.set_restored_epoch(self.model, None)
        self._engine.data_listener = None
        if self._warn_of_unsaved in self._engine.listeners:
            self._engine.listeners.remove(self._warn_of_unsaved)

    # --- saving -----------------------------------------------------------------------------

    def _save(self, epoch, step, logs):
        self._saves.write(self._state(epoch, step, logs))
        strategy = self._engine.strategy
        if strategy.workers > 1:  # no worker removes what another may have to go back to
            strategy.check("Resume", {"save": [epoch, step]})
        self._saves.keep_newest()

    def _state(self, epoch, step, logs):
        return {
            "format": saves.FORMAT,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "versions": _versions(),
            "workers": self._engine.strategy.workers,
            "epoch": epoch,
            "step": step,
            "stop_training": bool(self.model.stop_training),
            "logs": {name: np.array(value) for name, value in (logs or {}).items()},
            "optimizers": _configs(self.model),
            "variables": values_of(self.model),
            "random": {"host": host_state(), "generators": generator_states()},
            "data": [{"description": position.description(), "position": position.state()} for position in self._positions],
            "callbacks": self._counters.state(),
        }


def _versions():
    return {"Keras": keras.__version__, "TensorFlow": tf.__version__, "format": saves.FORMAT}


def _configs(model):
    """What every optimizer was made with, a line for each setting; without the learning rate, which training may change."""
    found = {}
    for name, optimizer in optimizers_of(model).items():
        try:
            config = keras.saving.serialize_keras_object(optimizer)
        except NotImplementedError:  # a schedule of the user's own that cannot be saved
            config = {"class_name": type(optimizer).__name__}
        found[name] = [f"{path}={value}" for path, value in sorted(_settings(config, ""))]
    return found


def _settings(config, path):
    for name, value in config.items():
        if isinstance(value, dict) and name != "learning_rate":
            yield from _settings(value, path if name == "config" else f"{path}{name}.")
        elif name not in ("learning_rate", "name", "module", "registered_name"):
            yield f"{path}{name}".replace("class_name", "class"), repr(value)


def _other_optimizer(model, saved):
    here = _configs(model)
    for name in sorted({*here, *saved}):
        was, now = set(saved.get(name, ())), set(here.get(name, ()))
        if was != now:
            texts = [", ".join(sorted(each)) or "nothing more" for each in (was - now, now - was)]
            return f"its {name} was made with {texts[0]} where this one has {texts[1]}"
    return None
