"""Flags of DDTREE on a stand-in for ``ServerArgs``, and (``real``) on sglang's own."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from server_arguments import UNTOUCHED

from ddtree_sglang import flags
from ddtree_sglang.check import DDTreeError


@dataclasses.dataclass
class Arguments:
    """As much of ``ServerArgs`` as the hooks touch. Extended once, below: the way sglang's class is."""

    speculative_algorithm: str | None = None
    seen: str | None = None

    def get_attention_backends(self) -> tuple[str, str]:
        return "triton", "triton"


for _name, _value in UNTOUCHED.items():
    setattr(Arguments, _name, _value)

_init = Arguments.__init__


def _hooked(self: Arguments, *args: Any, **kwargs: Any) -> None:
    flags.init(_init, self, *args, **kwargs)


Arguments.__init__ = _hooked  # type: ignore[method-assign,assignment]
flags.add_fields(Arguments)


def dflash(arguments: Arguments) -> None:
    """What sglang's handler does for DFLASH, as far as it matters: it compares the name."""
    arguments.seen = arguments.speculative_algorithm


def test_the_fields_are_fields_with_defaults() -> None:
    names = [field.name for field in dataclasses.fields(Arguments)]
    assert names[-3:] == list(flags.FIELDS)
    assert dataclasses.asdict(Arguments())["speculative_ddtree_budget"] is None
    assert dataclasses.asdict(Arguments(speculative_ddtree_budget=32))["speculative_ddtree_budget"] == 32  # type: ignore[call-arg]


def test_a_second_ddtree_in_the_tree_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has a field speculative_ddtree_budget already"):
        flags.add_fields(Arguments)


def test_the_fields_survive_pickling_and_copying() -> None:
    arguments = Arguments("DDTREE", speculative_ddtree_budget=32)  # type: ignore[call-arg]
    for again in (pickle.loads(pickle.dumps(arguments)), copy.deepcopy(arguments)):
        assert again.speculative_ddtree_budget == 32
        assert again.speculative_ddtree_topk_cap == flags.TOPK_CAP


def test_the_log_line_shows_them() -> None:
    shown = flags.show("Arguments(a=1)", Arguments(speculative_ddtree_budget=7))  # type: ignore[call-arg]
    assert shown == (
        "Arguments(a=1, speculative_ddtree_budget=7, speculative_ddtree_topk_cap=8, "
        "speculative_ddtree_budget_schedule='fixed')"
    )


def parser() -> argparse.ArgumentParser:
    built = argparse.ArgumentParser()
    built.add_argument("--speculative-algorithm", choices=["DFLASH", "EAGLE"])
    flags.add_flags(None, built)
    return built


def test_the_story_s_command_line_parses() -> None:
    parsed = parser().parse_args(
        [
            *("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", "32"),
            *("--speculative-ddtree-topk-cap", "4", "--speculative-ddtree-budget-schedule", "adaptive"),
        ]
    )
    assert parsed.speculative_algorithm == "DDTREE"
    assert (parsed.speculative_ddtree_budget, parsed.speculative_ddtree_topk_cap) == (32, 4)
    assert parsed.speculative_ddtree_budget_schedule == "adaptive"


def test_the_help_tells_the_rule_of_the_schedule() -> None:
    """As ``tree.slot_limits`` has it: a node's probability against a threshold, no acceptance rate anywhere."""
    torch = pytest.importorskip("torch")
    from ddtree_sglang.tree import ADAPTIVE_MIN_PROB, build_tree

    told = " ".join(parser().format_help().split())
    assert ADAPTIVE_MIN_PROB == 0.01
    assert (
        "besides the best block size - 1 only nodes that the drafter expects to be accepted at least once"
        in told
    )
    logprobs = torch.log(torch.tensor([[[0.98, 0.02], [0.98, 0.02], [0.98, 0.02]]]))
    grown = build_tree(logprobs, torch.arange(6).view(1, 3, 2), 14, min_prob=ADAPTIVE_MIN_PROB)
    # the chain of 3, then the nodes of one second choice (0.0196 and 0.0192): two of them is 0.0004
    assert grown.count.tolist() == [1 + 3 + 1 + 2 + 3]


def test_other_algorithms_and_unknown_schedules_stay_what_they_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parser().parse_args(["--speculative-algorithm", "EAGLE"]).speculative_algorithm == "EAGLE"
    for bad in (["--speculative-algorithm", "DDTREES"], ["--speculative-ddtree-budget-schedule", "wild"]):
        with pytest.raises(SystemExit):
            parser().parse_args(bad)
    assert "invalid choice" in capsys.readouterr().err


def test_a_parser_without_the_algorithm_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no flag --speculative-algorithm"):
        flags.add_flags(None, argparse.ArgumentParser())


def test_ddtree_takes_dflash_s_rules_and_keeps_its_name() -> None:
    arguments = Arguments("DDTREE", speculative_ddtree_budget=32)  # type: ignore[call-arg]
    flags.handle_speculative_decoding(dflash, arguments)
    assert (arguments.seen, arguments.speculative_algorithm) == ("DFLASH", "DDTREE")


def test_the_name_is_restored_when_dflash_refuses() -> None:
    def refuse(arguments: Arguments) -> None:
        raise ValueError("no draft model")

    arguments = Arguments("DDTREE", speculative_ddtree_budget=32)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no draft model"):
        flags.handle_speculative_decoding(refuse, arguments)
    assert arguments.speculative_algorithm == "DDTREE"


def test_what_sglang_fills_in_is_looked_at_after_it_did() -> None:
    def fill(arguments: Arguments) -> None:
        arguments.speculative_num_draft_tokens = 16  # type: ignore[attr-defined]

    arguments = Arguments("DDTREE", speculative_ddtree_budget=8)  # type: ignore[call-arg]
    with pytest.raises(DDTreeError, match="raise it to at least 15"):
        flags.handle_speculative_decoding(fill, arguments)


@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_a_ddtree_flag_without_ddtree_is_refused(algorithm: str | None) -> None:
    arguments = Arguments(algorithm, speculative_ddtree_topk_cap=2)  # type: ignore[call-arg]
    with pytest.raises(
        DDTreeError, match="--speculative-ddtree-topk-cap only works with --speculative-algorithm"
    ):
        flags.handle_speculative_decoding(dflash, arguments)
    plain = Arguments(algorithm)
    flags.handle_speculative_decoding(dflash, plain)
    assert plain.seen == algorithm


def launch(models: str, *more: str) -> list[str]:
    return [
        *("--model-path", models, "--skip-tokenizer-init", "--device", "cpu", "--disable-cuda-graph"),
        *("--attention-backend", "triton", "--grammar-backend", "none", "--dtype", "float32"),
        *more,
    ]


@pytest.mark.real
def test_sglang_s_own_arguments(pair: SimpleNamespace, real_plugin: None) -> None:
    """Parsed, resolved, pickled: 4 is the drafter's block size and stays ``speculative_num_draft_tokens``."""
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    flagged = ("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", pair.draft)
    arguments = prepare_server_args(launch(pair.target, *flagged, "--speculative-ddtree-budget", "7"))
    again = pickle.loads(pickle.dumps(arguments))
    for each in (arguments, again, copy.deepcopy(arguments)):
        assert each.speculative_algorithm == "DDTREE"
        assert (each.speculative_num_draft_tokens, each.speculative_ddtree_budget) == (4, 7)
        assert each.disable_overlap_schedule
    assert dataclasses.asdict(again)["speculative_ddtree_budget_schedule"] == "fixed"
    assert "speculative_ddtree_budget=7" in repr(again)
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    assert algorithm.is_dflash() and algorithm.is_ddtree() and algorithm.is_speculative()
    assert pickle.loads(pickle.dumps(algorithm)) is algorithm


@pytest.mark.real
def test_sglang_s_other_algorithms_are_as_they_were(pair: SimpleNamespace, real_plugin: None) -> None:
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.dflash_worker import DFlashWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    arguments = prepare_server_args(
        launch(pair.target, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", pair.draft)
    )
    assert (arguments.speculative_algorithm, arguments.speculative_num_draft_tokens) == ("DFLASH", 4)
    algorithm = SpeculativeAlgorithm.from_string("DFLASH")
    assert algorithm.is_dflash() and not algorithm.is_ddtree()
    assert algorithm.create_worker(arguments) is DFlashWorker
    assert not SpeculativeAlgorithm.EAGLE.is_dflash() and SpeculativeAlgorithm.NONE.is_none()
    assert len(list(SpeculativeAlgorithm)) == 7


@pytest.mark.real
def test_sglang_switches_off_what_a_step_cannot_take(pair: SimpleNamespace, real_plugin: None) -> None:
    """DDTREE refuses neither the overlap schedule nor mixed chunks: DFLASH's rules end both, asked for or not."""
    from sglang.srt.server_args import prepare_server_args

    flagged = ("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", pair.draft)
    flagged += ("--speculative-ddtree-budget", "8", "--enable-mixed-chunk")
    arguments = prepare_server_args(launch(pair.target, *flagged))
    assert arguments.disable_overlap_schedule and not arguments.enable_mixed_chunk


@pytest.mark.real
@pytest.mark.parametrize(
    ("more", "change"),
    [
        (("--speculative-ddtree-budget", "2"), "raise it to at least 3"),
        (("--page-size", "16"), "set --page-size 1"),
        (("--attention-backend", "torch_native"), "set --attention-backend triton"),
        (("--prefill-attention-backend", "fa3"), "attention backend fa3 \\(prefill\\)"),
        (("--pp-size", "2"), "set --pp-size 1"),
        (("--disaggregation-mode", "prefill"), "leave out --disaggregation-mode"),
        (("--enable-torch-compile",), "leave out --enable-torch-compile"),
        (("--enable-hierarchical-cache",), "leave out --enable-hierarchical-cache"),
        (("--enable-custom-logit-processor",), "leave out --enable-custom-logit-processor"),
        (("--speculative-ddtree-topk-cap", "0"), "give at least 1"),
        (
            ("--speculative-ddtree-budget", "99999", "--speculative-ddtree-topk-cap", "64"),
            "lower --speculative-ddtree-budget or --speculative-ddtree-topk-cap",
        ),
    ],
)
def test_sglang_refuses_what_ddtree_cannot(
    pair: SimpleNamespace, real_plugin: None, more: tuple[str, ...], change: str
) -> None:
    from sglang.srt.server_args import prepare_server_args

    flagged = ("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", pair.draft)
    with pytest.raises(DDTreeError, match=change):
        prepare_server_args(launch(pair.target, *flagged, "--speculative-ddtree-budget", "8", *more))
