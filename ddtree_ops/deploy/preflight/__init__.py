"""What must hold on the host before anything is changed: one request, many facts, all problems at once.

:func:`probe_request` gathers the facts in one request, :func:`parse_facts` types them, and
:func:`ddtree_ops.deploy.preflight.judge.judge` turns them into one :class:`~ddtree_ops.results.CheckResult` a check.
Nothing is changed on the host.
"""

from __future__ import annotations

from ddtree_ops.deploy.preflight.facts import Facts, parse_facts, probe_request

__all__ = ["Facts", "parse_facts", "probe_request"]
