"""Is this text what a language model says, or garbage? Pure; no knowledge of any model.

A corrupted cache, a wrong tree mask or a broken kernel does not crash: it answers 200 with ``!!!!!!``, with a loop, or
with a salad of scripts. The rules are coarse on purpose: code, Chinese, JSON and tables must pass.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TextQuality", "judge_text"]

_SEPARATORS = frozenset("-=_*#.~+|/\\<>^`─═━│┄┈—–·•…")
_MAX_CHARS = 8000
_MAX_PERIOD = 400
_SAME_SCRIPT = {
    "HIRAGANA": "CJK",
    "KATAKANA": "CJK",
    "HANGUL": "CJK",
    "FULLWIDTH": "CJK",
    "IDEOGRAPHIC": "CJK",
}


@dataclass(frozen=True)
class TextQuality:
    """Outcome of :func:`judge_text`.

    :param reason: why the text is garbage, or None where nothing speaks against it.
    :param figures: what was measured: ``chars``, ``alnum_share`` (0..1, of the characters that are not blank),
        ``longest_run`` (characters), ``loop_period`` and ``loop_share`` (characters; 0..1 of the text),
        ``compressed_share`` (0..1), ``distinct_trigrams`` (0..1 of the runs of three words), ``replacement_chars``, ``control_chars``, ``scripts``.
    """

    reason: str | None
    figures: Mapping[str, int | float]

    @property
    def ok(self) -> bool:
        """True where no rule fired."""
        return self.reason is None


def _longest_run(text: str) -> tuple[str, int]:
    best, length = "", 0
    for match in re.finditer(r"(\S)\1*", text):
        if len(match[0]) > length:
            best, length = match[1], len(match[0])
    return best, length


def _tail_loop(text: str) -> tuple[int, int]:
    """Period and length of the longest tail of ``text`` that repeats itself: ``(0, 0)`` without one."""
    size = len(text)
    best = (0, 0)
    for period in range(1, min(_MAX_PERIOD, size // 2) + 1):
        position = size - 1
        while position >= period and text[position] == text[position - period]:
            position -= 1
        length = size - 1 - position + period
        if length >= 2 * period and length > best[1]:
            best = (period, length)
    return best


def _scripts(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for char in text:
        if char.isalpha():
            word = unicodedata.name(char, "OTHER").split(" ", 1)[0]
            if word not in {"MATHEMATICAL", "MODIFIER", "SUPERSCRIPT", "SUBSCRIPT", "DOUBLE-STRUCK", "GREEK"}:
                found[_SAME_SCRIPT.get(word, word)] += 1
    return found


def _distinct_trigrams(words: list[str]) -> float:
    """Share of the runs of three words that differ from all others; 1 where there are none."""
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) / len(runs) if runs else 1.0


def _loops(text: str, period: int, length: int, words: list[str], compressed: float) -> str | None:
    if period and text[-period:].strip(" \t\n"):
        repeats, share = length / period, length / len(text)
        sample = text[-period:].strip()[:40] or text[-period:]
        if (length >= 40 and repeats >= 4 and share >= 0.5) or (
            repeats >= 6 and share >= 0.8 and length >= 12
        ):
            return f"a loop: {sample!r} repeated {repeats:.0f} times makes {share:.0%} of the text"
        if length >= 200 and repeats >= 8 and len(set(text[-period:])) > 1:
            return f"ends in a loop: {sample!r} repeated {repeats:.0f} times"
    if len(words) >= 24 and len(set(words)) / len(words) < 0.12:
        return f"a loop of words: {len(set(words))} different ones among {len(words)}"
    if len(words) >= 60 and _distinct_trigrams(words) < 0.25:
        return f"repeats itself: {_distinct_trigrams(words):.0%} of its runs of three words are distinct"
    if len(text) >= 300 and compressed < 0.12:
        return f"repeats itself: compresses to {compressed:.0%} of its length"
    return None


def judge_text(text: str | None, *, completion_tokens: int = 0, loops: bool = True) -> TextQuality:
    """Say why ``text`` cannot be a sane answer, or that nothing speaks against it.

    :param text: the answer; join ``reasoning_content`` and ``content`` before: both are text the model made.
    :param completion_tokens: what the server says it generated: text that is missing in spite of it is a finding.
    :param loops: False leaves out the rules on repetition (a tiny test model says ``thethethe``).
    """
    if text is None or not text.strip():
        what = "no content" if text is None else "blank content"
        reason = f"{what} although {completion_tokens} tokens were generated" if completion_tokens else what
        return TextQuality(reason, {"chars": len(text or "")})
    text = text[:_MAX_CHARS]
    dense = [char for char in text if not char.isspace()]
    run_char, run = _longest_run(text)
    period, length = _tail_loop(text)
    compressed = len(zlib.compress(text.encode("utf-8", "replace"))) / len(text.encode("utf-8", "replace"))
    replacement = text.rstrip("\ufffd").count("\ufffd")
    control = sum(
        1 for char in text if unicodedata.category(char) in {"Cc", "Cs", "Cn", "Co"} and char not in "\t\n\r"
    )
    alnum = sum(1 for char in dense if char.isalnum()) / len(dense)
    scripts = _scripts(text)
    dominant = max(scripts.values(), default=0) / max(1, scripts.total())
    words = re.findall(r"[^\W\d_]+", text.lower())
    figures: dict[str, int | float] = {
        "chars": len(text),
        "alnum_share": round(alnum, 3),
        "longest_run": run,
        "loop_period": period,
        "loop_share": round(length / len(text), 3),
        "compressed_share": round(compressed, 3),
        "distinct_trigrams": round(_distinct_trigrams(words), 3),
        "replacement_chars": replacement,
        "control_chars": control,
        "scripts": len(scripts),
    }

    def found() -> str | None:
        if (run >= 5 and run / len(dense) > 0.5) or (run >= 24 and run_char not in _SEPARATORS):
            return f"{run_char!r} repeated {run} times in a row"
        if replacement >= 2 or replacement / len(text) > 0.01:
            return f"{replacement} replacement characters (U+FFFD): the tokens are not text"
        if control >= 2 or control / len(text) > 0.01:
            return f"{control} control or unassigned characters"
        if len(dense) >= 4 and alnum == 0:
            return f"no letter or digit among {len(dense)} characters"
        if len(dense) >= 12 and alnum < 0.2:
            return f"only {alnum:.0%} letters and digits among {len(dense)} characters"
        if len(scripts) >= 4 and dominant < 0.8:
            return f"letters of {len(scripts)} scripts mixed: {', '.join(sorted(scripts))}"
        if loops:
            return _loops(text, period, length, words, compressed)
        return None

    return TextQuality(found(), figures)
