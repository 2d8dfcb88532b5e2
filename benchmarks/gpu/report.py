"""Markdown tables of a GPU run.

    python3 benchmarks/gpu/report.py docs/evidence/h200/result.json [--into docs/evidence/README.md]

Prints them, or puts them between the two marks of a page. Every number comes from the JSON that ``ddtree_gpu.py``
wrote; what was not run is listed as such.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BEGIN", "END", "insert", "render", "table"]

BEGIN, END = "<!-- report: begin -->", "<!-- report: end -->"
"""The marks between which :func:`insert` puts a report."""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is shown as ``-``, ``|`` in a cell is escaped."""

    def line(cells: Iterable[Any]) -> str:
        shown = ("-" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
        return "| " + " | ".join(shown) + " |"

    body = [line(row) for row in rows]
    if not body:
        return "Nothing was measured."
    return "\n".join([line(head), line("---" for _ in head), *body])


def _of(figure: Mapping[str, Any] | None) -> str | None:
    """``median (least to greatest, n samples)``."""
    if not figure or not figure.get("samples"):
        return None
    return f"{figure['median']:g} ({figure['least']:g} to {figure['greatest']:g}, n={figure['samples']})"


def _head(result: Mapping[str, Any]) -> str:
    seen = result["parts"].get("env", {}).get("seen", {})
    packages = seen.get("packages") or {}
    rows = [
        ("command", f"`{result.get('command')}`"),
        ("git revision", result.get("revision")),
        ("began, ended (UTC)", f"{result.get('began')}, {result.get('ended')}"),
        ("seconds", result.get("seconds")),
        ("GPU, driver, memory", seen.get("nvidia_smi") or seen.get("gpu")),
        ("Python", seen.get("python")),
        *((name, version) for name, version in packages.items() if version),
        ("CUDA of torch", seen.get("cuda")),
    ]
    return table(("what", "value"), rows)


def _verdicts(result: Mapping[str, Any]) -> str:
    rows = []
    for name, part in result["parts"].items():
        checks = part.get("checks", [])
        failed = [check["name"] for check in checks if check["passed"] is not True]
        left = [f"{row['what']}: {row['why']}" for row in part.get("not_run", [])]
        passed = f"{len(checks) - len(failed)} of {len(checks)}"
        rows.append((name, part["verdict"], passed, "; ".join(failed) or None, "; ".join(left) or None))
    return table(("part", "verdict", "checks passed", "failed", "not run"), rows)


def _crash(part: Mapping[str, Any]) -> str:
    first, check = part.get("unpatched", {}), part.get("self_check", {})
    rows = [
        (
            "self-check skipped",
            first.get("start"),
            first.get("exit_status"),
            " ".join(first.get("text") or []),
        ),
        ("self-check on", check.get("start"), check.get("exit_status"), " ".join(check.get("text") or [])),
    ]
    return table(("without the patch", "start", "exit status in the end", "text"), rows)


def _equality(part: Mapping[str, Any], servers: Mapping[str, Any]) -> str:
    rows = []
    for name, row in part.get("servers", {}).items():
        kind, totals = servers.get(name, {}), row.get("totals")
        if totals is None:
            rows.append((name, kind.get("dtype"), "not finished", *[None] * 6))
            continue
        ties = [tie["gap_nats"] for phase in row["phases"].values() for tie in phase["near_ties"]]
        graphs = row.get("graphs_captured") or []
        rows.append(
            (
                name,
                kind.get("dtype"),
                totals["requests"],
                totals["equal"],
                totals["near_ties"],
                f"{max(ties):.3g}" if ties else None,
                totals["mismatches"],
                row.get("accept_length"),
                graphs[0] if graphs else None,
            )
        )
    head = (
        *("server", "dtype", "requests", "equal", "near ties", "widest gap (nats)", "mismatches"),
        *("accept length", "graphs"),
    )
    return table(head, rows)


def _soak(part: Mapping[str, Any]) -> str:
    rows = [
        (kind, sum(row.values()), ", ".join(f"{what} {count}" for what, count in sorted(row.items())))
        for kind, row in sorted(part.get("outcomes", {}).items())
    ]
    text = table(("kind", "requests", "how they ended"), rows)
    if "tokens_after" in part:
        text += (
            f"\n\n{part['requests']} requests of {part['clients']} clients in {part['seconds_of_requests']} s. "
            "Slots of KV in use before, idle afterwards, and after the cache was dropped: "
            + ", ".join(
                f"{part[name]['num_used_tokens']} of {part[name]['max_total_num_tokens']}"
                for name in ("tokens_before", "tokens_idle", "tokens_after")
            )
            + "."
        )
    return text


def _speed(part: Mapping[str, Any]) -> str:
    rows = []
    for name, row in part.get("servers", {}).items():
        for batch, seen in row["batches"].items():
            rows.append(
                (
                    name,
                    row["pair"],
                    batch,
                    seen["accept_length"],
                    _of(seen["tokens_per_s"]),
                    _of(seen["step_ms"]),
                )
            )
    head = ("server", "drafter", "batch", "accept length", "tokens/s", "step (ms)")
    return table(head, rows)


def _tree(part: Mapping[str, Any]) -> str:
    rows = [
        (
            *(row["depth"], row["topk"], row["budget"], row["batch"]),
            *(row.get("kernels"), row.get("gpu_us"), row.get("call_us"), row.get("replay_us")),
            row.get("error") or row.get("skipped") or "equal",
        )
        for row in part.get("rows", [])
    ]
    head = (
        "depth",
        "topk",
        "budget",
        "batch",
        "kernels",
        "GPU µs",
        "eager µs",
        "graph µs",
        "against the CPU",
    )
    return table(head, rows)


def _cost(part: Mapping[str, Any]) -> str:
    rows = []
    for name, row in part.get("servers", {}).items():
        for batch, seen in row["batches"].items():
            ms, share = seen.get("ms", {}), seen.get("share_of_step", {})
            by = "graph" if row["tree_graph"] else "kernel by kernel"
            builds = f"{share['build']:.1%}" if "build" in share else None
            trees = f"{share['tree']:.1%}" if "tree" in share else None
            phases = (ms.get(phase) for phase in ("draft", "tree", "build", "verify", "commit", "step"))
            rows.append((name, by, batch, *phases, builds, trees, seen.get("steps")))
    head = (
        *(
            "server",
            "tree by",
            "batch",
            "draft ms",
            "tree ms",
            "build ms",
            "verify ms",
            "commit ms",
            "step ms",
        ),
        *("build / step", "tree / step", "steps"),
    )
    return table(head, rows)


def _real(part: Mapping[str, Any]) -> str:
    rows = [
        (name, batch, _of(seen["step_ms"]), _of(seen["client_step_ms"]))
        for name, row in part.get("servers", {}).items()
        for batch, seen in row["batches"].items()
    ]
    text = table(("server", "batch", "step (ms)", "step by the client's clock (ms)"), rows)
    even = [
        (row["batch"], row["budget"], row["step_ms"], row["over_none"], row["over_dflash"])
        for row in part.get("break_even", [])
    ]
    head = (
        "batch",
        "budget",
        "step (ms)",
        "wins over none above",
        "wins over DFLASH above, times its accept length",
    )
    return text + "\n\n" + table(head, even)


def render(result: Mapping[str, Any]) -> str:
    """The whole report of a result, as Markdown."""
    parts, servers = result["parts"], result.get("servers", {})

    def equality(part: Mapping[str, Any]) -> str:
        return str(result.get("near_tie_rule", "")) + "\n\n" + _equality(part, servers)

    sections: list[tuple[str, str, Callable[[Mapping[str, Any]], str]]] = [
        ("crash", "The crash", _crash),
        ("equality", "Outputs against plain greedy decoding", equality),
        ("soak", "Mixed requests", _soak),
        ("speed", "Accept length and tokens/s, tiny models", _speed),
        ("tree", "The tree step alone", _tree),
        ("cost", "The tree step as a share of a decode step", _cost),
        ("real", "Dummy weights of the shape of Qwen3-8B", _real),
    ]
    text = ["### The run", _head(result), "### Verdicts", _verdicts(result)]
    for name, title, show in sections:
        part = parts.get(name, {})
        text += [f"### {title}", f"Verdict: {part.get('verdict', 'not run')}."]
        if part.get("units"):
            text.append(part["units"])
        text.append(show(part))
    return "\n\n".join(text) + "\n"


def insert(page: str, text: str) -> str:
    """``page`` with ``text`` between the marks. Raises ValueError unless each mark is there once, in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have {BEGIN} and behind it {END}, once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Markdown tables of a GPU run.")
    parser.add_argument("json", type=Path, help="the result.json of ddtree_gpu.py")
    parser.add_argument("--into", type=Path, help="page whose marked section is replaced")
    args = parser.parse_args()
    text = render(json.loads(args.json.read_text()))
    if args.into is None:
        sys.stdout.write(text)
    else:
        args.into.write_text(insert(args.into.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
