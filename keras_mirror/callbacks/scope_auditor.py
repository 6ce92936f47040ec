"""Flags variables that were made outside of the strategy's scope, before they do harm."""

import keras

from keras_mirror.auditing import audit
from keras_mirror.engine import engine_of
from keras_mirror.errors import OutOfScopeError, warn_once


class ScopeAuditor(keras.callbacks.Callback):
    """Flags every variable that was not made in the scope: its path, owner, file and line, and the cure.

    It looks when training (or evaluation) begins and again when the step was traced, before the
    step runs, so that a variable which only the step uses (the forgotten global counter) is found
    too. Costs nothing per step.

    Args:
        on_violation: `"warn"` for a `MirrorWarning` per variable, `"raise"` to stop before the
            first step with an `OutOfScopeError`.

    Raises:
        ValueError: If `on_violation` is something else.

    Example:

    >>> auditor = km.ScopeAuditor(on_violation="raise")
    >>> history = model.fit(x, y, callbacks=[auditor], verbose=0)
    >>> print(auditor.report().title)
    Scope audit: all 9 variables are in scope
    """

    async_safe = True
    every_batch = False

    def __init__(self, on_violation="warn"):
        super().__init__()
        if on_violation not in ("warn", "raise"):
            raise ValueError(f"ScopeAuditor: on_violation must be 'warn' or 'raise', and got {on_violation!r}.")
        self.on_violation = on_violation
        self.violation = None  # what was raised

    def report(self):
        """The `Audit` of the model as it is now."""
        if self.model is None:
            raise RuntimeError("ScopeAuditor.report: the auditor has no model yet; pass it to fit(callbacks=[...]) first.")
        return audit(self.model)

    def on_train_begin(self, logs=None):
        self._begin()

    def on_train_end(self, logs=None):
        self._end()

    def on_test_begin(self, logs=None):
        self._begin()

    def _begin(self):
        for place in self._places():
            if self._look not in place.listeners:
                place.listeners.append(self._look)
        self._look()

    def _end(self):
        for place in self._places():
            if self._look in place.listeners:
                place.listeners.remove(self._look)

    def _places(self):
        """Who tells what a step uses: the model's own steps, and any loop over `strategy.run`."""
        return [place for place in (engine_of(self.model), self.model.distribute_strategy) if hasattr(place, "listeners")]

    def _look(self, captured=None):
        found = audit(self.model).findings
        if found and self.on_violation == "raise":
            self._end()
            self.violation = OutOfScopeError("; ".join(str(finding) for finding in found))
            raise self.violation
        for finding in found:
            warn_once((id(self.model), finding.path, finding.owner, finding.origin), f"ScopeAuditor: {finding}", stacklevel=4)
