"""What is wrong, and why: SGLang's output parsed, known failures matched, the root cause found and explained.

Names are imported on first use: who only parses lines does not pay for the signatures.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport, Searched, diagnose, diagnose_stream
    from ddtree_ops.diagnose.events import (
        DecodeFigures,
        Phase,
        PhaseKind,
        parse_decode,
        parse_events,
        parse_phase,
        parse_prefix,
        parse_server_args,
    )
    from ddtree_ops.diagnose.facts import ServiceFacts
    from ddtree_ops.diagnose.figures import DecodeSummary
    from ddtree_ops.diagnose.library import Library, Signature, default_library, load_library
    from ddtree_ops.diagnose.lines import LogLine, from_entries, read_log
    from ddtree_ops.diagnose.reduce import Diagnosis, EvidenceLine, fingerprint

__all__ = [
    "DecodeFigures",
    "DecodeSummary",
    "Diagnosis",
    "DiagnosisReport",
    "EvidenceLine",
    "Library",
    "LogLine",
    "Phase",
    "PhaseKind",
    "Searched",
    "ServiceFacts",
    "Signature",
    "default_library",
    "diagnose",
    "diagnose_stream",
    "fingerprint",
    "from_entries",
    "load_library",
    "parse_decode",
    "parse_events",
    "parse_phase",
    "parse_prefix",
    "parse_server_args",
    "read_log",
]

_HOMES = {
    "api": ("DiagnosisReport", "Searched", "diagnose", "diagnose_stream"),
    "events": (
        *("DecodeFigures", "Phase", "PhaseKind", "parse_decode", "parse_events", "parse_phase"),
        *("parse_prefix", "parse_server_args"),
    ),
    "facts": ("ServiceFacts",),
    "library": ("Library", "Signature", "default_library", "load_library"),
    "lines": ("LogLine", "from_entries", "read_log"),
    "figures": ("DecodeSummary",),
    "reduce": ("Diagnosis", "EvidenceLine", "fingerprint"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
