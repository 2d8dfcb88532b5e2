"""The parts that a deployment is made of, where they need no host."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.deploy import goback, releases
from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.evidence import evidence_files
from ddtree_ops.deploy.frame import Frame
from ddtree_ops.deploy.goback import choose, damage, rollback, where_to
from ddtree_ops.deploy.history import Activation, History, new_activation
from ddtree_ops.deploy.hold import longest
from ddtree_ops.deploy.looking import sight_of
from ddtree_ops.deploy.plan import Observed, text_sha256, unit_mode
from ddtree_ops.deploy.refusals import judged, refusal
from ddtree_ops.errors import CheckFailed, Inconclusive, OpsError, PreflightError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Reply
from ddtree_ops.results import CheckResult, Event, EventKind, Evidence, Verdict
from ddtree_ops.service.journal import Entry
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState


def result(name: str, verdict: Verdict, summary: str = "s", hint: str = "") -> CheckResult:
    return CheckResult(name, verdict, summary, hint=hint)


def service(**settings: object) -> Service:
    return Service.model_validate(
        {"name": "s", "unit": "t.service", "runtime": "r", "venv": "/v", "model": "/m", **settings}
    )


class TestFrame:
    def test_an_error_learns_where_it_happened_and_keeps_no_secret(self):
        events: list[Event] = []
        frame = Frame("h", events.append, secrets=("s3cret!",))
        frame.state_left = "stopped"
        with pytest.raises(OpsError) as caught, frame.phase("push"):
            raise OpsError("no s3cret!", details=("by s3cret!",))
        error = caught.value
        assert (error.host, error.phase, error.state) == ("h", "push", "stopped")
        assert (error.message, error.details) == ("no ********", ("by ********",))
        assert frame.failure is error
        assert [(event.kind, event.host, event.phase, event.message) for event in events] == [
            (EventKind.START, "h", "push", ""),
            (EventKind.FAIL, "h", "push", "no ********"),
        ]

    def test_the_first_failure_is_kept_and_the_time_of_a_step_that_is_repeated_adds_up(self):
        frame = Frame("h", lambda event: None)
        first = OpsError("first")
        for error in (first, OpsError("second")):
            with pytest.raises(OpsError), frame.phase("wait"):
                raise error
        once = frame.seconds["wait"]
        with frame.phase("wait"):
            pass
        assert frame.failure is first
        assert (list(frame.seconds), frame.seconds["wait"] >= once) == (["wait"], True)

    @pytest.mark.parametrize("failure", [OpsError("the session ended"), RuntimeError("cannot join thread")])
    def test_an_interruption_that_a_failure_hides_is_no_failure_of_the_step(self, failure: Exception):
        events: list[Event] = []
        frame = Frame("h", events.append)
        with pytest.raises(KeyboardInterrupt), frame.phase("wait"):
            try:
                raise KeyboardInterrupt
            finally:
                raise failure
        assert [event.kind for event in events] == [EventKind.START]
        assert (list(frame.seconds), frame.failure) == (["wait"], None)

    def test_what_could_not_be_judged_has_not_failed(self):
        events: list[Event] = []
        with pytest.raises(Inconclusive), Frame("h", events.append).phase("signatures"):
            raise Inconclusive("no line to judge by")
        assert [event.kind for event in events] == [EventKind.START, EventKind.UNSURE]

    def test_an_interruption_is_no_end_of_the_step(self):
        events: list[Event] = []
        frame = Frame("h", events.append)
        with pytest.raises(KeyboardInterrupt), frame.phase("wait"):
            raise KeyboardInterrupt
        assert [event.kind for event in events] == [EventKind.START]
        assert (frame.step, list(frame.seconds), frame.failure) == ("wait", ["wait"], None)

    def test_the_note_of_a_step_is_said_at_its_end_and_is_not_that_of_the_next(self):
        events: list[Event] = []
        frame = Frame("h", events.append)
        with frame.phase("push"):
            frame.note = "2 files"
        with frame.phase("verify"):
            pass
        assert [event.message for event in events if event.kind is EventKind.DONE] == ["2 files", ""]

    def test_a_result_of_the_target_shows_no_secret(self):
        frame = Frame("h", lambda event: None, secrets=("s3cret!",))
        found = frame.own(
            CheckResult("smoke", Verdict.FAIL, "s3cret!", evidence=(Evidence("answer", "a s3cret!"),))
        )
        assert (found.host, found.summary, found.evidence[0].text) == ("h", "********", "a ********")


class TestVerdicts:
    def test_what_passed_is_said(self):
        assert judged([result("a", Verdict.PASS, "x"), result("b", Verdict.PASS, "y")], "h") == "x; y"

    def test_the_worst_names_the_error_and_the_others_that_are_as_bad_follow(self):
        with pytest.raises(CheckFailed) as caught:
            judged(
                [
                    result("a", Verdict.INCONCLUSIVE, "unsure"),
                    result("b", Verdict.FAIL, "one"),
                    result("c", Verdict.FAIL, "two"),
                ],
                "h",
            )
        assert (caught.value.message, caught.value.details) == ("one", ("c: two",))
        assert caught.value.hint == "ddtree-ops logs h --lines 100"

    @pytest.mark.parametrize("results", [[], [result("a", Verdict.INCONCLUSIVE, "no data")]])
    def test_no_data_is_never_a_pass(self, results):
        with pytest.raises(Inconclusive):
            judged(results, "h")

    def test_a_preflight_names_all_that_failed_with_what_to_do(self):
        bad = [result("port", Verdict.FAIL, "taken", "free it"), result("venv", Verdict.FAIL, "gone")]
        assert refusal([result("disk", Verdict.PASS)], "h") is None
        assert refusal([result("disk", Verdict.INCONCLUSIVE)], "h") is None
        error = refusal([result("disk", Verdict.PASS), *bad], "h")
        assert error is not None
        assert error.message == "2 of 3 preflight checks failed"
        assert error.details == ("port: taken", "    free it", "venv: gone")
        assert error.hint.startswith("ddtree-ops doctor h ")
        alone = refusal(bad[:1], "h")
        assert alone is not None
        assert (alone.details, alone.hint) == (("port: taken",), "free it")


class TestEvidence:
    def test_the_journal_the_unit_and_the_results(self):
        time = datetime(2026, 11, 29, 18, 0, tzinfo=UTC)
        entries = [Entry(time, "é dies", 3, 7, "python3", "t.service", "i", "c", "service", "h", "", {})]
        unit = "[Service]\nEnvironment=HF_TOKEN=hf_1 A=b\n"
        files = evidence_files(entries, unit, [result("smoke", Verdict.FAIL, "é")])
        assert files["unit.service"] == "[Service]\nEnvironment=HF_TOKEN=********\n"
        (line,) = files["journal.jsonl"].splitlines()
        assert json.loads(line)["message"] == "é dies"
        assert "é dies" in line
        assert json.loads(files["checks.json"])[0]["summary"] == "é"


class TestDamage:
    MANIFEST = json.dumps({"files": [{"path": "a", "sha256": "1"}, {"path": "b", "sha256": "2"}]}).encode()

    @pytest.mark.parametrize(
        ("there", "problem"),
        [
            ({"a": "1", "b": "2", "manifest.json": "3"}, None),
            ({"a": "1", "b": "9"}, "1 file of it is not as built: b"),
            ({}, "2 files of it are not as built, first a"),
        ],
    )
    def test_every_file_of_the_manifest_must_be_there_as_built(self, there, problem):
        assert damage(self.MANIFEST, there) == problem

    def test_without_a_manifest_it_is_gone(self):
        assert damage(None, {"a": "1"}) == ""

    @pytest.mark.parametrize("manifest", [b"{", b"[]", b"{}", b'{"files": [{}]}'])
    def test_what_is_no_manifest_is_an_error(self, manifest):
        with pytest.raises((ValueError, KeyError, TypeError)):
            damage(manifest, {})


class TestNothingToGoBackTo:
    """One release passed, and ``a`` of it is edited or not."""

    def refused(self, root: Path, content: str) -> OpsError:
        made, digest, unit = service(), "a" * 64, "[Service]\n"
        target = Target(
            host=Host(name="h", deploy_root=str(root), services={"s": made}),
            service=made,
            runtime=RuntimeSpec(name="r"),
        )
        release = Path(Layout.of(target).release(digest))
        release.mkdir(parents=True)
        built = {"path": "a", "sha256": hashlib.sha256(b"built").hexdigest()}
        (release / "manifest.json").write_text(json.dumps({"files": [built]}))
        (release / "a").write_text(content)
        past = new_activation(
            release=digest, unit_sha256=text_sha256(unit), plan="", who="", origin="", reason="deploy"
        )
        history = History((replace(past, verdict=Verdict.PASS),))
        with connect_local("h") as session:
            deployment = Deployment(target, session, lambda event: None)
            deployment.observed = Observed(
                digest,
                frozenset({digest}),
                unit,
                UnitState.parse({"LoadState": "loaded", "ActiveState": "active"}),
                history,
            )
            with pytest.raises(PreflightError, match="there is nothing to go back to") as caught:
                choose(deployment, None)
        return caught.value

    def test_an_altered_release_is_told_with_what_mends_it(self, tmp_path):
        error = self.refused(tmp_path, "edited")
        assert error.details[0] == "the current release aaaaaaaaaaaa: 1 file of it is not as built: a"
        assert error.hint == "ddtree-ops deploy h   (publishes it again as it was built)"

    def test_one_that_is_whole_is_not_spoken_of(self, tmp_path):
        error = self.refused(tmp_path, "built")
        assert error.details == ()
        assert error.hint == "ddtree-ops history h"


class TestAfterAFailure:
    """Where a deployment that failed goes back to by itself."""

    def deployment(self, monkeypatch, *activations: tuple[str, str]) -> Deployment:
        """Of releases that passed, by command; all are whole on the host."""
        made = service()
        target = Target(host=Host(name="h"), service=made, runtime=RuntimeSpec(name="r"))
        said: list[Event] = []
        found = Deployment(target, SimpleNamespace(host="h"), said.append)  # type: ignore[arg-type]
        history = History(
            tuple(
                replace(self.activation(release, command), verdict=Verdict.PASS)
                for release, command in activations
            )
        )
        state = UnitState.parse({"LoadState": "loaded", "ActiveState": "active"})
        found.observed = Observed(None, frozenset(), "[Service]\n", state, history)
        monkeypatch.setattr(goback, "kept", lambda deployment, good: ("[Service]\n", made))
        self.said = said
        return found

    def activation(self, release: str, command: str) -> Activation:
        return new_activation(
            release=release * 64,
            unit_sha256="u",
            plan="",
            who="",
            origin="",
            reason="deploy",
            command=command,
        )

    def went(self, monkeypatch, *activations: tuple[str, str]) -> tuple[str, str]:
        """Release that it goes to, and what it says."""
        found, switched = self.deployment(monkeypatch, *activations), []
        found.activation = self.activation("f", "deploy")
        monkeypatch.setattr(found, "record", lambda *given: None)
        monkeypatch.setattr(found.hold, "arm_again", lambda failed: None)
        monkeypatch.setattr(found.hold, "disarm", lambda: None)
        monkeypatch.setattr(Deployment, "failed_run", "")
        monkeypatch.setattr(found, "switch", lambda release, *given, **more: switched.append(release[0]))
        monkeypatch.setattr(goback, "see_that_it_serves", lambda *given: None)
        rollback(found)
        return switched[0], self.said[-1].message

    def test_what_a_bench_that_was_killed_left_is_the_last_choice_and_is_said(self, monkeypatch):
        release, note = self.went(monkeypatch, ("a", "deploy"), ("b", "bench"))
        assert (release, "bench" in note) == ("a", False)
        release, note = self.went(monkeypatch, ("b", "bench"))
        assert (release, note.endswith("(which a bench measured)")) == ("b", True)

    def test_the_host_is_told_the_same(self, monkeypatch):
        both = self.deployment(monkeypatch, ("a", "deploy"), ("b", "bench"))
        assert where_to(both).values["release"][0] == "a"
        assert self.said == []
        assert where_to(self.deployment(monkeypatch, ("b", "bench"))).values["release"][0] == "b"
        assert "goes back to what a bench measured" in self.said[0].message

    def test_nodes_agree_on_it_though_one_of_them_alone_knows_of_the_bench(self, monkeypatch):
        found = self.deployment(monkeypatch, ("a", "deploy"), ("b", "bench"))
        newest = [item.id for item in found.seen.history.good()]
        other = dict.fromkeys(newest, False)
        asked: list[str] = []

        def share(what: str, value: Any) -> list[Any]:
            asked.append(what)
            return [value, other if what == "back.passed" else ""]

        agreed = goback._agree(found, SimpleNamespace(share=share))  # type: ignore[arg-type]
        assert agreed is not None
        assert (agreed[0].release[0], asked) == ("a", ["back.passed", f"back.kept.{newest[1]}"])

    def test_an_interruption_under_a_prune_that_fails_is_one(self, monkeypatch):
        found = self.deployment(monkeypatch)
        found.hold.locked = True
        monkeypatch.setattr(found.hold, "need_lock", lambda: None)

        def interrupted(*given: object, **more: object) -> None:
            try:
                raise KeyboardInterrupt
            finally:
                raise OpsError("the session is gone")

        monkeypatch.setattr(releases, "prune", interrupted)
        with pytest.raises(KeyboardInterrupt):
            found.prune()


def test_a_unit_file_with_secrets_is_for_root_alone():
    assert unit_mode("Environment=A=b\n") == 0o644
    assert unit_mode("Environment=A=b HF_TOKEN=x\n") == 0o600


def test_a_client_is_hung_a_quarter_of_an_hour_after_all_that_its_steps_may_take():
    health = {"stop_timeout": 10, "request_timeout": 5, "window": 2}
    assert longest(service(health=health), 100) == 10 + 100 + 20 + 2 + 900


def replies(link: str | None = None, manifest: dict[str, object] | None = None) -> list[Reply]:
    """To the requests of a look, on a host with one whole release and a push under way."""
    found = [{"name": "current", "kind": "link", "target": link}] if link else []
    releases = [{"name": "a" * 64, "kind": "dir"}, {"name": ".staging-1", "kind": "dir"}]
    missing = Reply({"found": False})
    return [
        Reply({"entries": found}),
        Reply({"entries": releases}),
        Reply({"found": True}, b"[Service]\n"),
        missing,
        Reply({"LoadState": "loaded", "ActiveState": "inactive"}),
        Reply({"entries": []}),
        missing,
        Reply(manifest or {"found": True, "same": False}, b"{}"),
    ]


def test_the_sight_of_a_host_before_and_after_a_release_was_activated():
    before = sight_of(service(), replies())
    assert (before.link, before.observed.release) == (None, None)
    assert before.observed.releases == {"a" * 64}
    assert (before.observed.unit_text, before.observed.manifest) == ("[Service]\n", b"{}")
    assert before.observed.history.activations == ()
    after = sight_of(service(), replies(f"../../releases/{'a' * 64}"))
    assert (after.link, after.observed.release) == (f"../../releases/{'a' * 64}", "a" * 64)


@pytest.mark.parametrize("manifest", [{"found": False, "same": False}, {"found": True, "same": True}])
def test_a_list_of_files_that_is_missing_or_known_is_not_kept(manifest):
    assert sight_of(service(), replies(manifest=manifest)).observed.manifest is None
