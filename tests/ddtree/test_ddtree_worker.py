"""The worker's own parts: candidates (log-probabilities over the whole vocabulary and GLOBAL ids, on one rank and on
several), the drafter's KV of a committed path, the times in the log."""

from __future__ import annotations

import importlib.util
import logging
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

from ddtree_sglang import check  # noqa: E402
from ddtree_sglang.check import DDTreeError  # noqa: E402
from ddtree_sglang.times import MARKS, TIMES, StepTimes, times_wanted  # noqa: E402
from ddtree_sglang.verify import DDTreeVerifyInput  # noqa: E402
from ddtree_sglang.worker import (  # noqa: E402
    DDTreeWorker,
    DFlashWorker,
    gather_candidates,
    head_logits,
    local_candidates,
)

pytestmark = pytest.mark.real

HIDDEN, ROWS = 16, 21


def head(
    weight: torch.Tensor, first: int, added: torch.Tensor | None = None, added_first: int = 0
) -> SimpleNamespace:
    """A shard as sglang's ``ParallelLMHead`` holds it: base rows, 3 rows of padding, added rows, 2 rows of padding.

    Padding holds large numbers: read as tokens they would win.
    """
    parts = [weight, torch.full((3, HIDDEN), 1e4)]
    if added is not None:
        parts += [added, torch.full((2, HIDDEN), 1e4)]
    return SimpleNamespace(
        weight=torch.cat(parts),
        shard_indices=SimpleNamespace(
            num_org_elements=len(weight),
            num_org_elements_padded=len(weight) + 3,
            num_added_elements=0 if added is None else len(added),
            org_vocab_start_index=first,
            added_vocab_start_index=added_first,
        ),
    )


class Rank:
    """One rank's view of a group: gathers return what every rank of the same call gave."""

    def __init__(self, calls: list[list[torch.Tensor]]) -> None:
        self.calls, self.at, self.world_size = calls, 0, len(calls[0])

    def all_gather_into_tensor(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        output.copy_(torch.cat(self.calls[self.at]))
        assert any(torch.equal(mine, theirs) for theirs in self.calls[self.at])
        self.at += 1


def expected(hidden: torch.Tensor, weight: torch.Tensor, k: int) -> Any:
    return torch.topk(torch.log_softmax(hidden.double() @ weight.double().T, dim=-1), k, dim=-1)


@pytest.mark.parametrize("shards", [[40], [20, 20], [16, 16, 8], [36, 3, 1]], ids=str)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_candidates_are_those_of_the_whole_vocabulary(shards: list[int], k: int) -> None:
    """Shards of any size, some smaller than ``k``: every rank gets the same, best first."""
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(sum(shards), HIDDEN, generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    given = []
    first = 0
    for size in shards:
        given.append(local_candidates(*head_logits(hidden, head(weight[first : first + size], first)), k))
        first += size
    calls = [[part[index] for part in given] for index in range(3)]
    best = expected(hidden, weight, k)
    for mine in given:
        values, tokens, lse = gather_candidates(*mine, Rank(calls))
        assert torch.equal(tokens, best.indices)
        torch.testing.assert_close((values - lse[:, None]).double(), best.values, atol=1e-5, rtol=0)


def test_ranks_that_rounded_otherwise_hold_the_same_candidates() -> None:
    """Each rank ran the drafter for itself: its own logits count as those of its shard only, on every rank."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(40, HIDDEN, generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    given = [
        local_candidates(*head_logits(hidden * scale, head(weight[first : first + 20], first)), 4)
        for first, scale in ((0, 1.0), (20, 1.0 + 1e-3))
    ]
    calls = [[part[index] for part in given] for index in range(3)]
    one, other = (gather_candidates(*mine, Rank(calls)) for mine in given)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_added_tokens_have_ids_of_their_own_and_padding_has_none() -> None:
    generator = torch.Generator().manual_seed(0)
    base, added = torch.randn(10, HIDDEN, generator=generator), torch.randn(4, HIDDEN, generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    logits, ids = head_logits(hidden, head(base, 0, added, 100))
    assert ids.tolist() == [*range(10), *range(100, 104)]
    torch.testing.assert_close(logits, hidden @ torch.cat([base, added]).T)


def test_fewer_tokens_than_candidates_are_filled_up_as_impossible() -> None:
    values, tokens, lse = local_candidates(torch.zeros(2, 3), torch.arange(3), 5)
    assert values.shape == tokens.shape == (2, 5)
    assert torch.isneginf(values[:, 3:]).all() and not torch.isneginf(values[:, :3]).any()
    torch.testing.assert_close(lse, torch.log(torch.tensor([3.0, 3.0])))


def test_log_probabilities_of_a_half_precision_head_are_float32() -> None:
    weight = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    shard = head(weight.float(), 0)
    shard.weight = shard.weight.bfloat16()
    logits, _ = head_logits(torch.randn(2, HIDDEN), shard)
    assert logits.dtype == torch.float32
    assert local_candidates(logits, torch.arange(9), 2)[2].dtype == torch.float32


def worker(**known: Any) -> Any:
    """A worker without an engine: only what is given."""
    made = object.__new__(DDTreeWorker)
    vars(made).update({"target_worker": SimpleNamespace(), "tp_rank": 0, "_times": None} | known)
    return made


class Loading:
    """The construction of a worker over stand-ins for what sglang would have loaded: block size 8, context 1000."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed: list[str] = []
        weight = SimpleNamespace(dtype="torch.bfloat16")
        self.model = SimpleNamespace(lm_head=SimpleNamespace(weight=weight, shard_indices=object()))
        self.draft = SimpleNamespace(
            device="cuda",
            model_config=SimpleNamespace(dtype="torch.bfloat16"),
            graph_runner=None,
            attn_backend=SimpleNamespace(num_draft_tokens=8),
            req_to_token_pool=SimpleNamespace(size=48),
        )
        self.arguments = SimpleNamespace(
            speculative_ddtree_budget=32,
            speculative_ddtree_topk_cap=8,
            speculative_ddtree_budget_schedule="fixed",
            speculative_num_draft_tokens=8,
            decode_log_interval=40,
        )
        self.backend = SimpleNamespace(num_draft_tokens=33, ddtree_tree_mask=True)
        self.missing: list[str] = []
        monkeypatch.delenv(check.SKIP_SELF_CHECK, raising=False)
        monkeypatch.setattr(check, "missing_hooks", lambda *_: self.missing)
        monkeypatch.setattr(check, "refuse", lambda arguments: self.passed.append("arguments"))
        monkeypatch.setattr(check, "refuse_model", lambda runner: self.passed.append("model"))

        def load(worker: Any, arguments: Any, rank: int, *, target_worker: Any) -> None:
            self.passed.append("loaded")
            vars(worker).update(
                {
                    "draft_model_runner": self.draft,
                    "target_worker": target_worker,
                    "block_size": 8,
                    "tp_rank": rank,
                    "device": "cpu",
                }
            )

        monkeypatch.setattr(DFlashWorker, "__init__", load)

    def worker(self, rank: int = 0) -> Any:
        runner = SimpleNamespace(
            model=self.model,
            model_config=SimpleNamespace(vocab_size=100, context_len=1000),
            attn_backend=self.backend,
            graph_runner=None,
            req_to_token_pool=SimpleNamespace(req_to_token=SimpleNamespace(shape=(48, 1033))),
        )
        return DDTreeWorker(self.arguments, rank, target_worker=SimpleNamespace(model_runner=runner))


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(monkeypatch)


def test_a_worker_refuses_before_it_loads_and_is_silent_where_all_is_well(
    loading: Loading, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ddtree_sglang.worker"):
        made = loading.worker()
    assert loading.passed == ["arguments", "model", "loaded"]
    assert (made.verify_width, made.topk, made.draft_depth, made.min_prob) == (33, 8, 7, None)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.messages[-1].endswith("verify tokens=33, topk=8, schedule=fixed, self-check=passed")


def test_a_worker_looks_at_its_hooks_first(loading: Loading) -> None:
    loading.missing = ["a.b"]
    with pytest.raises(DDTreeError, match=r"no hook on a\.b"):
        loading.worker()
    assert loading.passed == []


def test_a_worker_refuses_a_target_without_a_head(loading: Loading) -> None:
    del loading.model.lm_head
    with pytest.raises(DDTreeError, match="no vocabulary-parallel lm_head"):
        loading.worker()


def test_a_worker_refuses_a_drafter_that_would_leave_its_graphs(loading: Loading) -> None:
    """48 requests may run, as sglang's pool says, and the largest graph holds 8."""
    loading.draft.model_config.dtype = "torch.float16"
    loading.draft.graph_runner = SimpleNamespace(max_bs=8, num_tokens_per_bs=8, capture_bs=[8])
    with pytest.raises(DDTreeError, match="which hold 8 of 48 requests"):
        loading.worker()
    loading.draft.req_to_token_pool.size = 8
    loading.worker()


@pytest.mark.parametrize(("topk", "most"), [(1, 7), (2, 254)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_warns_of_a_budget_that_the_branches_do_not_fill(
    loading: Loading, caplog: pytest.LogCaptureFixture, topk: int, most: int, rank: int
) -> None:
    """Once, by rank 0; 2 branches at each of 7 positions fill more than 32."""
    loading.arguments.speculative_ddtree_topk_cap = topk
    with caplog.at_level(logging.WARNING, logger="ddtree_sglang.worker"):
        loading.worker(rank)
    wanted = (
        f"DDTREE: {topk} branches over 7 positions make {most} nodes at most, {32 - most} of the budget are"
    )
    if most < 32 and rank == 0:
        (message,) = caplog.messages
        assert message.startswith(wanted)
    else:
        assert caplog.messages == []


def test_a_worker_checks_what_was_loaded(
    loading: Loading, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loading.backend.num_draft_tokens = 8
    with pytest.raises(DDTreeError, match=r"self-check failed, nothing is served:\n.*counts 8 tokens"):
        loading.worker()
    monkeypatch.setenv(check.SKIP_SELF_CHECK, "1")
    with caplog.at_level(logging.INFO, logger="ddtree_sglang.worker"):
        loading.worker()
    assert "starting all the same" in caplog.messages[0] and "counts 8 tokens" in caplog.messages[0]
    assert caplog.messages[-1].endswith("self-check=FAILED, skipped on request")


PREFIXES, COMMITS = [5, 17, 9], [3, 1, 2]


def committed() -> tuple[Any, Any, Any]:
    """A batch after a verify step of three requests, the drafter's state, what the step knows of its path."""
    table = torch.randperm(3 * 40, generator=torch.Generator().manual_seed(0)).view(3, 40).to(torch.int32)
    lens = torch.tensor([prefix + count for prefix, count in zip(PREFIXES, COMMITS, strict=True)])
    rows = [table[b, p : p + c] for b, (p, c) in enumerate(zip(PREFIXES, COMMITS, strict=True))]
    batch = SimpleNamespace(
        batch_size=lambda: 3,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        is_extend_in_batch=False,
        req_pool_indices=torch.arange(3),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        seq_lens=lens,
        out_cache_loc=torch.cat(rows).to(torch.int64),
        spec_info=None,
    )
    state = SimpleNamespace(
        target_hidden=torch.arange(12.0).view(6, 2),
        ctx_lens=torch.tensor(COMMITS, dtype=torch.int32),
        draft_seq_lens=torch.tensor(PREFIXES, dtype=torch.int32),
    )
    entered = DDTreeVerifyInput(draft_token=torch.zeros(4), positions=torch.zeros(4), draft_token_num=4)
    entered.committed = torch.cat([torch.arange(p, p + c) for p, c in zip(PREFIXES, COMMITS, strict=True)])
    return batch, state, entered


def appended(after_a_step: bool, fused: bool = False, compact: bool = False) -> tuple[list[Any], Any]:
    """What is written into the drafter's cache, and the drafter's state afterwards."""
    batch, state, entered = committed()
    written: list[Any] = []
    held = worker(
        block_size=4,
        device="cpu",
        model_runner=SimpleNamespace(device="cpu"),
        draft_model_runner=SimpleNamespace(req_to_token_pool=batch.req_to_token_pool),
        draft_model=SimpleNamespace(project_target_hidden=lambda hidden: hidden * 2),
        use_compact_draft_cache=compact,
        _block_pos_offsets=torch.arange(4),
        _use_fused_kv_materialize=fused,
        _fused_kv_helper=object() if fused else None,
        _append_target_hidden_sequential=lambda *given: written.append(("sequential", *given)),
        _append_target_hidden_fused=lambda *given: written.append(("fused", *given)),
    )
    batch.spec_info = entered if after_a_step else None
    held._append_target_hidden_to_draft_kv(batch, state)
    return written, state


@pytest.mark.parametrize("fused", [False, True], ids=["sequential", "fused"])
def test_the_drafter_gets_the_path_as_dflash_would_look_it_up(fused: bool) -> None:
    """The same rows at the same positions in the same slots, and no boolean mask, which would wait for the GPU."""
    looked_up, expected_state = appended(False, fused)
    known, state = appended(True, fused)
    ((how, hidden, places, slots),) = known
    ((want_how, want_hidden, want_places, want_slots),) = looked_up
    assert how == want_how == ("fused" if fused else "sequential")
    for got, want in ((hidden, want_hidden), (places, want_places), (slots, want_slots)):
        assert torch.equal(got, want) and got.dtype == want.dtype
    for name in ("target_hidden", "ctx_lens", "draft_seq_lens"):
        got, want = getattr(state, name), getattr(expected_state, name)
        assert torch.equal(got, want) and got.dtype == want.dtype, name


def test_a_step_writes_the_drafters_kv_without_waiting() -> None:
    """Reading a value waits for the GPU, and so does an index by a boolean mask, whose size it must learn."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waits: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func.overloadpacket.__name__
            masks = [part for part in args[1] if part is not None] if name == "index" else []
            if name in ("_local_scalar_dense", "nonzero") or any(part.dtype == torch.bool for part in masks):
                waits.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        appended(False)
    assert waits == ["index", "index"], "DFLASH's way"
    waits.clear()
    with Watch():
        appended(True)
    assert waits == []


def test_a_path_that_does_not_fit_its_slots_is_an_error() -> None:
    batch, state, entered = committed()
    batch.spec_info = entered
    state.target_hidden = state.target_hidden[:5]
    with pytest.raises(RuntimeError, match="5 hidden states for 6 slots"):
        worker(use_compact_draft_cache=False)._append_target_hidden_to_draft_kv(batch, state)


@pytest.mark.parametrize(
    ("cuda", "switch", "runner", "sizes"),
    [
        (True, None, SimpleNamespace(capture_bs=[1, 2, 4]), [1, 2, 4]),
        (True, "1", SimpleNamespace(capture_bs=[1, 2, 4]), [1, 2, 4]),
        (True, "0", SimpleNamespace(capture_bs=[1, 2, 4]), []),
        (True, None, None, []),
        (False, None, SimpleNamespace(capture_bs=[1]), []),
    ],
    ids=["on", "asked for", "switched off", "no CUDA graphs", "no GPU"],
)
def test_the_tree_has_graphs_where_the_drafter_has(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, switch: str | None, runner: Any, sizes: list[int]
) -> None:
    monkeypatch.setattr("ddtree_sglang.worker.is_cuda", lambda: cuda)
    monkeypatch.delenv("DDTREE_TREE_GRAPH", raising=False)
    if switch is not None:
        monkeypatch.setenv("DDTREE_TREE_GRAPH", switch)
    assert worker(draft_model_runner=SimpleNamespace(graph_runner=runner))._graph_sizes() == sizes


LINE = re.compile(
    r"DDTREE times: steps=(?P<steps>\d+), bs=(?P<bs>\d+\.\d\d), draft=(?P<draft>\d+\.\d{3}) ms, "
    r"tree=(?P<tree>\d+\.\d{3}) ms, verify=(?P<verify>\d+\.\d{3}) ms, commit=(?P<commit>\d+\.\d{3}) ms, "
    r"step=(?P<step>\d+\.\d{3}) ms, build=(?P<build>\d+\.\d{3}) ms"
)


def read(line: str) -> dict[str, float]:
    found = LINE.fullmatch(line)
    assert found is not None, line
    return {name: float(value) for name, value in found.groupdict().items()}


def test_times_stand_beside_the_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two lines each interval of 3 steps. The parts of a step do not overlap, so they are at most the step."""
    held = worker(
        _times=StepTimes(cuda=False),
        _log_interval=3,
        **dict.fromkeys(("_steps", "_accepted", "_requests", "_off_top"), 0),
    )

    def step(self: Any, batch: Any, **kwargs: Any) -> Any:
        for mark in MARKS[1:-1]:
            time.sleep(0.001)
            self._reached(mark)
        self._verify_input = SimpleNamespace(off_top=1)
        return SimpleNamespace(num_accepted_drafts_per_req_cpu=[2] * batch.batch_size())

    monkeypatch.setattr(DFlashWorker, "forward_batch_generation", step)
    with caplog.at_level(logging.INFO, logger="ddtree_sglang.worker"):
        for bs in (1, 3, 2, 4, 4, 4):
            held.forward_batch_generation(
                SimpleNamespace(
                    forward_mode=SimpleNamespace(is_decode=lambda: True), batch_size=lambda bs=bs: bs
                )
            )
    assert held._verify_input is None, "it would keep the mask until the next step"
    metrics, first, again, second = caplog.messages
    assert (
        metrics
        == "DDTREE metrics: steps=3, accept len=3.00, accepted drafts=12, of these off the top branch=3"
    )
    assert again.startswith("DDTREE metrics: steps=3")
    for line, bs in ((first, 2.0), (second, 4.0)):
        times = read(line)
        assert (times["steps"], times["bs"]) == (3, bs)
        # 3 decimals of each: the sum of four is off by 0.002 at most
        parts = times["draft"] + times["tree"] + times["verify"] + times["commit"]
        assert 0 < parts <= times["step"] + 0.003
        assert 0 < times["build"] < times["tree"]


def test_times_that_fail_end_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The metrics stand, one line says why there are no times, and no further step keeps any."""
    times = StepTimes(cuda=False)
    held = worker(
        _times=times,
        _log_interval=1,
        **dict.fromkeys(("_steps", "_accepted", "_requests", "_off_top"), 0),
    )

    def fail() -> str:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(times, "line", fail)
    with caplog.at_level(logging.INFO, logger="ddtree_sglang.worker"):
        held._note([1], 0)
        held._note([2], 1)
    kinds = ["metrics", "times", "metrics"]
    assert [message.split()[1].rstrip(":") for message in caplog.messages] == kinds
    assert caplog.messages[1] == (
        "DDTREE times are switched off: RuntimeError: CUDA error: invalid resource handle"
    )
    assert "accepted drafts=2, of these off the top branch=1" in caplog.messages[2]
    assert held._times is None


def test_times_are_kept_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMES, raising=False)
    assert not times_wanted()
    monkeypatch.setenv(TIMES, "1")
    assert times_wanted()
    worker()._reached("drafted")  # no times, no error


class Event:
    """A CUDA event on a clock of this test: done once ``now`` has come to its time."""

    now = passed = made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        Event.now += 1
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "the time of an event that is not done waits for it, or fails"
        return float(later.at - self.at)


def test_events_are_read_when_they_are_done_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.now = Event.passed = Event.made = 0
    times = StepTimes(cuda=True)
    for bs in (1, 2, 3):
        times.begin(bs)
        for mark in MARKS[1:-1]:
            times.mark(mark)
        times.end()
    assert times.line() is None, "none is done"
    Event.passed = 2 * len(MARKS)
    assert read(times.line() or "")["steps"] == 2
    Event.passed = Event.now
    last = read(times.line() or "")
    assert (last["steps"], last["bs"], last["step"], last["tree"], last["verify"]) == (1, 3.0, 6.0, 2.0, 1.0)
    assert times.line() is None
    made = Event.made
    times.begin(1)
    times.begin(1)  # the step before did not come to its end
    for mark in MARKS[1:-1]:
        times.mark(mark)
    times.end()
    Event.passed = Event.now
    assert read(times.line() or "")["steps"] == 1
    assert Event.made == made == 3 * len(MARKS)


def test_a_step_that_left_a_mark_out_is_not_counted() -> None:
    times = StepTimes(cuda=False)
    times.mark("drafted")  # nothing runs
    times.end()
    times.begin(1)
    times.end()
    assert times.line() is None
    times.begin(1)
    for mark in MARKS[1:-1]:
        times.mark(mark)
    times.end()
    assert read(times.line() or "")["steps"] == 1
