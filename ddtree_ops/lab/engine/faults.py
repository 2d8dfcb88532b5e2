"""Faults of the lab engine: what each breaks, and how a set of them is written. Pure; standard library, Python >= 3.8.

``LAB_FAULTS="garbage,late-crash=5"`` switches faults on for the life of the engine. ``LAB_FAULTS_FILE`` names a file with
the same words (commas or lines, ``#`` to the end of a line), which is read anew at every request: faults come and go
without a restart. Where the set of faults changes, counts of requests start anew, and what a leak or an ignored abort has
kept is let go. Faults begin when the server is ready.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FAULTS", "Fault", "Faults"]


@dataclass(frozen=True)
class Fault:
    """A way to be broken.

    :param effect: what the engine does; ``n`` is the value.
    :param checks: names of the validation checks that should fail, with a space between.
    :param default: of the value: a number, or the first of ``words``; None where it takes none.
    :param words: the values that may be given, where they are not numbers.
    """

    name: str
    effect: str
    checks: str
    default: float | None = None
    words: tuple[str, ...] = ()

    def value(self, given: str) -> float | str:
        """The value that ``name=given`` means.

        :raises ValueError: it takes none, or another kind.
        """
        if self.words:
            if given in self.words:
                return given
            raise ValueError(f"fault {self.name}={given}: one of {', '.join(self.words)} is wanted")
        if self.default is None:
            raise ValueError(f"fault {self.name} takes no value")
        try:
            return float(given)
        except ValueError:
            raise ValueError(f"fault {self.name}={given}: a number is wanted") from None


_ALL = (
    Fault("garbage", "every answer is `!!!!`", "garbage short-chat"),
    Fault("repeated", "every answer is a loop of the same words", "garbage"),
    Fault("replacement", "every 7th character is U+FFFD", "garbage"),
    Fault("salad", "words of many scripts in place of every answer", "garbage"),
    Fault("null-content", "the content of a chat is null, its tokens are counted", "short-chat garbage"),
    Fault("mojibake", "UTF-8 taken for Latin-1", "unicode"),
    Fault("wrong-copy", "a copied text has one character changed", "copy"),
    Fault("wrong-arithmetic", "sums are off by ten", "arithmetic"),
    Fault("lost-needle", "the secret code is not found in prompts over n tokens", "needle", 0),
    Fault("tool-call-as-text", "a tool call stays in the content", "tools"),
    Fault("truncated", "ends after n tokens with finish_reason length", "short-chat copy", 8),
    Fault("no-eos", "never ends by itself", "stop"),
    Fault("ignores-stop", "stop strings have no effect", "stop"),
    Fault("stop-uncut", "ends at a stop string, and leaves it in the text", "stop"),
    Fault("ignores-limit", "makes n tokens more than max_tokens (-1: one less)", "short-limits", 1),
    Fault(
        "wrong-stream", "the second piece of a streamed chat is missing, or comes twice", "stream",
        words=("dropped", "doubled"),
    ),
    Fault("stream-no-usage", "a stream has no usage at its end", "stream"),
    Fault("stream-wrong-finish", "a stream says length for stop, and stop for length", "stream"),
    Fault("stream-no-done", "a stream ends without [DONE]", "stream"),
    Fault("hang-in-stream", "status 200, n events, and nothing more", "stream", 0),
    Fault("wrong-usage", "the usage counts three tokens too many", "short-limits"),
    Fault("accept-1", "every draft is rejected", "acceptance"),
    Fault("accept-above-block", "counts more accepted tokens than a block holds", "acceptance"),
    Fault(
        "lossy", "under speculation the first token from n on with a large top-2 gap is another one", "lossless", 5
    ),
    Fault(
        "lossy-near-tie", "under speculation the first near tie from token n on goes the other way", "lossless", 5
    ),
    Fault("lossy-at-batch", "under speculation answers differ where n requests run or more", "lossless", 2),
    Fault("nondeterministic", "every n-th answer goes another way", "lossless", 2),
    Fault("refuses-nothing", "under speculation logprobs and grammars are accepted and ignored", "refusals"),
    Fault(
        "wrong-refusal", "what is to be refused gets 500, or 400 in other words", "refusals",
        words=("500", "words"),
    ),
    Fault("overlong-accepted", "input over the context length is answered", "over-long"),
    Fault("overlong-500", "input over the context length gets 500", "over-long"),
    Fault("overlong-crash", "input over the context length ends the server", "over-long"),
    Fault("long-prompt-refused", "prompts over n tokens get 400", "long-prompt", 2000),
    Fault("long-prompt-crash", "prompts over n tokens end the server", "long-prompt", 2000),
    Fault("crash-on-prefix-hit", "a hit of n cached tokens or more ends the server: triton's shared memory", "prefix-hit", 1),
    Fault("wrong-on-prefix-hit", "a hit of n cached tokens or more gets another answer", "prefix-hit", 64),
    Fault("no-cache", "never a prefix hit", "prefix-hit"),
    Fault("flush-ignored", "a flush is answered 200 and nothing is flushed", "flush"),
    Fault("late-crash", "after n requests the next ends the server: an illegal memory access", "endurance", 20),
    Fault("oom-late", "after n requests the next ends the server: CUDA out of memory", "endurance signatures", 20),
    Fault("restart-itself", "after n requests it ends with status 1, for systemd to start it again", "steady", 20),
    Fault("hang-after", "after n requests the scheduler hangs; /v1/models stays 200", "endurance", 200),
    Fault("crash-on-abort", "a client that leaves ends the server", "abort"),
    Fault("abort-ignored", "the request of a client that has left runs for ever", "abort"),
    Fault("crash-on-batch", "n requests at a time end the server", "burst", 8),
    Fault("burst-drops", "500 for a request while n others run", "burst", 4),
    Fault("crossed-answers", "of parallel requests one gets the answer of another", "burst"),
    Fault("error-every", "every n-th request gets 500", "endurance short-chat", 3),
    Fault("flap-503", "every n-th /health is 503", "steady", 2),
    Fault("slow-decay", "the rate halves every n requests", "endurance", 10),
    Fault("leak", "every request keeps n MB, and its tokens are not given back", "memory", 4),
    Fault("xid", "every request writes a line of an Xid into the log", "no-xid signatures"),
)  # fmt: skip

FAULTS = {fault.name: fault for fault in _ALL}
"""Every fault, by name."""


class Faults:
    """A set of faults that are on, with their values."""

    def __init__(self, values: dict[str, float | str] | None = None) -> None:
        self._values = dict(values or {})

    @classmethod
    def parse(cls, text: str) -> Faults:
        """The faults named in a text; of a fault named twice the last counts.

        :raises ValueError: a name that is none, or a value that does not fit it.
        """
        found: dict[str, float | str] = {}
        for word in re.split(r"[,\n]", re.sub(r"#.*", "", text)):
            name, given, value = (part.strip() for part in word.partition("="))
            if not name:
                continue
            if name not in FAULTS:
                raise ValueError(f"unknown fault {name!r}; there are: {', '.join(FAULTS)}")
            fault = FAULTS[name]
            if given:
                found[name] = fault.value(value)
            else:
                found[name] = (
                    fault.words[0] if fault.words else fault.default if fault.default is not None else 1.0
                )
        return cls(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Faults) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, name: str) -> bool:
        return self[name] is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __getitem__(self, name: str) -> float | str | None:
        """The value of a fault; None where it is off. A name that is none is an error of the engine: KeyError."""
        return self._values.get(FAULTS[name].name)

    def number(self, name: str) -> int:
        """The value of a fault that is on."""
        return int(self._values[name])

    def reached(self, name: str, count: float) -> bool:
        """Whether a fault is on and ``count`` has come to its value."""
        return name in self and count >= self.number(name)

    def over(self, name: str, count: float) -> bool:
        """Whether a fault is on and ``count`` is over its value."""
        return name in self and count > self.number(name)

    def every(self, name: str, count: int) -> bool:
        """Whether a fault is on and ``count`` is a multiple of its value."""
        return name in self and count % max(1, self.number(name)) == 0
