"""Markdown tables of a GPU run.

    python3 benchmarks/gpu/report.py docs/evidence/h200/result.json [--into docs/evidence/README.md]

Prints them, or puts them between the two marks of a page that bear the name of the JSON's folder. Every number comes
from the JSON that ``ddtree_gpu.py`` wrote, or from the ``logs.tar.xz`` beside it, where that is there: the spread of
times over the servers' log lines. What was not run is listed as such. Without the JSON the page says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from evidence import spread, step_rounds, times_lines

__all__ = ["ABSENT", "changed_since", "insert", "marks", "of_folder", "read_logs", "render", "table"]

ABSENT = "Not recorded."
"""What the page says of a run that is not there."""
NOT_ASKED = "not asked for (--only)"
"""Why a part that ``--only`` left out was not run; the table of verdicts says so, and no section is shown."""
LEAST = 8
"""Log lines below which a round is too short to be shown: the warm-up."""
Logs = Mapping[str, str]


def marks(name: str) -> tuple[str, str]:
    """The marks between which :func:`insert` puts the report of that name."""
    return f"<!-- report {name}: begin -->", f"<!-- report {name}: end -->"


def changed_since(result: Mapping[str, Any], root: Path) -> list[str]:
    """Files of the tree ``root`` that are not, by sha256, those a run was made with; paths from ``root``.

    What :mod:`report` itself, which only shows a result, was then is left out. Files that came or went count.
    """
    seen = result["parts"]["env"]["seen"]
    recorded: dict[str, str] = {}
    for name, digest in seen["sha256"].items():
        folder = "patches/sglang-0.5.11" if name.endswith(".patch") else "ddtree_sglang"
        recorded[f"{folder}/{name}"] = digest
    for name, digest in seen["script_sha256"].items():
        folder = "tests/ddtree/cpu" if name == "make_models.py" else "benchmarks/gpu"
        recorded[f"{folder}/{name}"] = digest
    there = {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in ("ddtree_sglang/*.py", "benchmarks/gpu/*.py", "tests/ddtree/cpu/make_models.py")
        for path in root.glob(pattern)
    }
    for name in recorded:
        if name.startswith("patches/") and (root / name).exists():
            there[name] = hashlib.sha256((root / name).read_bytes()).hexdigest()
    differ = {name for name in recorded.keys() | there.keys() if recorded.get(name) != there.get(name)}
    return sorted(differ - {"benchmarks/gpu/report.py"})


def of_folder(folder: Path) -> str:
    """The report of a folder with ``result.json``; :data:`ABSENT` where there is none."""
    if not (folder / "result.json").exists():
        return ABSENT
    return render(json.loads((folder / "result.json").read_text()), read_logs(folder / "logs.tar.xz"))


def read_logs(archive: Path) -> dict[str, str]:
    """Text of every ``logs/NAME.log`` of an archive, by name; empty where there is no archive."""
    if not archive.exists():
        return {}
    texts = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            stream = tar.extractfile(member)
            if stream is not None:
                texts[Path(member.name).stem] = stream.read().decode(errors="replace")
    return texts


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
        if part.get("not_asked"):
            left.append("not asked for: " + ", ".join(part["not_asked"]))
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
    said = [
        (
            key,
            row["requests"],
            len(row["tokens_said"]),
            row.get("different_outputs"),
            row.get("repeating_outputs"),
        )
        for key, row in part.get("reference", {}).items()
    ]
    text = table(head, rows) + _ties(part)
    if said:
        head = ("target", "requests", "different tokens", "different texts of 24", "that repeat themselves")
        text += "\n\nWhat the targets say to plain decoding, batch size 1:\n\n" + table(head, said)
    return text


def _ties(part: Mapping[str, Any]) -> str:
    """Where the near ties were: a place that several servers and batch sizes met is one row."""
    seen: Counter[tuple[Any, ...]] = Counter()
    servers: dict[tuple[Any, ...], set[str]] = {}
    for name, row in part.get("servers", {}).items():
        for phase, outcome in row["phases"].items():
            for tie in outcome["near_ties"]:
                what = "second turn" if phase == "prefix hits" else "prompt"
                if row.get("reference", "lower") != "lower":
                    what = f"`{row['reference']}`, {what}"
                place = f"{what} {tie.get('request')}, token {tie.get('place')}"
                key = (place, tie.get("plain"), tie.get("other"), tie["gap_nats"])
                seen[key] += 1
                servers.setdefault(key, set()).add(name)
    if not seen:
        return ""
    rows = [(*key, len(servers[key]), count) for key, count in seen.most_common()]
    head = ("place", "plain says", "the other says", "gap (nats)", "servers", "times")
    return f"\n\nAll {seen.total()} near ties are at {len(seen)} places:\n\n" + table(head, rows)


def _soak(part: Mapping[str, Any]) -> str:
    rows = [
        (kind, sum(row.values()), ", ".join(f"{what} {count}" for what, count in sorted(row.items())))
        for kind, row in sorted(part.get("outcomes", {}).items())
    ]
    text = table(("kind", "requests", "how they ended"), rows)
    if "greedy" in part:
        seen = part["greedy"]
        text += (
            f"\n\nThe greedy ones among them against plain decoding, each alone: {seen['requests']} compared, "
            f"{seen['while_a_sampled_one_was_asked']} of them asked while a sampled one was; {seen['equal']} equal, "
            f"{len(seen['near_ties'])} near ties, {len(seen['mismatches'])} mismatches; {seen['tokens_equal']} of "
            f"{seen['tokens']} tokens before a difference."
        )
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


def _spread(samples: Sequence[float], unit: float = 1) -> str:
    """``median (tenth to ninetieth percentile)``."""
    low, middle, high = (value * unit for value in spread(samples))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _cost_spread(part: Mapping[str, Any], logs: Logs) -> str:
    """Times of phases and shares of a step over the log lines of each server."""
    rows = []
    for name, row in part.get("servers", {}).items():
        lines = times_lines(logs.get(name, ""))
        for batch in row["batches"]:
            kept = [line for line in lines if abs(line.get("bs", 0) - int(batch)) < 0.01]
            # the very first line of a server holds what is done once
            kept = [line for line in kept if line is not lines[0] and line.get("step")]
            if not kept:
                continue
            phases = (
                _spread([line[phase] for line in kept]) for phase in ("build", "verify", "commit", "step")
            )
            shares = (
                _spread([line[phase] / line["step"] for line in kept], 100) for phase in ("build", "tree")
            )
            by = "graph" if row["tree_graph"] else "kernel by kernel"
            rows.append((name, by, batch, len(kept), *phases, *shares))
    if not rows:
        return ""
    head = ("server", "tree by", "batch", "lines", "build ms", "verify ms", "commit ms", "step ms")
    head = (*head, "build / step, %", "tree / step, %")
    return (
        "\n\nThe spread over log lines, each the mean of 10 steps: median (tenth to ninetieth percentile).\n\n"
        + table(head, rows)
    )


def _rounds(part: Mapping[str, Any], logs: Logs) -> dict[str, dict[str, list[list[float]]]]:
    """Times of a step in milliseconds, by server, batch size and round."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for name, row in part.get("servers", {}).items():
        for batch in row["batches"]:
            rounds = step_rounds(logs.get(row["server"], ""), int(batch))
            found.setdefault(name, {})[batch] = [one for one in rounds if len(one) >= LEAST]
    return found


def _between(ours: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> str | None:
    """Least and greatest ratio of the rounds' medians."""
    if not ours or not base:
        return None
    over = [statistics.median(one) for one in ours]
    under = [statistics.median(one) for one in base]
    return f"{min(over) / max(under):.2f} to {max(over) / min(under):.2f}"


def _real(part: Mapping[str, Any], logs: Logs) -> str:
    rounds = _rounds(part, logs)
    wide = max((len(one) for row in rounds.values() for one in row.values()), default=0)
    rows = [
        (
            name,
            batch,
            _of(seen["step_ms"]),
            _of(seen["client_step_ms"]),
            *(
                f"{_spread(one)}, n={len(one)}"
                for one in [*rounds[name][batch], *[[]] * (wide - len(rounds[name][batch]))]
                if one
            ),
        )
        for name, row in part.get("servers", {}).items()
        for batch, seen in row["batches"].items()
    ]
    head: tuple[str, ...] = ("server", "batch", "step (ms)", "step by the client's clock (ms)")
    text = ""
    if wide:
        head += tuple(f"round {number + 1} (ms)" for number in range(wide))
        text = (
            "A round is one answer to each request of the batch, without its first log line, which counts the "
            "prefill and what was between the rounds (in `step (ms)` it is the greatest): median (tenth to ninetieth percentile).\n\n"
        )
    text += table(head, rows)
    even = [
        (
            *(row["batch"], row["budget"], row["step_ms"]),
            *(
                value
                for base in ("none", "dflash")
                for value in (
                    row[f"over_{base}"],
                    _between(
                        rounds.get(f"ddtree-{row['budget']}", {}).get(str(row["batch"]), []),
                        rounds.get(base, {}).get(str(row["batch"]), []),
                    ),
                )
            ),
        )
        for row in part.get("break_even", [])
    ]
    head = (
        "batch",
        "budget",
        "step (ms)",
        "wins over none above",
        "by rounds",
        "wins over DFLASH above, times its accept length",
        "by rounds",
    )
    return text + "\n\n" + table(head, even)


def render(result: Mapping[str, Any], logs: Logs | None = None) -> str:
    """The whole report of a result, as Markdown; ``logs`` (:func:`read_logs`) add the spread of times."""
    logs = logs or {}
    parts, servers = result["parts"], result.get("servers", {})

    def equality(part: Mapping[str, Any]) -> str:
        return str(result.get("near_tie_rule", "")) + "\n\n" + _equality(part, servers)

    def cost(part: Mapping[str, Any]) -> str:
        return _cost(part) + _cost_spread(part, logs)

    def real(part: Mapping[str, Any]) -> str:
        return _real(part, logs)

    sections: list[tuple[str, str, Callable[[Mapping[str, Any]], str]]] = [
        ("crash", "The crash", _crash),
        ("equality", "Outputs against plain greedy decoding", equality),
        ("soak", "Mixed requests", _soak),
        ("speed", "Accept length and tokens/s, tiny models", _speed),
        ("tree", "The tree step alone", _tree),
        ("cost", "The tree step as a share of a decode step", cost),
        ("real", "Dummy weights of the shape of Qwen3-8B", real),
    ]
    text = ["### The run", _head(result), "### Verdicts", _verdicts(result)]
    for name, title, show in sections:
        part = parts.get(name, {})
        if [row["why"] for row in part.get("not_run", [])] == [NOT_ASKED]:
            continue
        text += [f"### {title}", f"Verdict: {part.get('verdict', 'not run')}."]
        if part.get("units"):
            text.append(part["units"])
        text.append(show(part))
    return "\n\n".join(text) + "\n"


def insert(page: str, text: str, name: str) -> str:
    """``page`` with ``text`` between the marks of ``name``. Raises ValueError unless each is there once, in order."""
    begin, end = marks(name)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must have {begin} and behind it {end}, once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Markdown tables of a GPU run.")
    parser.add_argument("json", type=Path, help="the result.json of ddtree_gpu.py")
    parser.add_argument("--into", type=Path, help="page whose marked section is replaced")
    args = parser.parse_args()
    text = of_folder(args.json.parent)
    if args.into is None:
        sys.stdout.write(text)
    else:
        args.into.write_text(insert(args.into.read_text(), text, args.json.resolve().parent.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
