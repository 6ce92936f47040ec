"""Speed-up and efficiency from measured rates, as a table and a picture. No TensorFlow."""

import statistics

from keras_mirror.report import Report, axes_or_new
from keras_mirror.throughput_report import readable

COLUMNS = [
    "replicas", "global batch", "rows per replica", "examples/s", "least", "most", "speed-up", "from", "to", "efficiency %"
]  # fmt: skip


class ScalingReport(Report):
    """How training speeds up with replicas; see `scaling`.

    Rates measured in the same round are compared with each other, so that what else went on in
    the machine meets all of them; `speed-up` is the median over the rounds, `from` and `to` the
    least and the most of them.

    Args:
        rates: Dict of number of replicas to examples per second, one entry a round.
        batches: Dict of number of replicas to rows of a global batch.
        notes: Sentences below the table.
    """

    def __init__(self, rates, batches, notes=()):
        first = next(iter(rates))
        rows = [_row(n, rates, first, batches[n]) for n in rates]
        weak = len(set(batches.values())) > 1
        title = f"Scaling with {'the rows per replica' if weak else 'the global batch'} fixed"
        super().__init__(title, COLUMNS, rows, [*_doubts(rows, first, len(rates[first])), *notes])

    def plot(self, ax=None):
        """Draws the measured speed-up, with its spread, against the ideal.

        Args:
            ax: Matplotlib axes to draw on, or None for new ones.

        Returns:
            The axes.
        """
        ax = axes_or_new(ax)
        replicas = [row["replicas"] for row in self.rows]
        measured = [row["speed-up"] for row in self.rows]
        below = [row["speed-up"] - row["from"] for row in self.rows]
        above = [row["to"] - row["speed-up"] for row in self.rows]
        ax.plot(replicas, [n / replicas[0] for n in replicas], "--", color="gray", label="ideal")
        ax.errorbar(replicas, measured, yerr=[below, above], fmt="o-", capsize=4, label="measured")
        ax.set(xlabel="replicas", ylabel=f"speed-up against {replicas[0]}", xticks=replicas, ylim=(0, None), title=self.title)
        ax.legend()
        return ax


def _row(n, rates, first, batch):
    ratios = [mine / base for mine, base in zip(rates[n], rates[first])]
    speedup = statistics.median(ratios)
    return {
        "replicas": n,
        "global batch": batch,
        "rows per replica": batch / n if batch % n else batch // n,
        "examples/s": readable(statistics.median(rates[n])),
        "least": readable(min(rates[n])),
        "most": readable(max(rates[n])),
        "speed-up": speedup,
        "from": min(ratios),
        "to": max(ratios),
        "efficiency %": 100 * speedup * first / n,
    }


def _doubts(rows, first, rounds):
    yield f"Speed-up against {_replicas(first)}: median of {rounds} rounds, from the least to the most of them."
    for row in rows[1:]:
        if row["from"] <= 1 <= row["to"]:
            yield f"Whether {_replicas(row['replicas'])} are faster or slower than {first} is not certain: the rounds disagree."
        elif row["to"] > 1.25 * row["from"]:
            yield f"The speed-up of {_replicas(row['replicas'])} is rough: it varied by over a quarter; take more steps or repeats."


def _replicas(n):
    return f"{n} replica{'s' * (n != 1)}"
