"""Chat prompts of several kinds, as the tokens that the server would make of them.

``/generate`` is the only request of sglang 0.5.11 that answers with token ids, log-probabilities and exact speculative counts,
and it applies no chat template; no request of 0.5.11 applies one and gives it back. So the template is applied on the host, by
the service's own venv and the model's own tokenizer, as the server does it, and the number of tokens is held against that of
a chat.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from ddtree_ops.checks.validation.base import Context
from ddtree_ops.errors import DeadlineError, RemoteError

__all__ = ["Ask", "Rendered", "digest", "kinds", "pick_prompts", "ready", "render"]

_PROMPTS = Path(__file__).with_name("acceptance_prompts.yaml")
_RENDERING_S = 180.0
"""Seconds for the host to import transformers, cold, and read a tokenizer."""
_SCRIPT = """\
import json, os, sys
asked = json.load(sys.stdin)
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(asked["model"], trust_remote_code=asked["trust"])
if asked["template"]:
    with open(asked["template"], encoding="utf-8") as file:
        tokenizer.chat_template = file.read()
found = []
for text in asked["texts"]:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    found.append([int(each) for each in ids])
sys.stdout.write("\\n@@" + json.dumps(found) + "\\n")
"""
_SAID = re.compile(r"^@@(.*)$", re.M)
_TRUST, _TEMPLATE, _TOKENIZER = "trust-remote-code", "chat-template", "tokenizer-path"


@dataclass(frozen=True)
class Ask:
    """A prompt.

    :param name: kind and number: ``code-1``.
    :param given: what ``/generate`` is sent: ids of the tokens with the chat template, or the text without one.
    """

    name: str
    kind: str
    text: str
    given: str | tuple[int, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """Prompts as they are sent.

    :param templated: with the model's chat template.
    :param note: why not, or what is odd about it; empty where all is well.
    """

    prompts: tuple[Ask, ...]
    templated: bool
    note: str = ""


@cache
def kinds() -> dict[str, tuple[str, ...]]:
    """The shipped prompts by kind."""
    return TypeAdapter(dict[str, tuple[str, ...]]).validate_python(
        yaml.safe_load(_PROMPTS.read_text("utf-8"))
    )


def pick_prompts(number: int, only: Sequence[str] = ()) -> tuple[Ask, ...]:
    """``number`` prompts, of every kind in turn; ``only`` of these kinds.

    Unknown kinds are left out.
    """
    chosen = {kind: texts for kind, texts in kinds().items() if not only or kind in only}
    columns = (
        [Ask(f"{kind}-{place}", kind, text) for place, text in enumerate(texts, 1)]
        for kind, texts in chosen.items()
    )
    turns = [each for turn in zip_longest(*columns) for each in turn if each is not None]
    return tuple(turns[:number])


def digest(prompts: Sequence[Ask]) -> str:
    """SHA-256 of the texts, in order."""
    return hashlib.sha256(json.dumps([each.text for each in prompts]).encode()).hexdigest()


def ready(ctx: Context, prompts: Sequence[Ask]) -> Rendered:
    """These of the shipped prompts as they are sent; the host is asked once a run, for all that there are.

    :raises EngineError: as :func:`render`.
    """
    every = render(ctx, pick_prompts(sum(map(len, kinds().values()))))
    names = {each.name for each in prompts}
    return replace(every, prompts=tuple(each for each in every.prompts if each.name in names))


def render(ctx: Context, prompts: Sequence[Ask]) -> Rendered:
    """Apply the model's chat template, once a run; without one the texts are sent as they are, and the note says why.

    :raises EngineError: the chat that the number of tokens is taken from fails.
    """
    key = f"rendered {digest(prompts)}"
    if key not in ctx.shared:
        ctx.shared[key] = _render(ctx, prompts)
    found: Rendered = ctx.shared[key]
    return found


def _render(ctx: Context, prompts: Sequence[Ask]) -> Rendered:
    ctx.say("the host applies the model's chat template")
    found = _ids_on_host(ctx, [each.text for each in prompts])
    if isinstance(found, str):
        plain = tuple(Ask(each.name, each.kind, each.text, each.text) for each in prompts)
        return Rendered(plain, False, f"prompts are sent without a chat template: {found}")
    done = tuple(
        Ask(each.name, each.kind, each.text, tuple(ids)) for each, ids in zip(prompts, found, strict=True)
    )
    chat = ctx.engine.chat(ctx.model.name, done[0].text, max_tokens=1, timeout=ctx.timeout)
    if chat.prompt_tokens != len(done[0].given):
        note = f"the template makes {len(done[0].given)} tokens of {done[0].name} here, the server's {chat.prompt_tokens}"
        return Rendered(done, True, note)
    return Rendered(done, True)


def _ids_on_host(ctx: Context, texts: Sequence[str]) -> list[list[int]] | str:
    """Ids of the texts with the template, or why there are none."""
    service = ctx.target.service
    args = {key.strip("-").replace("_", "-"): value for key, value in service.args.items()}
    template = args.get(_TEMPLATE)
    if template is not None and not str(template).startswith("/"):
        return f"--{_TEMPLATE} {template} is one of sglang's own, which only the server applies"
    asked = {
        "model": str(args.get(_TOKENIZER) or service.model),
        "trust": args.get(_TRUST) is True,
        "template": str(template or ""),
        "texts": list(texts),
    }
    argv = [f"{service.venv}/bin/python", "-c", _SCRIPT]
    if service.user:
        argv = ["runuser", "-u", service.user, "--", *argv]
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    try:
        done = ctx.session.run(argv, input=json.dumps(asked).encode(), env=env, deadline=_RENDERING_S)
    except DeadlineError:
        return f"{service.venv} did not apply it within {_RENDERING_S:g} s"
    except RemoteError as error:
        return error.message
    said = _SAID.search(done.stdout.decode("utf-8", "replace"))
    if done.rc != 0 or said is None:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{service.venv} cannot apply it: {lines[-1][:200] if lines else f'exit status {done.rc}'}"
    return TypeAdapter(list[list[int]]).validate_json(said[1])
