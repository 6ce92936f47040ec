"""The table and the picture of a throughput. No TensorFlow."""

from keras_mirror.report import Report, axes_or_new
from keras_mirror.timing import total

COLUMNS = ["epoch", "phase", "steps", "rows", "examples/s", "per replica", "ms per step", "waiting", "stepping", "waiting %"]
PHASES = ("training", "validation")
LOOP = (
    "In a loop of your own waiting and stepping cannot be told apart, and everything in it counts from the end of the first trace "
    "on; keras_mirror.TrainingLoop tells more."
)


class ThroughputReport(Report):
    """Examples per second and the time of a step; see `Throughput.report`.

    Args:
        spans: List of `Span`.
    """

    def __init__(self, spans):
        self.spans = sorted(spans, key=lambda span: (span.epoch is None, span.epoch or 0, PHASES.index(span.phase)))
        totals = [total(phase) for phase in map(self._of, PHASES) if phase]
        several = [span for span in totals if len(self._of(span.phase)) > 1]
        super().__init__("Throughput", COLUMNS, [_row(span) for span in [*self.spans, *several]], _notes(totals))

    def _of(self, phase):
        return [span for span in self.spans if span.phase == phase]

    def plot(self, ax=None):
        """Draws examples per second over epochs, training and validation.

        Args:
            ax: Matplotlib axes to draw on, or None for new ones.

        Returns:
            The axes.
        """
        ax = axes_or_new(ax)
        for phase, style in zip(PHASES, ("o-", "s--")):
            points = [
                (index if span.epoch is None else span.epoch + 1, span.examples_per_second)
                for index, span in enumerate(self._of(phase), 1)
                if span.steps
            ]
            if points:
                ax.plot(*zip(*points), style, label=phase)
        ax.set(xlabel="epoch", ylabel="examples per second", ylim=(0, None), title="Throughput")
        ax.xaxis.get_major_locator().set_params(integer=True)
        if ax.lines:
            ax.legend()
        return ax


def _row(span):
    measured = bool(span.steps)
    return {
        "epoch": span.epoch + 1 if isinstance(span.epoch, int) else span.epoch,
        "phase": span.phase,
        "steps": span.steps,
        "rows": sum(span.rows),
        "examples/s": readable(span.examples_per_second) if measured else None,
        "per replica": _replicas([readable(rate) for rate in span.per_replica]) if measured else None,
        "ms per step": span.per_step(span.seconds),
        "waiting": span.per_step(span.waiting),
        "stepping": span.per_step(span.stepping),
        "waiting %": 100 * span.waiting_share if measured and span.waiting is not None else None,
    }


def readable(number):
    """A rate without digits that mean nothing: a whole number from 100 on."""
    return round(number) if number >= 100 else float(number)


def _replicas(rates):
    texts = [str(rate) if isinstance(rate, int) else f"{rate:.3g}" for rate in rates]
    return ", ".join(texts) if len(texts) <= 4 else f"{len(texts)} x {min(rates):.4g} to {max(rates):.4g}"


def _notes(totals):
    if not totals:
        return ["Nothing was trained or evaluated yet."]
    notes = [
        "waiting and stepping are in ms per step; the rest of a step's time is Python, callbacks, and starting an epoch's data."
    ]
    if any(span.left_out for span in totals):
        left_out = ", ".join(f"{span.left_out} of {span.phase}" for span in totals if span.left_out)
        notes.append(f"Steps left out as warm-up: {left_out}.")
    if any(span.steps and span.waiting is None for span in totals):
        notes.append(LOOP)
    return notes + [note for span in totals for note in _what_dominates(span)]


def _what_dominates(span):
    if not span.steps or span.waiting is None:
        return
    verb = "wait" if len(span.rows) > 1 else "waits"
    who = "The replicas" if len(span.rows) > 1 else "The replica"
    rest = 1 - (span.waiting + span.stepping) / span.seconds
    if span.waiting_share > 0.5:
        yield (
            f"{who} {verb} {span.waiting_share:.0%} of the time for data in {span.phase}: add .prefetch(tf.data.AUTOTUNE) to the "
            "dataset, or num_parallel_calls=tf.data.AUTOTUNE to its map."
        )
    elif rest > 0.5:
        yield (
            f"Python, callbacks and starting the data of each epoch take {rest:.0%} of the time in {span.phase}: make epochs "
            "longer or batches larger, or let callbacks look at fewer batches."
        )
