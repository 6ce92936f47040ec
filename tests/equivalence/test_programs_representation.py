"""Programs in the style of published Keras examples, written for one device, on replicas as they are."""

import warnings

import pytest

import keras_mirror as km
from tests.equivalence import programs_attention, programs_representation, programs_supervision
from tests.equivalence.harness import assert_equal

PROGRAMS = [*programs_representation.PROGRAMS, *programs_supervision.PROGRAMS, *programs_attention.PROGRAMS]


def never_warning(build):
    """`build`, from which on a `MirrorWarning` is an error; the harness, which ignores warnings, resets it after each run."""

    def built():
        warnings.simplefilter("error", km.MirrorWarning)
        return build()

    return built


@pytest.mark.parametrize("replicas, rows, batch", [(2, 28, 14), (3, 29, 7)], ids=["2 replicas", "3 replicas, uneven"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(program, replicas, rows, batch):
    build, use = program(rows, batch)
    assert_equal(never_warning(build), use, replicas, traced=program is programs_attention.semantic_clustering)
