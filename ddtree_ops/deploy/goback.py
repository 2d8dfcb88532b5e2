"""Going back: after a failure to what passed last, or by a person's word to what was recorded.

What a :class:`~ddtree_ops.deploy.deployment.Deployment` does in its steps ``rollback`` and ``go_back``, and what it
tells the host to go back to where this client is gone. The nodes of a service go back together or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree_ops.deploy.changed import against_now, kept_texts
from ddtree_ops.deploy.guard import WayBack
from ddtree_ops.deploy.history import BENCH, Activation, History
from ddtree_ops.deploy.looking import armed_request
from ddtree_ops.deploy.nodes import Member, PeerFailed, join_plans, same_choice
from ddtree_ops.deploy.plan import Observed, Plan, Wish, make_plan, manifest_files, text_sha256, unit_mode
from ddtree_ops.deploy.secrets import Secrets, recorded_service
from ddtree_ops.errors import (
    Inconclusive,
    LockHeld,
    LockLost,
    NotDeployed,
    OpsError,
    PreflightError,
    RolledBack,
    UnreachableError,
    heed_interruption,
)
from ddtree_ops.inventory.models import Service
from ddtree_ops.results import Verdict
from ddtree_ops.service.credentials import named_files

if TYPE_CHECKING:
    from ddtree_ops.deploy.deployment import Deployment
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.remote.session import Session

__all__ = [
    "Back",
    "choose",
    "damage",
    "go_back",
    "kept",
    "preview",
    "rollback",
    "see_that_it_serves",
    "where_to",
]


def rollback(deployment: Deployment) -> None:
    """See :meth:`~ddtree_ops.deploy.deployment.Deployment.rollback`."""
    failed, frame, safety = deployment.activation, deployment.frame, deployment.hold.safety
    if failed is None and (deployment.member is None or not safety.rollback):
        return
    if isinstance(frame.failure, LockLost):
        frame.say("rollback", "the lock is lost: whoever has it now is in charge")
        return
    if failed is not None and not safety.rollback:
        with frame.phase("rollback"):
            deployment.hold.need_lock()
            deployment.record(failed, _judged(frame.failure))
            frame.state_left = f"left as it failed (--no-rollback): {deployment.control.state().describe()}"
            frame.note = "left as it is: --no-rollback"
        return
    try:
        if deployment.member is not None:
            _roll_back_together(deployment, deployment.member)
        elif failed is not None:
            _go_back(deployment, failed)
    except (UnreachableError, LockLost):
        raise
    except OpsError:
        if deployment.member is not None or deployment.went_back:
            deployment.hold.disarm()
        raise
    deployment.hold.disarm()


def _judged(failure: OpsError | None) -> Verdict:
    return Verdict.INCONCLUSIVE if isinstance(failure, Inconclusive) else Verdict.FAIL


def _leave(deployment: Deployment, why: str, note: str) -> None:
    deployment.frame.state_left = f"{why}; {deployment.control.state().describe()}"
    deployment.frame.note = note


def _leave_unjudged(deployment: Deployment) -> None:
    _leave(
        deployment,
        "nothing was switched, and nothing is known to be wrong",
        "there was nothing to judge by: left as it is",
    )


def _leave_the_same(deployment: Deployment, good: Activation) -> None:
    _leave(
        deployment,
        f"{_passed_before(good)}, so nothing was switched",
        "nothing to go back to: the same release and unit passed before",
    )


def _passed_before(good: Activation) -> str:
    return f"the same release and unit passed on {good.time}: the cause is not the deployment"


def _told(deployment: Deployment, what: str, action: Callable[[], None]) -> None:
    """Do what keeps no service from coming back, such as a note on a full disk: that it failed is told.

    :raises UnreachableError, LockHeld, RolledBack: nothing more can be done from here, or may.
    """
    try:
        action()
    except (UnreachableError, LockHeld, RolledBack):
        raise
    except OpsError as error:
        heed_interruption(error)
        deployment.frame.say("rollback", f"{what}: {error.message}")


def _go_back(deployment: Deployment, failed: Activation) -> None:
    unit, host, frame = deployment.layout.unit, deployment.target.host.name, deployment.frame
    with frame.phase("rollback"):
        _told(deployment, "the host stays armed as it was", lambda: deployment.hold.arm_again(failed))
        _told(
            deployment,
            "the verdict could not be written down",
            lambda: deployment.record(failed, _judged(frame.failure)),
        )
        only_judged = failed.reason == "validate"
        if only_judged and isinstance(frame.failure, Inconclusive | UnreachableError):
            _leave_unjudged(deployment)
            return
        before = deployment.seen
        passed = before.history.ways_back()
        earlier = _earlier_unit(deployment, before)
        if earlier is not None:
            _put_back(deployment, earlier)
            deployment.went_back = True
            frame.state_left = f"{unit} was started from the earlier unit file, and nobody has validated it"
            raise RolledBack(
                f"the deployment failed; the unit file that ran {unit} before is back",
                hint=f"ddtree-ops logs {host} --follow",
            )
        found = _newest_whole(deployment, passed)
        if found is None:
            why = (
                "no release that passed here is whole any more"
                if passed
                else "no earlier release of it ever passed here"
            )
            if only_judged:
                _leave(deployment, f"nothing was switched: {why}", f"{why}: left as it is")
                return
            deployment.running.stop_if_there()
            frame.state_left = f"{unit} is stopped: {why}, there is nothing to go back to"
            frame.note = f"{why}: the unit was stopped"
            return
        good, unit_text, service = found
        if (good.release, good.unit_sha256) == (failed.release, failed.unit_sha256):
            _leave_the_same(deployment, good)
            return
        failed_run = deployment.failed_run
        deployment.switch(good.release, unit_text, good.plan, service, "rollback")
        frame.note = (
            f"back to {good.release[:12]}, which passed on {good.time}{_of_a_bench(deployment, good)}"
        )
    see_that_it_serves(deployment, good, service, failed_run)


def see_that_it_serves(deployment: Deployment, good: Activation, service: Service, failed_run: str) -> None:
    """Validate what was just gone back to, as a deployment is validated.

    :param failed_run: invocation of the run that failed.
    :raises RolledBack: it serves. :raises OpsError: it does not either.
    """
    frame, member = deployment.frame, deployment.member
    deployment.went_back = True
    back = deployment.again(service)
    try:
        back.wait()
        back.smoke()
        back.signatures()
        if member is not None:
            member.share("rollback.passed", True)
    except OpsError:
        if member is not None:
            deployment.running.stop_if_there()
        frame.state_left = (
            f"the rollback to {good.release[:12]} is not healthy either: the service is down or broken"
        )
        assert back.activation is not None
        back.record(back.activation, Verdict.FAIL)
        raise
    _told(deployment, "it serves again, but that could not be written down", back.accept)
    frame.seconds.update({f"rollback.{name}": value for name, value in back.frame.seconds.items()})
    frame.state_left = (
        f"release {good.release[:12]} of {good.time}{_of_a_bench(deployment, good)} serves again"
    )
    raise RolledBack(
        f"the deployment failed and was rolled back to {good.release[:12]}",
        host=deployment.target.name,
        phase="rollback",
        state=frame.state_left,
        hint=f"see why: ddtree-ops logs {deployment.target.host.name} --invocation {failed_run}",
    )


def _of_a_bench(deployment: Deployment, good: Activation) -> str:
    """To be said of what serves now, where nobody chose it to last; else empty."""
    return " (which a bench measured)" if deployment.seen.history.measured(good) else ""


def _earlier_unit(deployment: Deployment, before: Observed) -> str | None:
    """The unit file to go back to where nothing ever passed and another unit file than ours ran."""
    text = before.unit_text
    if before.history.good() or not before.state.running or text == deployment.unit_text:
        return None
    return text


def _put_back(deployment: Deployment, unit_text: str) -> None:
    deployment.running.stop_if_there()
    if deployment.link:
        deployment.session.swap_link(deployment.layout.current, deployment.link)
    deployment.install(unit_text)
    deployment.control.start()


def where_to(deployment: Deployment) -> WayBack:
    """What the host would go back to; as :func:`rollback` decides."""
    layout, before = deployment.layout, deployment.seen
    if deployment.member is not None:
        agreed = _agree(deployment, deployment.member)
        if agreed is None:
            return WayBack.to_nothing()
        return WayBack.to_release(layout, agreed[0], unit_mode=unit_mode(agreed[1]))
    earlier = _earlier_unit(deployment, before)
    if earlier is not None:
        path = f"{layout.kept_unit(text_sha256(earlier))}.service"
        deployment.session.write_file(path, earlier.encode(), mode=0o600)
        return WayBack.to_unit(path, text_sha256(earlier), link=deployment.link, unit_mode=unit_mode(earlier))
    found = _newest_whole(deployment, before.history.ways_back())
    if found is None:
        return WayBack.to_nothing()
    if deployment.hold.safety.command != BENCH and before.history.measured(found[0]):
        told = f"on a failure the host goes back to what a bench measured, activation {found[0].id}: nothing else passed"
        deployment.frame.say(deployment.frame.step, f"{told} here and is whole")
    return WayBack.to_release(layout, found[0], unit_mode=unit_mode(found[1]))


def _newest_whole(
    deployment: Deployment, passed: Sequence[Activation]
) -> tuple[Activation, str, Service] | None:
    """The first of activations that passed of which everything is still there; those before it are told and left out."""
    for item in passed:
        found = kept(deployment, item)
        if not isinstance(found, str):
            return item, *found
        deployment.frame.say("rollback", f"{item.release[:12]} of {item.time} cannot come back: {found}")
    return None


def kept(deployment: Deployment, good: Activation) -> tuple[str, Service] | str:
    """Unit file and service of an activation, or why they cannot be used."""
    session, layout = deployment.session, deployment.layout
    path = layout.kept_unit(good.unit_sha256)
    text = session.read_file(f"{path}.service")
    record = session.read_file(f"{path}.json")
    if text is None or record is None or hashlib.sha256(text).hexdigest() != good.unit_sha256:
        return "its unit file is gone or damaged"
    try:
        service = recorded_service(record)
        problem = _damage_of(session, layout.release(good.release))
    except (ValueError, KeyError, TypeError) as error:
        return f"its record cannot be read: {str(error).splitlines()[0]}"
    if problem is not None:
        return problem
    needed = named_files(text.decode(), layout.secrets)
    gone = sorted(set(needed) - {*deployment.host_secrets.names, *deployment.secrets.files()})
    if gone:
        return f"its secrets are gone from the host: {', '.join(gone)}"
    return text.decode(), service


def _damage_of(session: Session, release: str) -> str | None:
    """What is wrong with the release at a path, read back whole; None: nothing. :raises: as :func:`damage`."""
    manifest = session.read_file(f"{release}/manifest.json")
    there = {entry.path: entry.sha256 for entry in session.hash_tree(release) or ()}
    problem = damage(manifest, there)
    return f"{release} is gone" if problem == "" else problem


def damage(manifest: bytes | None, there: Mapping[str, str]) -> str | None:
    """What is wrong with a release; None: nothing, empty: it is gone. Pure.

    :param there: path -> sha256 of its files.
    :raises ValueError, KeyError, TypeError: it is no manifest.
    """
    wanted = {item["path"]: item["sha256"] for item in json.loads(manifest or b'{"files": []}')["files"]}
    damaged = [path for path, sha256 in wanted.items() if there.get(path) != sha256]
    if damaged:
        if len(damaged) == 1:
            return f"1 file of it is not as built: {damaged[0]}"
        return f"{len(damaged)} files of it are not as built, first {damaged[0]}"
    return None if wanted else ""


@dataclass(frozen=True)
class Back:
    """What a rollback that was asked for comes to.

    :param changes: what it changes of what is there now, in the words of the plan.
    """

    activation: Activation
    unit_text: str
    service: Service
    plan: Plan
    changes: tuple[str, ...]

    def describe(self) -> str:
        """``be66191c5c9d of TIME, activation ID: what changes``."""
        item = self.activation
        passed = "" if item.good else ", which never passed here"
        what = "; ".join(self.changes) or "as it is there now"
        return f"{item.release[:12]} of {item.time}, activation {item.id}{passed}: {what}"

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form: the plan, with what it goes back to."""
        return {**self.plan.to_json(), "activation": self.activation.id, "time": self.activation.time}


def choose(deployment: Deployment, to: str | None) -> Back:
    """What going back as asked for comes to. The host was looked at; nothing is changed.

    :raises PreflightError, UsageError: as :meth:`~ddtree_ops.deploy.deployment.Deployment.go_back`.
    """
    from ddtree_ops.deploy.earlier import alternatives, way_back

    observed, layout, host = deployment.seen, deployment.layout, deployment.target.host.name
    if to is None and not observed.history.activations and observed.unit_text is None:
        raise NotDeployed(layout.unit, host, acting=True)
    deployment.known_secrets = Secrets(deployment.host_secrets.values)
    now = (observed.release, None if observed.unit_text is None else text_sha256(observed.unit_text))
    past = observed.history
    texts = kept_texts(deployment.session, layout, (item.unit_sha256 for item in past.activations))
    changes = against_now(past, texts, observed.release, observed.unit_text)
    try:
        good = way_back(past, now, to, host=host, changes=changes)
    except PreflightError as error:
        _tell_damage(deployment, error)
        raise
    found = kept(deployment, good)
    if isinstance(found, str):
        without = (now, (good.release, good.unit_sha256))
        other = next((one for one in past.ways_back() if (one.release, one.unit_sha256) not in without), None)
        raise PreflightError(
            f"{good.release[:12]} of {good.time} cannot come back: {found}",
            details=alternatives(past, now, without={good.id}, changes=changes),
            hint=f"ddtree-ops deploy {host} publishes the release it deploys again where files of it are altered"
            + (f", or ddtree-ops rollback {host} --to {other.id}" if other else ""),
        )
    unit_text, service = found
    manifest = (
        deployment.session.read_file(f"{layout.release(good.release)}/manifest.json")
        if good.release != observed.release
        else None
    )
    wish = Wish(
        deployment.target.name,
        service.name,
        layout.unit,
        good.release,
        good.runtime,
        unit_text=unit_text,
        files=None if manifest is None else manifest_files(manifest),
    )
    return Back(good, unit_text, service, make_plan(wish, observed), changes[good.id])


def _tell_damage(deployment: Deployment, error: PreflightError) -> None:
    """Nothing to go back to: say so too where the release that is there is altered, which may be why one wants to."""
    release, host = deployment.seen.release, deployment.target.host.name
    if release is None:
        return
    try:
        problem = _damage_of(deployment.session, deployment.layout.release(release))
    except (ValueError, KeyError, TypeError):
        problem = "its manifest cannot be read"
    if problem:
        error.details = (f"the current release {release[:12]}: {problem}", *error.details)
        error.hint = f"ddtree-ops deploy {host}   (publishes it again as it was built)"


def preview(target: Target, session: Session, to: str | None) -> Back:
    """What ``rollback`` would do on a host, without a lock and without a change.

    :raises PreflightError, UsageError: nothing recorded to go back to, or ``to`` names nothing.
    """
    from ddtree_ops.deploy.deployment import Deployment

    deployment = Deployment(target, session, lambda event: None)
    deployment.look()()
    return choose(deployment, to)


def go_back(deployment: Deployment, to: str | None) -> None:
    """See :meth:`~ddtree_ops.deploy.deployment.Deployment.go_back`; in its phase."""
    frame, hold, member = deployment.frame, deployment.hold, deployment.member
    hold.lock()
    (armed,) = deployment.look(armed_request(deployment.layout))()
    hold.find(armed)
    deployment.tell_sight()
    back = choose(deployment, to)
    good, plan = back.activation, back.plan
    if member is not None:
        same_choice(member, good)
    deployment.become(back.service, back.unit_text)
    deployment.plan = plan
    if member is not None:
        join_plans(deployment, member)
    if deployment.settled:
        hold.settle()
        frame.note = f"already there: {good.release[:12]} of {good.time} runs and passed"
        return
    frame.say("go_back", f"to {back.describe()}")
    if not plan.activates and deployment.joined != "activate":
        deployment.validate_again(f"{deployment.layout.unit} runs it already and is not validated")
        frame.note = f"already there: {good.release[:12]} of {good.time} runs, nobody saw this run pass"
        return
    deployment.audit("rollback", outcome="asked for", detail=f"to {good.release[:12]} of {good.time}")
    deployment.switch(good.release, back.unit_text, plan.digest, back.service, "rollback", arm=True)
    passed = f"which passed on {good.time}" if good.good else f"of {good.time}, which never passed"
    frame.note = f"back to {good.release[:12]}, {passed}"
    if back.changes:
        frame.note += f": {'; '.join(back.changes)}"


# -- the nodes of a service together -------------------------------------------------------------------------------


def _agree(deployment: Deployment, member: Member) -> tuple[Activation, str, Service] | None:
    """The newest activation that passed on all nodes and is whole on all, one that only a bench measured on any of them last:
    it, its unit file and settings here; or None.

    Nodes of one activation have its id in common. To be called by all nodes in the same step, once.
    """
    past = deployment.observed.history if deployment.observed else History()
    passed = [item for item in reversed(past.activations) if item.good]
    known = member.share("back.passed", {item.id: past.measured(item) for item in passed})
    common = [one for one in passed if all(one.id in ids for ids in known)]
    for item in sorted(common, key=lambda one: any(ids[one.id] for ids in known)):
        found = kept(deployment, item)
        problems = member.share(f"back.kept.{item.id}", found if isinstance(found, str) else "")
        if not isinstance(found, str) and not any(problems):
            return item, *found
        broken = [f"{member.lockstep.names[rank]}: {text}" for rank, text in enumerate(problems) if text]
        told = f"{item.release[:12]} of {item.time} cannot come back: {'; '.join(broken)}"
        deployment.frame.say(deployment.frame.step, told)
    return None


def _roll_back_together(deployment: Deployment, member: Member) -> None:
    """Take all nodes back to what :func:`_agree` finds; without it all are stopped. None is left running alone: where one
    cannot go back, or cannot be asked, the others are stopped.

    :raises RolledBack: it serves again.
    """
    unit = deployment.target.service.unit
    with deployment.frame.phase("rollback"):
        try:
            found = _choose(deployment, member)
            if found is None:
                return
            activation, text, service = found
            failed_run = deployment.failed_run
            deployment.switch(activation.release, text, activation.plan, service, "rollback")
            member.share("back.started", True)
            deployment.frame.note = (
                f"all nodes back to {activation.release[:12]}, which passed on {activation.time}"
                f"{_of_a_bench(deployment, activation)}"
            )
        except (UnreachableError, LockLost):
            raise
        except OpsError as error:
            deployment.running.stop_if_there()
            deployment.frame.state_left = f"{unit} is stopped here: its nodes could not all go back"
            error.state = ""
            raise
    see_that_it_serves(deployment, activation, service, failed_run)


def _choose(deployment: Deployment, member: Member) -> tuple[Activation, str, Service] | None:
    """What all nodes go back to; None: nothing is switched, and ``state_left`` says what was done instead."""
    failed, unit = deployment.activation, deployment.target.service.unit
    cause = member.failure.cause if isinstance(member.failure, PeerFailed) else member.failure
    if failed is not None:
        deployment.hold.arm_again(failed)
        deployment.record(failed, _judged(cause))
    only_judged = failed is None or failed.reason == "validate"
    harmless = only_judged and isinstance(cause, Inconclusive | UnreachableError)
    if all(member.share("back.harmless", harmless)):
        _leave_unjudged(deployment)
        return None
    found = _agree(deployment, member)
    if found is None:
        _stop_all(
            deployment,
            f"no earlier release that passed on all nodes of {unit} together is whole on all of them",
        )
        return None
    good = found[0]
    same = failed is not None and (good.release, good.unit_sha256) == (failed.release, failed.unit_sha256)
    if not all(member.share("back.same", same)):
        return found
    if not all(member.share("back.running", deployment.control.state().running)):
        _stop_all(deployment, _passed_before(good))
        return None
    _leave_the_same(deployment, good)
    return None


def _stop_all(deployment: Deployment, why: str) -> None:
    deployment.running.stop_if_there()
    deployment.frame.state_left = f"{deployment.target.service.unit} is stopped on all of its nodes: {why}"
    deployment.frame.note = f"{why}: stopped on all nodes"
