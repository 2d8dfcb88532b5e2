"""What a rollback goes to, what a prune removes and what it never does: decided from data alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from ddtree_ops.deploy.earlier import alternatives, way_back
from ddtree_ops.deploy.history import Activation, History
from ddtree_ops.deploy.releases import (
    Leftover,
    PrunePlan,
    Published,
    ServiceState,
    Survey,
    old_evidence,
    plan_prune,
    releases_of,
)
from ddtree_ops.errors import PreflightError, UsageError
from ddtree_ops.results import Verdict

A, B, C, D, E = (letter * 64 for letter in "abcde")
U, V = "1" * 64, "2" * 64
NOW = datetime(2026, 11, 29, 18, tzinfo=UTC).timestamp()
DAY = 86400.0


def act(number: int, release: str, unit: str = U, verdict: Verdict | None = Verdict.PASS) -> Activation:
    return Activation(
        id=f"20261129T1200{number:02}.000-{number:06x}",
        time=f"2026-11-29T12:00:{number:02}+00:00",
        release=release,
        unit_sha256=unit,
        plan="",
        who="ann",
        origin="desk",
        verdict=verdict,
        runtime="r",
    )


def service(
    current: str | None, *activations: Activation, unit: str = "x.service", **more: object
) -> ServiceState:
    values: dict = {"armed": None, "units": ()} | more
    return ServiceState(unit, current, history=History(activations, values.pop("damaged", 0)), **values)


def survey(*services: ServiceState, releases: str = "", age: float = 10 * DAY, **more: object) -> Survey:
    found = tuple(
        Published(letter * 64, NOW - age - number, 10, 1000, 100, True)
        for number, letter in enumerate(reversed(releases))
    )
    return Survey("/opt/d", NOW, 10**9, found, services=services, **more)  # type: ignore[arg-type]


class TestWayBack:
    def test_the_newest_that_passed_and_is_something_else(self) -> None:
        history = History((act(1, A), act(2, B), act(3, C), act(4, D, verdict=Verdict.FAIL)))
        assert way_back(history, (D, U)).release == C
        assert way_back(history, (C, U)).release == B
        assert way_back(history, (None, None)).release == C

    def test_the_same_release_with_another_unit_file_is_something_else(self) -> None:
        assert way_back(History((act(1, A, U), act(2, A, V))), (A, V)).unit_sha256 == U

    def test_what_a_bench_measured_is_chosen_by_nobody(self) -> None:
        """After a bench the newest other that passed is its last configuration: the linear drafter, or no speculation."""
        benched = replace(act(3, B, V), command="bench")
        back = replace(act(4, B), command="bench", reason="rollback")
        history = History((act(1, A), act(2, B), benched, back))
        assert way_back(history, (B, U)) == act(1, A)
        assert way_back(history, (B, U), benched.id) == benched
        assert (
            way_back(
                History((act(1, A), act(2, A, V), replace(act(3, A, V), command="bench"))), (A, U)
            ).unit_sha256
            == V
        )
        with pytest.raises(PreflightError, match="but for what a bench measured") as refused:
            way_back(History((act(2, B), benched, back)), (B, U))
        assert refused.value.details[0].endswith("(measured by a bench)")
        assert refused.value.hint.startswith(
            f"ddtree-ops rollback HOST --to {benched.id}   (which a bench measured"
        )

    def test_a_deploy_that_failed_makes_no_choice_of_what_a_bench_measured_later(self) -> None:
        failed, measured = act(3, B, verdict=Verdict.FAIL), replace(act(5, B), command="bench")
        back = [replace(act(number, A), reason="rollback") for number in (4, 6)]
        history = History((act(1, C), act(2, A), failed, back[0], measured, back[1]))
        assert way_back(history, (A, U)) == act(1, C)

    def test_a_refusal_names_an_activation_that_is_there_or_none(self) -> None:
        def hint(*activations: Activation) -> str:
            with pytest.raises(PreflightError) as refused:
                way_back(History(activations), (A, U))
            return refused.value.hint

        failed = act(2, B, verdict=Verdict.FAIL)
        assert hint(act(1, A), failed).startswith(
            f"ddtree-ops rollback HOST --to {failed.id}   (which never passed"
        )
        assert hint(act(1, A)) == "ddtree-ops history HOST"
        assert hint() == "ddtree-ops deploy HOST"

    def test_nothing_is_never_a_pass(self) -> None:
        for history in (
            History(),
            History((act(1, A, verdict=None), act(2, B, verdict=Verdict.INCONCLUSIVE))),
        ):
            with pytest.raises(PreflightError, match="no activation of it ever passed"):
                way_back(history, (B, U))
        with pytest.raises(PreflightError, match="no other release or unit file ever passed"):
            way_back(History((act(1, A),)), (A, U))

    def test_a_release_by_its_first_digits_is_its_newest_pass(self) -> None:
        history = History((act(1, A), act(2, A, V), act(3, A, verdict=Verdict.FAIL), act(4, B)))
        assert way_back(history, (B, U), "aaaa") == act(2, A, V)
        assert way_back(History((act(1, A, verdict=None),)), (B, U), "aaaa") == act(1, A, verdict=None)

    def test_an_activation_by_its_id(self) -> None:
        history = History((act(1, A), act(2, A, V), act(3, B)))
        assert way_back(history, (B, U), act(1, A).id) == act(1, A)
        assert way_back(history, (B, U), act(1, A).id[:17]) == act(1, A)

    @pytest.mark.parametrize(
        ("text", "number"), [("2026-11-29T12:00:02", 2), ("2026-11-29T13:00:02+01:00", 2), ("2026-11-30", 3)]
    )
    def test_a_time_is_what_had_passed_by_then(self, text: str, number: int) -> None:
        history = History((act(1, A), act(2, B), act(3, C), act(4, D, verdict=Verdict.FAIL)))
        assert way_back(history, (D, U), text) == history.activations[number - 1]

    @pytest.mark.parametrize(
        ("to", "words"),
        [
            ("ffff", "names no recorded"),
            ("aa", "names no recorded"),
            ("yesterday", "names no recorded"),
            ("2020-01-01", "nothing had passed here by"),
            ("20261129T12", "fits 2 of the recorded activations"),
            ("abcd", "fits 2 of the recorded releases"),
        ],
    )
    def test_what_is_not_recorded_is_refused(self, to: str, words: str) -> None:
        history = History((act(1, "abcd" + "0" * 60), act(2, "abcd" + "1" * 60)))
        with pytest.raises(UsageError, match=words):
            way_back(history, (None, None), to)

    def test_alternatives_leave_out_what_is_there_and_what_was_found_broken(self) -> None:
        history = History((act(1, A), act(2, B), act(3, C)))
        (line,) = alternatives(history, (C, U), without={act(2, B).id})
        assert "aaaaaaaaaaaa r of 2026-11-29T12:00:01" in line and act(1, A).id in line


class TestPrune:
    def test_what_is_kept_and_why(self) -> None:
        one = service(E, act(1, A), act(2, B), act(3, C), act(4, D), act(5, E))
        plan = plan_prune(survey(one, releases="abcde"), keep=2)
        assert plan.remove == (A, B, C)
        assert plan.stays[E] == (
            "current of x.service",
            "newest activation of x.service",
            "last known good of x.service",
        )
        assert plan.stays[D] == ("one of the last 2 that passed on x.service",)
        assert plan.estimate == 300

    def test_last_known_good_stays_however_many_failed_after_it(self) -> None:
        failed = [act(number, letter * 64, verdict=Verdict.FAIL) for number, letter in enumerate("bcde", 2)]
        plan = plan_prune(survey(service(E, act(1, A), *failed), releases="abcde"), keep=1)
        assert set(plan.stays) == {A, E}

    def test_every_service_of_the_host_counts(self) -> None:
        one, two = service(B, act(1, A), act(2, B)), service(A, act(3, A), unit="y.service")
        plan = plan_prune(survey(one, two, releases="ab"), keep=1)
        assert not plan.remove and plan.stays[A] == (
            "current of y.service",
            "newest activation of y.service",
            "last known good of y.service",
        )

    def test_an_armed_rollback_keeps_what_it_points_to(self) -> None:
        one = service(
            C,
            act(1, A),
            act(2, B),
            act(3, C),
            armed=f'{{"release": "{A}", "unit_sha256": "{V}"}}',
            units=(f"{V}.service",),
        )
        plan = plan_prune(survey(one, releases="abc"), keep=1)
        assert plan.remove == (B,) and not plan.unit_files

    def test_a_link_to_nothing_keeps_nothing(self) -> None:
        plan = plan_prune(survey(service(D), releases="a"), keep=1)
        assert plan.remove == (A,) and not plan.stays

    def test_what_was_pushed_today_and_not_activated_yet_stays(self) -> None:
        assert plan_prune(survey(releases="a", age=3600), keep=1).stays[A] == (
            "pushed within a day and not activated yet",
        )
        used = service(B, act(1, A, verdict=Verdict.FAIL), act(2, B))
        assert plan_prune(survey(used, releases="ab", age=3600), keep=1).remove == (A,)

    def test_a_damaged_history_keeps_what_it_may_have_named(self) -> None:
        one = service(B, act(2, B), damaged=1, units=(f"{V}.service",))
        plan = plan_prune(survey(one, releases="ab"), keep=1)
        assert "cannot be read" in plan.stays[A][0] and not plan.unit_files and not plan.remove

    def test_unit_files_go_with_the_activations_that_need_them(self) -> None:
        names = (f"{U}.service", f"{U}.json", f"{V}.service", f"{V}.json", "notes.txt")
        one = service(B, act(1, A, V), act(2, B, U), units=names)
        assert plan_prune(survey(one, releases="ab"), keep=1).unit_files == (
            ("x.service", f"{V}.service"),
            ("x.service", f"{V}.json"),
        )
        assert plan_prune(survey(one, releases="ab"), keep=2).unit_files == ()
        tried = service(A, act(1, A, U), act(2, A, V, Verdict.FAIL), units=names)
        assert not plan_prune(survey(tried, releases="a"), keep=1).unit_files, "the newest may be under way"

    def test_leftovers_of_the_living_stay(self) -> None:
        found = (Leftover(".staging-x.1-2-3", True, 5, 5), Leftover(".partial-x.1-2-3", False, 7, 7))
        plan = plan_prune(survey(leftovers=found), keep=1)
        assert plan == PrunePlan(leftovers=(".partial-x.1-2-3",), estimate=7)


def test_the_list_of_releases() -> None:
    one = service(B, act(1, A), act(2, B, verdict=Verdict.FAIL), armed=A, damaged=2)
    found = releases_of(survey(one, releases="ab"), origins={A: ("wheel", ("0001.patch",), "over 1")})
    newest, oldest = found.releases
    assert (newest.digest, newest.current_of, newest.good_of, newest.verdict) == (
        B,
        ("x.service",),
        (),
        Verdict.FAIL,
    )
    assert (oldest.good_of, oldest.armed_of, oldest.patches) == (
        ("x.service",),
        ("x.service",),
        ("0001.patch",),
    )
    assert (newest.overlay, oldest.overlay, oldest.to_json()["overlay"]) == ("", "over 1", "over 1")
    assert found.damaged_lines == 2
    record = oldest.to_json()
    assert (record["own_bytes"], record["shared_bytes"], record["runtime"], record["whole"]) == (
        100,
        900,
        "r",
        None,
    )


def test_evidence_is_judged_by_the_time_in_its_name() -> None:
    now = datetime(2026, 11, 29, tzinfo=UTC)
    names = [
        "ct200-20261001T000000Z",
        "ct200-20261128T000000Z",
        "a-b-20250101T000000Z",
        "mine",
        "x-20269999T000000Z",
    ]
    assert old_evidence(names, days=30, now=now) == ["a-b-20250101T000000Z", "ct200-20261001T000000Z"]
    assert old_evidence(names, days=0.5, now=now)[-1] == "ct200-20261128T000000Z"
