"""The serving venv: its Python, and versions against what the runtime requires. Pure."""

from __future__ import annotations

from ddtree_ops.deploy.preflight.facts import Facts
from ddtree_ops.deploy.preflight.pins import Mismatch, Pins
from ddtree_ops.deploy.preflight.verdicts import failed, listed, passed, unsure
from ddtree_ops.inventory.models import Target
from ddtree_ops.results import CheckResult, Evidence
from ddtree_ops.wording import count

__all__ = ["judge_plugins", "judge_venv", "judge_versions"]

ESSENTIAL = ("torch", "sglang-kernel", "transformers")
"""What every start imports, whatever the flags."""
KERNEL = "sglang-kernel"
_PLUGIN, _PACKAGE = "ddtree", "ddtree-sglang"
SKIP_KERNEL_CHECK = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"


def judge_venv(target: Target, facts: Facts) -> CheckResult:
    """The interpreter is there, runs, and is of the version that the runtime's wheel was built for."""
    venv, path = facts.venv, f"{target.service.venv.rstrip('/')}/bin/python"
    if not venv.there or not venv.executable:
        summary = f"{path} is {'not executable' if venv.there else 'missing'}"
        return failed("venv", summary, f"make the venv, or correct venv in the inventory: ls -l {path}")
    if not venv.version:
        summary = f"{path} does not run: {venv.said.splitlines()[0] if venv.said else 'it said nothing'}"
        hint = f"{path} -V on the host; after an upgrade of the system its base Python may be gone"
        return failed("venv", summary, hint, Evidence(f"{path} -V", venv.said))
    tag = "cp" + venv.version.replace(".", "")
    if tag != target.runtime.python:
        return failed(
            "venv",
            f"the venv has Python {venv.version} ({tag}), runtime {target.runtime.name or 'chosen'} is built for "
            f"{target.runtime.python}",
            f"set python: {tag} for the runtime in the inventory, or make the venv with the other Python",
            python=venv.version,
        )
    torch = next(iter(venv.packages.get("torch", ())), "")
    return passed("venv", f"Python {venv.version}{f', torch {torch}' if torch else ''}", python=venv.version)


def judge_versions(target: Target, facts: Facts, pins: Pins | None) -> list[CheckResult]:
    """The venv's packages against the base wheel's ``Requires-Dist``; what cannot run is refused, the rest is a warning.

    Refused: torch, sglang-kernel or transformers missing; an sglang-kernel older than pinned, because the engine itself
    refuses it (``assert_pkg_version`` in srt/entrypoints/engine.py), likewise flashinfer where it is the attention
    backend; a torch of another minor version than pinned, because the kernels' shared objects are linked against its
    C++ library, which keeps no binary interface between minor versions.
    """
    venv = facts.venv
    if not venv.version or not venv.packages:
        if venv.version and not venv.outside:
            summary = f"the venv has no packages below lib/python{venv.version}/site-packages"
            return [failed("versions", summary, "install sglang's requirements into it, or correct venv")]
        return []
    twice = [f"{name} {' and '.join(found)}" for name, found in venv.packages.items() if len(found) > 1]
    if pins is None:
        missing = [name for name in ESSENTIAL if name not in venv.packages]
        if missing and not venv.outside:
            return [failed("versions", f"{listed(missing)} missing in the venv", _install(target, missing))]
        return []
    wrong = pins.mismatches(venv.packages, facts.machine, venv.version)
    fatal = [one for one in wrong if _fatal(target, one, outside=venv.outside)]
    rest = [one for one in wrong if one not in fatal]
    evidence = [Evidence("dist-info METADATA", str(one)) for one in [*fatal, *rest]]
    figures = {
        "torch": _one(facts, "torch"), KERNEL.replace("-", "_"): _one(facts, KERNEL),
        "transformers": _one(facts, "transformers"), "wrong": [str(one) for one in wrong],
    }  # fmt: skip
    hint = _install(target, [f"{one.name}{one.wanted}" for one in [*fatal, *rest]])
    if fatal:
        summary = f"{pins.source} cannot run with {listed(fatal)}"
        return [failed("versions", summary, hint, *evidence, **figures)]
    if rest:
        summary = f"{count(len(rest), 'package')} not as {pins.source} requires: {listed(rest)}"
        return [unsure("versions", summary, hint, *evidence, **figures)]
    if twice:
        summary = f"several versions on record of {listed(twice)}: which one is imported is a matter of luck"
        return [
            unsure(
                "versions", summary, "remove the leftover .dist-info, or install the package again", **figures
            )
        ]
    shown = ", ".join(f"{name} {_one(facts, name)}" for name in ESSENTIAL)
    return [passed("versions", f"{shown}: as {pins.source} requires", **figures)]


def judge_plugins(target: Target, facts: Facts, *, overlay: bool = True) -> list[CheckResult]:
    """Packages of the venv that get in the way of the plugin in the release. Nothing is said where there are none.

    sglang keeps one plugin a name, the last that it finds, and the venv comes after the release on the path.

    :param overlay: the release has that plugin; a tree with a DDTREE of its own goes without.
    """
    speculative = target.service.speculative
    if speculative is None or speculative.algorithm.upper() != "DDTREE" or target.runtime.plugin_flags:
        return []
    pip = f"{target.service.venv.rstrip('/')}/bin/python -m pip uninstall"
    for package, name, value in facts.venv.plugins:
        if name == _PLUGIN and package != _PACKAGE:
            if not overlay:
                return []
            summary = f"{package} of the venv names a plugin {name} too ({value}): sglang takes that one, not the release's"
            return [
                failed(
                    "plugins", summary, f"{pip} {package}", Evidence("entry_points.txt", f"{name} = {value}")
                )
            ]
    if _PACKAGE in facts.venv.packages:
        if not overlay:
            summary = f"{_PACKAGE} {_one(facts, _PACKAGE)} is installed in the venv; the release has none, and sglang runs it"
            return [unsure("plugins", summary, f"{pip} {_PACKAGE}")]
        summary = (
            f"{_PACKAGE} {_one(facts, _PACKAGE)} is installed in the venv; the release's own goes before it"
        )
        return [unsure("plugins", summary, f"{pip} {_PACKAGE}")]
    return []


def _one(facts: Facts, name: str) -> str:
    return next(iter(facts.venv.packages.get(name, ())), "")


def _fatal(target: Target, one: Mismatch, *, outside: bool) -> bool:
    if one.name in ESSENTIAL and not one.found:
        return not outside
    if one.name == KERNEL:
        return one.older and SKIP_KERNEL_CHECK not in target.service.environment
    if one.name.replace("_", "-") == "flashinfer-python":
        asked = target.service.args.get("attention-backend") == "flashinfer"
        return asked and (one.older or not one.found) and SKIP_KERNEL_CHECK not in target.service.environment
    return one.name == "torch" and not one.near


def _install(target: Target, wanted: list[str]) -> str:
    names = " ".join(f"'{name}'" if set(name) & set("<>=!~") else name for name in wanted[:4])
    return f"{target.service.venv.rstrip('/')}/bin/python -m pip install {names}"
