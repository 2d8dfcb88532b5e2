"""What the lab engine answers: simple rules in place of a model. Pure; standard library, Python >= 3.8.

The same prompt always gets the same text, with and without speculation. The rules know a few kinds of question (copy this
text, count, a sum, the secret code in a long text, a tool to call); everything else gets a canned text. A text is split
into tokens by :func:`pieces_of`; every position of an answer has a made-up runner-up and a made-up gap to it, which
:func:`gap` makes tiny at about one in ten.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from faults import Faults  # type: ignore[import-not-found]

__all__ = [
    "EOS_ID", "NEAR_TIE", "Ending", "chance", "compose", "diverge", "ending", "gap", "logprobs_at", "pieces_of",
    "runner_up", "spoil", "tool_calls_in",
]  # fmt: skip

EOS_ID = 163586
NEAR_TIE = 0.002
"""The top-2 gap of a near tie, in nats; all others are 1.5 and more."""

QUICKSORT = '''Here is quicksort in Python, with comments.

```python
def quicksort(items):
    """Return a new list with the items in ascending order."""
    # A list of zero or one items is already sorted.
    if len(items) <= 1:
        return list(items)

    # The middle item as pivot avoids the worst case on sorted input.
    pivot = items[len(items) // 2]

    # Split into three parts: smaller, equal and larger than the pivot.
    smaller = [item for item in items if item < pivot]
    equal = [item for item in items if item == pivot]
    larger = [item for item in items if item > pivot]

    # Sort both sides and put the parts together again.
    return quicksort(smaller) + equal + quicksort(larger)


print(quicksort([3, 6, 1, 8, 2, 9, 2]))  # [1, 2, 2, 3, 6, 8, 9]
```

On average it takes O(n log n) comparisons; a bad pivot at every step would make it O(n^2). The version above
uses O(n) extra memory in exchange for being short and easy to read. An in-place partition avoids that.
'''

OTHERWISE = """This is a canned answer of the lab engine; no model has read the question, which ends in: {topic}.
It has {count} words, and the longest of them is "{longest}". A real server would now explain {longest} step by
step, name its assumptions, give an example, and say where that example stops being right. The lab engine only
counts tokens, so that length, speed and acceptance can be checked. In short: {topic}.
"""

_COPY = re.compile(r"(?i)\b(?:repeat|copy)\b[^\n]*\b(?:exactly|verbatim)\b[^\n]*:[ \t]*\n+(.*)", re.S)
_SUM = re.compile(r"(?i)\bwhat is (\d{1,9})\s*([-+*x×])\s*(\d{1,9})")
_COUNT = re.compile(r"(?i)\bcount from (\d{1,6}) to (\d{1,6})")
_NEEDLE = re.compile(r"(?i)\bsecret code is ([\w-]+)")
_ASKED = re.compile(r"(?i)\bsecret code\?[^?]*$")
_CALL = re.compile(
    r"<\|tool_call_begin\|>functions\.([\w.-]+):(\d+)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.S,
)
_CALLS = re.compile(r"<\|tool_calls_section_begin\|>.*<\|tool_calls_section_end\|>", re.S)
_SALAD = ("слово", "言葉", "كلمة", "מילה", "λόγος", "शब्द", "คำ", "word", "단어", "բառ", "სიტყვა", "parola")
_OTHERS = ("other", "perhaps", "never", "seven", "again")


def pieces_of(text: str) -> list[str]:
    """Split a text into tokens; joined again they give the text."""
    return re.findall(r"\s*[A-Za-z]{1,8}|\s*\d{1,3}|\s*[^\sA-Za-z\d]|\s+", text)


def chance(*words: object) -> float:
    """A number in [0, 1) that depends on the words only."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=4).digest(), "big") / 2**32


# --- the answer --------------------------------------------------------------------------------------------


def compose(prompt: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, str]:
    """The kind of a prompt and the whole answer to it.

    :param prompt: what the user said last, or the whole text of a completion.
    :param tools: as the chat API has them; where there are some, the first is called.
    :return: kind ``copy``, ``sum``, ``count``, ``needle``, ``tool`` or ``text``, and the answer.
    """
    if tools:
        return "tool", _call(tools[0], prompt)
    found = _COPY.search(prompt)
    if found:
        return "copy", found[1]
    if _ASKED.search(prompt):
        found = _NEEDLE.search(prompt)
        return "needle", f"{found[1]}" if found else "There is no secret code."
    found = _SUM.search(prompt)
    if found:
        a, b = int(found[1]), int(found[3])
        return "sum", str({"+": a + b, "-": a - b}.get(found[2], a * b))
    found = _COUNT.search(prompt)
    if found:
        return "count", ", ".join(
            str(n) for n in range(int(found[1]), min(int(found[2]), int(found[1]) + 999) + 1)
        )
    if "quicksort" in prompt.lower():
        return "text", QUICKSORT
    words = re.findall(r"[^\W_]+", prompt) or ["nothing"]
    return "text", OTHERWISE.format(topic=" ".join(words[-8:]), count=len(words), longest=max(words, key=len))


def _call(tool: Mapping[str, Any], prompt: str) -> str:
    """A tool call as Kimi K2 writes it."""
    function = tool.get("function") or {}
    schema = function.get("parameters") or {}
    wanted = schema.get("required") or list(schema.get("properties") or {})
    arguments = {name: _argument((schema.get("properties") or {}).get(name) or {}, prompt) for name in wanted}
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{function.get('name')}:0"
        f"<|tool_call_argument_begin|>{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def _argument(schema: Mapping[str, Any], prompt: str) -> Any:
    """A value that fits a schema: a number of the prompt, or the last word of it that begins with a capital."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return int((re.findall(r"\d{1,9}", prompt) or ["1"])[0])
    if kind in ("boolean", "array", "object"):
        return {"boolean": True, "array": [], "object": {}}[kind]
    words = re.findall(r"[^\W\d_]+", prompt) or ["nothing"]
    return ([word for word in words if word[0].isupper()] or words)[-1]


def tool_calls_in(text: str) -> tuple[str, list[tuple[str, int, str]]]:
    """The text without its tool calls, and the calls: name, index, arguments as JSON."""
    found = _CALLS.search(text)
    if not found:
        return text, []
    calls = [(call[1], int(call[2]), call[3]) for call in _CALL.finditer(found[0])]
    return text[: found.start()] + text[found.end() :], calls


def spoil(kind: str, text: str, prompt_tokens: int, faults: Faults) -> str:
    """An answer as the faults have it."""
    if "garbage" in faults:
        return "!" * 4096
    if "repeated" in faults:
        return "and so it goes on and on, " * 200
    if "salad" in faults:
        return " ".join(_SALAD[int(chance(text, n) * len(_SALAD))] for n in range(120))
    middle = len(text) // 2
    if kind == "copy" and "wrong-copy" in faults:
        text = text[:middle] + ("x" if text[middle : middle + 1] != "x" else "y") + text[middle + 1 :]
    if kind == "sum" and "wrong-arithmetic" in faults:
        text = str(int(text) + 10)
    if kind == "needle" and faults.over("lost-needle", prompt_tokens):
        text = "The text does not name one."
    if "mojibake" in faults:
        text = text.encode().decode("latin-1")
    if "replacement" in faults:
        text = re.sub(r"(.{6}).", "\\1\ufffd", text + " " * max(0, 28 - len(text)), flags=re.S)
    return text


# --- its end -----------------------------------------------------------------------------------------------


class Ending:
    """The tokens of an answer up to its end. ``texts`` is what is sent, ``pieces`` what the tokens are ("": EOS)."""

    def __init__(self, pieces: list[str], texts: list[str], finish: dict[str, Any]) -> None:
        self.pieces, self.texts, self.finish = pieces, texts, finish


def ending(pieces: list[str], limit: int, stop: Sequence[str], ignore_eos: bool, faults: Faults) -> Ending:
    """Where an answer ends: at the first stop string, at its own end, or at the limit, which goes before both.

    As in sglang the tokens of a stop string are counted, and its text is cut off.
    :param limit: tokens.
    """
    answer = "".join(pieces)
    ends = [(answer.find(word) + len(word), word) for word in stop if word and word in answer]
    finish: dict[str, Any] = {"type": "stop", "matched": EOS_ID}
    cut = None
    if ends and "ignores-stop" not in faults:
        end, word = min(ends, key=lambda each: each[0])
        total = 0
        for count, piece in enumerate(pieces, 1):
            total += len(piece)
            if total >= end:
                pieces = pieces[:count]
                break
        finish = {"type": "stop", "matched": word}
        cut = answer.find(word) if "stop-uncut" not in faults else end
    elif ignore_eos or "no-eos" in faults:
        pieces = list(islice(cycle(pieces or ["!"]), limit + 1))
    else:
        pieces = [*pieces, ""]
    if len(pieces) >= limit:
        more = faults.number("ignores-limit") if "ignores-limit" in faults else 0
        wanted = max(limit + more, 0)
        pieces = pieces[:wanted] + (
            list(islice(cycle(["!"]), wanted - len(pieces))) if wanted > len(pieces) else []
        )
        finish, cut = {"type": "length", "length": limit}, None
    if faults.over("truncated", len(pieces)):
        pieces, finish, cut = pieces[: faults.number("truncated")], {"type": "length", "length": limit}, None
    texts, left = [], cut if cut is not None else sum(map(len, pieces))
    for piece in pieces:
        texts.append(piece[:left])
        left -= len(texts[-1])
    return Ending(pieces, texts, finish)


# --- other ways it could have gone -------------------------------------------------------------------------


def gap(prompt: Sequence[str], position: int) -> float:
    """How far the runner-up is behind at a position of the answer, in nats."""
    if chance(prompt, position, "tie") < 0.1:
        return NEAR_TIE
    return 1.5 + 4 * chance(prompt, position, "gap")


def runner_up(piece: str, rank: int = 1) -> str:
    """The token in place ``rank`` behind ``piece``."""
    others = [word for word in _OTHERS if word != piece.strip()]
    return re.match(r"\s*", piece)[0] + others[(rank - 1) % len(others)]  # type: ignore[index]


def logprobs_at(prompt: Sequence[str], position: int, count: int) -> list[float]:
    """Log-probabilities of the best ``count`` tokens at a position, falling."""
    behind = gap(prompt, position)
    offsets = [0.0, *(behind + rank for rank in range(max(count, 2) - 1))]
    norm = math.log(sum(math.exp(-offset) for offset in offsets[:2]) * 1.01)
    return [-offset - norm for offset in offsets[:count]]


def diverge(
    prompt: Sequence[str], pieces: Sequence[str], start: int, near_tie: bool | None = None
) -> int | None:
    """The position where an answer goes another way: the first from ``start`` on, or the last before it.

    :param near_tie: at a near tie, where there is none, or either.
    :return: None where there is no such position.
    """
    fitting = [
        n
        for n, piece in enumerate(pieces)
        if piece and (near_tie is None or (gap(prompt, n) <= NEAR_TIE) == near_tie)
    ]
    later = [n for n in fitting if n >= start]
    return later[0] if later else fitting[-1] if fitting else None
