"""A parameter followed from its flag to the place of the failure, over small trees of the shape of sglang's."""

from __future__ import annotations

from textwrap import dedent

import pytest

from ddtree_ops.diagnose.events import Frame
from ddtree_ops.diagnose.trace import files_for, frames_of, matching, trace_parameters
from ddtree_ops.launchflags import ARGS_PATH, PLUGIN_PATH

RUNNER = "sglang/srt/model_executor/cuda_graph_runner.py"
BACKEND = "sglang/srt/layers/attention/some_backend.py"
FIELDS = ("speculative_num_draft_tokens", "speculative_ddtree_budget")

ARGUMENTS = dedent(
    """
    class ServerArgs:
        speculative_num_draft_tokens: Optional[int] = None
        page_size: Optional[int] = None

        @staticmethod
        def add_cli_args(parser):
            parser.add_argument(
                "--speculative-num-draft-tokens",
                type=int,
                default=ServerArgs.speculative_num_draft_tokens,
            )
            parser.add_argument("--page-size", type=int, default=1)
    """
).lstrip()
STOCK = dedent(
    """
    class Runner:
        def __init__(self, model_runner, speculative_num_draft_tokens=None):
            self.speculative_num_draft_tokens = (
                model_runner.server_args.speculative_num_draft_tokens
                if speculative_num_draft_tokens is None
                else speculative_num_draft_tokens
            )
            self.unrelated = model_runner.device
            self.num_tokens_per_bs = 1
            if model_runner.spec:
                self.num_tokens_per_bs = self.speculative_num_draft_tokens
            self.max_num_token = self.max_bs * self.num_tokens_per_bs

        def replay_prepare(self, raw_bs):
            raw_num_token = raw_bs * self.num_tokens_per_bs
            copy(raw_num_token)

    def copy(count):
        torch._foreach_copy_(dsts, srcs)
    """
).lstrip()
PATCHED = STOCK.replace(
    "        self.max_num_token",
    '        budget = getattr(model_runner.server_args, "speculative_ddtree_budget", None)\n'
    "        self.num_tokens_per_bs = budget + 1\n"
    "        self.max_num_token",
)


def tree(runner: str = STOCK, **more: str) -> dict[str, str]:
    return {ARGS_PATH: ARGUMENTS, RUNNER: runner, **more}


def line_of(text: str, start: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(start))


def frame(runner: str, start: str, function: str) -> Frame:
    number = line_of(runner, start)
    return Frame(f"/srv/current/{RUNNER}", number, function, runner.splitlines()[number - 1].strip())


def steps(
    sources: dict[str, str], frames: list[Frame], fields: tuple[str, ...] = FIELDS
) -> list[tuple[str, str, int]]:
    found = trace_parameters(fields, frames, files_for(frames), sources.get)
    return [(step.step, step.file.rpartition("/")[2], step.line) for step in found]


def test_the_story() -> None:
    frames = [frame(STOCK, "torch._foreach", "copy")]
    found = trace_parameters(FIELDS, frames, files_for(frames), tree().get)
    assert [(step.step, step.place) for step in found] == [
        ("flag", "server_args.py:7"),
        ("field", "server_args.py:2"),
        ("use", "cuda_graph_runner.py:3"),
        ("use", "cuda_graph_runner.py:11"),
        ("crash", f"cuda_graph_runner.py:{line_of(STOCK, 'torch._foreach')}"),
        ("absent", "cuda_graph_runner.py"),
    ]
    assert found[0].text == "--speculative-num-draft-tokens"
    assert found[3].text == "self.num_tokens_per_bs = self.speculative_num_draft_tokens"
    assert found[-1].text == (
        "--speculative-ddtree-budget: cuda_graph_runner.py never reads speculative_ddtree_budget"
    )


def test_a_frame_that_holds_a_derived_value_is_the_end_of_the_way() -> None:
    frames = [frame(STOCK, "raw_num_token", "replay_prepare"), frame(STOCK, "torch._foreach", "copy")]
    uses = [line for kind, _, line in steps(tree(), frames) if kind == "use"]
    assert uses == [3, 11, line_of(STOCK, "raw_num_token")]


def test_a_patched_file_shows_that_it_reads_the_budget() -> None:
    found = trace_parameters(FIELDS, [frame(PATCHED, "torch._foreach", "copy")], [RUNNER], tree(PATCHED).get)
    assert "absent" not in [step.step for step in found]
    assert found[-2].text == "self.num_tokens_per_bs = budget + 1"


def test_a_parameter_is_followed_in_the_file_that_failed() -> None:
    backend = (
        "class B:\n    def __init__(self, runner):\n        self.page_size = runner.server_args.page_size\n"
    )
    frames = [Frame(f"/x/{BACKEND}", 3, "__init__", "self.page_size = runner.server_args.page_size")]
    found = steps(tree(**{BACKEND: backend}), frames, ("page_size",))
    assert found == [
        ("flag", "server_args.py", 12),
        ("field", "server_args.py", 3),
        ("crash", "some_backend.py", 3),
    ]


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {ARGS_PATH: ARGUMENTS},
        {ARGS_PATH: "no python (", RUNNER: "class ("},
        {ARGS_PATH: ARGUMENTS, RUNNER: "x = 1\n"},
        {ARGS_PATH: ARGUMENTS, RUNNER: "x = " + "(" * 5000},
    ],
)
def test_without_a_use_there_is_no_trace(sources: dict[str, str]) -> None:
    assert steps(sources, [Frame(f"/x/{RUNNER}", 1, "f", "x = 1")]) == []


def test_a_loop_of_assignments_ends() -> None:
    runner = "class R:\n    def f(self, a):\n        self.x = a.server_args.page_size\n" + "".join(
        f"        self.x{n} = self.x{n - 1 or ''} + self.x\n        self.x = self.x{n}\n"
        for n in range(1, 200)
    )
    found = steps({ARGS_PATH: ARGUMENTS, RUNNER: runner}, [Frame(f"/x/{RUNNER}", 9, "g", "")], ("page_size",))
    assert found[2][2] == 3


def test_lines_of_a_traceback_tell_trees_apart() -> None:
    frames = [frame(STOCK, "raw_num_token", "replay_prepare"), frame(STOCK, "torch._foreach", "copy")]
    assert matching(frames, tree(STOCK).get) is True
    assert matching(frames, tree(PATCHED).get) is False
    assert matching(frames, {}.get) is False
    assert matching([Frame("/usr/lib/python3/queue.py", 3, "get", "x")], tree().get) is None
    assert matching([], tree().get) is None


def test_frames_of_a_printed_traceback() -> None:
    printed = (
        '  File "/srv/current/sglang/srt/a.py", line 7, in one',
        "    call(",
        '  File "/usr/lib/x.py", line 9',
        "RuntimeError: no",
    )
    one, two = frames_of(printed)
    assert (one.file, one.line, one.function, one.code) == ("/srv/current/sglang/srt/a.py", 7, "one", "call(")
    assert (two.line, two.function, two.code) == (9, "", "")
    assert files_for([one, two], ["sglang/srt/b.py"]) == (ARGS_PATH, "sglang/srt/a.py", "sglang/srt/b.py")


def test_chains_are_whole_stand_apart_and_share_no_line() -> None:
    runner = dedent(
        """
        class R:
            def __init__(self, server_args):
                self.draft = server_args.speculative_num_draft_tokens
                self.pages = server_args.page_size
                self.size = self.draft * self.pages
                self.total = self.size + self.size

            def replay(self):
                copy(self.total)
        """
    ).lstrip()
    frames = [frame(runner, "copy", "replay")]
    found = steps(tree(runner), frames, ("speculative_num_draft_tokens", "page_size"))
    places = [(file, line) for _, file, line in found]
    assert len(places) == len(set(places))
    kinds = [kind for kind, _, _ in found]
    starts = [number for number, kind in enumerate(kinds) if kind == "flag"]
    assert kinds[0] == "flag" and len(starts) == 2 and kinds[-1] == "crash"
    assert [kinds[number + 1] for number in starts] == ["field", "field"]
    of_pages = [line for _, file, line in found[starts[1] :] if file == "cuda_graph_runner.py"]
    assert line_of(runner, "self.draft") not in of_pages and line_of(runner, "self.pages") in of_pages


def test_a_field_without_its_flag_begins_no_chain() -> None:
    arguments = ARGUMENTS.replace('    parser.add_argument("--page-size", type=int, default=1)\n', "")
    runner = "class R:\n    def f(self, a):\n        self.x = a.server_args.page_size\n"
    sources = {ARGS_PATH: arguments, RUNNER: runner}
    found = trace_parameters(("page_size",), [], (ARGS_PATH, RUNNER), sources.get)
    assert [(step.step, step.line) for step in found] == [("flag", 0), ("field", 3), ("use", 3)]
    assert found[0].text == "--page-size (no such flag in this file)"


def test_a_flag_of_the_overlay_is_found_in_its_file() -> None:
    plugin = (
        "class _Fields:\n    speculative_ddtree_budget: int | None = None\n\n"
        'def add_flags(parser):\n    parser.add_argument(\n        "--speculative-ddtree-budget",\n        type=int,\n    )\n'
    )
    runner = "class R:\n    def f(self, a):\n        self.x = a.server_args.speculative_ddtree_budget + 1\n"
    sources = {ARGS_PATH: ARGUMENTS, PLUGIN_PATH: plugin, RUNNER: runner}
    found = trace_parameters(("speculative_ddtree_budget",), [], (ARGS_PATH, RUNNER), sources.get)
    assert [(step.step, step.file, step.line) for step in found] == [
        ("flag", PLUGIN_PATH, 6),
        ("field", PLUGIN_PATH, 2),
        ("use", RUNNER, 3),
    ]
    assert found[0].text == "--speculative-ddtree-budget" and found[0].place == "flags.py:6"
