"""What holds for every method: names, options, complete state, equal replicas, counted bytes."""

import pytest
import torch

from atoll.compression import CodecError
from atoll.compression import parse as parse_codec
from atoll.optim import GossipGroup, GroupError, InProcessGroup, methods
from atoll.optim.methods import MethodError, parse
from atoll.optim.state.layout import LayoutError
from support.toys import Team, backward, flat, net, sgd

SETTINGS = {
    "diloco": (3, {}),
    "muloco": (3, {}),
    "muloco(count=2, tau=2, codec=sign, feedback=0.5)": (4, {}),
    "ddp": (1, {}),
    "ddp(codec=powersgd(rank=1))": (1, {}),
    "ddp(codec=int8, feedback=1.0)": (1, {}),
    "diloco(codec=powersgd(rank=1))": (3, {}),
    "streaming(count=2, tau=2)": (4, {}),
    "streaming(count=3, pattern=sequential, tau=4, codec=int4)": (4, {"blocks": 3}),
    "eager(peers=3)": (3, {}),
    "co2": (3, {}),
    "co2(stale=False, clip=0.01)": (3, {}),
    "sparseloco": (3, {}),
    "sparseloco(tau=2)": (3, {}),
    "sparseloco(average=all)": (3, {}),
    "sparseloco(merge=select)": (3, {}),
    "demo": (1, {}),
    "demo(delay=1, decay=0.1, average=senders)": (1, {}),
    "dlion": (1, {}),
    "dlion(vote=average)": (1, {}),
    "noloco": (3, {}),
}
SELDOM = {
    "co2",
    "ddp",
    "ddp(codec=powersgd(rank=1))",
    "demo",
    "dlion",
    "muloco",
    "sparseloco",
    "sparseloco(average=all)",
    "streaming(count=3, pattern=sequential, tau=4, codec=int4)",
}
"""Settings whose code the others reach too."""
USUAL = [
    pytest.param(spec, marks=pytest.mark.exhaustive) if spec in SELDOM else spec
    for spec in SETTINGS
]


def team(spec: str, size: int = 3) -> Team:
    inner_steps, model = SETTINGS[spec]
    inner = sgd if parse(spec).inner != "adamw" else None
    kinds = {} if inner is None else {"inner": inner}
    return Team(size, spec, inner_steps, make=lambda: net(**model), **kinds)


def test_every_method_is_trained_here():
    assert {parse(spec).name for spec in SETTINGS} == set(methods.names())


PUBLISHED = {
    "streaming": {"alpha": 0.5, "tau": 5, "pattern": "strided"},
    "co2": {"lr": 1.0, "momentum": 0.5, "penalty": 1.0, "clip": float("inf")},  # of the code
    "demo": {"feedback": 0.999, "weights": "equal"},
    "sparseloco": {"lr": 1.0, "feedback": 0.95},
    "muloco": {"lr": 0.7, "momentum": 0.6},  # for one worker
    "noloco": {"lr": 0.7, "momentum": 0.5, "pull": 0.7, "feedback": 0.0},
    "dlion": {"beta1": 0.9, "beta2": 0.99, "weights": "equal", "feedback": 0.0},
}
CODECS = {
    "streaming": "fp4",
    "sparseloco": "topk(k=64)+2bit",
    "demo": "dct(k=32)",
    "dlion": "sign",
    "noloco": "fp32",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_constants(name):
    method = parse(name)
    assert {option: getattr(method, option) for option in PUBLISHED[name]} == PUBLISHED[name]
    assert method.codec == parse_codec(CODECS.get(name, "int8"))


def test_what_is_selected_again_was_divided_by_all():
    assert parse("sparseloco(merge=select, average=senders)").divides_by == "all"
    assert [parse(f"sparseloco(average={who})").divides_by for who in ("all", "senders")] == [
        "all",
        "senders",
    ]


def test_muloco_keeps_its_constants_in_runs_of_all_lengths():
    for rounds in (10, 1_000):
        assert not methods.defaults_for("muloco", rounds=rounds, inner_steps=30, peers=4)
    found = methods.defaults_for("eager", rounds=10, inner_steps=30, peers=4)
    assert found == {"lr": 0.8, "momentum": 0.3, "peers": 4}


@pytest.mark.parametrize("spec", SETTINGS)
def test_spec_names_a_method_completely(spec):
    assert parse(parse(spec).spec) == parse(spec)


@pytest.mark.parametrize("spec", USUAL)
@pytest.mark.parametrize(
    ("stop", "ahead"), [pytest.param(4, 0, marks=pytest.mark.exhaustive), (5, 2)]
)
def test_resume_gives_the_bits_of_not_stopping(spec, stop, ahead):
    """At any step of a window, and with a reduction that lacks one worker's contribution."""
    whole = team(spec)
    whole.run(range(stop))
    for index in range(ahead):
        whole.turn(index, stop)
    saved = whole.save()
    resumed = team(spec)
    resumed.load(saved)
    for each in (whole, resumed):
        for index in range(ahead, 3):
            each.turn(index, stop)
        each.run(range(stop + 1, 12))
    assert resumed.states() == whole.states()
    assert resumed.group.statistics() == whole.group.statistics()
    for index in range(3):
        assert torch.equal(resumed.local(index), whole.local(index))
        assert resumed.workers[index].statistics().tokens == 12 * 48


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        ("diloco", "eager(peers=3)"),
        ("diloco", "streaming(count=2, tau=2)"),
        ("streaming(count=2, tau=2)", "diloco"),
        ("dlion", "ddp"),
        ("muloco(count=2, tau=2, codec=sign, feedback=0.5)", "diloco"),
    ],
)
def test_state_of_another_method_is_refused_before_anything_changes(saved, other):
    first, second = team(saved), team(other)
    first.run(range(3))
    before = second.local()
    with pytest.raises(LayoutError, match="resume with the method that was saved"):
        second.load(first.save())
    assert torch.equal(second.local(), before)


@pytest.mark.parametrize(
    "spec", [s for s in USUAL if not isinstance(s, str) or parse(s).reduction != "pairs"]
)
def test_replicas_stand_at_the_same_bits(spec):
    trained = team(spec)
    trained.run(range(12))
    first, *others = trained.workers
    assert all(torch.equal(first.synced_N, other.synced_N) for other in others)
    assert not torch.equal(first.synced_N, flat(net(**SETTINGS[spec][1])))


@pytest.mark.parametrize("spec", USUAL)
def test_state_is_not_changed_by_training_on(spec):
    trained = team(spec)
    trained.run(range(5))
    state = trained.workers[0].state_dict()
    kept = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    trained.run(range(5, 10))
    for key, value in kept.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("spec", USUAL)
def test_gradient_that_is_not_finite_never_reaches_the_others(spec):
    trained = team(spec)
    trained.run(range(4))
    poisoned = trained.workers[0]
    backward(poisoned.model, 400)
    next(poisoned.model.parameters()).grad.fill_(float("nan"))
    poisoned.step(tokens=48)
    for index in (1, 2):
        trained.turn(index, 4)
    trained.run(range(5, 12))
    assert poisoned.statistics().discarded >= 1
    assert all(bool(torch.isfinite(trained.local(index)).all()) for index in range(3))


def test_one_worker_sends_nothing():
    for spec in SETTINGS:
        alone = team(spec, size=1)
        alone.run(range(4))
        assert alone.group.statistics().wire_bytes == 0


def test_bytes_are_those_of_the_frames():
    pair = Team(2, "diloco", 1, codec="fp32")
    pair.run(range(1))
    values = flat(net()).numel()
    frame = 4 * values + 8
    statistics = pair.group.statistics()
    assert statistics.body_bytes == frame
    assert statistics.wire_bytes == 2 * frame  # to the owner, and back


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("dilco", "expected one of the methods"),
        ("diloco(rate=1)", "expected options among"),
        ("diloco(lr)", "key=value"),
        ("diloco(lr=1, lr=2)", "once"),
        ("diloco(lr=fast)", "number"),
        ("diloco(weights=speed)", "one of rate, tokens, equal"),
        ("streaming(alpha=2)", "between 0 and 1"),
        ("diloco(count=2, codec=powersgd)", "one fragment"),
        ("eager(count=2)", "one fragment"),
        ("eager(tau=5)", "no tau"),
        ("co2(penalty=inf)", "penalty"),
        ("ddp(clip_norm=inf)", "clip_norm"),
        ("ddp(eps=inf)", "eps"),
        ("streaming(count=2", "name or name"),
        ("diloco(codec=int8(block=2)", "brackets"),
        ("x" * 2_000, "1000 characters"),
    ],
)
def test_spec_that_is_wrong_says_what_is_right(spec, expected):
    with pytest.raises(MethodError, match=expected):
        parse(spec)


@pytest.mark.parametrize("name", ["diloco", "muloco", "streaming", "eager", "co2", "noloco"])
@pytest.mark.parametrize("option", ["lr=-1", "lr=inf", "lr=nan", "momentum=1", "momentum=-0.1"])
def test_outer_step_that_climbs_or_grows_is_refused(name, option):
    with pytest.raises(MethodError, match="expected"):
        parse(f"{name}({option})")


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("option", ["clip_at=-1", "clip_at=nan", "feedback=-0.1", "feedback=2"])
def test_options_of_all_methods_out_of_range_are_refused(name, option):
    with pytest.raises(MethodError, match="expected"):
        parse(f"{name}({option})")


@pytest.mark.parametrize("name", ["ddp", "demo", "dlion"])
@pytest.mark.parametrize("decay", ["-1", "inf", "nan"])
def test_decay_out_of_range_is_refused(name, decay):
    with pytest.raises(MethodError, match="decay"):
        parse(f"{name}(decay={decay})")


def test_sparseloco_that_climbs_is_refused():
    for lr in (-1, float("inf")):
        with pytest.raises(MethodError, match="outer rate"):
            parse("sparseloco", lr=lr)


def test_unknown_codec_is_refused():
    with pytest.raises(CodecError):
        parse("diloco(codec=int9)")


def test_options_change_a_spec_and_a_method():
    assert parse("diloco(lr=0.5)", momentum=0.25) == parse("diloco(lr=0.5, momentum=0.25)")
    group = InProcessGroup(2, parse("diloco(lr=0.5)"), codec="int4")
    assert group.method == parse("diloco(lr=0.5, codec=int4)")


def test_a_group_refuses_methods_of_the_other_kind():
    with pytest.raises(GroupError, match="common state"):
        InProcessGroup(2, "noloco")
    with pytest.raises(GroupError, match="gossip"):
        GossipGroup(2, "diloco")
