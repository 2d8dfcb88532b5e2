"""The tree builder against an oracle that ranks every prefix, one by one, in plain Python."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, fields

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from ddtree_sglang import tree as tree_module  # noqa: E402
from ddtree_sglang.grow import TREE_GRAPH, Grown, TreeStep, graph_wanted  # noqa: E402
from ddtree_sglang.tree import (  # noqa: E402
    ADAPTIVE_MIN_PROB,
    Tree,
    build_tree,
    custom_mask,
    fill_mask,
    mask_places,
    positions,
    prepare,
    retrieve_index,
    slot_limits,
)

pytestmark = pytest.mark.real

INF = math.inf
QUANTUM = 1 << 24
NEVER = 1 << 42


@dataclass(frozen=True)
class Node:
    """A prefix as the oracle sees it."""

    cost: int
    depth: int
    ranks: tuple[int, ...]


def cost_of(logprob: float) -> int:
    """A log-probability as a whole number of 2**-24 nats, as the module's text says."""
    if math.isnan(logprob) or logprob == -INF:
        return NEVER
    if logprob >= 0:
        return 0
    return min(NEVER, math.floor(-logprob * QUANTUM))


def oracle(logprobs: list[list[float]], budget: int) -> list[Node]:
    """The first ``budget`` of all possible prefixes: each is written down, all are sorted."""
    costs = [[cost_of(value) for value in row] for row in logprobs]
    found = []
    for depth in range(1, len(costs) + 1):
        for ranks in itertools.product(range(len(costs[0])), repeat=depth):
            cost = sum(costs[level][rank] for level, rank in enumerate(ranks))
            if cost < NEVER:
                found.append(Node(cost, depth, ranks))
    return sorted(found, key=lambda node: (node.cost, node.depth, node.ranks))[:budget]


def heap(logprobs: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    """The best-first search that the tree is defined by: pop a node, push its next sibling and its first
    child."""
    import heapq

    costs = [[cost_of(value) for value in row] for row in logprobs]
    queue = [(costs[0][0], 1, (0,))]
    popped: list[tuple[int, ...]] = []
    while queue and len(popped) < budget:
        cost, depth, ranks = heapq.heappop(queue)
        if cost >= NEVER:
            break
        popped.append(ranks)
        last = ranks[-1]
        if last + 1 < len(costs[0]):
            more = cost - costs[depth - 1][last] + costs[depth - 1][last + 1]
            heapq.heappush(queue, (more, depth, (*ranks[:-1], last + 1)))
        if depth < len(costs):
            heapq.heappush(queue, (cost + costs[depth][0], depth + 1, (*ranks, 0)))
    return popped


def walk_reference(
    candidates: list[int], next_token: list[int], next_sibling: list[int], predicted: list[int], length: int
) -> tuple[list[int], list[int]]:
    """What ``verify_tree_greedy`` does for one request, local numbers: ``accept_index`` (-1 filled) and
    ``predicts`` along it. ``length`` is the number of columns of ``accept_index``."""
    accepted = [0]
    current = 0
    for _ in range(1, length):
        current = next_token[current]
        while current != -1 and candidates[current] != predicted[accepted[-1]]:
            current = next_sibling[current]
        if current == -1:
            break
        accepted.append(current)
    return accepted + [-1] * (length - len(accepted)), [predicted[node] for node in accepted]


def draws(
    seed: int, bs: int, depth: int, width: int, vocabulary: int = 50
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((bs, depth, vocabulary), generator=generator) * 3
    best = torch.log_softmax(logits, dim=-1).topk(width, dim=-1)
    return best.values, best.indices


def given_rows(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One request with these log-probabilities; rank r of depth d is token 100 * d + r."""
    logprobs = torch.tensor([rows], dtype=torch.float32)
    tokens = torch.tensor([[[100 * d + r for r in range(len(row))] for d, row in enumerate(rows, 1)]])
    return logprobs, tokens


def paths_of(tree: Tree, token_ids: torch.Tensor, request: int) -> list[tuple[int, ...]]:
    """Ranks of every node from its parents and tokens, root first."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.count[request])):
        parent, depth = int(tree.parents[request, node]), int(tree.depths[request, node])
        assert 0 <= parent < node
        assert depth == len(paths[parent]) + 1
        rank = token_ids[request, depth - 1].tolist().index(int(tree.tokens[request, node - 1]))
        paths.append((*paths[parent], rank))
    return paths


def check_structure(tree: Tree, request: int) -> None:
    """Whatever the values are: a tree, padding apart from it, links and mask that say what the parents
    say."""
    nodes = tree.depths.shape[1]
    count = int(tree.count[request])
    assert 1 <= count <= nodes
    parents, depths = tree.parents[request].tolist(), tree.depths[request].tolist()
    children: dict[int, list[int]] = {}
    for node in range(1, count):
        children.setdefault(parents[node], []).append(node)
    assert parents[0] == -1
    assert depths[0] == 0
    assert all(0 <= parents[node] < node for node in range(1, count))
    assert all(depths[node] == depths[parents[node]] + 1 for node in range(1, count))
    assert parents[count:] == [-1] * (nodes - count)
    assert depths[count:] == [0] * (nodes - count)

    following, sibling = [-1] * nodes, [-1] * nodes
    for parent, family in children.items():
        following[parent] = family[0]
        for left, right in itertools.pairwise(family):
            sibling[left] = right
    assert tree.next_token[request].tolist() == following
    assert tree.next_sibling[request].tolist() == sibling

    for node in range(nodes):
        seen, current = set(), node
        while current != -1:
            seen.add(current)
            current = parents[current]
        assert {j for j, flag in enumerate(tree.mask[request, node].tolist()) if flag} == seen


def check_against_oracle(
    logprobs: torch.Tensor, token_ids: torch.Tensor, tree: Tree, request: int, want: list[Node]
) -> None:
    assert int(tree.count[request]) == len(want) + 1
    assert paths_of(tree, token_ids, request)[1:] == [node.ranks for node in want]
    check_structure(tree, request)


@pytest.mark.parametrize("budget", [7, 8, 16, 32, 64])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_the_best_prefixes_are_the_tree(budget: int, width: int) -> None:
    # All prefixes of 7 depths and 8 ranks are 2.4 million: the oracle takes 4 depths, the heap below takes 7.
    depth = 7 if width == 1 else 4
    logprobs, token_ids = draws(budget * 10 + width, 3, depth, width)
    tree = build_tree(logprobs, token_ids, budget)
    for request in range(3):
        check_against_oracle(logprobs, token_ids, tree, request, oracle(logprobs[request].tolist(), budget))


@pytest.mark.parametrize("budget", [7, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_it_is_what_the_heap_pops(budget: int, width: int) -> None:
    logprobs, token_ids = draws(budget + width, 4, 7, width)
    tree = build_tree(logprobs, token_ids, budget)
    for request in range(4):
        assert paths_of(tree, token_ids, request)[1:] == heap(logprobs[request].tolist(), budget)
        check_structure(tree, request)


@pytest.mark.parametrize(("depth", "width", "budget"), [(15, 8, 16), (15, 4, 64), (15, 8, 64)])
def test_blocks_of_sixteen(depth: int, width: int, budget: int) -> None:
    logprobs, token_ids = draws(7, 2, depth, width)
    tree = build_tree(logprobs, token_ids, budget)
    for request in range(2):
        assert paths_of(tree, token_ids, request)[1:] == heap(logprobs[request].tolist(), budget)


def test_one_branch_is_the_chain_of_dflash() -> None:
    logprobs, token_ids = draws(3, 2, 7, 1)
    root = torch.tensor([41, 42])
    tree = build_tree(logprobs, token_ids, 7, root=root)
    assert tree.draft.tolist() == [
        [r, *chain] for r, chain in zip([41, 42], token_ids[:, :, 0].tolist(), strict=True)
    ]
    assert tree.parents.tolist() == [list(range(-1, 7))] * 2
    assert tree.depths.tolist() == [list(range(8))] * 2
    assert tree.next_token.tolist() == [[*range(1, 8), -1]] * 2
    assert tree.next_sibling.tolist() == [[-1] * 8] * 2
    assert torch.equal(tree.mask, torch.ones(8, 8).tril().bool().expand(2, 8, 8))


values = st.one_of(
    st.sampled_from([0.0, -1.0, -2.0, -0.5, -3.0, -INF]),
    st.floats(min_value=-20, max_value=0, width=32),
    st.floats(min_value=-(2.0**-20), max_value=0, width=32),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    depth, width = draw(
        st.sampled_from([(1, 1), (1, 6), (2, 2), (2, 5), (3, 3), (4, 2), (4, 3), (5, 2), (6, 1)])
    )
    row = st.lists(values, min_size=width, max_size=width).map(lambda row: sorted(row, reverse=True))
    return draw(st.lists(row, min_size=depth, max_size=depth)), draw(st.integers(1, 40))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
def test_any_values_give_the_oracles_tree(problem: tuple[list[list[float]], int]) -> None:
    rows, budget = problem
    logprobs, token_ids = given_rows(rows)
    exact = logprobs[0].tolist()
    tree = build_tree(logprobs, token_ids, budget)
    check_against_oracle(logprobs, token_ids, tree, 0, oracle(exact, budget))
    assert paths_of(tree, token_ids, 0)[1:] == heap(exact, budget)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
        min_size=3,
        max_size=3,
    ),
    budget=st.integers(1, 30),
)
def test_values_of_no_sense_give_no_broken_tree(rows: list[list[float]], budget: int) -> None:
    """Unsorted, positive, NaN, infinite: parents stand before children, masks are ancestors, paths are within
    D."""
    logprobs, token_ids = given_rows(rows)
    tree = build_tree(logprobs, token_ids, budget)
    count = int(tree.count[0])
    assert paths_of(tree, token_ids, 0)[0] == ()
    assert int(tree.depths.max()) <= 3
    assert tree.parents[0, count:].tolist() == [-1] * (budget + 1 - count)
    for node in range(count):
        above = {node} | ({int(tree.parents[0, node])} if node else set())
        assert all(bool(tree.mask[0, node, seen]) for seen in above)
    costs = [[cost_of(value) for value in row] for row in rows]
    if all(row == sorted(row) for row in costs):
        check_against_oracle(logprobs, token_ids, tree, 0, oracle(rows, budget))


def test_equal_scores_are_broken_by_depth_then_ranks() -> None:
    logprobs, token_ids = given_rows([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    tree = build_tree(logprobs, token_ids, 14)
    assert paths_of(tree, token_ids, 0)[1:] == [
        ranks for depth in (1, 2, 3) for ranks in itertools.product(range(2), repeat=depth)
    ]
    cut = build_tree(logprobs, token_ids, 4)
    assert paths_of(cut, token_ids, 0)[1:] == [(0,), (1,), (0, 0), (0, 1)]
    check_structure(cut, 0)


def test_ties_come_out_the_same_in_any_company() -> None:
    logprobs, token_ids = given_rows([[-1.0] * 4] * 5)
    alone = build_tree(logprobs, token_ids, 32)
    among = build_tree(
        torch.cat([logprobs - 3, logprobs, logprobs]), torch.cat([token_ids, token_ids, token_ids]), 32
    )
    for field in fields(Tree):
        one, many = getattr(alone, field.name), getattr(among, field.name)
        assert torch.equal(one[0], many[1])
        assert torch.equal(one[0], many[2])


@pytest.mark.parametrize("budget", [7, 16, 64])
def test_a_batch_equals_its_requests_one_by_one(budget: int) -> None:
    logprobs, token_ids = draws(budget, 9, 7, 8)
    root = torch.arange(900, 909)
    batch = build_tree(logprobs, token_ids, budget, root=root)
    for request in range(9):
        part = slice(request, request + 1)
        single = build_tree(logprobs[part], token_ids[part], budget, root=root[part])
        for field in fields(Tree):
            assert torch.equal(getattr(single, field.name), getattr(batch, field.name)[part]), field.name


def test_an_empty_batch_has_the_shapes() -> None:
    tree = build_tree(torch.zeros(0, 7, 4), torch.zeros(0, 7, 4, dtype=torch.int64), 16)
    assert tree.draft.shape == (0, 17)
    assert tree.mask.shape == (0, 17, 17)
    assert custom_mask(tree, torch.zeros(0, dtype=torch.int64), 0).shape == (0,)


@pytest.mark.parametrize(
    ("depth", "width", "budget", "possible"), [(1, 3, 16, 3), (2, 2, 16, 6), (5, 1, 9, 5)]
)
def test_slots_beyond_the_possible_prefixes_are_padding(
    depth: int, width: int, budget: int, possible: int
) -> None:
    logprobs, token_ids = draws(1, 2, depth, width)
    tree = build_tree(logprobs, token_ids, budget, root=torch.tensor([71, 72]))
    assert tree.count.tolist() == [possible + 1] * 2
    assert tree.draft[:, possible + 1 :].tolist() == [[root] * (budget - possible) for root in (71, 72)]
    for request in range(2):
        check_structure(tree, request)


def test_a_vocabulary_smaller_than_the_cap_is_filled_with_impossible_ranks() -> None:
    logprobs, token_ids = given_rows([[-0.1, -2.0, -INF, -INF], [-0.2, -1.0, -INF, -INF]])
    tree = build_tree(logprobs, token_ids, 20)
    assert int(tree.count[0]) == 1 + 2 + 4
    assert {int(token) % 100 for token in tree.tokens[0, :6]} == {0, 1}
    check_structure(tree, 0)


def test_nothing_possible_leaves_the_root() -> None:
    for value in (-INF, math.nan):
        logprobs, token_ids = given_rows([[value] * 3] * 2)
        tree = build_tree(logprobs, token_ids, 5)
        assert tree.count.tolist() == [1]
        assert tree.mask[0].tolist() == torch.eye(6).bool().tolist()
        check_structure(tree, 0)


def test_a_dead_depth_ends_the_tree_above_it() -> None:
    logprobs, token_ids = given_rows([[-0.5, -1.0], [-INF, -INF], [0.0, 0.0]])
    tree = build_tree(logprobs, token_ids, 8)
    assert paths_of(tree, token_ids, 0) == [(), (0,), (1,)]


def test_logprobs_a_little_above_zero_do_not_lift_a_child_above_its_parent() -> None:
    logprobs, token_ids = given_rows([[1e-6, -9.0], [1e-6, -9.0], [1e-6, -9.0]])
    tree = build_tree(logprobs, token_ids, 3)
    assert paths_of(tree, token_ids, 0) == [(), (0,), (0, 0), (0, 0, 0)]


@pytest.mark.parametrize("valid", [0, 1, 5, 7, 16])
def test_valid_keeps_the_best_and_the_shapes(valid: int) -> None:
    logprobs, token_ids = draws(5, 3, 7, 4)
    whole, part = build_tree(logprobs, token_ids, 16), build_tree(logprobs, token_ids, 16, valid=valid)
    smaller = build_tree(logprobs, token_ids, max(valid, 1))
    assert part.count.tolist() == [valid + 1] * 3
    for field in fields(Tree):
        assert getattr(part, field.name).shape == getattr(whole, field.name).shape
        assert getattr(part, field.name).dtype == getattr(whole, field.name).dtype
    for request in range(3):
        check_structure(part, request)
        if valid:
            assert paths_of(part, token_ids, request) == paths_of(smaller, token_ids, request)


def test_the_adaptive_schedule_keeps_what_is_probable_and_the_best_d() -> None:
    sure, unsure = math.log(0.9), math.log(0.005)
    logprobs, token_ids = given_rows([[sure, unsure]] * 3)
    tree = build_tree(logprobs, token_ids, 14, min_prob=0.01)
    # Three deep along the sure branch; all others are below one in a hundred.
    assert paths_of(tree, token_ids, 0) == [(), (0,), (0, 0), (0, 0, 0)]
    check_structure(tree, 0)
    hopeless, token_ids = given_rows([[unsure, unsure - 1]] * 3)
    assert build_tree(hopeless, token_ids, 14, min_prob=0.01).count.tolist() == [4]


@settings(max_examples=100, deadline=None)
@given(
    problem=problems(),
    min_prob=st.sampled_from([1.0, 0.5, 0.1, ADAPTIVE_MIN_PROB, 1e-6]),
    cut=st.integers(0, 40),
)
def test_the_schedule_is_the_oracles_rule(
    problem: tuple[list[list[float]], int], min_prob: float, cut: int
) -> None:
    rows, budget = problem
    valid = min(cut, budget)
    logprobs, token_ids = given_rows(rows)
    most = -math.log(min_prob) * QUANTUM
    best = oracle(logprobs[0].tolist(), budget)[:valid]
    want = [node for slot, node in enumerate(best, 1) if slot <= len(rows) or node.cost <= most]
    tree = build_tree(logprobs, token_ids, budget, valid=valid, min_prob=min_prob)
    check_against_oracle(logprobs, token_ids, tree, 0, want)


def test_slot_limits_refuse_what_makes_no_sense() -> None:
    assert slot_limits(2, 4) == (NEVER,) * 5
    assert slot_limits(2, 4, valid=3) == (NEVER, NEVER, NEVER, NEVER, 0)
    assert slot_limits(2, 4, min_prob=1.0) == (NEVER, NEVER, NEVER, 1, 1)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=r"must be within 0\.\.4"):
            slot_limits(2, 4, valid=wrong)
    for nonsense in (0.0, -0.5, 1.5, math.nan):
        with pytest.raises(ValueError, match="must be above 0"):
            slot_limits(2, 4, min_prob=nonsense)


def test_a_budget_below_the_depth_is_allowed_here() -> None:
    logprobs, token_ids = draws(2, 1, 7, 4)
    tree = build_tree(logprobs, token_ids, 3)
    check_against_oracle(logprobs, token_ids, tree, 0, oracle(logprobs[0, :3].tolist(), 3))


def test_wrong_arguments_are_refused() -> None:
    logprobs, token_ids = draws(2, 2, 3, 4)
    for wrong, text in (
        ((logprobs[0], token_ids[0], 4), r"must both be \[bs, D, K\]"),
        ((logprobs, token_ids[:, :, :2], 4), r"must both be \[bs, D, K\]"),
        ((logprobs.double(), token_ids, 4), "must be float32"),
        ((logprobs, token_ids.int(), 4), "int64"),
        ((logprobs, token_ids, 0), "must be 1 or more"),
        ((logprobs[:, :0], token_ids[:, :0], 4), "must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=text):
            build_tree(*wrong)
    with pytest.raises(ValueError, match=r"root must be \[2\]"):
        build_tree(logprobs, token_ids, 4, root=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="lower --speculative-ddtree-budget"):
        prepare(15, 8, 256, "cpu")
    with pytest.raises(ValueError, match="must be 1 or more"):
        prepare(0, 8, 256, "cpu")


def test_the_input_is_left_alone() -> None:
    logprobs, token_ids = draws(2, 2, 3, 4)
    before = logprobs.clone(), token_ids.clone()
    build_tree(logprobs, token_ids, 8, root=torch.tensor([1, 2]))
    assert torch.equal(logprobs, before[0])
    assert torch.equal(token_ids, before[1])


# What the target reads --------------------------------------------------------------------------------------


def test_positions_and_rows_are_flat() -> None:
    logprobs, token_ids = draws(4, 2, 7, 4)
    tree = build_tree(logprobs, token_ids, 16, valid=10)
    got = positions(tree, torch.tensor([5, 90], dtype=torch.int32))
    assert got.dtype == torch.int64
    assert got.tolist() == [
        start + depth for start, row in zip([5, 90], tree.depths.tolist(), strict=True) for depth in row
    ]
    assert retrieve_index(tree).tolist() == [list(range(17)), list(range(17, 34))]
    for table in (
        tree.next_token,
        tree.next_sibling,
        retrieve_index(tree),
        tree.draft,
        tree.depths,
        tree.mask,
    ):
        assert table.is_contiguous()


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), budget=st.sampled_from([1, 3, 8, 33]))
def test_the_flat_mask_is_prefix_and_tree(lengths: list[int], budget: int) -> None:
    logprobs, token_ids = draws(sum(lengths), len(lengths), 3, 3)
    tree = build_tree(logprobs, token_ids, budget)
    want = [
        flag
        for request, length in enumerate(lengths)
        for row in tree.mask[request].tolist()
        for flag in [True] * length + row
    ]
    for kind in (torch.int32, torch.int64):
        seq_lens = torch.tensor(lengths, dtype=kind)
        assert custom_mask(tree, seq_lens, sum(lengths)).tolist() == want
        for dtype in (torch.bool, torch.uint8):
            buffer = torch.zeros(len(want) + 7, dtype=dtype)
            part = custom_mask(tree, seq_lens, sum(lengths), out=buffer)
            assert part.data_ptr() == buffer.data_ptr()
            assert buffer.bool().tolist() == want + [False] * 7


def test_the_flat_mask_refuses_a_buffer_that_does_not_fit() -> None:
    logprobs, token_ids = draws(1, 1, 3, 3)
    tree = build_tree(logprobs, token_ids, 3)
    seq_lens = torch.tensor([2])
    with pytest.raises(ValueError, match="holds 23 flags, the mask of 1 requests needs 24"):
        custom_mask(tree, seq_lens, 2, out=torch.zeros(23, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool or uint8"):
        custom_mask(tree, seq_lens, 2, out=torch.zeros(24))


def test_a_chain_has_the_mask_and_positions_of_dflash() -> None:
    """As ``DFlashVerifyInput.prepare_for_verify`` builds them: k_idx <= prefix + q_idx."""
    logprobs, token_ids = draws(1, 2, 7, 1)
    tree = build_tree(logprobs, token_ids, 7)
    lengths = [4, 11]
    want = [k <= length + q for length in lengths for q in range(8) for k in range(length + 8)]
    assert custom_mask(tree, torch.tensor(lengths), 15).tolist() == want
    assert positions(tree, torch.tensor(lengths)).tolist() == [*range(4, 12), *range(11, 19)]


# The walk of verify_tree_greedy -----------------------------------------------------------------------------


def naive_walk(paths: list[tuple[int, ...]], tokens: list[int], answer: list[int]) -> list[int]:
    """The deepest node whose every token is the target's, by comparing whole paths instead of following
    links."""
    by_ranks = {ranks: node for node, ranks in enumerate(paths)}
    accepted = [0]
    while True:
        step = [
            node
            for ranks, node in by_ranks.items()
            if len(ranks) == len(accepted)
            and by_ranks[ranks[:-1]] == accepted[-1]
            and tokens[node] == answer[accepted[-1]]
        ]
        if not step:
            return accepted
        assert len(step) == 1
        accepted.append(step[0])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([7, 8, 16, 32]), width=st.sampled_from([1, 4, 8]))
def test_the_links_lead_the_kernels_walk_down_the_right_path(seed: int, budget: int, width: int) -> None:
    vocabulary = 10
    logprobs, token_ids = draws(seed, 1, 7, width, vocabulary=vocabulary)
    tree = build_tree(logprobs, token_ids, budget, root=torch.tensor([3]))
    paths = paths_of(tree, token_ids, 0)
    tokens = tree.draft[0].tolist()
    chance = random.Random(seed)
    answer = [chance.randrange(vocabulary) for _ in tokens]
    goal = chance.choice(paths)
    for length in range(len(goal)):
        # The target agrees with a branch drawn by lot, mostly not the top one.
        answer[paths.index(goal[:length])] = tokens[paths.index(goal[: length + 1])]
    index, said = walk_reference(
        tokens, tree.next_token[0].tolist(), tree.next_sibling[0].tolist(), answer, 8
    )
    want = naive_walk(paths, tokens, answer)
    assert index == want + [-1] * (8 - len(want))
    assert len(want) > len(goal)
    assert want[: len(goal) + 1] == [paths.index(goal[:length]) for length in range(len(goal) + 1)]
    # What is committed: the drafted tokens along the path, then the target's own.
    assert said == [*(tokens[node] for node in want[1:]), answer[want[-1]]]


def test_padding_is_never_accepted() -> None:
    logprobs, token_ids = draws(1, 1, 7, 4)
    tree = build_tree(logprobs, token_ids, 16, valid=3, root=torch.tensor([5]))
    links = tree.next_token[0].tolist(), tree.next_sibling[0].tolist()
    for token in {5, *tree.draft[0].tolist()}:
        index, _ = walk_reference(tree.draft[0].tolist(), *links, [token] * 17, 8)
        assert max(index) < 4


# Cost -------------------------------------------------------------------------------------------------------


def work_of(function: object) -> list[str]:
    """Operators that do work: views and allocations left out."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Count():
        function()  # type: ignore[operator]
    free = {
        "view",
        "_unsafe_view",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "permute",
        "unbind",
        "detach",
        "alias",
        "empty",
        "reshape",
    }
    return [name for name in names if name not in free]


@pytest.mark.parametrize(("bs", "depth", "width", "budget"), [(1, 7, 8, 32), (16, 7, 8, 64), (3, 2, 2, 7)])
def test_a_step_is_few_operators_whatever_the_shape(bs: int, depth: int, width: int, budget: int) -> None:
    logprobs, token_ids = draws(1, bs, depth, width)
    root = torch.zeros(bs, dtype=torch.int64)
    seq_lens = torch.full((bs,), 9)
    prepare(depth, width, budget, "cpu")
    build = work_of(lambda: build_tree(logprobs, token_ids, budget, root=root))
    assert len(build) == 20, build
    tree = build_tree(logprobs, token_ids, budget, root=root)
    rest = [
        *work_of(lambda: custom_mask(tree, seq_lens, 9 * bs)),
        *work_of(lambda: positions(tree, seq_lens)),
        *work_of(lambda: retrieve_index(tree)),
    ]
    assert len(rest) <= 12, rest
    # None of these waits for the device: no value is read, no boolean selects, nothing comes from the host.
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "lift_fresh", "item"} & {
        *build,
        *rest,
    }


def test_tables_are_made_once() -> None:
    prepare(5, 3, 11, "cpu")
    before = tree_module._tables.cache_info().misses
    logprobs, token_ids = draws(1, 2, 5, 3)
    for _ in range(3):
        build_tree(logprobs, token_ids, 11)
    assert tree_module._tables.cache_info().misses == before


# The step: buffers that do not move, padded batches, CUDA graphs --------------------------------------------------


def inputs(seed: int, bs: int, depth: int, width: int) -> tuple[torch.Tensor, ...]:
    logprobs, token_ids = draws(seed, bs, depth, width)
    generator = torch.Generator().manual_seed(seed)
    root = torch.randint(0, 999, (bs,), generator=generator)
    return logprobs, token_ids, root, torch.randint(1, 40, (bs,), generator=generator)


def check_grown(grown: Grown, given: tuple[torch.Tensor, ...], budget: int) -> None:
    """All of a step's outputs, and the flat mask made of them, are those of the functions they stand for."""
    logprobs, token_ids, root, seq_lens = (part.cpu() for part in given)
    want = build_tree(logprobs, token_ids, budget, root=root)
    for field in fields(Tree):
        got = getattr(grown.tree, field.name)
        assert torch.equal(got.cpu(), getattr(want, field.name)), field.name
        assert got.is_contiguous() or field.name not in ("draft", "next_token", "next_sibling", "mask")
    assert torch.equal(grown.positions.cpu(), positions(want, seq_lens))
    assert torch.equal(grown.rows.cpu(), retrieve_index(want))
    assert torch.equal(grown.places.cpu(), mask_places(seq_lens, budget + 1))
    total = int(seq_lens.sum())
    flat = fill_mask(grown.tree.mask, grown.places, total)
    assert torch.equal(flat.cpu(), custom_mask(want, seq_lens, total))


@pytest.mark.parametrize("sizes", [(), (4,), (1, 2, 4)], ids=str)
def test_a_step_in_fixed_buffers_is_the_same_whatever_was_there_before(sizes: tuple[int, ...]) -> None:
    """Batches of 1 to 5 in any order: smaller than a size (padded by what an earlier batch left), equal, above all."""
    step = TreeStep(4, 3, 9, "cpu", sizes=sizes)
    order = [5, 4, 3, 1, 2, 4, 1, 5, 3]
    for seed, bs in enumerate(order):
        given = inputs(seed, bs, 4, 3)
        check_grown(step(*given), given, 9)


def test_the_step_takes_lengths_of_either_type_and_leaves_its_input_alone() -> None:
    given = inputs(1, 2, 3, 2)
    kept = [part.clone() for part in given]
    step = TreeStep(3, 2, 5, "cpu", sizes=(4,))
    check_grown(step(*given[:3], given[3].to(torch.int32)), given, 5)
    assert all(torch.equal(*both) for both in zip(kept, given, strict=True))


def test_the_schedule_reaches_the_step() -> None:
    given = inputs(2, 3, 4, 4)
    for sizes in ((), (4,)):
        grown = TreeStep(4, 4, 20, "cpu", min_prob=0.3, sizes=sizes)(*given)
        want = build_tree(given[0], given[1], 20, min_prob=0.3, root=given[2])
        assert torch.equal(grown.tree.count, want.count) and int(want.count.min()) < 21


def test_the_mask_is_two_operators_outside_of_the_step() -> None:
    given = inputs(3, 3, 4, 3)
    grown = TreeStep(4, 3, 9, "cpu")(*given)
    total = int(given[3].sum())
    assert work_of(lambda: fill_mask(grown.tree.mask, grown.places, total)) == ["ones", "scatter_"]


def test_the_graph_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TREE_GRAPH, raising=False)
    assert graph_wanted()
    monkeypatch.setenv(TREE_GRAPH, "0")
    assert not graph_wanted()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("depth", "width", "budget"), [(7, 8, 32), (7, 1, 7), (7, 4, 64), (15, 8, 64)])
def test_graphs_grow_what_the_cpu_grows_and_wait_for_nothing(depth: int, width: int, budget: int) -> None:
    """On a GPU: every batch size twice, so that a graph is replayed over what another left."""
    step = TreeStep(depth, width, budget, "cuda", sizes=(1, 2, 4, 8))
    assert sorted(step._graphs) == [1, 2, 4, 8]
    for seed, bs in enumerate([8, 3, 1, 2, 4, 7, 3, 8, 1, 9]):
        given = tuple(part.cuda() for part in inputs(seed, bs, depth, width))
        total = int(given[3].sum())
        if bs == 9:
            step(*given)  # built kernel by kernel: a first call may load modules
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            grown = step(*given)
            fill_mask(grown.tree.mask, grown.places, total)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check_grown(grown, given, budget)
