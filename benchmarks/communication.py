"""What a step sends: bytes over each link and the time that takes, by arithmetic, for rings and trees.

`python -m benchmarks.communication` prints the tables of docs/scaling.md.
"""

import argparse
import dataclasses
import math

from keras_mirror.report import Report

REPLICAS = (2, 8, 64, 512)
MODELS = {"MLP 784-128-10": 101_770, "ResNet-50": 25_557_032, "BERT-base": 109_482_240, "1.3 billion": 1_300_000_000}


@dataclasses.dataclass(frozen=True)
class Link:
    """A replica's link to the others: seconds before the first byte, and bytes a second, in each direction, after it."""

    name: str
    latency: float
    bandwidth: float


LINKS = (
    Link("NVLink, 300 GB/s", 3e-6, 300e9),
    Link("100 Gbit/s network", 10e-6, 12.5e9),
    Link("10 Gbit/s network", 30e-6, 1.25e9),
)


def ring_bytes(size, replicas):
    """Bytes that each replica sends, and receives, in a ring.

    The replicas pass on `1/N` of the vector `N - 1` times to add it up and `N - 1` times to spread the
    sum: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    return 2 * (replicas - 1) / replicas * size


def tree_bytes(size, replicas):
    """Bytes that each replica sends, and receives, in a double binary tree.

    Half of the vector goes through each of two trees. Where a replica is an inner node it sends its half up once and
    down twice, and in the other tree, where it is a leaf, up once: Sanders, Speck and Träff, "Two-tree algorithms for
    full bandwidth broadcast, reduction and scan" (2009). Two replicas have no inner nodes and just swap.
    """
    return {1: 0, 2: size}.get(replicas, 2 * size)


def ring_seconds(size, replicas, link):
    """`2 (N - 1)` messages one after the other."""
    return 2 * (replicas - 1) * link.latency + ring_bytes(size, replicas) / link.bandwidth


def tree_seconds(size, replicas, link):
    """`2 log2 N` hops to fill the pipeline, and then all bytes."""
    return 2 * math.ceil(math.log2(replicas)) * link.latency + tree_bytes(size, replicas) / link.bandwidth


def bytes_table():
    """Megabytes over each link a step, for float32 gradients."""
    rows = [
        {
            "model": name,
            "gradients, MB": 4 * parameters / 1e6,
            **{f"ring of {n}": ring_bytes(4 * parameters, n) / 1e6 for n in REPLICAS},
            "tree of 8 or more": tree_bytes(4 * parameters, 8) / 1e6,
        }
        for name, parameters in MODELS.items()
    ]
    columns = ["model", "gradients, MB", *(f"ring of {n}" for n in REPLICAS), "tree of 8 or more"]
    return Report("Megabytes over each replica's link a step, in each direction", columns, rows)


def seconds_table(parameters=MODELS["ResNet-50"], links=LINKS):
    """Milliseconds of one all-reduce."""
    rows = [
        {"link": link.name, "algorithm": name, **{f"{n} replicas": 1e3 * seconds(4 * parameters, n, link) for n in REPLICAS}}
        for link in links
        for name, seconds in (("ring", ring_seconds), ("tree", tree_seconds))
    ]
    return Report(
        f"Milliseconds to reduce {4 * parameters / 1e6:.4g} MB", ["link", "algorithm", *(f"{n} replicas" for n in REPLICAS)], rows
    )


def main(arguments=None):
    """Prints both tables, the second for a model of any size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication", description=__doc__)
    parser.add_argument("--parameters", type=int, default=MODELS["ResNet-50"], help="trainable parameters (default: ResNet-50)")
    options = parser.parse_args(arguments)
    print(bytes_table(), "\n")
    print(seconds_table(options.parameters))
    print("\n", seconds_table(2_500), sep="")


if __name__ == "__main__":
    main()
