import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.invite import DamagedInvite, Invite, InviteVersion, NotAnInvite

INVITE = Invite(
    addresses=("203.0.113.7:7700", "[2001:db8::1]:7700"),
    run_id=b"r" * 32,
    run_key=b"k" * 32,
    tls_sha256=b"t" * 32,
    bootstrap=("/ip4/203.0.113.7/tcp/7701/p2p/12D3KooW",),
    token=b"0123456789abcdef",
)
TEXT = INVITE.encode()


def test_round_trip() -> None:
    assert Invite.decode(TEXT) == INVITE
    assert TEXT.startswith("atoll1")
    assert len(TEXT) < 400


@pytest.mark.parametrize("around", ["''", '""', "``", "<>", "\u201c\u201d", "\u00ab\u00bb"])
def test_quotes_around_it_are_ignored(around: str) -> None:
    assert Invite.decode(f" {around[0]}{TEXT}{around[1]}\n") == INVITE


def test_wrapped_by_a_mail_program() -> None:
    wrapped = "\n  ".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60))
    assert Invite.decode(f"  {wrapped}\r\n") == INVITE


@pytest.mark.parametrize("text", ["", "hello", "atoll", "http://x", "a" * 100_000])
def test_something_else_is_not_an_invite(text: str) -> None:
    with pytest.raises(NotAnInvite, match="invite"):
        Invite.decode(text)


def test_invite_of_another_version() -> None:
    with pytest.raises(InviteVersion, match="version 2"):
        Invite.decode("atoll2" + TEXT[6:])


@given(st.integers(6, len(TEXT) - 1), st.sampled_from("ABCabc019-_"))
def test_one_changed_character_is_damage(at: int, char: str) -> None:
    changed = TEXT[:at] + char + TEXT[at + 1 :]
    try:
        # The last character of base64 may have bits that mean nothing.
        assert Invite.decode(changed) == INVITE
    except (DamagedInvite, InviteVersion):
        assert changed != TEXT


@given(st.integers(6, len(TEXT) - 1))
def test_truncated_is_damage(length: int) -> None:
    with pytest.raises(DamagedInvite, match="copy the whole string"):
        Invite.decode(TEXT[:length])


@given(st.text(max_size=200))
def test_hostile_text_after_the_prefix(text: str) -> None:
    with pytest.raises((DamagedInvite, InviteVersion)):
        Invite.decode("atoll1" + text)


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ()},
        {"addresses": ("no port",)},
        {"run_id": b"short"},
        {"token": b"x" * 65},
        {"bootstrap": ("not a multiaddr",)},
        {"run_key": "text" * 8},
    ],
)
def test_fields_out_of_bounds_are_refused(changes: dict[str, object]) -> None:
    fields = {name: getattr(INVITE, name) for name in Invite.__dataclass_fields__}
    with pytest.raises(DamagedInvite):
        Invite(**{**fields, **changes}).encode()  # type: ignore[arg-type]
