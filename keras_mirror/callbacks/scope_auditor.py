"""Flags variables that were made outside of the strategy's scope, before they do harm."""

import keras

from keras_mirror.auditing import audit
from keras_mirror.engine import engine_of
from keras_mirror.errors import OutOfScopeError, check_codes, warn_once
from keras_mirror.global_batches import local_loss


class ScopeAuditor(keras.callbacks.Callback):
    """Flags every variable that was not made in the scope: its path, owner, file and line, and the cure.

    It looks when training (or evaluation) begins and again when the step was traced, before the
    step runs, so that a variable which only the step uses (the forgotten global counter) is found
    too. Costs nothing per step.

    Reports what `audit` reports, each finding with a code, a severity and a page in `docs/codes`.
    Notes are only in the report.

    Args:
        on_violation: `"warn"` for a `MirrorWarning` per error or warning. `"raise"` to stop before
            the first step with an `OutOfScopeError` where results are wrong for sure (errors, such
            as every variable out of scope); what is wrong in some circumstances only is warned of.
        ignore: Tuple of codes to leave out, e.g. `("KM106",)`.

    Raises:
        TypeError: If `ignore` is a string.
        ValueError: If `on_violation` is something else, or a code does not exist.

    Example:

    >>> auditor = km.ScopeAuditor(on_violation="raise")
    >>> history = model.fit(x, y, callbacks=[auditor], verbose=0)
    >>> print(auditor.report().title)
    Scope audit: all 9 variables are in scope
    """

    async_safe = True
    every_batch = False

    def __init__(self, on_violation="warn", ignore=()):
        super().__init__()
        if on_violation not in ("warn", "raise"):
            raise ValueError(f"ScopeAuditor: on_violation must be 'warn' or 'raise', and got {on_violation!r}.")
        self.on_violation = on_violation
        self.ignore = check_codes("ScopeAuditor: ignore", ignore)
        self.violation = None  # what was raised

    def report(self):
        """The `Audit` of the model as it is now."""
        if self.model is None:
            raise RuntimeError("ScopeAuditor.report: the auditor has no model yet; pass it to fit(callbacks=[...]) first.")
        return audit(self.model, self.ignore)

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
        found = [finding for finding in self.report().findings if finding.severity != "note"]
        errors = [finding for finding in found if finding.severity == "error"]
        if errors and self.on_violation == "raise":
            self._end()
            self.violation = OutOfScopeError("; ".join(str(finding) for finding in errors))
            raise self.violation
        for finding in found:
            also = local_loss(self.model.train_step) if finding.code == "KM201" else None
            key = (id(self.model), finding.code, finding.path, finding.owner, finding.origin, also)
            warn_once(key, f"ScopeAuditor: {finding.sentence}", code=finding.code, also=also)
