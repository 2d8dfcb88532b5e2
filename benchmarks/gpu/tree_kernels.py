"""The tree step alone, on a device: ``tree_kernels.py cuda|cpu OUT.json SECONDS`` with ``ddtree_sglang`` on PYTHONPATH.

For each shape: the tree of the device equals that of the CPU; no operator synchronises (``set_sync_debug_mode``); the
step as the worker takes it (a CUDA graph a batch size, padded between two of them) gives the same on other inputs;
number of kernels and their GPU time; time of a call launched one by one and of the worker's. Rows are written as they come; one that fails holds the ``error``.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ddtree_sglang.grow import Grown, TreeStep
from ddtree_sglang.tree import Tree, build_tree, custom_mask, fill_mask, positions, prepare

SHAPES = [
    (7, 8, 32),
    (7, 8, 64),
    (7, 8, 16),
    (7, 8, 8),
    (7, 8, 7),
    (7, 4, 32),
    (7, 1, 7),
    (15, 8, 64),
    (7, 8, 256),
]
"""(depth, topk cap, budget), the most wanted first."""
PREFIX = 1000
VOCABULARY = 4000


def same(left: Tree, right: Tree) -> None:
    """Raise AssertionError, naming the field, unless two trees are equal."""
    for field in fields(Tree):
        assert torch.equal(getattr(left, field.name).cpu(), getattr(right, field.name).cpu()), field.name


def timed(call: Callable[[], Any], repeats: int, cuda: bool) -> float:
    """Microseconds a call, mean over ``repeats``, the device's work included."""
    for _ in range(3):
        call()
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if cuda:
        torch.cuda.synchronize()
    return round((time.perf_counter() - began) / repeats * 1e6, 2)


def measure(device: torch.device, depth: int, width: int, budget: int, batch: int) -> dict[str, Any]:
    """One row. Raises what the operators raise, AssertionError for a tree that differs."""
    cuda = device.type == "cuda"
    generator = torch.Generator().manual_seed(batch)

    def drafted() -> torch.return_types.topk:
        return torch.log_softmax(torch.randn(batch, depth, VOCABULARY, generator=generator) * 3, -1).topk(
            width, -1
        )

    first = drafted()
    values, tokens = first.values.to(device), first.indices.to(device)
    root = torch.arange(batch, device=device)
    lens = torch.full((batch,), PREFIX, device=device)
    prepare(depth, width, budget, device)

    def build() -> Tree:
        return build_tree(values, tokens, budget, root=root)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        tree = build()
        return custom_mask(tree, lens, PREFIX * batch), positions(tree, lens)

    row: dict[str, Any] = {}
    want = build_tree(first.values, first.indices, budget, root=root.cpu())
    wanted_mask = custom_mask(want, lens.cpu(), PREFIX * batch)
    if not cuda:
        same(build(), want)
        row["equals_cpu"] = True
        row["call_us"] = timed(step, 3, cuda)
        return row

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree, (mask, _) = build(), step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row["no_sync"] = True
    same(tree, want)
    assert torch.equal(mask.cpu(), wanted_mask), "custom_mask"
    row["equals_cpu"] = True

    graphed = TreeStep(depth, width, budget, device, sizes=(1, 2, 4, 16))

    def replay(count: int) -> tuple[Grown, torch.Tensor]:
        grown = graphed(values[:count], tokens[:count], root[:count], lens[:count])
        return grown, fill_mask(grown.tree.mask, grown.places, PREFIX * count)

    for count in sorted({batch, max(1, batch - 1)}):
        other = drafted()
        values.copy_(other.values)
        tokens.copy_(other.indices)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            grown, kept_mask = replay(count)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        again = build_tree(other.values[:count], other.indices[:count], budget, root=root[:count].cpu())
        same(grown.tree, again)
        there = lens[:count].cpu()
        assert torch.equal(grown.positions.cpu(), positions(again, there)), "positions of the replay"
        assert torch.equal(kept_mask.cpu(), custom_mask(again, there, PREFIX * count)), "mask of the replay"
    row["graph_replay_equals_cpu"] = True

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    row["kernels"] = len(kernels)
    row["gpu_us"] = round(sum(event.device_time for event in kernels), 1)
    row["longest"] = sorted(([round(e.device_time, 1), e.name[:60]] for e in kernels), reverse=True)[:3]
    row["call_us"] = timed(step, 200, cuda)
    row["replay_us"] = timed(lambda: replay(batch), 200, cuda)
    row["timed_calls"] = 200
    return row


def main() -> None:
    device, out, seconds = torch.device(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    for depth, width, budget in SHAPES:
        for batch in (1, 4, 16):
            row: dict[str, Any] = {"depth": depth, "topk": width, "budget": budget, "batch": batch}
            if time.monotonic() > end:
                row["skipped"] = "no time left"
            else:
                try:
                    row |= measure(device, depth, width, budget, batch)
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:500]
                    print(traceback.format_exc(), flush=True)
            rows.append(row)
            out.write_text(json.dumps(rows))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
