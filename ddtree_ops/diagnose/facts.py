"""What is known of the service whose log is read: from the inventory, or else from the log itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ddtree_ops.errors import UsageError
from ddtree_ops.inventory.models import Target

__all__ = ["ServiceFacts"]

_WORDS = {
    "int": "a whole number of 0 or more",
    "float": "a number of 0 or more",
    "bool": "true or false",
    "str": "text",
}


def _converted(kind: str, text: str) -> Any:
    if kind.startswith("bool"):
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
    if not kind.startswith(("int", "float")):
        return text
    number = int(text.replace("_", "")) if kind.startswith("int") else float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


_DUMP = {
    "tensor_parallel": ("tp_size",),
    "algorithm": ("speculative_algorithm",),
    "block_size": ("speculative_dflash_block_size", "speculative_num_draft_tokens"),
    "budget": ("speculative_ddtree_budget",),
    "topk_cap": ("speculative_ddtree_topk_cap",),
    "attention_backend": ("attention_backend",),
    "context_length": ("context_length",),
    "mem_fraction_static": ("mem_fraction_static",),
    "cuda_graph_max_bs": ("cuda_graph_max_bs",),
    "max_running_requests": ("max_running_requests",),
    "port": ("port",),
    "model": ("model_path",),
    "drafter": ("speculative_draft_model_path",),
    "page_size": ("page_size",),
    "chunked_prefill_size": ("chunked_prefill_size",),
}
_LIMITS = {
    "context_length": "context_len",
    "max_running_requests": "max_running_requests",
    "kv_tokens": "max_total_num_tokens",
    "chunked_prefill_size": "chunked_prefill_size",
}
_ALIASES = {
    "bs": "cuda_graph_max_bs",
    "context": "context_length",
    "context_len": "context_length",
    "ddtree_budget": "budget",
    "hidden": "hidden_size",
    "max_bs": "cuda_graph_max_bs",
    "num_draft_tokens": "block_size",
    "page": "page_size",
    "topk": "topk_cap",
    "tp": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "vocab": "vocab_size",
}
"""Short names and names of flags for fields, as people write them."""


def _simulated(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None


@dataclass(frozen=True)
class ServiceFacts:
    """Settings that explanations name. None is "not known".

    :param algorithm: as sglang writes it; ``none`` without speculation.
    :param block_size: tokens the drafter proposes a step, root included.
    :param budget: tree nodes, root not included: the verify pass sends ``budget + 1`` tokens a request.
    :param tensor_parallel: number of ranks.
    :param context_length: tokens.
    :param gpu: compute architecture, ``sm120``.
    :param patched: whether the deployed runner sizes its graph for the tree (patch 0001).
    :param kv_tokens: capacity of the KV pool, tokens.
    :param hidden_size: width of the target model, from its ``config.json``; likewise the drafter's and the vocabulary.
    :param min_accept_length: least tokens a verify step that the inventory asks for.
    :param simulated: ``SGLANG_SIMULATE_ACC_LEN`` of the service's environment, where it is above 0.
    :param learned: names of the fields that were read from the log, not given.
    """

    unit: str | None = None
    host: str | None = None
    algorithm: str | None = None
    block_size: int | None = None
    budget: int | None = None
    topk_cap: int | None = None
    tensor_parallel: int | None = None
    attention_backend: str | None = None
    context_length: int | None = None
    mem_fraction_static: float | None = None
    cuda_graph_max_bs: int | None = None
    max_running_requests: int | None = None
    gpu: str | None = None
    port: int | None = None
    model: str | None = None
    drafter: str | None = None
    runtime: str | None = None
    patched: bool | None = None
    page_size: int | None = None
    chunked_prefill_size: int | None = None
    kv_tokens: int | None = None
    hidden_size: int | None = None
    draft_hidden_size: int | None = None
    vocab_size: int | None = None
    min_accept_length: float | None = None
    simulated: float | None = None
    learned: frozenset[str] = field(default_factory=frozenset)

    @property
    def verify_tokens(self) -> int | None:
        """Tokens a request that the verify pass sends: ``budget + 1``."""
        return None if self.budget is None else self.budget + 1

    @classmethod
    def of(cls, target: Target, *, patched: bool | None = None) -> ServiceFacts:
        """The facts of a service as the inventory has it."""
        service, host = target.service, target.host
        args = {key.lstrip("-").replace("_", "-"): value for key, value in service.args.items()}
        speculative = service.speculative

        def number(name: str) -> int | None:
            value = args.get(name)
            return value if isinstance(value, int) and not isinstance(value, bool) else None

        backend, fraction = args.get("attention-backend"), args.get("mem-fraction-static")
        return cls(
            unit=service.unit,
            host=host.name or None,
            algorithm=speculative.algorithm if speculative else "none",
            block_size=speculative.block_size if speculative else None,
            budget=speculative.budget if speculative else None,
            topk_cap=speculative.topk_cap if speculative else None,
            tensor_parallel=service.tensor_parallel,
            attention_backend=str(backend) if backend is not None else None,
            context_length=number("context-length"),
            mem_fraction_static=float(fraction) if isinstance(fraction, int | float) else None,
            cuda_graph_max_bs=number("cuda-graph-max-bs"),
            page_size=number("page-size"),
            chunked_prefill_size=number("chunked-prefill-size"),
            max_running_requests=number("max-running-requests"),
            gpu=host.gpu.arch if host.gpu else None,
            port=service.port,
            model=service.model,
            drafter=service.drafter,
            runtime=target.runtime.name or None,
            patched=patched,
            min_accept_length=service.health.min_accept_length,
            simulated=_simulated(service.environment.get("SGLANG_SIMULATE_ACC_LEN", "")),
        )

    @classmethod
    def given(cls, pairs: Iterable[str], base: ServiceFacts | None = None) -> ServiceFacts:
        """Facts from ``KEY=VALUE`` words, over ``base``; keys are fields of this class or their short names (``tp``).

        :raises UsageError: an unknown key, or a value of another type.
        """
        kinds = {item.name: str(item.type) for item in fields(cls) if item.name != "learned"}
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            plain = key.strip().lstrip("-").replace("-", "_").removeprefix("speculative_")
            name = _ALIASES.get(plain.removeprefix("ddtree_"), plain.removeprefix("ddtree_"))
            if not equals or name not in kinds:
                raise UsageError(
                    f"{pair!r}: " + (f"there is no fact {key!r}" if equals else "not KEY=VALUE"),
                    hint=f"facts are: {', '.join(sorted(kinds))}",
                )
            try:
                values[name] = _converted(kinds[name], text.strip())
            except (ValueError, KeyError):
                raise UsageError(
                    f"{pair!r}: {name} is {_WORDS[kinds[name].split(' ')[0]]}", hint=f"e.g. --facts {name}=8"
                ) from None
        return replace(base or cls(), **values)

    def learn_config(self, config: Mapping[str, Any], *, drafter: bool = False) -> ServiceFacts:
        """Fill gaps from a model's ``config.json``; the text part of a model for pictures too."""
        text = config.get("text_config")
        inner: Mapping[str, Any] = text if isinstance(text, dict) else config
        names = {"hidden_size": "draft_hidden_size"} if drafter else {"hidden_size": "hidden_size"}
        if not drafter:
            names["vocab_size"] = "vocab_size"
        found = {field: inner.get(name, config.get(name)) for name, field in names.items()}
        return self.learn({field: value for field, value in found.items() if type(value) is int})

    def learn(self, found: Mapping[str, Any]) -> ServiceFacts:
        """These facts with gaps filled from ``found`` (names of this class); what is known is never overwritten."""
        wanted = {field.name: field.type for field in fields(self)}
        new = {
            name: value
            for name, value in found.items()
            if name in wanted and value is not None and getattr(self, name) is None
        }
        return replace(self, **new, learned=self.learned | set(new)) if new else self

    def learn_arguments(self, values: Mapping[str, Any]) -> ServiceFacts:
        """Fill gaps from a parsed ``ServerArgs`` dump."""
        numbers = {
            "algorithm": str,
            "attention_backend": str,
            "model": str,
            "drafter": str,
            "mem_fraction_static": float,
        }
        found: dict[str, Any] = {}
        for name, sources in _DUMP.items():
            for source in sources:
                value = values.get(source)
                if isinstance(value, bool) or not isinstance(value, numbers.get(name, int)):
                    continue
                found[name] = value
                break
        if "speculative_algorithm" in values and values["speculative_algorithm"] is None:
            found["algorithm"] = "none"
        return self.learn(found)

    def learn_limits(self, values: Mapping[str, str]) -> ServiceFacts:
        """Fill gaps from the ``max_total_num_tokens=..., context_len=...`` line."""
        return self.learn(
            {
                name: int(values[source])
                for name, source in _LIMITS.items()
                if values.get(source, "").isdigit()
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Known facts only, JSON-serialisable."""
        known = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "learned"}
        result = {name: value for name, value in known.items() if value is not None}
        if self.learned:
            result["from_log"] = sorted(self.learned)
        return result
