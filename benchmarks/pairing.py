"""Paired, interleaved runs in one process: what is compared meets the same machine at the same time."""

import dataclasses
import statistics
import time


@dataclasses.dataclass
class Timings:
    """Seconds per step of each contender, one entry a round."""

    seconds: dict

    def median(self, name):
        """Median seconds per step."""
        return statistics.median(self.seconds[name])

    def ratio(self, name, against):
        """Median over the rounds of `name` divided by `against`, measured in the same round."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[against]))


def interleave(contenders, rounds=7, warm_up=1, clock=time.perf_counter):
    """Runs every contender once a round, in alternating order.

    Args:
        contenders: Dict of name to `run()`, which returns the number of steps it did.
        rounds: Rounds that count.
        warm_up: Rounds before that do not.
        clock: Returns seconds.

    Returns:
        `Timings`.
    """
    seconds = {name: [] for name in contenders}
    for round_number in range(warm_up + rounds):
        order = list(contenders.items())
        for name, run in order if round_number % 2 else reversed(order):
            start = clock()
            steps = run()
            spent = (clock() - start) / steps
            if round_number >= warm_up:
                seconds[name].append(spent)
    return Timings(seconds)
