"""Commands in hints name the inventory that the user named."""

from __future__ import annotations

import pytest

from ddtree_ops.report.clean import clean
from ddtree_ops.report.typed import remember_inventory, typed
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport, TargetReport


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("next: ddtree-ops logs ct200 --follow", "next: ddtree-ops -i lab logs ct200 --follow"),
        (
            "ddtree-ops patch check HOST; ddtree-ops deploy h",
            "ddtree-ops -i lab patch check HOST; ddtree-ops -i lab deploy h",
        ),
        ("ddtree-ops lab up", "ddtree-ops lab up"),
        ("ddtree-ops inventory show -i x.yaml", "ddtree-ops inventory show -i x.yaml"),
        ("the name ddtree-ops alone", "the name ddtree-ops alone"),
    ],
)
def test_the_inventory_is_named_where_it_was_given(text: str, shown: str):
    assert typed(text) == text
    remember_inventory("lab")
    assert typed(text) == shown
    remember_inventory("it's mine.yaml")
    assert ("'it'\"'\"'s mine.yaml'" in typed(text)) == (text != shown)


def test_a_report_names_the_inventory_wherever_it_was_given(monkeypatch: pytest.MonkeyPatch):
    check = CheckResult("stop", Verdict.FAIL, "no", hint="ddtree-ops deploy ct200")
    found = {"diagnoses": [{"remedy": "ddtree-ops plan ct200"}]}
    target = TargetReport(
        "ct200", "ct200", "k26", checks=(check,), diagnoses=(found,), errors=("next: ddtree-ops wait ct200",)
    )
    report = RunReport("validate", "id", "2026-11-30T06:30:00Z", targets=(target,))

    def shown() -> list[str]:
        (one,) = clean(report).targets
        return [one.checks[0].hint, one.diagnoses[0]["diagnoses"][0]["remedy"], *one.errors]

    monkeypatch.delenv("DDTREE_OPS_INVENTORY", raising=False)
    assert shown() == ["ddtree-ops deploy ct200", "ddtree-ops plan ct200", "next: ddtree-ops wait ct200"]
    named = [
        "ddtree-ops -i lab deploy ct200",
        "ddtree-ops -i lab plan ct200",
        "next: ddtree-ops -i lab wait ct200",
    ]
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", "lab")
    assert shown() == named
    assert typed("ddtree-ops deploy ct200") == "ddtree-ops deploy ct200", "in this shell the variable holds"
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", "other")
    remember_inventory("lab")
    assert shown() == named
