"""The walk, the draw, the commit: ``ddtree_sglang.verify`` with sglang's own pool and allocator, on a CPU."""

from __future__ import annotations

import importlib.util
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

from ddtree_sglang.tree import build_tree, custom_mask, positions, retrieve_index  # noqa: E402
from ddtree_sglang.verify import (  # noqa: E402
    DDTreeVerifyInput,
    commit_rows,
    sampling_requests,
    target_tokens,
    torch_walk,
)

pytestmark = pytest.mark.real

BLOCK, DEPTH, VOCABULARY = 4, 3, 12


def grown(bs: int, budget: int, seed: int, k: int = 4) -> tuple[Any, torch.Tensor]:
    """Random trees and their roots' tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, DEPTH, VOCABULARY, generator=generator)
    values, tokens = torch.topk(torch.log_softmax(logits, -1), k, dim=-1)
    root = torch.randint(0, VOCABULARY, (bs,), generator=generator)
    return build_tree(values, tokens, budget, root=root), root


def by_hand(tree: Any, b: int, predicted: list[int]) -> tuple[list[int], list[int]]:
    """The walk of request ``b`` by its child links, as a person would."""
    path, tokens, node = [0], [], 0
    while True:
        tokens.append(predicted[node])
        child = int(tree.next_token[b, node])
        while child >= 0 and int(tree.draft[b, child]) != predicted[node]:
            child = int(tree.next_sibling[b, child])
        if child < 0:
            return path, tokens
        path.append(child)
        node = child


@pytest.mark.parametrize("budget", [3, 8, 20, 84])
@pytest.mark.parametrize("seed", range(5))
def test_the_walk_is_the_walk_along_the_links(budget: int, seed: int) -> None:
    """Budget 84 is a whole tree of 4 branches; a smaller one is partly grown. Random answers and likely ones."""
    tree, _ = grown(16, budget, seed)
    rng = random.Random(seed)
    predicted = torch.tensor(
        [[rng.choice(tree.draft[b].tolist()) for _ in range(budget + 1)] for b in range(16)],
        dtype=torch.int64,
    )
    rows = torch_walk(tree.draft, tree, predicted, BLOCK, retrieve_index(tree))
    seen = set()
    for b in range(16):
        path, _ = by_hand(tree, b, predicted[b].tolist())
        flat = [b * (budget + 1) + node for node in path]
        assert rows[b].tolist() == flat + [-1] * (BLOCK - len(path))
        seen.add(len(path))
    assert len(seen) > 1


def test_padding_is_never_walked() -> None:
    """2 tokens a depth make 14 prefixes; the other slots hold the root's token and must not match it."""
    tree, root = grown(3, 30, 1, k=2)
    assert tree.count.tolist() == [15, 15, 15]
    predicted = root[:, None].expand(3, 31).contiguous()
    rows = torch_walk(tree.draft, tree, predicted, BLOCK, retrieve_index(tree))
    for b in range(3):
        assert int(rows[b].max()) - b * 31 < 15


@pytest.mark.parametrize(
    ("paths", "keep", "free"),
    [
        ([[0]], [0], [1, 2, 3]),
        ([[0, 3]], [0, 3], [1, 2]),
        ([[0, 2, 3], [0, 1]], [0, 2, 3, 4, 5], [1, 6, 7]),
    ],
)
def test_every_row_of_a_step_is_kept_or_freed_once(
    paths: list[list[int]], keep: list[int], free: list[int]
) -> None:
    assert commit_rows(paths, 4) == (keep, free)


@pytest.mark.parametrize("path", [[0, 0], [0, 4], [0, -1]])
def test_a_path_that_is_none_is_an_error(path: list[int]) -> None:
    with pytest.raises(RuntimeError, match="is not a path of a tree of 4 nodes"):
        commit_rows([path], 4)


def sampling(bs: int, **changed: Any) -> SimpleNamespace:
    known = {
        "is_all_greedy": False,
        "temperatures": torch.ones(bs, 1),
        "top_ks": torch.full((bs,), 1 << 30, dtype=torch.int32),
        "top_ps": torch.ones(bs),
        "min_ps": torch.zeros(bs),
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
        "sampling_seed": None,
    }
    return SimpleNamespace(**(known | changed))


def test_greedy_requests_get_the_argmax() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).view(2, 3)
    at = torch.arange(6)
    assert torch.equal(target_tokens(logits, None, at, 3, []), best)
    assert torch.equal(target_tokens(logits, SimpleNamespace(is_all_greedy=True), at, 3, []), best)
    # a greedy request beside a sampled one is a request of top_k 1
    ones = sampling(2, top_ks=torch.tensor([1, 1 << 30], dtype=torch.int32), need_top_k_sampling=True)
    assert torch.equal(target_tokens(logits, ones, at, 3, [1])[0], best[0])


def batch_of(*top_ks: int) -> list[SimpleNamespace]:
    """Requests of a batch."""
    return [SimpleNamespace(sampling_params=SimpleNamespace(top_k=top_k)) for top_k in top_ks]


def test_only_the_rows_of_requests_that_sample_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests of 3 rows, of which the second and the last sample; pieces of 4 rows. A draw sorts the vocabulary.

    Each row allows one token only, and in the greedy rows two tokens are equally good: a draw would take either, the
    argmax the first.
    """
    from ddtree_sglang import verify

    monkeypatch.setattr(verify, "SAMPLED_ROWS", 4)
    wanted = torch.arange(12) % (VOCABULARY - 1)
    logits = torch.nn.functional.one_hot(wanted, VOCABULARY).float() * 1e4
    tied = logits.clone()
    tied[:3, -1] = tied[6:9, -1] = 1e4
    seen: list[int] = []
    drawn = verify._drawn

    def spy(*given: Any) -> torch.Tensor:
        seen.extend(given[2].tolist())
        return drawn(*given)

    monkeypatch.setattr(verify, "_drawn", spy)
    info = sampling(4, temperatures=torch.arange(1, 5).float()[:, None])
    assert torch.equal(target_tokens(tied, info, torch.arange(12), 3, [1, 3]).view(-1), wanted)
    assert seen == [3, 4, 5, 9, 10, 11]


def test_a_position_is_that_of_the_row_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed of a request's own draws by position: the same token, whoever runs beside it."""
    from ddtree_sglang import verify

    seen: list[tuple[list[int], list[int]]] = []

    def draw(probs: torch.Tensor, sampling_seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((sampling_seed.tolist(), positions.tolist()))
        return probs.argmax(-1)

    monkeypatch.setattr(verify, "sampling_from_probs_torch", draw)
    info = sampling(3, sampling_seed=torch.tensor([70, 71, 72]))
    target_tokens(torch.randn(6, VOCABULARY), info, torch.arange(100, 106), 2, [0, 2])
    assert seen == [([70, 70, 72, 72], [100, 101, 104, 105])]


def test_the_requests_that_sample_are_known_one_by_one() -> None:
    reqs = batch_of(1, 1 << 30, 20, 1)
    assert sampling_requests(SimpleNamespace(sampling_info=sampling(4), reqs=reqs)) == [1, 2]
    # the last that sampled has left: sglang still says that not all are greedy
    assert sampling_requests(SimpleNamespace(sampling_info=sampling(2), reqs=batch_of(1, 1))) == []
    assert sampling_requests(SimpleNamespace(sampling_info=SimpleNamespace(is_all_greedy=True))) == []
    assert sampling_requests(SimpleNamespace(sampling_info=None)) == []


def test_the_output_is_distributed_as_without_speculation() -> None:
    """The token after the root, over many steps, follows the target's distribution, accepted or not.

    The drafter proposes 3 of 5 tokens. 20000 draws: 5 standard deviations of each share.
    """
    count = 20000
    torch.manual_seed(3)
    probs = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05])
    values = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(count, 1, 3).contiguous()
    tokens = torch.tensor([1, 4, 0]).expand(count, 1, 3).contiguous()
    tree = build_tree(values, tokens, 3, root=torch.full((count,), 2))
    logits = torch.log(probs).expand(count * 4, 5)
    places = torch.zeros(count * 4, dtype=torch.int64)
    predicted = target_tokens(logits, sampling(count), places, 4, range(count))
    rows = torch_walk(tree.draft, tree, predicted, 2, retrieve_index(tree))
    first = predicted[:, 0]
    for token, p in enumerate(probs.tolist()):
        share = float((first == token).float().mean())
        assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5
    drafted = rows[:, 1] >= 0
    assert torch.equal(drafted, torch.isin(first, torch.tensor([1, 4, 0])))
    accepted = float(drafted.float().mean())
    assert abs(accepted - 0.7) < 5 * (0.7 * 0.3 / count) ** 0.5
    # after an accepted node the next token is drawn at that node, independently
    second = predicted.view(-1)[rows[drafted, 1]]
    assert abs(float((second == 0).float().mean()) - 0.4) < 5 * (0.24 / len(second)) ** 0.5


def test_rows_are_drawn_in_pieces_and_none_is_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row allows one token only; pieces of 4 rows do not end where a request does."""
    monkeypatch.setattr("ddtree_sglang.verify.SAMPLED_ROWS", 4)
    wanted = torch.arange(15) % VOCABULARY
    logits = torch.nn.functional.one_hot(wanted, VOCABULARY).float() * 1e4
    info = sampling(5, temperatures=torch.arange(1, 6).float()[:, None])
    assert torch.equal(target_tokens(logits, info, torch.arange(15), 3, range(5)), wanted.view(5, 3))
    nearly = sampling(5, top_ps=torch.full((5,), 0.9), need_top_p_sampling=True)
    assert torch.equal(target_tokens(logits, nearly, torch.arange(15), 3, range(5)), wanted.view(5, 3))


def test_top_k_and_temperature_are_each_request_s_own() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]]).expand(2 * 500, 4).contiguous()
    info = sampling(
        2,
        top_ks=torch.tensor([2, 1 << 30], dtype=torch.int32),
        need_top_k_sampling=True,
        temperatures=torch.tensor([[1.0], [100.0]]),
    )
    drawn = target_tokens(logits, info, torch.zeros(1000, dtype=torch.int64), 500, [0, 1])
    assert set(drawn[0].tolist()) == {0, 1}
    assert set(drawn[1].tolist()) == {0, 1, 2, 3}


class Request:
    """As much of ``Req`` as a step touches. ``limit`` ends it."""

    def __init__(self, prefix: int, limit: int) -> None:
        self.prefix, self.limit = prefix, limit
        self.output_ids: list[int] = []
        self.spec_verify_ct = self.spec_accepted_drafts = 0
        self.require_reasoning = prefix % 2 == 1
        self.thought: list[tuple[int, int, int]] = []
        self.histogram: list[int] = []
        self.kv_committed_len = self.kv_allocated_len = prefix

    def update_reasoning_tokens(self, token: int, end: int) -> None:
        assert self.output_ids[-1] == token
        self.thought.append((token, end, len(self.output_ids)))

    def update_spec_acceptance_histogram(self, accepted: int) -> None:
        self.histogram.append(accepted)

    def check_finished(self) -> None:
        pass

    def finished(self) -> bool:
        return len(self.output_ids) >= self.limit


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs one whole verify step of given trees on sglang's pool and allocator."""
    from sglang.srt.mem_cache import common
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.speculative import spec_utils

    def assign(indices: Any, table: Any, start: Any, end: Any, slots: Any, bs: int) -> None:
        taken = 0
        for i in range(bs):
            first, last = int(start[i]), int(end[i])
            table[int(indices[i]), first:last] = slots[taken : taken + last - first].to(table.dtype)
            taken += last - first
        assert taken == len(slots)

    monkeypatch.setattr(spec_utils, "assign_req_to_token_pool_func", assign)
    monkeypatch.setattr(common, "evict_from_tree_cache", lambda cache, count: None)

    def run(tree: Any, prefixes: list[int], limits: list[int], predicted: torch.Tensor) -> SimpleNamespace:
        bs, width = tree.draft.shape
        size = 400
        pool = ReqToTokenPool(size=8, max_context_len=200, device="cpu", enable_memory_saver=False)
        allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
        seq_lens = torch.tensor(prefixes)
        before = []
        for b, prefix in enumerate(prefixes):
            slots = allocator.alloc(prefix)
            pool.req_to_token[b, :prefix] = slots.to(torch.int32)
            before.append(slots.tolist())
        cache = SimpleNamespace(token_to_kv_pool_allocator=allocator)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            device="cpu",
            reqs=[Request(prefix, limit) for prefix, limit in zip(prefixes, limits, strict=True)],
            batch_size=lambda: bs,
            sampling_info=None,
            req_pool_indices=torch.arange(bs),
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=cache,
            model_config=SimpleNamespace(think_end_id=7),
            seq_lens=seq_lens.clone(),
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=sum(prefixes),
        )
        monkeypatch.setattr(
            "ddtree_sglang.verify.alloc_token_slots", lambda tree_cache, count: allocator.alloc(count)
        )
        entered = DDTreeVerifyInput(
            draft_token=tree.draft.reshape(-1),
            positions=positions(tree, seq_lens),
            draft_token_num=width,
            custom_mask=custom_mask(tree, seq_lens, sum(prefixes)),
            tree=tree,
            rows=retrieve_index(tree),
            block_size=BLOCK,
        )
        entered.prepare_for_verify(batch, 1)
        step_slots = batch.out_cache_loc.view(bs, width).clone()
        hidden = torch.arange(bs * width, dtype=torch.float32)[:, None].repeat(1, 2)
        logits = torch.nn.functional.one_hot(predicted.reshape(-1), VOCABULARY).float()
        output = SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
        verified, lens, next_hidden, accepted = entered.verify(batch=batch, logits_output=output, page_size=1)
        return SimpleNamespace(
            batch=batch,
            pool=pool,
            allocator=allocator,
            size=size,
            before=before,
            slots=step_slots,
            verified=verified,
            lens=lens,
            hidden=next_hidden,
            accepted=accepted,
            off_top=entered.off_top,
            committed=entered.committed,
        )

    return run


@pytest.mark.parametrize("seed", range(8))
def test_a_step_commits_the_path_and_loses_no_slot(step: Any, seed: int) -> None:
    """Three requests of different length, one of which ends within the step."""
    tree, _ = grown(3, 20, seed)
    rng = random.Random(seed)
    predicted = torch.tensor(
        [[rng.choice(tree.draft[b].tolist()) for _ in range(21)] for b in range(3)], dtype=torch.int64
    )
    # the first request's answers lead down to a leaf of the lowest rank there is at depth 1
    child = int(tree.next_token[0, 0])
    while int(tree.next_sibling[0, child]) >= 0:
        child = int(tree.next_sibling[0, child])
    predicted[0, 0] = tree.draft[0, child]
    prefixes, limits = [5, 17, 9], [100, 1 + seed % 3, 100]
    done = step(tree, prefixes, limits, predicted)

    held = []
    hidden = []
    slots: list[int] = []
    places: list[int] = []
    off_top = 0
    for b in range(3):
        path, tokens = by_hand(tree, b, predicted[b].tolist())
        count = min(len(tokens), limits[b])
        off_top += sum(int(tree.next_token[b, up]) != node for up, node in itertools.pairwise(path[:count]))
        req = done.batch.reqs[b]
        assert req.output_ids == tokens[:count]
        assert int(done.verified[b]) == tokens[count - 1]
        assert int(done.lens[b]) == count <= BLOCK
        assert req.histogram == [count - 1]
        # a token of the thinking part is counted when it is appended
        assert req.thought == (
            [(token, 7, i + 1) for i, token in enumerate(tokens[:count])] if prefixes[b] % 2 else []
        )
        assert done.accepted[b] == req.spec_accepted_drafts == count - 1
        assert req.kv_committed_len == req.kv_allocated_len == prefixes[b] + count
        row = done.pool.req_to_token[b, : prefixes[b] + count].tolist()
        assert row == done.before[b] + done.slots[b][path[:count]].tolist()
        held += row
        hidden += [b * 21 + node for node in path[:count]]
        slots += row[prefixes[b] :]
        places += range(prefixes[b], prefixes[b] + count)
    # what the drafter's KV is written by: the slots and positions of the committed nodes, in one order
    assert done.batch.out_cache_loc.tolist() == slots
    assert done.committed.tolist() == places
    assert done.committed.storage_offset() == 0, "aligned, so that the drafter's kernel is compiled once"
    assert done.hidden[:, 0].tolist() == hidden
    assert done.off_top == off_top >= 1
    assert done.batch.seq_lens.tolist() == done.batch.seq_lens_cpu.tolist()
    assert done.batch.seq_lens_sum == sum(done.batch.seq_lens.tolist()) == len(held)
    # what is not in a row is free, and nothing is both
    free = done.allocator.free_pages.tolist() + done.allocator.release_pages.tolist()
    assert sorted(free + held) == list(range(1, done.size + 1))


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_no_more_is_off_the_top_branch_than_was_accepted(step: Any, limit: int) -> None:
    """Every node of the path is a second choice. A request that ends within the step accepts a part of it."""
    tree, _ = grown(1, 84, 0)
    predicted = torch.zeros((1, 85), dtype=torch.int64)
    path, node = [0], 0
    for _ in range(DEPTH):
        child = int(tree.next_sibling[0, int(tree.next_token[0, node])])
        predicted[0, node] = tree.draft[0, child]
        path.append(child)
        node = child
    predicted[0, node] = tree.draft[0, 0]
    done = step(tree, [5], [limit], predicted)
    assert done.lens.tolist() == [min(limit, len(path))]
    assert done.off_top == done.accepted[0] == min(limit, len(path)) - 1


def of_three_drafts(tree: Any, **more: Any) -> DDTreeVerifyInput:
    """One request's input with a tree of a root and three drafts."""
    return DDTreeVerifyInput(
        draft_token=tree.draft.view(-1),
        positions=torch.zeros(4, dtype=torch.int64),
        draft_token_num=4,
        tree=tree,
        rows=retrieve_index(tree),
        block_size=2,
        **more,
    )


@pytest.mark.parametrize("rows", [[[-1, -1]], [[1, -1]]], ids=["no root", "not from the root"])
def test_a_walk_that_does_not_begin_at_the_root_is_an_error(
    rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, _ = grown(1, 3, 0)
    monkeypatch.setattr("ddtree_sglang.verify.torch_walk", lambda *args: torch.tensor(rows))
    entered = of_three_drafts(tree)
    with pytest.raises(RuntimeError, match="does not begin at the root"):
        entered._accepted(SimpleNamespace(sampling_info=None), torch.zeros(4, VOCABULARY))


@pytest.mark.parametrize(
    ("size", "sampled", "asked", "sent"),
    [(2, False, False, 0), (2, False, True, 1), (2, True, False, 1), (1, True, True, 0)],
    ids=["greedy", "greedy, if sglang is to", "sampled", "one rank"],
)
def test_one_rank_draws_for_all(
    monkeypatch: pytest.MonkeyPatch, size: int, sampled: bool, asked: bool, sent: int
) -> None:
    """What rank 0 sends is what is walked: here the root's first child, which this rank did not choose."""
    monkeypatch.setattr("ddtree_sglang.verify.SYNC_TOKEN_IDS_ACROSS_TP", asked)
    tree, _ = grown(1, 3, 0)
    calls: list[int] = []

    def broadcast(predicted: torch.Tensor, src: int) -> None:
        calls.append(src)
        predicted.copy_(tree.draft[:, 1:2].expand(1, 4))

    entered = of_three_drafts(tree, tp_group=SimpleNamespace(world_size=size, broadcast=broadcast))
    other = next(token for token in range(VOCABULARY) if token not in tree.draft[0].tolist())
    logits = torch.nn.functional.one_hot(torch.full((4,), other), VOCABULARY).float() * 1e4
    batch = SimpleNamespace(sampling_info=sampling(1) if sampled else None, reqs=batch_of(1 << 30))
    ((path, _, _),) = entered._accepted(batch, logits)
    assert calls == [0] * sent
    assert path == ([0, 1] if sent else [0])


def test_no_hidden_states_is_an_error() -> None:
    entered = DDTreeVerifyInput(draft_token=torch.zeros(4), positions=torch.zeros(4), draft_token_num=4)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
    with pytest.raises(RuntimeError, match="hidden states"):
        entered.verify(batch=batch, logits_output=SimpleNamespace(hidden_states=None), page_size=1)


def test_a_step_without_a_mask_is_an_error() -> None:
    entered = DDTreeVerifyInput(draft_token=torch.zeros(4), positions=torch.zeros(4), draft_token_num=4)
    with pytest.raises(RuntimeError, match="page size 1 and a mask"):
        entered.prepare_for_verify(SimpleNamespace(), 1)
