"""A run report as JUnit XML: a suite a target, a case a check. Pure.

A check that failed is a ``failure``. One that found no data is an ``error`` of type ``inconclusive``: a CI server that knows
only these two words must not take it for a pass. One that does not apply is ``skipped``. What ended the work on a target
early, and a run that was cut off, are cases of their own, and errors.
"""

from __future__ import annotations

from xml.etree import ElementTree

from ddtree_ops.report.clean import clean
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.wording import moment_of

__all__ = ["junit_xml"]

_LONGEST = 20_000


def junit_xml(report: RunReport) -> str:
    """The document, with what the common schemas for JUnit ask for."""
    report = clean(report)
    root = ElementTree.Element("testsuites", name=f"ddtree-ops {report.command}")
    suites = [_suite(report, target, number) for number, target in enumerate(report.targets)]
    if not report.complete:
        cut = ElementTree.Element("testcase", name="complete", classname=report.command, time="0.000")
        _child(cut, "error", "the run was not finished: more was to come", "inconclusive")
        suites.append(_framed(report, "run", "localhost", len(suites), [cut]))
    root.extend(suites)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}")
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(report: RunReport, target: TargetReport, number: int) -> ElementTree.Element:
    cases = [_case(target, check) for check in target.checks]
    for place, error in enumerate(target.errors, 1):
        case = ElementTree.Element(
            "testcase", name=f"error {place}", classname=_class(target, "run"), time="0.000"
        )
        _child(case, "error", error.partition("\n")[0], "error", error)
        cases.append(case)
    if not cases:
        case = ElementTree.Element("testcase", name="checks", classname=_class(target, "run"), time="0.000")
        _child(case, "error", "nothing was checked", "inconclusive")
        cases.append(case)
    return _framed(report, target.target, target.host, number, cases)


def _framed(
    report: RunReport, name: str, host: str, number: int, cases: list[ElementTree.Element]
) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite",
        id=str(number),
        package="ddtree_ops",
        name=name,
        hostname=host or "localhost",
        timestamp=_timestamp(report.started),
        tests=str(len(cases)),
        failures=_number(cases, "failure"),
        errors=_number(cases, "error"),
        skipped=_number(cases, "skipped"),
        time=f"{sum(float(case.get('time', '0')) for case in cases):.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in (("run", report.id), ("version", report.version), ("inventory", report.inventory)):
        ElementTree.SubElement(properties, "property", name=key, value=value)
    suite.extend(cases)
    ElementTree.SubElement(suite, "system-out")
    ElementTree.SubElement(suite, "system-err")
    return suite


def _number(cases: list[ElementTree.Element], tag: str) -> str:
    return str(sum(case.find(tag) is not None for case in cases))


def _timestamp(text: str) -> str:
    """ISO 8601 in whole seconds without a zone, as the schemas want it: in UTC."""
    moment = moment_of(text)
    return moment.strftime("%Y-%m-%dT%H:%M:%S") if moment else "1970-01-01T00:00:00"


def _class(target: TargetReport, head: str) -> str:
    """Dots make packages: names of hosts hold some too."""
    return ".".join(part for part in (target.target.replace(".", "_").replace("/", "."), head) if part)


def _case(target: TargetReport, check: CheckResult) -> ElementTree.Element:
    seconds = f"{max(check.seconds, 0.0):.3f}"
    case = ElementTree.Element(
        "testcase", name=check.name, classname=_class(target, check.name.rpartition(".")[0]), time=seconds
    )
    if check.verdict is Verdict.FAIL:
        _child(case, "failure", check.summary, "fail", _details(check))
    elif check.verdict is Verdict.INCONCLUSIVE:
        _child(case, "error", check.summary, "inconclusive", _details(check))
    elif check.verdict is Verdict.SKIPPED:
        ElementTree.SubElement(case, "skipped", message=check.summary)
    return case


def _child(case: ElementTree.Element, tag: str, message: str, kind: str, text: str = "") -> None:
    ElementTree.SubElement(case, tag, message=message, type=kind).text = text or message


def _details(check: CheckResult) -> str:
    lines = [check.summary]
    if check.hint:
        lines.append(f"next: {check.hint}")
    for item in check.evidence:
        place = f" line {item.line}" if item.line is not None else ""
        lines.append(f"-- {item.source}{place}{' ' if item.time else ''}{item.time}")
        lines.append(item.text)
    text = "\n".join(lines)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n... (the whole is in report.json)"
