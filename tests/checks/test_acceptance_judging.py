"""Golden cases of the check ``acceptance``, its prompts, and golden files of the check ``lossless``."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks.engine import Generation, ServerInfo
from ddtree_ops.checks.speculation import DecodeWindow, summarise_decode
from ddtree_ops.checks.validation.acceptance_judging import (
    Counts,
    accounting,
    contradictions,
    judge_acceptance,
    judge_said,
    same_algorithm,
    total_counts,
)
from ddtree_ops.checks.validation.acceptance_prompts import Ask, kinds, pick_prompts, render
from ddtree_ops.checks.validation.base import CHECKS
from ddtree_ops.checks.validation.golden import (
    Golden,
    Spoken,
    answer_of,
    demand_room,
    load,
    other_target,
    save,
    server_facts,
    with_gaps,
)
from ddtree_ops.checks.validation.lossless import Lossless, _baseline
from ddtree_ops.checks.validation.lossless_judging import Answer
from ddtree_ops.checks.validation.suites import Planned, heed_golden
from ddtree_ops.errors import ConfigError, Inconclusive, OpsError, UsageError
from ddtree_ops.noise import compare
from ddtree_ops.results import Verdict

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
QUIET = summarise_decode(())


def log(*lengths: float) -> DecodeWindow:
    return summarise_decode(
        f"[2026-01-29 00:24:41] Decode batch, #running-req: 1, #token: 194, token usage: 0.05, accept len: {length:.2f}, "
        "accept rate: 1.00, cuda graph: True, gen throughput (token/s): 39.88, #queue-req: 0"
        for length in lengths
    )


def counts(name: str, *histogram: int) -> Counts:
    steps, accepted = sum(histogram), sum(place * number for place, number in enumerate(histogram))
    return Counts(name, steps, accepted, steps + accepted, 1, histogram)


GOOD = [counts("code-1", 1, 2, 3, 4), counts("prose-1", 5, 5)]


@pytest.mark.parametrize(
    ("given", "more", "verdict", "words"),
    [
        (GOOD, {}, PASS, "accept length 2.25 of at most 8 tokens a step (25 drafts in 20 steps)"),
        (GOOD, {"block_size": None}, PASS, "accept length 2.25 tokens a step"),
        (GOOD, {"floor": 2.25}, PASS, "2.25"),
        (GOOD, {"floor": 2.3}, FAIL, "below the 2.3 that is asked for"),
        ([counts("a", 40)], {}, FAIL, "useless: accept length 1.00"),
        ([counts("a", 40), counts("b", 1, 1)], {}, PASS, "accept length 1.02"),
        ([], {}, INCONCLUSIVE, "no accept length to be had"),
        ([counts("a")], {}, INCONCLUSIVE, "no accept length to be had"),
        ([Counts("a", 10, 90, 100)], {}, FAIL, "10.00 tokens a step exceed the block size 8"),
        ([counts("a", *[0] * 8, 1), *GOOD], {}, FAIL, "a: 9.00 tokens a step exceed"),
        ([counts("a", 20, *[0] * 7, 1)], {}, FAIL, "8 drafts accepted in one step, and a block of 8 has 7"),
        ([replace(GOOD[0], accepted=19)], {}, FAIL, "the histogram holds 20 drafts in 10 steps, the counts say 19"),
        (GOOD, {"decode": log(2.2, 2.4, 2.1)}, PASS, "2.25"),
        (GOOD, {"decode": log(4.0, 4.0, 4.0)}, INCONCLUSIVE, "the log says 4.00 tokens a step (3 decode lines)"),
        (GOOD, {"decode": log(4.0)}, PASS, "2.25"),
        (GOOD, {"decode": log(2.8, 2.8, 2.8)}, PASS, "2.25"),
        (GOOD, {"decode": log(2.9, 2.9, 2.9)}, INCONCLUSIVE, "the log says 2.90"),
        (GOOD, {"decode": log(1.6, 1.6, 1.6)}, INCONCLUSIVE, "the log says 1.60"),
        (GOOD, {"answered": 2}, PASS, "2.25"),
        (GOOD, {"answered": 3}, INCONCLUSIVE, "2 of 3 answers carry speculative counts"),
        (GOOD * 5, {"answered": 11}, PASS, "2.25"),
        (GOOD * 5, {"answered": 12}, INCONCLUSIVE, "10 of 12 answers carry speculative counts"),
        ([counts("a", 0, 2)], {}, INCONCLUSIVE, "2 verify steps in 1 answer: an accept length needs 10"),
        ([counts("a", 0, 9)], {}, INCONCLUSIVE, "9 verify steps"),
        ([counts("a", 0, 10)], {}, PASS, "accept length 2.00"),
        ([counts("a", 0, *[0] * 7, 2)], {}, FAIL, "exceed the block size"),
        (GOOD, {"decode": log(2.2, 9.1, 2.2)}, FAIL, "the log: 9.10 tokens a step exceed"),
        (GOOD, {"server": 9.1}, FAIL, "/server_info: 9.10 tokens a step exceed"),
        (GOOD, {"server": 3.1}, PASS, "2.25"),
        (GOOD, {"change": compare([4.0] * 6, 2.25, higher_is_better=True)}, FAIL, "worse than the median 4.00 of 6 runs"),
        (GOOD, {"change": compare([4.0] * 3, 2.25, higher_is_better=True)}, PASS, "2.25"),
        (GOOD, {"change": compare([2.3] * 6, 2.25, higher_is_better=True)}, PASS, "2.25"),
    ],
)  # fmt: skip
def test_acceptance(given: list[Counts], more: dict[str, Any], verdict: Verdict, words: str) -> None:
    found = judge_acceptance(given, **{"block_size": 8, "floor": None, "decode": QUIET, **more})
    assert found.verdict is verdict
    assert words in found.summary


def test_totals_add_the_histograms_where_every_answer_has_one() -> None:
    total = total_counts("all", GOOD)
    assert (total.histogram, total.steps, total.accepted, total.requests) == ((6, 7, 3, 4), 20, 25, 2)
    assert total_counts("all", [*GOOD, Counts("x", 4, 4, 8)]).histogram == ()
    assert total_counts("all", [*GOOD, Counts("x", 0, 0, 1)]).histogram == (6, 7, 3, 4)
    assert total_counts("all", []).length is None


def test_accounting_of_good_counts_is_silent() -> None:
    assert accounting(GOOD, 8) == []
    assert accounting(GOOD, None) == []
    assert accounting(GOOD, 4) == []
    assert accounting(GOOD, 3) == ["code-1: 3 drafts accepted in one step, and a block of 3 has 2"]
    assert contradictions(total_counts("all", GOOD), log(2.0, 2.5, 2.3)) == []


def test_counts_of_an_answer() -> None:
    answer = Generation("t", "stop", 9, 0.1, verify_steps=2, accepted_drafts=6, histogram=(0, 0, 0, 2))
    assert Counts.of("a", answer) == Counts("a", 2, 6, 9, 1, (0, 0, 0, 2))
    assert Counts.of("a", Generation("t", "stop", 9, 0.1)) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("DDTREE", "DDTREE", True),
        ("ddtree", "DDTREE", True),
        ("NEXTN", "EAGLE", True),
        ("DDTREE", "DFLASH", False),
        ("DDTREE", "EAGLE", False),
        ("EAGLE", "EAGLE3", False),
    ],
)
def test_the_algorithm_is_the_configured_one(one: str, other: str, same: bool) -> None:
    assert same_algorithm(one, other) is same


SENSE = "The harbour office keeps a ledger of every vessel that has asked for a berth since the spring."


@pytest.mark.parametrize(
    ("texts", "quality", "verdict", "words"),
    [
        ([SENSE] * 12, True, None, ""),
        ([SENSE] * 9 + ["!" * 80] * 3, True, None, ""),
        ([SENSE] * 8 + ["!" * 80] * 4, True, FAIL, "4 of 12 answers garbage"),
        (["!" * 80] * 12, True, FAIL, "their accept length says nothing"),
        (["!" * 80] * 12, False, None, ""),
        ([""] * 12, True, FAIL, "12 of 12 answers have tokens and no text (p0)"),
        ([""] * 12, False, INCONCLUSIVE, "tokens and no text"),
        ([], True, None, ""),
    ],
)
def test_answers_that_are_no_text(
    texts: list[str], quality: bool, verdict: Verdict | None, words: str
) -> None:
    said = [(f"p{place}", Generation(text, "length", 24, 0.1)) for place, text in enumerate(texts)]
    found = judge_said(said, quality=quality)
    assert (None if found is None else found.verdict) is verdict
    assert words in ("" if found is None else found.summary)


# -------------------------------------------------------------------------------------------------- the prompts


def test_prompts_are_of_every_kind_in_turn() -> None:
    assert set(kinds()) == {"code", "prose", "chat", "math", "chinese", "json"}
    picked = pick_prompts(7)
    assert [each.name for each in picked] == [
        "code-1", "prose-1", "chat-1", "math-1", "chinese-1", "json-1", "code-2",
    ]  # fmt: skip
    every = pick_prompts(1000)
    assert len(every) == sum(map(len, kinds().values())) >= 16
    assert len({each.text for each in every}) == len(every)
    assert [each.kind for each in pick_prompts(2, ["json"])] == ["json", "json"]
    assert pick_prompts(3, ["nothing"]) == ()


class Host:
    """A host whose venv answers the script that applies the template."""

    def __init__(self, rc: int, stdout: str, stderr: str = "") -> None:
        self.done = SimpleNamespace(rc=rc, stdout=stdout.encode(), stderr=stderr.encode())
        self.asked: list[tuple[list[str], dict[str, Any]]] = []

    def run(self, argv: list[str], *, input: bytes, env: dict[str, str], deadline: float) -> Any:
        self.asked.append((argv, json.loads(input)))
        return self.done


def rendering(host: Host, tokens: int = 3, **service: Any) -> Any:
    given = {"venv": "/venv", "model": "/models/m", "args": {}, "user": None, **service}
    engine = SimpleNamespace(chat=lambda *_, **__: SimpleNamespace(prompt_tokens=tokens))
    return SimpleNamespace(
        say=lambda *_: None,
        session=host,
        shared={},
        engine=engine,
        model=SimpleNamespace(name="m"),
        timeout=1,
        target=SimpleNamespace(service=SimpleNamespace(**given)),
    )


ASKS = (Ask("a-1", "a", "one"), Ask("a-2", "a", "two"))


def test_the_template_is_applied_by_the_venv_of_the_service() -> None:
    host = Host(0, "noise of an import\n@@[[1, 2, 3], [4, 5]]\n")
    ctx = rendering(host, args={"trust-remote-code": True}, user="serve")
    found = render(ctx, ASKS)
    assert ([each.given for each in found.prompts], found.templated, found.note) == (
        [(1, 2, 3), (4, 5)],
        True,
        "",
    )
    ((argv, asked),) = host.asked
    assert argv[:5] == ["runuser", "-u", "serve", "--", "/venv/bin/python"]
    assert asked == {"model": "/models/m", "trust": True, "template": "", "texts": ["one", "two"]}
    assert render(ctx, ASKS) is found, "once a run"
    odd = render(rendering(host, tokens=9), ASKS)
    assert odd.note == "the template makes 3 tokens of a-1 here, the server's 9"


def test_without_the_template_the_text_is_sent_and_the_reason_told() -> None:
    host = Host(1, "", "Traceback\nModuleNotFoundError: No module named 'transformers'\n")
    found = render(rendering(host), ASKS)
    assert ([each.given for each in found.prompts], found.templated) == (["one", "two"], False)
    assert "No module named 'transformers'" in found.note
    named = Host(0, "@@[]")
    assert "one of sglang's own" in render(rendering(named, args={"chat-template": "chatml"}), ASKS).note
    assert named.asked == []


def test_the_script_that_the_host_runs_is_python(tmp_path: Path) -> None:
    """A stand-in for transformers: what is asked of the tokenizer, and how the answer comes back."""
    from ddtree_ops.checks.validation import acceptance_prompts

    (tmp_path / "transformers.py").write_text(
        "class AutoTokenizer:\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, model, trust_remote_code):\n"
        "        print('noise')\n"
        "        return cls()\n"
        "    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, return_dict):\n"
        "        assert tokenize and add_generation_prompt and not return_dict\n"
        "        return [len(messages[0]['content']), len(self.chat_template)]\n"
    )
    (tmp_path / "t.jinja").write_text("abc")
    asked = {"model": "m", "trust": False, "template": str(tmp_path / "t.jinja"), "texts": ["one", "three"]}
    done = subprocess.run(
        ["python3", "-c", acceptance_prompts._SCRIPT],
        input=json.dumps(asked),
        env={
            "PYTHONPATH": str(tmp_path),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    found = acceptance_prompts._SAID.search(done.stdout)
    assert found is not None
    assert json.loads(found[1]) == [[3, 3], [5, 3]]


# ------------------------------------------------------------------------------------------------- golden files

ONE = Answer((1, 2), "ab", "length", (((1, -0.1), (3, -2.0)), ((2, -0.2), (4, -0.25))))
GOLDEN = Golden(
    model="m",
    version="0.5.11",
    facts={"dtype": "bfloat16", "files": {"config.json": "00"}},
    max_tokens=2,
    batch=8,
    templated=True,
    prompts=(
        Spoken(Ask("a-1", "a", "one", (7, 8)), ONE, ONE, replace(ONE, best=())),
        Spoken(Ask("a-2", "a", "zwei ü", "zwei ü"), ONE, ONE, None),
    ),
    recorded="2026-11-30T00:00:00+00:00",
)


def test_a_golden_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "golden.json"
    save(GOLDEN, path)
    assert load(path) == replace(GOLDEN, source=str(path))
    assert [each.name for each in path.parent.iterdir()] == ["golden.json"], "nothing is left of the writing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"prompts": []}, "it holds no prompt"),
        ({"prompts_sha256": "00"}, "not those that it was recorded with"),
        ({"batch": None}, "a damaged golden file$"),
        ({"sampling": {}}, "a damaged golden file"),
    ],
)
def test_a_damaged_golden_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({**GOLDEN.to_json(), **change}))
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert caught.value.hint.endswith(f"--record {path}"), "what is ours may be recorded anew"
    assert demand_room(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "# notes", "[" * 100_000, "\udcff"])
def test_what_is_no_golden_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "golden.json"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(
        ConfigError, match=r"no golden file: it is (not JSON|JSON of another kind)$"
    ) as caught:
        load(path)
    assert str(path) not in caught.value.hint, "nothing else is to be overwritten"
    with pytest.raises(UsageError, match="would be overwritten"):
        demand_room(path)
    with pytest.raises(ConfigError, match="there is no such file") as caught:
        load(tmp_path / "none.json")
    assert caught.value.hint.endswith("none.json")
    assert not demand_room(tmp_path / "none.json")


def test_the_golden_file_of_the_command_comes_before_that_of_the_suite(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    save(GOLDEN, path)
    elsewhere = Lossless(golden=str(tmp_path / "none.json"))
    ctx: Any = SimpleNamespace(shared={"golden": str(path)}, host="h")
    assert _baseline(ctx, elsewhere) == replace(GOLDEN, source=str(path))
    plan = [Planned(CHECKS["lossless"], elsewhere)]
    heed_golden(plan, str(path))
    with pytest.raises(ConfigError, match=r"none\.json: there is no such file"):
        heed_golden(plan)


def test_a_folder_that_is_a_file_takes_no_golden_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OpsError, match="cannot be written"):
        save(GOLDEN, tmp_path / "file" / "golden.json")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"model_path": "/a/K26"}, {"model_path": "/b/K26/"}, ""),
        ({"model_path": "/a/K26"}, {"model_path": "/a/K25"}, "model_path K26 and K25"),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}, "dtype bfloat16 and float16"),
        ({"dtype": "bfloat16"}, {}, ""),
        ({"attention_backend": "triton"}, {"attention_backend": "fa3"}, ""),
        ({"files": {"config.json": "1"}}, {"files": {"config.json": "2"}}, "another config.json"),
        ({"files": {"config.json": "1"}}, {}, ""),
    ],
)
def test_another_target(one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    assert other_target(one, other) == words


def test_facts_of_a_server() -> None:
    info = ServerInfo("0.5.11", None, None, None, None, {"dtype": "auto", "quantization": None, "port": 1})
    assert server_facts(info) == {"dtype": "auto"}


def test_the_token_that_ended_an_answer_counts() -> None:
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "output_top_logprobs": [[[-0.1, 4, None], [-2.5, 5, "x"]], None],
    }
    found = answer_of(Generation("t", "stop", 2, 0.1, output_ids=(4, 5), meta=meta))
    assert (found.ids, found.best) == ((4, 5, 9), (((4, -0.1), (5, -2.5)), ()))
    meta = {"finish_reason": {"type": "stop", "matched": 5}}
    assert answer_of(Generation("t", "stop", 2, 0.1, output_ids=(4, 5), meta=meta)).ids == (4, 5)
    meta = {"finish_reason": {"type": "length", "length": 2}}
    assert answer_of(Generation("t", "length", 2, 0.1, output_ids=(4, 5), meta=meta)).ids == (4, 5)


def test_log_probabilities_that_are_no_numbers_are_left_out() -> None:
    rows = [[float("nan"), 4, None], [float("-inf"), 5, None], [-0.1, 6, None], ["x", 7], [], 3, [-0.2, None]]
    meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "output_top_logprobs": [rows, "x", None]}
    found = answer_of(Generation("t", "length", 3, 0.1, output_ids=(6, 6, 6), meta=meta))
    assert found.best == (((6, -0.1),), (), ())
    meta = {"finish_reason": {"type": "length"}, "output_top_logprobs": 7}
    assert answer_of(Generation("t", "length", 1, 0.1, output_ids=(6,), meta=meta)).best == ()


def test_a_baseline_without_log_probabilities_is_none() -> None:
    with_gaps(GOLDEN, "box")
    blind = replace(GOLDEN.prompts[1], first=replace(ONE, best=()))
    with pytest.raises(Inconclusive, match=r"1 of 2 answers .* no log-probabilities \(a-2\)"):
        with_gaps(replace(GOLDEN, prompts=(GOLDEN.prompts[0], blind)), "box")


def test_a_golden_file_whose_prompts_were_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    document = GOLDEN.to_json()
    document["prompts"][0]["text"] = "two"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="not those that it was recorded with"):
        load(path)
