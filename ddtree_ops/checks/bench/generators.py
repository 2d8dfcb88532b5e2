"""Load generators: ``sglang.bench_serving`` of the host's own venv, and a small one of ours for lab hosts.

Both run on the host, so that neither the network nor the SSH connection is measured, with the same prompts: chats, put
through the model's own chat template by the server, answered at temperature 0 to their natural end. Random tokens, and
answers that are forced on beyond their end, would measure acceptance of text that nobody asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ddtree_ops.checks.bench.measured import Distribution, Measurement, Sample, from_samples, mad
from ddtree_ops.checks.engine import base_url
from ddtree_ops.errors import Inconclusive
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.secret import Secret, redact
from ddtree_ops.service.layout import Layout

__all__ = [
    "BENCH_SERVING",
    "OWN",
    "Choice",
    "Load",
    "bench_serving_argv",
    "dataset",
    "find_bench_serving",
    "numbered",
    "parse_bench_serving",
    "parse_own",
    "run_bench_serving",
    "run_own",
]

Choice = Literal["auto", "bench_serving", "own"]
BENCH_SERVING, OWN = "sglang.bench_serving", "own load generator"
_PROGRAM = Path(__file__).with_name("load_host.py")
_MODULE = "sglang.bench_serving"
_NEEDED_FLAGS = (b"--sharegpt-output-len", b"--max-concurrency", b"--output-details", b"--flush-cache")


@dataclass(frozen=True)
class Load:
    """What one point is loaded with.

    :param prompts: one a request, in their order.
    :param max_tokens: longest answer.
    :param timeout: seconds for one request.
    :param deadline: seconds for all of it; then it is killed.
    """

    model: str
    prompts: tuple[str, ...]
    concurrency: int
    max_tokens: int
    timeout: float
    deadline: float
    api_key: Secret | None = None


def numbered(prompts: Sequence[str], count: int, *, first: int = 1) -> tuple[str, ...]:
    """``count`` requests from fewer prompts: each has its number in front, so that no two share a cached prefix. Pure."""
    return tuple(f"({number}) {text}" for number, text in enumerate(islice(cycle(prompts), count), first))


def dataset(prompts: Sequence[str]) -> bytes:
    """Prompts as ``--dataset-name custom`` reads them. The second turn is not sent; it must be there. Pure."""
    rows = ({"conversations": [{"content": text}, {"content": "not sent"}]} for text in prompts)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


# ---------------------------------------------------------------------------------- sglang.bench_serving


def bench_serving_argv(target: Target, load: Load, prompts: str) -> list[str]:
    """The command line. The API key is not on it. Pure.

    :param prompts: path of the dataset on the host.
    """
    options = {
        "--backend": "sglang-oai-chat",
        "--base-url": base_url(target),
        "--model": target.service.model,
        "--served-model-name": load.model,
        "--dataset-name": "custom",
        "--dataset-path": prompts,
        "--num-prompts": str(len(load.prompts)),
        "--sharegpt-output-len": str(load.max_tokens),
        "--max-concurrency": str(load.concurrency),
        "--warmup-requests": str(max(2, load.concurrency)),
        "--extra-request-body": '{"stream_options": {"include_usage": true}}',
        "--output-file": "/proc/self/fd/1",
        "--seed": "1",
    }
    flags = ["--flush-cache", "--disable-ignore-eos", "--output-details", "--disable-tqdm"]
    words = [word for pair in options.items() for word in pair]
    return [f"{target.service.venv}/bin/python", "-m", _MODULE, *words, *flags]


def _environment(target: Target, api_key: Secret | None) -> dict[str, str]:
    """The service's own, for it imports what the engine imports; of the secrets the API key alone."""
    layout = Layout.of(target)
    found = {
        **target.service.environment,
        "PYTHONPATH": layout.current,
        "PYTHONPYCACHEPREFIX": layout.pycache,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    return found if api_key is None else {**found, "OPENAI_API_KEY": api_key.reveal()}


def find_bench_serving(session: Session, target: Target) -> str:
    """Why the host's venv cannot run it; empty: it can. It is asked for its help, which imports all that it needs."""
    argv = [f"{target.service.venv}/bin/python", "-m", _MODULE, "--help"]
    done = session.run(argv, env=_environment(target, None), deadline=300.0)
    if done.rc != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{_MODULE} does not run in {target.service.venv}: {said[-1] if said else f'exit status {done.rc}'}"
    lacking = [flag.decode() for flag in _NEEDED_FLAGS if flag not in done.stdout]
    return f"{_MODULE} of this runtime has no {', '.join(lacking)}" if lacking else ""


def run_bench_serving(session: Session, target: Target, load: Load) -> Measurement:
    """Measure a point: warm-up, flush of the prefix cache, then the requests, all by ``sglang.bench_serving``.

    Its result comes over standard output: it holds ``/server_info`` with the API key in clear, which belongs on no disk.

    :raises Inconclusive: it ended without a result; its last lines are the details.
    """
    layout = Layout.of(target)
    folder = f"{layout.service_dir}/bench"
    path = f"{folder}/prompts.jsonl"
    session.write_file(path, dataset(load.prompts), mode=0o600)
    try:
        done = session.run(
            bench_serving_argv(target, load, path),
            env=_environment(target, load.api_key),
            deadline=load.deadline,
        )
    finally:
        session.remove_tree(folder, below=layout.service_dir)
    secrets = (load.api_key.reveal(),) if load.api_key else ()
    text = done.stdout.decode("utf-8", "replace")
    found = parse_bench_serving(text, requested=len(load.prompts)) if done.rc == 0 else None
    if found is None:
        said = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace").splitlines()[-6:]
        raise Inconclusive(
            f"{_MODULE} gave no result (exit status {done.rc})",
            details=tuple(redact(line, *secrets)[:300] for line in said),
        )
    return found


def parse_bench_serving(output: str, *, requested: int) -> Measurement | None:
    """What it printed, the JSON line of its result among it; None where there is none. Pure.

    Medians and 99th percentiles are its own; deviations come from its details, a value a request.
    """
    document: Any = None
    for line in output.split(
        "\n"
    ):  # str.splitlines cuts at U+0085 and U+2028 too, which may stand in an answer
        if line.startswith("{") and '"request_throughput"' in line:
            try:
                document = json.loads(line)
            except ValueError:
                continue
    if not isinstance(document, Mapping):
        return None
    errors = [str(error) for error in document.get("errors") or ()]
    answered = [place for place, error in enumerate(errors) if not error]
    try:
        completed = int(document["completed"])
        details = _details(document, answered)
        times = {
            name: Distribution(
                float(document[f"median_{theirs}_ms"]) / 1000,
                float(document[f"p99_{theirs}_ms"]) / 1000,
                len(details[name]) or completed,
                mad(details[name]),
            )
            if completed
            else None
            for name, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("latency", "e2e_latency"))
        }
        accept = document.get("accept_length")
        return Measurement(
            generator=BENCH_SERVING,
            requested=requested,
            completed=completed,
            seconds=float(document["duration"]),
            tokens=int(document["total_output_tokens"]) if completed else None,
            times=times,
            errors=tuple(
                dict.fromkeys(error.strip().splitlines()[-1][:300] for error in errors if error.strip())
            ),
            accept_length=float(accept) if isinstance(accept, int | float) else None,
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _details(document: Mapping[str, Any], answered: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each answered request by quantity."""
    ttfts = [float(document["ttfts"][place]) for place in answered]
    rests = [sum(document["itls"][place]) for place in answered]
    tokens = [int(document["output_lens"][place]) for place in answered]
    return {
        "ttft": ttfts,
        "latency": [ttft + rest for ttft, rest in zip(ttfts, rests, strict=True)],
        "tpot": [rest / (count - 1) for rest, count in zip(rests, tokens, strict=True) if count > 1],
    }


# ---------------------------------------------------------------------------------------------------- own


def run_own(session: Session, target: Target, load: Load) -> Measurement:
    """Measure a point with our own generator. Nothing is warmed up or flushed.

    :raises Inconclusive: it ended without a result.
    """
    place = urlsplit(base_url(target))
    given = {
        "host": place.hostname,
        "port": place.port,
        "model": load.model,
        "prompts": list(load.prompts),
        "concurrency": load.concurrency,
        "max_tokens": load.max_tokens,
        "timeout": load.timeout,
        "api_key": load.api_key.reveal() if load.api_key else "",
    }
    program = _PROGRAM.read_text("utf-8") + f"\n\nmain(json.loads({json.dumps(given)!r}))\n"
    argv = [target.host.ssh.python, "-X", "utf8", "-ISB", "-"]
    done = session.run(argv, input=program.encode(), deadline=load.deadline)
    found = parse_own(done.stdout) if done.rc == 0 else None
    if found is None:
        secrets = (load.api_key.reveal(),) if load.api_key else ()
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-6:]
        raise Inconclusive(
            f"the load generator gave no result (exit status {done.rc})",
            details=tuple(redact(line, *secrets)[:300] for line in said),
        )
    return found


def parse_own(output: bytes) -> Measurement | None:
    """What ``load_host.py`` printed; None where that is something else. Pure."""
    try:
        document = json.loads(output)
        samples = [
            Sample(each["ttft"], each["latency"], each["tokens"], str(each["error"]))
            for each in document["samples"]
        ]
        return from_samples(OWN, samples, float(document["seconds"]))
    except (ValueError, KeyError, TypeError):
        return None
