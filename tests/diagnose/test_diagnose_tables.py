"""Numbers of the kernel, of systemd and of exit codes, and signatures that are close to each other."""

from __future__ import annotations

import pytest

from ddtree_ops.diagnose.events import Frame
from ddtree_ops.diagnose.explain import SOLVERS
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Where, load_library
from ddtree_ops.diagnose.tables import EXEC_STATUS, SIGNALS, UNIT_RESULTS, XID

LIBRARY = load_library()
FACTS = ServiceFacts()
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.90 GiB."
SMEM = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: {}, Hardware limit: 101376."


def frame(path: str, function: str = "run") -> tuple[Frame, ...]:
    return (Frame(f"/srv/sglang/srt/{path}", 1, function),)


def found(text: str, where: Where, frames: tuple[Frame, ...] = ()) -> str:
    match = LIBRARY.match(text, where, FACTS, frames)
    return match.signature.id if match else ""


@pytest.mark.parametrize("number", [8, 13, 31, 43, 45, 48, 63, 74, 79, 94, 95, 119, 120, 154, 171])
def test_every_xid_has_one_reading(number: int) -> None:
    match = LIBRARY.match(f"NVRM: Xid (PCI:0000:1b:00): {number}, pid=7, name=python3, text", "kernel", FACTS)
    assert match is not None and match.signature.id in ("xid", "xid-after", "xid-note")
    assert f"Xid {number} on the GPU at PCI 0000:1b:00: " in match.explanation
    assert match.explanation.endswith("Process: python3, pid 7.") and match.remedy
    assert (match.signature.severity == "fatal") == (number in XID and number not in (63, 92))
    assert (match.signature.role == "consequence") == (number in (43, 45))


def test_recovery_action_of_xid_154() -> None:
    text = "NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    match = LIBRARY.match(text, "kernel", FACTS)
    assert match is not None and "needs now: Node Reboot Required" in match.explanation


@pytest.mark.parametrize("number", [8, 13, 31, 43, 45])
def test_faults_of_other_programs_are_not_ours(number: int) -> None:
    text = f"NVRM: Xid (PCI:0000:1b:00): {number}, pid=7, name={{}}, text"
    assert found(text.format("chromium"), "kernel") == ""
    assert found(text.format("sglang::schedul"), "kernel").startswith("xid")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("-9", "SIGKILL"),
        ("-11", "SIGSEGV"),
        ("137", "SIGKILL"),
        ("-31", "ended by signal 31"),
        ("1", "accord"),
    ],
)
def test_exit_codes(code: str, says: str) -> None:
    solution = SOLVERS["exit-code"][0]({"code": code}, FACTS, ())
    assert solution is not None and says in solution.values["meaning"]


def test_tables_are_complete_sentences() -> None:
    texts = [text for entry in (*XID.values(), *EXEC_STATUS.values()) for text in entry]
    texts += [*SIGNALS.values(), *UNIT_RESULTS.values()]
    assert all(text and text == text.strip() and not text.endswith(".") for text in texts)


@pytest.mark.parametrize(
    ("path", "function", "signature"),
    [
        ("mem_cache/memory_pool.py", "_create_buffers", "oom-kv-pool"),
        ("model_loader/loader.py", "load_model", "oom-weights"),
        ("layers/logits_processor.py", "_get_logits", "oom-gpu"),
    ],
)
def test_out_of_memory_by_place(path: str, function: str, signature: str) -> None:
    assert found(OOM, "traceback", frame(path, function)) == signature


def test_opposite_remedies_stay_apart() -> None:
    texts = {
        "oom-capture": f"Exception: Capture cuda graph failed: {OOM.partition(': ')[2]}",
        "oom-pool": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "oom-runtime": "RuntimeError: Prefill out of memory. Try to lower your batch size.",
        "nccl-alloc": "DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\nFailed to CUDA calloc 8 bytes",
    }
    for signature, text in texts.items():
        assert found(text, "traceback") == signature
    raised = {name for name in texts if LIBRARY[name].remedy.startswith("raise mem-fraction-static")}
    lowered = {name for name in texts if LIBRARY[name].remedy.startswith("lower mem-fraction-static")}
    assert raised == {"oom-pool"} and lowered == {"oom-capture", "nccl-alloc"}


@pytest.mark.parametrize(
    ("required", "path", "signature"),
    [
        (106496, "layers/attention/triton_ops/extend_attention.py", "triton-smem-attn"),
        (147456, "layers/moe/fused_moe_triton/fused_moe.py", "triton-smem-moe"),
        (106496, "layers/moe/fused_moe_triton/fused_moe.py", "triton-smem-moe"),
        (131072, "layers/attention/triton_ops/decode_attention.py", "triton-smem-attn"),
        (131072, "lora/triton_ops/sgemm_lora_a.py", "triton-smem"),
        (106496, "", "triton-smem-attn"),
        (147456, "", "triton-smem-moe"),
    ],
)
def test_shared_memory_by_kernel(required: int, path: str, signature: str) -> None:
    assert found(SMEM.format(required), "traceback", frame(path) if path else ()) == signature


def test_a_kill_is_an_oom_only_where_the_kernel_says_so() -> None:
    unit = "sglang-k26-ddtree.service: "
    assert found(f"{unit}Main process exited, code=killed, status=9/KILL", "systemd") == "systemd-exit"
    assert found(f"{unit}Failed with result 'signal'.", "systemd") == "systemd-failed"
    assert found(f"{unit}Failed with result 'oom-kill'.", "systemd") == "host-oom"
    killed = "ut of memory: Killed process 7 ({}) total-vm:1kB, anon-rss:8388608kB"
    assert found("O" + killed.format("python3"), "kernel") == "host-oom"
    assert found("O" + killed.format("mysqld"), "kernel") == "host-oom-other"
    assert found("Memory cgroup o" + killed.format("python3"), "kernel") == "cgroup-oom"
    assert found("Memory cgroup o" + killed.format("mysqld"), "kernel") == "host-oom-other"


@pytest.mark.parametrize("status", sorted(EXEC_STATUS))
def test_every_status_of_systemd_itself(status: int) -> None:
    name, meaning, _ = EXEC_STATUS[status]
    text = f"a.service: Main process exited, code=exited, status={status}/{name}"
    solution = SOLVERS["exec-status"][0]({"status": str(status)}, FACTS, ())
    assert solution is not None and solution.values["name"] == f"{status}/{name}"
    match = LIBRARY.match(text, "systemd", FACTS)
    assert match is not None and match.signature.id == "systemd-exec" and meaning in match.explanation
