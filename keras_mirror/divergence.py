"""The record of many checks of the replicas' copies, as a table and as a plot."""

import math

from keras_mirror.report import Report, axes_or_new

MOST_LINES = 8  # of a plot
MOST_NAMES = 4  # of what is not compared


class Divergence:
    """What was seen of one variable whose copies differed at some time.

    Attributes:
        copies: Its `Copies`.
        replicas: Set of the replicas that differed.
        largest: The largest difference; NaN if one copy held a NaN and another did not.
        equal_at: int, the step of the last check before in which the copies were equal; None if there was none.
        seen_at: int, the step of the first check that saw the difference.
        last_at: int, the step of the last check that saw it.
        repaired: How the copies were made equal, `""` if they never were.
        repairs: int, how often.
    """

    def __init__(self, copies, equal_at, seen_at):
        self.copies = copies
        self.replicas = set()
        self.largest = 0.0
        self.equal_at = equal_at
        self.seen_at = self.last_at = seen_at
        self.repaired, self.repairs = "", 0

    def add(self, step, difference):
        """Takes in one more check that saw it."""
        self.replicas |= set(difference.largest)
        self.largest = math.nan if math.isnan(difference.worst) else max(self.largest, difference.worst)
        self.last_at = step
        if difference.repaired:
            self.repaired, self.repairs = difference.repaired, self.repairs + 1

    @property
    def since(self):
        """Since when, e.g. `between step 8 and step 12`."""
        if self.equal_at is not None and self.equal_at < self.seen_at:
            return f"between step {self.equal_at} and step {self.seen_at}"
        if self.equal_at is not None:
            return f"step {self.seen_at}"
        return "before the first step" if self.seen_at == 0 else f"step {self.seen_at} or before"

    @property
    def done(self):
        """What was done about it."""
        if not self.repairs:
            return "nothing"
        return self.repaired + (f", {self.repairs} times" if self.repairs > 1 else "")


class Record:
    """Many checks, one after the other.

    Attributes:
        checks: List of `(step, differences)` with a dict of path to largest difference.
        divergences: Dict of path to `Divergence`.
        last: The last `Check`, None before the first.
    """

    def __init__(self):
        self.checks = []
        self.divergences = {}
        self.last = None
        self._compared = set()

    def add(self, step, check):
        """Takes in a `Check` made after `step` steps; returns the paths that it is the first to see differ."""
        new = []
        for difference in check.differences:
            path = difference.copies.path
            if path not in self.divergences:
                equal_at = self.checks[-1][0] if path in self._compared else None
                self.divergences[path] = Divergence(difference.copies, equal_at, step)
                new.append(path)
            self.divergences[path].add(step, difference)
        self.checks.append((step, {difference.copies.path: difference.worst for difference in check.differences}))
        self._compared = {each.path for each in check.inventory.mirrored}
        self.last = check
        return new


class DivergenceReport(Report):
    """Which variables differed on which replicas, by how much and since when.

    True in a condition if any did.

    Attributes:
        checks: List of `(step, {path: largest difference})`, one entry a check.
    """

    COLUMNS = ("variable", "kind", "replicas", "largest difference", "since", "done")

    def __init__(self, record):
        self.checks = list(record.checks)
        rows = [
            {
                "variable": path,
                "kind": each.copies.kind,
                "replicas": ", ".join(str(replica) for replica in sorted(each.replicas)),
                "largest difference": each.largest,
                "since": each.since,
                "done": each.done,
            }
            for path, each in record.divergences.items()
        ]
        super().__init__(f"Replica consistency: {_verdict(record)}", self.COLUMNS, rows, _notes(record))

    def __bool__(self):
        return bool(self.rows)

    def plot(self, ax=None):
        """Draws the largest difference of each variable over the steps, on a scale that is linear near zero.

        Args:
            ax: matplotlib axes to draw on; None for those of a new figure.

        Returns:
            The axes. NaN, where one copy held a NaN and another did not, is a cross at the top.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        ax = axes_or_new(ax)
        steps = [step for step, _ in self.checks]
        paths = sorted({path for _, found in self.checks for path in found}, key=lambda path: -self._height(path))
        for path in paths[:MOST_LINES]:
            self._draw(ax, steps, path, [found.get(path, 0.0) for _, found in self.checks])
        if not paths:
            ax.plot(steps, [0.0] * len(steps), marker="o", label="all variables")
        more = f" ({MOST_LINES} of {len(paths)} variables)" if len(paths) > MOST_LINES else ""
        ax.set(xlabel="step", ylabel="largest difference", title=f"Difference between the replicas' copies{more}")
        ax.locator_params(axis="x", integer=True)
        self._scale(ax)
        if steps:
            ax.legend(fontsize="small")
        return ax

    def _height(self, path):
        """For sorting: the largest difference, NaN above all."""
        values = [found[path] for _, found in self.checks if path in found]
        return math.inf if any(math.isnan(value) for value in values) else max(values)

    def _draw(self, ax, steps, path, values):
        (line,) = ax.plot(steps, values, marker="o", label=path)
        beyond = [step for step, value in zip(steps, values) if not math.isfinite(value)]
        top = ax.get_xaxis_transform()
        ax.plot(beyond, [0.97] * len(beyond), "x", color=line.get_color(), transform=top, label="_not finite")

    def _scale(self, ax):
        finite = [value for _, found in self.checks for value in found.values() if math.isfinite(value) and value > 0]
        if finite:
            ax.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(finite))))
            ax.set_ylim(0, max(finite) * 3)
        else:
            ax.set_ylim(-0.05, 1)
            ax.set_yticks([0], ["0"])


def _verdict(record):
    if record.last is None:
        return "nothing was checked yet"
    if record.last.replicas == 1:
        return "one replica, so there is nothing to compare"
    compared = len(record.last.inventory.mirrored)
    if not record.divergences:
        return f"all {compared} variables agree on {record.last.replicas} replicas"
    return f"{len(record.divergences)} of {compared} variables differed on {record.last.replicas} replicas"


def _notes(record):
    if record.last is None or record.last.replicas == 1:
        return []
    found, steps = record.last.inventory, [step for step, _ in record.checks]
    equal = len(found.mirrored) - len(record.last.differences)
    before = " before the repair" if any(each.repaired for each in record.last.differences) else ""
    times = "1 check, after" if len(steps) == 1 else f"{len(steps)} checks, from step {steps[0]} to"
    notes = [f"{times} step {steps[-1]}; in the last one {equal} of {len(found.mirrored)} variables were equal{before}."]
    if found.local:
        notes.append(f"Local by design, so not compared: {_local(found)}.")
    if found.single:
        notes.append(f"Made outside the scope, so there is one copy only: {_some(found.single)}; see keras_mirror.audit(model).")
    return notes


def _local(found):
    own = found.local[found.metrics :]
    parts = [f"{found.metrics} of metrics"] if found.metrics else []
    return " and ".join(parts + ([_some(own)] if own else []))


def _some(paths):
    names = list(dict.fromkeys(paths))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{len(names)} ({', '.join(names[:MOST_NAMES])}{more})"
