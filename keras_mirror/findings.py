"""What an audit finds, as a table that is read from the top: errors first."""

import dataclasses
import textwrap

from keras_mirror.provenance import Origin
from keras_mirror.report import Report

SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that does not do on several replicas what it does on one device.

    Attributes:
        code: Stable short code of the kind of fault, e.g. `"KM105"`; its page is `docs/codes/KM105.md`.
        severity: `"error"`: results are wrong for sure; `"warning"`: in some circumstances; `"note"`:
            right, but worth knowing.
        path: The variable's path, or its name; for a finding about code, the function's name.
        owner: What holds it, e.g. `layer dense_1` or `the step`.
        origin: `Origin` of the line that created it, or None if unknown.
        effect: What goes wrong because of it.
        remedy: What to write instead.
    """

    code: str
    severity: str
    path: str
    owner: str
    origin: Origin | None
    effect: str
    remedy: str

    @property
    def sentence(self):
        """All of it but the code and the severity."""
        where = f" ({self.origin.place})" if self.origin else ""
        return f"{self.path} of {self.owner}{where}: {self.effect}. {self.remedy}."

    def __str__(self):
        return f"{self.code} {self.severity}: {self.sentence}"


class Audit(Report):
    """What `audit` returns: print it, or read it.

    True when there is an error or a warning; notes alone leave it false.

    Attributes:
        findings: List of `Finding`, errors first.
        checked: int, number of variables looked at.
    """

    def __init__(self, findings, checked, traced):
        self.findings = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        self.checked = checked
        rows = [_row(finding) for finding in self.findings]
        notes = list(dict.fromkeys(_wrapped(f"{f.code}: {f.effect}. {f.remedy}.") for f in self.findings))
        if not traced:
            notes.append("No step was traced yet: variables that only the step uses (a forgotten counter) are not in this list.")
        if findings:
            notes.append("Each code has a page in docs/codes.")
        super().__init__(f"Scope audit: {self._verdict()}", ["code", "severity", "what", "owner", "at"], rows, notes)

    def _verdict(self):
        serious = [finding for finding in self.findings if finding.severity != "note"]
        code = [finding for finding in serious if finding.code.startswith("KM2")]
        variables, notes = len(serious) - len(code), len(self.findings) - len(serious)
        verdict = f"{variables} of {self.checked} variables need attention"
        verdict = verdict if variables else f"all {self.checked} variables are in scope"
        verdict += f", {_count(len(code), 'finding')} about the code" if code else ""
        return verdict + (f", {_count(notes, 'note')}" if notes else "")

    def __bool__(self):
        return any(finding.severity != "note" for finding in self.findings)


def _row(finding):
    return {
        "code": finding.code,
        "severity": finding.severity,
        "what": finding.path,
        "owner": finding.owner,
        "at": finding.origin.place if finding.origin else "",
        "what goes wrong": finding.effect,
        "write instead": finding.remedy,
    }


def _wrapped(note):
    return textwrap.fill(note, width=140, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)


def _count(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"
