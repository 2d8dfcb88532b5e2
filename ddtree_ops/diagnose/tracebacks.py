"""Crash records: Python tracebacks with their chains, C++ stacks, fatal errors of the interpreter, Rust panics.

A collector takes the lines of one process one by one and says which belong to it. Pure; nothing is judged here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

__all__ = [
    "CAUSE",
    "DURING",
    "LINKED",
    "MARK",
    "Collector",
    "ExceptionBlock",
    "Frame",
    "Kind",
    "NativeCollector",
    "Traceback",
    "exception_of",
    "lone_exception",
    "native_begin",
    "root_block",
    "unrelated",
]

Kind = Literal["python", "line", "native", "signal", "build", "threads"]

MARK = "Traceback (most recent call last)"
DURING = "During handling of the above exception, another exception occurred:"
CAUSE = "The above exception was the direct cause of the following exception:"

_KEEP_FRAMES = 80
_KEEP_MESSAGE = 24
_KEEP_TOLD = 40
_KEEP_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback; ``code`` is the source line under it, if printed."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def engine(self) -> bool:
        """True for a file of sglang, or of the overlay beside it."""
        return "/sglang/" in self.file or "/ddtree_sglang/" in self.file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class ExceptionBlock:
    """One exception of a chain.

    :param type: dotted class name; empty where the traceback was cut off before it.
    :param message: text behind the colon, continuation lines included, CUDA's help lines left out.
    :param link: how it follows the one before: ``""`` (the first), ``"during"``, ``"cause"`` or ``"group"`` (a member
        of an exception group).
    :param number: line number of the exception's own line; of the last frame where the traceback was cut off.
    :param bare: ``type`` is a name of ours that stands nowhere in the log: the message is all that was printed.
    :param printed: numbers and lines as they stood, where ``type: message`` is not how they were printed.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]
    link: str = ""
    number: int = 0
    bare: bool = False
    printed: tuple[tuple[int, str], ...] = ()

    @property
    def text(self) -> str:
        """``type: message`` as Python prints it."""
        if self.bare and self.message:
            return self.message
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def line(self) -> str:
        """The first line of :attr:`text` that says something: some messages begin with an empty line."""
        said = self.message.lstrip().partition("\n")[0]
        if self.bare and said:
            return said
        return f"{self.type}: {said}" if said else self.type


@dataclass(frozen=True, slots=True)
class Traceback:
    """One crash record with its whole chain, in the order printed: the deepest cause first.

    :param header: text before ``Traceback (most recent call last)`` on its line, e.g. ``Scheduler hit an exception:``.
    :param before: the line before a traceback that has no header of its own, if that line announces one.
    :param number: line number of the header.
    :param kind: ``python``; ``line`` (an exception's last line without a traceback); ``native`` (C++, the interpreter's
        fatal errors, Rust panics); ``signal`` (a native death that names no place); ``build`` (compiler errors);
        ``threads`` (a dump of all threads: where they were, not what failed).
    :param voter: tells apart processes whose lines were shuffled together so that none can be named.
    :param sure: False where lines were shuffled so that the frames may be those of another exception.
    """

    header: str
    rank: str
    time: str
    number: int
    pid: int | None
    exceptions: tuple[ExceptionBlock, ...]
    before: str = ""
    kind: Kind = "python"
    voter: str = ""
    sure: bool = True


_FRAME = re.compile(r'\s*File "([^"]{0,500})", line (\d{1,9})(?:,? in (.{1,200}?))?\s*$')
_EXCEPTION = re.compile(
    r"((?=[\w.]{0,200}[A-Z.])[A-Za-z_]\w{0,80}(?:\.[\w<>]{1,80}){0,16})(?::(?: (.*))?)?$", re.DOTALL
)
_LONE = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){0,12}(?:[A-Z]\w{0,60}?"
    r"(?:(?:Error|Exception)[A-Za-z0-9]{0,40}|OutOfResources)|OutOfResources))(?:: (\S.*)|:?)$",
    re.DOTALL,
)
_STRICT = re.compile(r"(?:(?:[a-z_]\w{0,60}\.){1,12}[A-Z_]\w{0,60}|[A-Z]\w{0,60}(?:Error|Exception|Exit|Interrupt|Group"
                     r"|Warning|Timeout|Empty|OutOfResources|Iteration)\w{0,20})(?::|$)")  # fmt: skip
_UNRELATED = re.compile(
    r"(?:exit \d+$|/[^\s:]+:\d+: \w*Warning|<frozen \w|Multi-thread loading|Loading \w+ checkpoint|Capturing |INFO: |ERROR: "
    r"|WARNING: |\[Gloo\]|\[[A-Z]\d{4} \d\d:|[IWEF]\d{4} \d\d:|usage: |Process \S+:$|Exception ignored in"
    r"|(?:Segmentation fault|Aborted)(?: \(core dumped\))?$|Killed$|Downloading )"
)
_HELP = re.compile(
    r"(?:CUDA|HIP) kernel errors might be|For debugging consider passing|Compile with `TORCH_USE_|Search for `cuda"
    r"|Device-side assertion tracking|Device-side assertions were explicitly|Search for `hip"
)
_TOLD = re.compile(r"error|fatal|undefined|No such file|not found|FAILED")
_STACK = re.compile(r"(?:Exception raised from |C\+\+ CapturedTraceback:|frame #\d|#\d+ )")
_ITEM = re.compile(r"(?:[-*•] |\d{1,3}[.)] |ptxas |Repro command: )\S")
_HEADING = re.compile(
    r"(?!Exception |Process |Traceback|Call stack|Stack|Thread |Current thread|Extension modules)[A-Z].{0,120}:$"
)
"""Lines that go on with the message of an exception behind an empty line."""
_QUOTES = '"""'


def unrelated(body: str) -> bool:
    """Whether an unprefixed line is plainly something else than a part of a traceback."""
    return _UNRELATED.match(body) is not None


@lru_cache(maxsize=4096)
def _frame(text: str, code: str) -> Frame | None:
    match = _FRAME.match(text)
    if match is None:
        return None
    return Frame(match[1], int(match[2]), match[3] or "", code.strip()[:300])


def exception_of(body: str, *, strict: bool = False) -> tuple[str, str] | None:
    """Type and message of the line that ends a traceback, or None.

    :param strict: only names that look like an exception's: dotted, or ending as such names do.
    """
    if strict and _STRICT.match(body) is None:
        return None
    match = _EXCEPTION.match(body)
    return (match[1], match[2] or "") if match is not None else None


def lone_exception(body: str) -> tuple[str, str] | None:
    """Type and message where a line by itself is plainly that of an exception: ``RuntimeError: The size of ...``."""
    if "Error" not in body and "Exception" not in body and "OutOf" not in body:
        return None
    match = _LONE.match(body)
    if match is None or "Traceback" in match[1]:
        return None
    return match[1], match[2] or ""


_LOOKUPS = frozenset(
    {
        *(
            "KeyError",
            "AttributeError",
            "ImportError",
            "ModuleNotFoundError",
            "IndexError",
            "LookupError",
            "StopIteration",
        ),
        *(
            "FileNotFoundError",
            "Empty",
            "EOFError",
            "BrokenPipeError",
            "ConnectionResetError",
            "NotImplementedError",
        ),
    }
)
_LEAVING = frozenset({"SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit"})


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def root_block(blocks: Sequence[ExceptionBlock]) -> ExceptionBlock | None:
    """The deepest cause of a chain, or None where there is no exception.

    The first exception of the chain, except: the first member of an exception group instead of the group; an exception
    that only ends the program (``SystemExit``) never, while there is another; and where ``During handling`` joins two
    and the first is a failed look-up or a lost peer (KeyError, AttributeError, ImportError, FileNotFoundError, EOFError
    and their like), of another type than the second, and the second does not repeat the first one's message, then the
    first was caught by a fallback and the second is the failure.
    """
    chain = [block for block in blocks if block.type and not _bare(block.type).endswith("ExceptionGroup")]
    grouped = False
    members: list[ExceptionBlock] = []
    for block in chain:
        if block.link == "group":
            if grouped:
                break
            grouped, members = True, []
        members.append(block)
    chain = members or [block for block in blocks if block.type]
    if not chain:
        return blocks[0] if blocks else None
    kept = [block for block in chain if _bare(block.type) not in _LEAVING] or chain
    root = kept[0]
    for block in kept[1:]:
        if (
            block.link != "during"
            or _bare(root.type) not in _LOOKUPS
            or _bare(block.type) == _bare(root.type)
        ):
            break
        said = root.message.partition("\n")[0].strip().strip("'\"")
        if said and said in block.message:
            break
        root = block
    return root


FRAMES, MESSAGE, GAP, LINKED = range(4)
"""States of a collector: frames are read; a message is read; an empty line came after it; a link line came."""


@dataclass(slots=True)
class Collector:
    """A Python traceback being read."""

    header: str
    rank: str
    time: str
    number: int
    pid: int | None
    touched: int
    before: str = ""
    kind: Kind = "python"
    indent: int = 0
    prefixed: bool = False
    flat: bool = False
    state: int = FRAMES
    link: str = ""
    type: str = ""
    message: list[str] = field(default_factory=list)
    at: int = 0
    filed: int = 0
    files: deque[str] = field(default_factory=lambda: deque(maxlen=_KEEP_FRAMES))
    codes: deque[str] = field(default_factory=lambda: deque(maxlen=_KEEP_FRAMES))
    done: list[ExceptionBlock] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the exception's line was read: what comes next may be something else."""
        return self.state == MESSAGE or self.state == GAP

    @property
    def empty(self) -> bool:
        """Nothing but the header was read."""
        return not self.files and not self.type and not self.done

    def raised(self, kind: str, message: str, number: int) -> None:
        """The line that names the exception was read."""
        self.type, self.at, self.state = kind, number, MESSAGE
        self.message = [message[:8000]]

    def resume(self) -> None:
        """A header came after a link: the next traceback of the chain begins."""
        self.state = FRAMES

    def take(self, body: str, number: int) -> bool:
        """Add an unprefixed line; False if it cannot belong to this traceback."""
        state = self.state
        if body[:1] == " ":
            if body.startswith('  File "'):
                if state != FRAMES:
                    return self._more(body)
                self.files.append(body)
                self.codes.append("")
                self.filed = number
                return True
            if state == FRAMES:
                return self._indented(body)
        if not body or body.isspace() or body.strip() == _QUOTES:
            if state == MESSAGE:
                self.state = GAP
            return True
        if state == FRAMES:
            return self._flat(body) or self._end(body, number)
        if body.startswith((DURING, CAUSE)):
            return self._linked("during" if body.startswith(DURING) else "cause", LINKED)
        return self._more(body)

    def _flat(self, body: str) -> bool:
        """A frame or its source line in a paste that lost the indentation."""
        if body.startswith('File "') and '", line ' in body:
            self.files.append("  " + body)
            self.codes.append("")
            self.flat = True
            return True
        if not self.flat or exception_of(body, strict=True) is not None:
            return False
        if not self.codes[-1]:
            bare = body.strip(" \t^~")
            if (
                bare
                and exception_of(body) is not None
                and not body.startswith(("raise", "return", "pass", "yield"))
            ):
                return False
            self.codes[-1] = body if bare else ""
            return True
        return not body.strip(" \t^~")

    def member(self) -> bool:
        """A separator of an exception group's box was read."""
        if not self.finished:
            return self.state == FRAMES and not self.files
        return self._linked("group", FRAMES)

    def _linked(self, link: str, state: int) -> bool:
        if not self.finished:
            return False
        self.shut()
        self.link, self.state = link, state
        return True

    def _indented(self, body: str) -> bool:
        if self.codes and not self.codes[-1]:
            bare = body.strip(" \t^~")
            if bare and not bare.startswith("[Previous line repeated"):
                self.codes[-1] = body
        elif not self.codes and not body.isspace():
            return _FRAME.match(body) is not None or not self.empty or bool(self.header)
        return True

    def _end(self, body: str, number: int) -> bool:
        match = _EXCEPTION.match(body)
        if match is None or _UNRELATED.match(body):
            return False
        self.raised(match[1], match[2] or "", number)
        return True

    def _more(self, body: str) -> bool:
        """A line after the exception's: of its message, or CUDA's help and C++ stack."""
        if self.state == LINKED:
            return False
        if _STACK.match(body) or _HELP.match(body):
            if body.startswith("Exception raised from ") and len(self.message) < _KEEP_TOLD:
                self.message.append(body[:400])
            return True
        if _UNRELATED.match(body) or body.startswith('  File "'):
            return False
        if self.state == GAP:
            if not self.message or not self._resumed(body):
                return False
            self.state = MESSAGE
        if self.kind == "line" and not body[0].isspace():
            return False
        kept = len(self.message)
        if kept < _KEEP_MESSAGE or (kept < _KEEP_TOLD and _TOLD.search(body)):
            self.message.append(body[:2000])
        return True

    def _resumed(self, body: str) -> bool:
        """Whether a line after an empty one is still the message: a heading or an item of its list."""
        if self.kind != "python" or len(self.message) >= _KEEP_TOLD:
            return False
        if _ITEM.match(body):
            return True
        return _HEADING.match(body) is not None and native_begin(body) is None

    def replay(self) -> Iterator[tuple[str, int]]:
        """The lines that were taken, as Python prints them, with their numbers as far as they are kept."""
        for place, block in enumerate(self.done):
            if place:
                yield (DURING if block.link == "during" else CAUSE), block.number
                yield MARK + ":", block.number
            for frame in block.frames:
                yield (
                    f'  File "{frame.file}", line {frame.line}'
                    + (f", in {frame.function}" if frame.function else ""),
                    self.number,
                )
                if frame.code:
                    yield f"    {frame.code}", self.number
            for text in block.text.split("\n"):
                yield text, block.number
        if self.done:
            yield (DURING if self.link == "during" else CAUSE), self.number
            if self.state != LINKED:
                yield MARK + ":", self.number
        for file, code in zip(self.files, self.codes, strict=True):
            yield file, self.number
            if code:
                yield code, self.number

    def shut(self) -> None:
        """End the current exception of the chain."""
        if self.type or self.files:
            if len(self.done) >= _KEEP_BLOCKS:
                del self.done[_KEEP_BLOCKS // 2]
            frames = tuple(
                found
                for text, code in zip(self.files, self.codes, strict=True)
                if (found := _frame(text, code))
            )
            text = "\n".join(self.message).rstrip()
            number = self.at or (self.filed if frames else 0)
            self.done.append(ExceptionBlock(self.type, text, frames, self.link, number))
        self.type, self.message, self.at, self.filed = "", [], 0, 0
        self.files.clear()
        self.codes.clear()

    def record(self) -> Traceback | None:
        """The record, or None where there is nothing to tell."""
        self.shut()
        if not self.done and not self.header:
            return None
        named = self.header or any(block.type for block in self.done)
        if not named and sum(len(block.frames) for block in self.done) < 2:
            return None
        return Traceback(
            self.header, self.rank, self.time, self.number, self.pid, tuple(self.done), self.before, self.kind
        )


_TERMINATE = re.compile(
    r"terminate called (?:after throwing an instance of '([^']{1,200})'|without an active exception|recursively)"
)
_FATAL = re.compile(r"Fatal Python error: (.{1,400})")
_PANIC = re.compile(
    r"thread '([^']{0,80})' (?:\(\d{1,12}\) )?panicked at (?:'(.{0,400})', )?(\S{1,300}?):(\d{1,9})(?::\d{1,9})?:?$"
)
_THREADS = re.compile(
    r"(?:Current t|T)hread 0x[0-9a-fA-F]{1,16}\b.{0,80}\(most recent call first\):|Thread (?:0x)?[0-9a-fA-F]{1,16} \((?:active|idle)[^)]{0,40}\)"
    r"|Timeout \(\d+:\d\d:\d\d\)!|Process \d{1,10}: \S|Python v\d\.\d{1,3}\.\d{1,3}\S* \("
)
_SIGNAL = re.compile(
    r"(?:(?:double )?free\(\): \w|free\(\): invalid|malloc\(\): |realloc\(\): |munmap_chunk\(\): |corrupted size vs|corrupted double-linked"
    r"|double free or corruption|\*\*\* stack smashing detected|\*\*\* SIG[A-Z]{3,5} received|\*\*\* Process received signal"
    r"|!!!!!!! Segfault encountered|(?:Segmentation fault|Aborted|Bus error|Illegal instruction)(?: +\(core dumped\)|$))"
)
_DUMPED = re.compile(
    r".{0,80}: line \d{1,6}: *\d{1,10} (?:Segmentation fault|Aborted|Bus error|Illegal instruction)"
)
_BUILD = re.compile(
    r"(?:ptxas (?:\S+, line \d{1,9}; )?(?:fatal|error) *:|nvcc (?:fatal|error) *:|\S{1,300}\(\d{1,7}\): (?:fatal |catastrophic )?error:? "
    r"|\S{1,300}:\d{1,7}(?::\d{1,5})?: (?:fatal )?error: |collect2: error: |/usr/bin/ld: |ninja: (?:build stopped|error|fatal)"
    r"|FAILED: (?:\[code=\d+\] )?\S+\.o)"
)
_RAISED = re.compile(r"Exception raised from (\S{1,300}) at (\S{1,400}):(\d{1,9})")
_CPP = re.compile(
    r"(?:frame )?#(\d{1,4}): (.{1,2000}?)(?: \+ 0x[0-9a-f]+)?(?: \(0x[0-9a-f]+ in (.{1,400})\))?$"
)
_BUILD_CONTEXT = re.compile(r"(?:\d+ errors? detected|\s+|compilation terminated)")


def native_begin(body: str) -> Kind | None:
    """The kind of crash record that this line begins, or None. Bodies without their prefix only."""
    first = body[:1]
    if first == "t":
        return "native" if _TERMINATE.match(body) or _PANIC.match(body) else _build_begin(body)
    if first == "F" and body.startswith("Fatal Python error: "):
        return "native"
    if first and first in "CTP" and _THREADS.match(body):
        return "threads"
    if first and first in "fdmrc*!SABI" and _SIGNAL.match(body):
        return "signal"
    if "(core dumped)" in body and _DUMPED.match(body):
        return "signal"
    return _build_begin(body)


def _build_begin(body: str) -> Kind | None:
    if (
        "error" in body or "fatal" in body or body.startswith(("FAILED: ", "/usr/bin/ld", "ninja:"))
    ) and _BUILD.match(body):
        return "build"
    return None


@dataclass(slots=True)
class NativeCollector:
    """A crash record that is no Python traceback, being read."""

    kind: Kind
    rank: str
    time: str
    number: int
    pid: int | None
    touched: int
    type: str = ""
    message: list[str] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    place: Frame | None = None
    own: bool = False
    threads: int = 0
    blank: bool = False
    panic: bool = False
    taken: int = 0
    printed: list[tuple[int, str]] = field(default_factory=list)

    def begin(self, body: str, text: str = "") -> None:
        """Read the first line; ``text`` is the line with its prefix."""
        self.printed = [(self.number, text or body)]
        if self.kind == "build":
            self.type = (
                body.partition(" ")[0].rstrip(":")
                if body.startswith(("ptxas", "nvcc", "ninja"))
                else "compiler"
            )
            self.message = [body[:2000]]
        elif self.kind == "signal":
            self.type = (
                re.sub(r"^.{0,80}: line \d{1,6}: *\d{1,10} ", "", body)
                .strip()[:160]
                .partition(" received at")[0]
            )
        elif self.kind == "threads":
            self._thread(body)
        elif match := _TERMINATE.match(body):
            self.type = match[1] or "terminate"
            if match[1] is None:
                self.message = [match[0]]
        elif match := _FATAL.match(body):
            self.type, self.message = "Fatal Python error", [match[1]]
        elif match := _PANIC.match(body):
            self.panic = True
            self.type = "panic"
            self.message = [match[2]] if match[2] else []
            self.place = Frame(match[3], int(match[4]), match[1])

    def take(self, body: str, number: int = 0, text: str = "") -> bool:
        """Add a line; False if the record ended before it."""
        self.taken += 1
        if self.kind == "signal" or self.taken > 4000:
            return False
        if not body or body.isspace():
            if self.blank and self.kind != "threads":
                return False
            self.blank = True
            return self.kind != "build"
        found = self._take(body)
        self.blank = False
        if found and number and self.type != "Fatal Python error" and body.startswith("  what():"):
            self.printed.append((number, text or body))
        return found

    def _take(self, body: str) -> bool:
        if self.kind == "build":
            if _BUILD.match(body) or _BUILD_CONTEXT.match(body):
                if len(self.message) < _KEEP_MESSAGE:
                    self.message.append(body[:2000])
                return True
            return False
        if self.kind == "threads" or self.type == "Fatal Python error":
            return self._dump(body)
        if self.panic:
            if not self.message:
                self.message.append(body[:2000])
                return True
            return (
                body.startswith(("note: run with", "stack backtrace:", "   ")) or body.lstrip()[:1].isdigit()
            )
        return self._stack(body)

    def _stack(self, body: str) -> bool:
        if match := _RAISED.match(body):
            self.place = Frame(match[2], int(match[3]), match[1])
            return True
        if match := _CPP.match(body):
            if len(self.frames) < _KEEP_FRAMES:
                self.frames.append(Frame(match[3] or "", 0, match[2][:200]))
            return True
        if body.startswith("  what():"):
            self.message.append(body[9:].strip()[:2000])
            return True
        if _HELP.match(body):
            return True
        if self.frames or self.place or self.blank or not self.message or _UNRELATED.match(body):
            return False
        if len(self.message) < _KEEP_MESSAGE:
            self.message.append(body[:2000])
        return True

    def _thread(self, body: str) -> None:
        self.threads += 1
        if body.startswith("Current"):
            self.own, self.frames = True, []
        elif self.threads > 1:
            self.own = False

    def _dump(self, body: str) -> bool:
        if _THREADS.match(body):
            self._thread(body)
            return True
        if match := _FRAME.match(body):
            if (self.own or self.threads == 1) and len(self.frames) < _KEEP_FRAMES:
                self.frames.append(Frame(match[1], int(match[2]), match[3] or ""))
            return True
        return body[0].isspace() or body.startswith(
            ("Extension modules:", "Python runtime state:", "Stack (most recent")
        )

    def record(self) -> Traceback:
        """The record; frames in Python's order, the place of the crash last."""
        frames = list(reversed(self.frames))
        if self.place is not None:
            frames.append(self.place)
        message = "\n".join(self.message).rstrip()
        block = ExceptionBlock(
            self.type, message, tuple(frames), "", self.number, self.kind == "build", tuple(self.printed)
        )
        blocks: Iterable[ExceptionBlock] = () if self.kind == "threads" else (block,)
        return Traceback("", self.rank, self.time, self.number, self.pid, tuple(blocks), "", self.kind)
