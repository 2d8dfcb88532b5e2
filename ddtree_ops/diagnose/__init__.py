"""What is wrong, and why: SGLang's output parsed, known failures matched, the root cause found and explained."""

from __future__ import annotations

from ddtree_ops.diagnose.api import DiagnosisReport, Searched, diagnose, scan
from ddtree_ops.diagnose.events import (
    DecodeFigures,
    Phase,
    PhaseKind,
    PrefillFigures,
    parse_decode,
    parse_events,
    parse_phase,
    parse_prefill,
    parse_prefix,
    parse_server_args,
)
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Library, Signature, load_library
from ddtree_ops.diagnose.lines import LogLine, from_entries, read_log
from ddtree_ops.diagnose.reduce import DecodeSummary, Diagnosis, EvidenceLine, fingerprint

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
    "PrefillFigures",
    "Searched",
    "ServiceFacts",
    "Signature",
    "diagnose",
    "fingerprint",
    "from_entries",
    "load_library",
    "parse_decode",
    "parse_events",
    "parse_phase",
    "parse_prefill",
    "parse_prefix",
    "parse_server_args",
    "read_log",
    "scan",
]
