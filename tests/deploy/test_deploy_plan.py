"""The plan says what changes and why; the same facts give the same plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.deploy.plan import ChangeKind, Observed, Wish, make_plan, text_sha256
from ddtree_ops.results import Verdict
from ddtree_ops.service.state import UnitState

RUNNING = UnitState.parse(
    {
        "LoadState": "loaded",
        "ActiveState": "active",
        "SubState": "running",
        "MainPID": "7",
        "InvocationID": "i1",
    }
)
DEAD = UnitState.parse({"LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"})
WISH = Wish(
    host="h", service="s", unit="s.service", release="b" * 64, runtime="r", unit_text="[Service]\nA=2\n"
)


def _judged(
    verdict: Verdict | None, release: str = "b" * 64, unit_text: str = WISH.unit_text, run: str = "i1"
) -> History:
    activation = new_activation(
        release=release, unit_sha256=text_sha256(unit_text), plan="p", who="w", origin="o", reason="deploy"
    )
    return History((replace(activation, verdict=verdict, invocation=run),))


AS_WISHED = Observed(
    release=WISH.release,
    releases=frozenset({WISH.release}),
    unit_text=WISH.unit_text,
    state=RUNNING,
    history=_judged(Verdict.PASS),
)


def test_nothing_to_change():
    plan = make_plan(WISH, AS_WISHED)
    assert plan.empty
    assert not plan.activates


def test_a_fresh_host_gets_everything():
    plan = make_plan(WISH, Observed(None, frozenset(), None, DEAD))
    assert [change.kind for change in plan.changes] == [
        ChangeKind.RELEASE,
        ChangeKind.UNIT,
        ChangeKind.LINK,
        ChangeKind.START,
    ]
    assert plan.activates


def test_a_changed_unit_is_shown_as_a_diff_and_restarts():
    plan = make_plan(WISH, replace(AS_WISHED, unit_text="[Service]\nA=1\n"))
    unit = next(change for change in plan.changes if change.kind is ChangeKind.UNIT)
    assert "-A=1" in unit.diff
    assert "+A=2" in unit.diff
    restart = next(change for change in plan.changes if change.kind is ChangeKind.RESTART)
    assert "the unit file changes" in restart.summary


def test_a_published_release_is_not_pushed_again_only_switched():
    plan = make_plan(WISH, replace(AS_WISHED, release="a" * 64))
    assert [change.kind for change in plan.changes] == [ChangeKind.LINK, ChangeKind.RESTART]


def test_a_unit_that_is_down_is_started_even_when_nothing_else_changes():
    plan = make_plan(WISH, replace(AS_WISHED, state=DEAD))
    assert [change.kind for change in plan.changes] == [ChangeKind.START]


@pytest.mark.parametrize(
    "history",
    [
        History(),
        _judged(None),
        _judged(Verdict.FAIL),
        _judged(Verdict.INCONCLUSIVE),
        _judged(Verdict.PASS, release="a" * 64),
        _judged(Verdict.PASS, unit_text="other"),
        _judged(Verdict.PASS, run="the one before systemd restarted it"),
    ],
)
def test_what_was_never_seen_to_pass_is_validated_again_without_a_restart(history):
    plan = make_plan(WISH, replace(AS_WISHED, history=history))
    assert [change.kind for change in plan.changes] == [ChangeKind.VALIDATE]
    assert not plan.activates


def test_the_digest_follows_what_is_applied():
    fresh = Observed(None, frozenset(), None, DEAD)
    assert make_plan(WISH, fresh).digest == make_plan(WISH, fresh).digest
    assert make_plan(WISH, fresh).digest != make_plan(WISH, AS_WISHED).digest
    assert make_plan(replace(WISH, unit_text="x"), fresh).digest != make_plan(WISH, fresh).digest


def test_a_repaired_release_is_told_and_what_was_started_from_it_is_started_again():
    plan = make_plan(WISH, replace(AS_WISHED, repaired=("sglang/a.py: other content",)))
    assert [change.kind for change in plan.changes] == [ChangeKind.RELEASE, ChangeKind.RESTART]
    assert "sglang/a.py" in plan.changes[0].summary
    assert "not as built" in plan.changes[1].summary


def test_a_unit_file_that_systemd_has_not_read_restarts():
    stale = replace(AS_WISHED, state=replace(RUNNING, need_daemon_reload=True))
    assert [change.kind for change in make_plan(WISH, stale).changes] == [ChangeKind.RESTART]


@pytest.mark.parametrize(
    "line",
    [
        "Environment=HF_TOKEN=hf_secret",
        'Environment="MY_CREDENTIAL=hf_secret 42"',
        "Environment=AWS_SECRET_ACCESS_KEY=hf_secret",
        "Environment=A=1 wandb_api_key=hf_secret B=2",
        "  HF_TOKEN=hf_secret \\",
        "Environment=WHATEVER=hf_secretsecretsecret",
    ],
)
def test_secrets_in_a_unit_are_not_in_its_plan(line):
    plan = make_plan(
        replace(WISH, unit_text=f"[Service]\n{line}\n"),
        replace(AS_WISHED, unit_text=f"[Service]\n{line} \n"),
    )
    text = str(plan.to_json())
    assert "hf_secret" not in text
    assert "********" in text
    assert plan.has(ChangeKind.RESTART)


def test_figures_with_tokens_in_their_name_are_shown():
    plan = make_plan(replace(WISH, unit_text="Environment=LAB_TOKENS_PER_S=2000\n"), AS_WISHED)
    assert "2000" in str(plan.to_json())


OBSERVED = st.builds(
    Observed,
    release=st.sampled_from([None, "a" * 64, "b" * 64]),
    releases=st.sets(st.sampled_from(["a" * 64, "b" * 64])).map(frozenset),
    unit_text=st.sampled_from([None, "", "[Service]\nA=1\n", WISH.unit_text]),
    state=st.sampled_from([RUNNING, DEAD, replace(RUNNING, need_daemon_reload=True)]),
    history=st.sampled_from([History(), _judged(None), _judged(Verdict.PASS), _judged(Verdict.FAIL)]),
    repaired=st.sampled_from([(), ("sglang/a.py: other content",)]),
    secrets=st.sampled_from([(), ("write HF_TOKEN",)]),
    stale_secrets=st.sampled_from([(), ("OLD",)]),
)


@given(OBSERVED)
def test_a_host_on_which_a_plan_was_applied_has_nothing_left_to_change(observed):
    """Every kind of change does what it says, one after the other; nothing else is touched."""
    plan = make_plan(WISH, observed)
    assert plan == make_plan(WISH, observed)
    now = observed
    for change in plan.changes:
        match change.kind:
            case ChangeKind.RELEASE:
                now = replace(now, releases=now.releases | {WISH.release}, repaired=())
            case ChangeKind.UNIT:
                now = replace(now, unit_text=WISH.unit_text)
            case ChangeKind.SECRET:
                now = replace(now, secrets=(), stale_secrets=())
            case ChangeKind.LINK:
                now = replace(now, release=WISH.release)
            case ChangeKind.START | ChangeKind.RESTART:
                now = replace(now, state=replace(RUNNING, invocation_id="i2"))
            case ChangeKind.VALIDATE:
                pass
    if plan.changes:
        now = replace(now, history=_judged(Verdict.PASS, run=now.state.invocation_id))
    again = make_plan(WISH, now)
    assert again.empty, again.short()
    assert plan.empty == (observed == now)
    assert plan.activates == (now.state is not observed.state)
