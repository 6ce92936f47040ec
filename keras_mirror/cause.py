"""What `check` found: why replicas differ from one device."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a step on replicas is not the step of one device.

    Attributes:
        kind: `"non-determinism"`, `"random layers"`, `"local mean"`, `"divided twice"`, `"scale"`,
            `"unequal parts"`, `"local denominator"`, `"regularizers counted again"`, `"sum over rows"`,
            `"local batch statistics"`, `"rows are mixed"`, `"clipping before the reduction"`,
            `"gradients changed before the reduction"`, `"unsynchronised state"`, `"rows"` or `"unknown"`.
        evidence: What was measured.
        remedy: What to write instead.
        by_design: Whether replicas are meant to differ here, as random layers do.
    """

    kind: str
    evidence: str
    remedy: str
    by_design: bool = False

    def __str__(self):
        return f"{self.kind}: {self.evidence}. {self.remedy}."
