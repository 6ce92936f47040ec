"""The table and the picture of the rows that every replica got. No TensorFlow."""

from keras_mirror.report import Report, axes_or_new

COLUMNS = ["epoch", "phase", "replica", "rows", "mean", "least", "most", "empty steps", "uneven steps", "steps"]
STYLES = {"training": ("-", "o"), "validation": ("--", "s")}


class MostReadings:
    """Rows per step over the steps of a training, in at most so many readings.

    When there are more, neighbours are put together, so that a long training is kept as small as a
    short one.

    Args:
        most: int, readings to keep.

    Attributes:
        readings: List of `(phase, first, last, steps, rows)`: training steps counted before and after, steps
            that were read, and their rows, one entry per replica. Validation happens between two training steps.
    """

    def __init__(self, most=400):
        self.readings = []
        self._most = most
        self._trained = 0

    def add(self, phase, steps, rows):
        """Adds what was read since the last time."""
        if not steps:
            return
        first = self._trained
        self._trained += steps if phase == "training" else 0
        self.readings.append((phase, first, self._trained, steps, tuple(int(each) for each in rows)))
        if len(self.readings) > self._most:
            self.readings = [reading for phase in STYLES for reading in self._halved(phase)]

    def _halved(self, phase):
        own = [reading for reading in self.readings if reading[0] == phase]
        for one, *other in zip(own[::2], own[1::2]):
            yield _together(one, *other)
        yield from own[len(own) - len(own) % 2 :]

    def curve(self, phase, replica):
        """`(steps, rows per step)` of one replica: two lists, a point in the middle of each reading."""
        own = [reading for reading in self.readings if reading[0] == phase]
        return [(first + last) / 2 for _, first, last, _, _ in own], [rows[replica] / steps for _, _, _, steps, rows in own]


def _together(one, other):
    phase, first, _, steps, rows = one
    _, _, last, more_steps, more_rows = other
    return phase, first, last, steps + more_steps, tuple(a + b for a, b in zip(rows, more_rows))


class RowsReport(Report):
    """Rows that every replica got; see `ReplicaBatchLogger.report`.

    Args:
        counts: List of `(epoch, phase, RowCounts)`; the epoch is None for an evaluation of its own.
        readings: `MostReadings` to draw over steps, or None to draw over epochs.
    """

    def __init__(self, counts, readings=None):
        self._counts = sorted(counts, key=_order)
        self._readings = readings
        rows = [_row(epoch, phase, counts, index) for epoch, phase, counts in self._counts for index in range(len(counts.rows))]
        notes = [] if rows else ["Nothing was trained or evaluated yet."]
        super().__init__("Rows that every replica got", COLUMNS, rows, notes)

    def plot(self, ax=None):
        """Draws the mean rows per step of each replica: training solid, validation dashed.

        Args:
            ax: Matplotlib axes to draw on, or None for new ones.

        Returns:
            The axes.
        """
        ax = axes_or_new(ax)
        over_steps = self._readings is not None and bool(self._readings.readings)
        replicas = len(self._counts[0][2].rows) if self._counts else 0
        highest = 0.0
        for phase, (line, marker) in STYLES.items():
            for replica in range(replicas):
                x, y = self._readings.curve(phase, replica) if over_steps else self._over_epochs(phase, replica)
                if x:
                    highest = max(highest, *y)
                    # Wide lines below narrow ones, so that replicas with the same rows are all seen.
                    width = 1 + 3 * (replicas - 1 - replica) / max(replicas - 1, 1)
                    ax.plot(x, y, line, marker=marker if len(x) <= 40 else "", markersize=3 + width, linewidth=width,
                            color=f"C{replica}", label=f"replica {replica}, {phase}")  # fmt: skip
        ax.set(xlabel="step" if over_steps else "epoch", ylabel="rows per step", ylim=(0, 1.1 * highest or 1), title=self.title)
        ax.xaxis.get_major_locator().set_params(integer=True)
        if ax.lines:
            ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
        return ax

    def _over_epochs(self, phase, replica):
        own = [(epoch, counts) for epoch, each, counts in self._counts if each == phase]
        x = [index if epoch is None else epoch + 1 for index, (epoch, _) in enumerate(own, 1)]
        return x, [float(counts.mean[replica]) for _, counts in own]


def _row(epoch, phase, counts, index):
    return {
        "epoch": None if epoch is None else epoch + 1,
        "phase": phase,
        "replica": index,
        "rows": int(counts.rows[index]),
        "mean": float(counts.mean[index]),
        "least": int(counts.least[index]),
        "most": int(counts.most[index]),
        "empty steps": int(counts.empty_steps[index]),
        "uneven steps": counts.uneven_steps,
        "steps": counts.steps,
    }


def _order(entry):
    epoch, phase, _ = entry
    return (epoch is None, epoch or 0, phase)
