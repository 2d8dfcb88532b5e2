"""The plugin: the algorithm's name, the hooks, and what each of them tells the engine.

``speculative_num_draft_tokens`` stays the drafter's block size. The target verifies ``budget + 1`` tokens a request,
and every consumer on the target's side is told so:

=====================================  ==================================================================
consumer (sglang 0.5.11)               told by
=====================================  ==================================================================
``CudaGraphRunner`` and capture spec   patch 0001 of the runtime, not from here
``TritonAttnBackend.num_draft_tokens`` :func:`size_backend`
graph state of that backend            :func:`size_graph_state` (refuses a runner of another size)
width of ``req_to_token``              :func:`size_pools`
memory check before a decode step      :func:`tokens_required`
``ModelRunner._dummy_run``             :func:`dummy_run`
=====================================  ==================================================================

sglang logs a hook that it cannot install and goes on; :class:`ddtree_sglang.worker.DDTreeWorker` looks at all of them
before it serves. The algorithm's name is added last: a plugin that failed half-way leaves ``DDTREE`` unknown.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from ddtree_sglang import flags
from ddtree_sglang.check import (
    ALGORITHM,
    DDTreeError,
    block_size,
    neutralise,
    patch_missing,
    refuse_version,
    request_refusal,
    self_check_skipped,
    verify_tokens,
)

__all__ = [
    "HOOKS",
    "add_algorithm",
    "dummy_run",
    "register",
    "request_error",
    "resolve",
    "size_backend",
    "size_graph_state",
    "size_pools",
    "speculative_arguments",
    "tokens_required",
]

logger = logging.getLogger(__name__)


def _is_tree_target(model_runner: Any) -> bool:
    """Whether this runner holds the target under DDTREE. The drafter's runner keeps the block size."""
    return bool(model_runner.spec_algorithm.is_ddtree()) and not model_runner.is_draft_worker


@contextlib.contextmanager
def _told(server_args: Any, tokens: int) -> Iterator[None]:
    """Let ``speculative_num_draft_tokens`` read ``tokens`` while a function that sizes by it runs."""
    kept = server_args.speculative_num_draft_tokens
    server_args.speculative_num_draft_tokens = tokens
    try:
        yield
    finally:
        server_args.speculative_num_draft_tokens = kept


def speculative_arguments(original: Callable[[Any], None], self: Any) -> None:
    """Around ``ServerArgs._handle_speculative_decoding``: the flags, and whether a tree of this shape can be built.

    Raises:
        DDTreeError: saying what to change.
    """
    flags.handle_speculative_decoding(original, self)
    if self.speculative_algorithm != ALGORITHM:
        return
    from ddtree_sglang.tree import prepare

    budget, depth = self.speculative_ddtree_budget, block_size(self) - 1
    try:
        prepare(depth, min(self.speculative_ddtree_topk_cap, budget), budget, "cpu")
    except ValueError as error:
        raise DDTreeError(f"DDTREE does not run with these arguments:\n  - {error}") from error


def size_backend(result: None, self: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ``TritonAttnBackend.__init__``: the target's backend works on budget + 1 rows a request."""
    if _is_tree_target(model_runner):
        self.num_draft_tokens = self.ddtree_tokens = verify_tokens(model_runner.server_args)
        self.ddtree_tree_mask = True


def size_graph_state(
    original: Callable[..., None], self: Any, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
) -> None:
    """Around ``TritonAttnBackend.init_cuda_graph_state``: compare the runner's size before anything is captured.

    A graph of another size would be captured with rows that the buffers do not have. Where the self-check is
    switched off the backend follows the runner instead, so that the capture is sound and the first request fails.
    The mask buffer gets room for the tree on top of the context: sglang's holds ``context_len`` columns a row,
    which one request near the limit exceeds. All other buffers are made for one token a request: sglang counts them
    by tokens, but in a verify step ``cuda_graph_kv_indices`` holds a row of the context for each request, and those
    of the decode kernel are not used (the target captures nothing else).

    Raises:
        DDTreeError: if the runner is not sized for the tree; the text names the patch.
    """
    import torch

    tokens = getattr(self, "ddtree_tokens", None)
    if tokens is None:
        original(self, max_bs, max_num_tokens, *args, **kwargs)
        return
    sized = max_num_tokens // max_bs
    if sized != tokens:
        if not self_check_skipped():
            raise DDTreeError(patch_missing(tokens, sized))
        logger.warning("DDTREE: capturing graphs all the same, although %s", patch_missing(tokens, sized))
        self.num_draft_tokens = sized
    original(self, max_bs, max_bs, *args, **kwargs)
    self.cuda_graph_custom_mask = None
    self.cuda_graph_custom_mask = torch.zeros(
        max_num_tokens * (self.max_context_len + tokens), dtype=torch.uint8, device=self.device
    )


def size_pools(original: Callable[[Any], None], self: Any) -> None:
    """Around ``ModelRunner._init_pools``: a row of ``req_to_token`` holds the context and a whole tree."""
    if not _is_tree_target(self):
        original(self)
        return
    with _told(self.server_args, verify_tokens(self.server_args)):
        original(self)


def dummy_run(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner._dummy_run``: warm up with as many rows as the backend works on."""
    if not _is_tree_target(self):
        return original(self, *args, **kwargs)
    with _told(self.server_args, verify_tokens(self.server_args)):
        return original(self, *args, **kwargs)


def tokens_required(result: int, self: Any, selected_indices: list[int] | None = None) -> int:
    """After ``ScheduleBatch.new_tokens_required_next_decode``: a verify step takes budget + 1 slots a request."""
    if not self.spec_algorithm.is_ddtree():
        return result
    from sglang.srt.server_args import get_global_server_args

    requests = len(self.reqs) if selected_indices is None else len(selected_indices)
    return max(result, verify_tokens(get_global_server_args()) * requests)


def request_error(result: str | None, req: Any) -> str | None:
    """After ``validate_dflash_request``: what DDTREE refuses of a request, in the name of the algorithm it asked."""
    from sglang.srt.server_args import get_global_server_args

    if get_global_server_args().speculative_algorithm != ALGORITHM:
        return result
    counted = request_refusal(req.sampling_params)
    refused = counted if result is None else result.replace("DFLASH", ALGORITHM)
    if refused is not None:
        neutralise(req.sampling_params)
    return refused


_AROUND, _AFTER = "around", "after"

_TABLE: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("sglang.srt.server_args.ServerArgs.__init__", flags.init, _AROUND),
    ("sglang.srt.server_args.ServerArgs.__repr__", flags.show, _AFTER),
    ("sglang.srt.server_args.ServerArgs.add_cli_args", flags.add_flags, _AFTER),
    ("sglang.srt.server_args.ServerArgs._handle_speculative_decoding", speculative_arguments, _AROUND),
    ("sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__", size_backend, _AFTER),
    (
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_cuda_graph_state",
        size_graph_state,
        _AROUND,
    ),
    (
        "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._init_pools",
        size_pools,
        _AROUND,
    ),
    ("sglang.srt.model_executor.model_runner.ModelRunner._dummy_run", dummy_run, _AROUND),
    (
        "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        tokens_required,
        _AFTER,
    ),
    ("sglang.srt.managers.scheduler.validate_dflash_request", request_error, _AFTER),
)

HOOKS: dict[str, Callable[..., Any]] = {target: hook for target, hook, _ in _TABLE}
"""Every hook that must be in place, by its target."""


def resolve(target: str) -> Any:
    """The function behind a dotted name, as it is now, without its classmethod or staticmethod wrapper."""
    owner, _, name = target.rpartition(".")
    found = pkgutil.resolve_name(owner)
    raw = vars(found).get(name) if isinstance(found, type) else getattr(found, name, None)
    return getattr(raw, "__func__", raw)


def add_algorithm(algorithms: Any) -> None:
    """Make ``DDTREE`` a member of the enumeration ``SpeculativeAlgorithm``.

    It answers True to ``is_dflash()``, whose drafter and scheduling it shares, and alone to ``is_ddtree()``; its
    worker is :class:`ddtree_sglang.worker.DDTreeWorker`. An Enum cannot be subclassed, and one of its own would not
    be the one that other modules already hold, so the member is added in place.
    """
    if ALGORITHM in algorithms.__members__:
        raise RuntimeError(
            f"sglang has an algorithm {ALGORITHM} already: this plugin is for a tree without one"
        )
    create_worker = algorithms.create_worker

    def is_dflash(self: Any) -> bool:
        return self.name in ("DFLASH", ALGORITHM)

    def is_ddtree(self: Any) -> bool:
        return bool(self.name == ALGORITHM)

    def create(self: Any, server_args: Any) -> Any:
        if self.name != ALGORITHM:
            return create_worker(self, server_args)
        from ddtree_sglang.worker import DDTreeWorker

        return DDTreeWorker

    member = object.__new__(algorithms)
    member._name_ = ALGORITHM
    member._value_ = max(other.value for other in algorithms) + 1
    member.__objclass__ = algorithms
    member._sort_order_ = len(algorithms._member_names_)
    for name, value in (("is_dflash", is_dflash), ("is_ddtree", is_ddtree), ("create_worker", create)):
        setattr(algorithms, name, value)
    type.__setattr__(algorithms, ALGORITHM, member)
    algorithms._member_names_.append(ALGORITHM)
    algorithms._member_map_[ALGORITHM] = member
    algorithms._value2member_map_[member._value_] = member


def register() -> None:
    """Entry point ``sglang.srt.plugins``: called by sglang in the launcher and in every scheduler process.

    Raises:
        DDTreeError: another sglang than 0.5.11. Nothing was changed then, so ``DDTREE`` stays an unknown choice.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.version import __version__

    refuse_version(__version__, logger.warning)
    flags.add_fields(ServerArgs)
    for target, hook, kind in _TABLE:
        HookRegistry.register(target, hook, HookType(kind))
    add_algorithm(SpeculativeAlgorithm)
