"""The time of steps: who wants to know it, and the arithmetic of a throughput. No TensorFlow."""

import contextlib
import dataclasses
import time


class Timers:
    """Those who want to know how long the steps of one kind take; while there are none, nobody measures.

    Attributes:
        listening: List of `SpanTimer`.
    """

    def __init__(self):
        self.listening = []

    def __bool__(self):
        return bool(self.listening)

    def begin(self, steps_since_trace):
        """A call of steps begins; 0 if it was traced just now."""
        for timer in self.listening:
            timer.begin(steps_since_trace)

    def end(self, steps, waiting, stepping):
        """The call has ended: how many steps it ran, and the seconds that it waited for data and stepped."""
        for timer in self.listening:
            timer.end(steps, waiting, stepping)

    @contextlib.contextmanager
    def waiting(self, clock=time.perf_counter):
        """Around getting a batch in Python; the time counts for the next call."""
        start = clock()
        yield
        for timer in self.listening:
            timer.wait(clock() - start)


@dataclasses.dataclass(frozen=True)
class Span:
    """What was measured over some steps; times in seconds.

    Attributes:
        epoch: int, counted from 0; None for an evaluation of its own.
        phase: `"training"` or `"validation"`.
        steps: int, steps that count.
        left_out: int, steps that do not: the warm-up.
        rows: Rows of each replica in the steps that count.
        seconds: All the time of the steps that count: waiting, stepping, Python and callbacks between.
        waiting: Waiting for data; None where it cannot be told.
        stepping: On the steps; None where it cannot be told.
    """

    epoch: int | None
    phase: str
    steps: int
    left_out: int
    rows: tuple
    seconds: float
    waiting: float | None
    stepping: float | None

    @property
    def per_replica(self):
        """Examples per second of each replica."""
        return [_ratio(rows, self.seconds) for rows in self.rows]

    @property
    def examples_per_second(self):
        """Of all replicas together."""
        return _ratio(sum(self.rows), self.seconds)

    @property
    def waiting_share(self):
        """Part of the time that went to waiting for data, 0 to 1."""
        return float("nan") if self.waiting is None else _ratio(self.waiting, self.seconds)

    def per_step(self, seconds):
        """`seconds` of this span per step, in milliseconds; None where they cannot be told."""
        return None if seconds is None or not self.steps else seconds / self.steps * 1e3


def total(spans):
    """All spans of one phase as one."""
    first = spans[0]
    known = [span for span in spans if span.steps and span.waiting is not None]
    split = bool(known) and len(known) == sum(bool(span.steps) for span in spans)
    return Span(
        "all",
        first.phase,
        sum(span.steps for span in spans),
        sum(span.left_out for span in spans),
        tuple(sum(rows) for rows in zip(*[span.rows for span in spans])),
        sum(span.seconds for span in spans),
        sum(span.waiting for span in known) if split else None,
        sum(span.stepping for span in known) if split else None,
    )


def _ratio(amount, seconds):
    return amount / seconds if seconds > 0 else float("nan")


class SpanTimer:
    """Measures one span: what happens from one call of steps to the next, but for the warm-up.

    The time of a call goes from the end of the call before to its own end, so that callbacks and
    Python between the calls count. A call that begins within `warmup` steps of a trace is left out,
    with the time before it and its rows.

    Args:
        take_rows: Returns the rows of each replica since it was called last.
        warmup: int, steps to leave out after each trace, that of the trace included; at least 1.
        clock: Returns seconds.
    """

    def __init__(self, take_rows, warmup, clock):
        self._take_rows = take_rows
        self._warmup = warmup
        self._clock = clock
        self._rows = [0] * len(take_rows())
        self._steps = self._left_out = 0
        self._seconds = self._waiting = self._stepping = self._waited = 0.0
        self._counts = True
        self.calls = 0
        self.resume()

    def resume(self):
        """Time up to now does not count, as when something else went on in between."""
        self._since = self._clock()

    def wait(self, seconds):
        """Data for the next call were waited for in Python."""
        self._waited += seconds

    def begin(self, steps_since_trace):
        """A call begins, so many steps after the steps were traced."""
        self.calls += 1
        self._counts = steps_since_trace >= max(self._warmup, 1)
        if not self._counts:
            self._fetch()

    def end(self, steps, waiting, stepping):
        """The call has ended."""
        now, waited = self._clock(), self._waited
        spent, self._since, self._waited = now - self._since, now, 0.0
        if not self._counts:
            self._take_rows()
            self._left_out += steps
            return
        self._steps += steps
        self._seconds += spent
        self._waiting += waited + waiting
        self._stepping += stepping

    def _fetch(self):
        self._rows = [known + more for known, more in zip(self._rows, self._take_rows())]

    def span(self, epoch, phase):
        """The `Span` so far."""
        self._fetch()
        return Span(epoch, phase, self._steps, self._left_out, tuple(self._rows), self._seconds, self._waiting, self._stepping)
