"""What of a finding is traced, over trees that are given. No host is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.deploy import explaining
from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.explaining import name_the_first_node, trace_local, trace_of
from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.diagnose.api import diagnose_stream
from ddtree_ops.errors import OpsError
from ddtree_ops.inventory import load_inventory, select
from ddtree_ops.launchflags import ARGS_PATH
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.runs import Chosen, Run

RUNNER = "sglang/srt/model_executor/cuda_graph_runner.py"
TREE = {
    ARGS_PATH: "class ServerArgs:\n    speculative_num_draft_tokens: int = 8\n    speculative_ddtree_budget: int = 32\n",
    RUNNER: "class Runner:\n    def __init__(self, runner):\n"
    "        self.tokens = runner.server_args.speculative_num_draft_tokens\n"
    "        self.budget = runner.server_args.speculative_ddtree_budget\n",
}
LOG = f"""\
[2026-11-29 14:53:46] server_args=ServerArgs(model_path='/m', speculative_algorithm='DDTREE', speculative_num_draft_tokens=8, speculative_ddtree_budget=32)
[2026-11-29 14:53:53 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/current/{RUNNER}", line 3, in replay
    self.tokens = runner.server_args.speculative_num_draft_tokens
EXCEPTION
"""


@pytest.mark.parametrize(
    ("exception", "signature", "traced"),
    [
        (
            "RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0",
            "ddtree-graph-size",
            True,
        ),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "ima", False),
    ],
)
def test_a_frame_that_may_be_late_is_no_place_to_trace_parameters_to(
    exception: str, signature: str, traced: bool
) -> None:
    root = diagnose_stream(LOG.replace("EXCEPTION", exception).encode()).root
    assert root is not None and root.signature == signature
    assert "budget 32" in root.explanation, "the settings are named either way"
    asked: list[Sequence[str]] = []
    trace = trace_of(root, TREE.get, asked.append, origin="here")
    assert (bool(trace.steps), len(asked)) == (traced, int(traced))


NODES = Path(__file__).parents[1] / "data" / "inventories" / "nodes.yaml"
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.7]:39982"
GIVEN_UP = (
    '{"__REALTIME_TIMESTAMP":"1796000000000000","UNIT":"sglang-two.service","_PID":"1","SYSLOG_IDENTIFIER":"systemd",'
    '"MESSAGE":"sglang-two.service: Start request repeated too quickly."}\n'
)


@pytest.mark.parametrize("more", ["", GIVEN_UP])
def test_a_node_that_lost_its_peer_names_the_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", "/nowhere")
    monkeypatch.setenv("DDTREE_OPS_LAB_NET", "192.0.2")
    targets = select(load_inventory(str(NODES)), service="two", default_all=True)
    lost = diagnose_stream(LOG.replace("EXCEPTION", PEER).encode() + more.encode())
    failed = diagnose_stream(
        LOG.replace(
            "EXCEPTION", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        )
        .replace("14:53:53", "14:53:54")
        .encode()
    )
    head, other = name_the_first_node(list(zip(targets, (lost, failed), strict=True)))
    assert other is failed
    (note,) = head.notes
    assert note.startswith(
        f"a peer was lost: {targets[1].name}, a node of the same engine, failed first: ima on TP0"
    )
    both = name_the_first_node(list(zip(targets, (lost, lost), strict=True)))
    assert [report.notes for report in both] == [(), ()]
    single = select(load_inventory(str(NODES)), ["ct200/one"])
    assert name_the_first_node([(single[0], lost), (targets[1], failed)])[0] is lost


def test_an_error_of_cuda_is_late_whatever_its_signature_says() -> None:
    late = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    root = diagnose_stream(LOG.replace("EXCEPTION", late).encode()).root
    assert root is not None
    root = replace(root, explanation="With budget 32 and block_size 8 it fails.")
    assert not trace_of(root, TREE.get, lambda _: None, origin="here").steps


def test_a_log_without_a_traceback_is_traced_in_no_tree() -> None:
    line = "RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0\n"
    root = diagnose_stream(line.encode()).root
    assert root is not None and root.signature == "ddtree-graph-size"
    trace = trace_local(root, None)
    assert not trace.steps and "no traceback in the log" in trace.note


HANGS = LOG.partition("[2026-11-29 14:53:53")[0] + (
    "Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]\n"
)


def test_a_load_under_way_says_since_when_and_how_its_validation_ended() -> None:
    report = diagnose_stream(HANGS.encode())
    now = datetime(2026, 11, 29, 15, tzinfo=UTC)
    run = Run("a" * 32, now - timedelta(seconds=412))
    look = explaining._Look(runs=(run,), state="active running", now=now)
    text = "the server is loading since 412 s (last step seen: weights 0/64)"
    assert explaining._loading(report, Chosen(run), look) == text
    judged = new_activation(release="r" * 64, unit_sha256="u", plan="p", who="w", origin="o", reason="deploy")
    judged = replace(
        judged,
        invocation=run.id,
        verdict=Verdict.FAIL,
        summary="no progress for 120 s; the log ends while ...",
    )
    look.history = History((judged,))
    assert explaining._loading(report, Chosen(run), look) == (
        f"{text}; its validation ended with fail: no progress for 120 s"
    )
    ended = replace(run, end=now)
    look.history, look.runs, look.state = History(), (ended,), "inactive dead"
    assert explaining._loading(report, Chosen(ended, now), look) == report.loading


def test_why_a_validation_failed_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", "/nowhere")
    monkeypatch.setenv("DDTREE_OPS_LAB_NET", "192.0.2")
    (target,) = select(load_inventory(str(NODES)), ["ct200/one"])
    session: Any = SimpleNamespace(host="ct200", facts={})
    deployment = Deployment(target, session, lambda _: None)
    deployment.frame.failure = OpsError("no progress for 120 s")
    assert deployment.verdict_summary() == "no progress for 120 s"
    deployment.diagnosis = diagnose_stream(HANGS.encode())
    assert deployment.verdict_summary() == f"no progress for 120 s; {deployment.diagnosis.loading}"
    deployment.checks = [CheckResult("smoke.answer", Verdict.FAIL, "no answer")]
    assert deployment.verdict_summary() == "no answer"
