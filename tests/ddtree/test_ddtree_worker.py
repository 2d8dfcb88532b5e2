"""The drafter's candidates: log-probabilities over the whole vocabulary and GLOBAL ids, on one rank and on several."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed: make test-real", allow_module_level=True)

from ddtree_sglang.worker import gather_candidates, head_logits, local_candidates  # noqa: E402

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
