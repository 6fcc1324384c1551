import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dht.identity import Identity, IdentityError, peer_id_of, public_key_of, verify


def test_identity_survives_on_disk(tmp_path):
    path = tmp_path / "deep" / "key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(path.parent) == ["key"]


def test_signature_is_bound_to_the_peer_id():
    ours, other = Identity.ephemeral(), Identity.ephemeral()
    signature = ours.sign(b"vote 7")
    assert verify(ours.peer_id, b"vote 7", signature)
    assert not verify(ours.peer_id, b"vote 8", signature)
    assert not verify(other.peer_id, b"vote 7", signature)
    assert not verify(ours.peer_id, b"vote 7", signature[:-1])


def test_peer_id_is_libp2ps():
    # libp2p specification, peer-ids: an Ed25519 key is inlined by the identity multihash.
    assert peer_id_of(bytes(32)).startswith("12D3Koo")
    assert public_key_of(peer_id_of(bytes(range(32)))) == bytes(range(32))


@pytest.mark.parametrize("data", [b"", b"x" * 68, b"\x08\x01\x12\x40" + bytes(64), bytes(10_000)])
def test_a_file_that_is_no_identity_is_refused_and_kept(tmp_path, data):
    path = tmp_path / "key"
    path.write_bytes(data)
    with pytest.raises(IdentityError):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


def test_a_folder_where_the_key_should_be_is_named(tmp_path):
    with pytest.raises(IdentityError, match="identity file"):
        Identity.load_or_create(tmp_path)


@given(st.text(max_size=60), st.binary(max_size=80), st.binary(max_size=80))
def test_hostile_peer_ids_and_signatures_are_only_false(peer_id, data, signature):
    assert verify(peer_id, data, signature) is False


def test_peer_ids_of_other_key_types_are_no_keys():
    rsa = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    assert public_key_of(rsa) is None
    assert public_key_of("z" * 52) is None
    assert public_key_of("1" * 52) is None
