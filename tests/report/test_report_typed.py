"""Commands in hints name the inventory that the user named."""

from __future__ import annotations

import pytest

from ddtree_ops.report.typed import remember_inventory, typed


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
