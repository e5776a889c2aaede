"""Names of links, the keys of their peers, and a client's key as a word: at the bounds of what is one."""

from __future__ import annotations

import pytest

from actors.transport.keys import FIRST_CLIENT, OWNER, HubKeys, LinkKey, is_client, peer_of, public_half


@pytest.mark.parametrize(
    ("link", "peer", "of_client"),
    [
        ("target-0", "target-0", False),
        ("target-0#3", "target-0", False),
        ("target-0#3/heart", "target-0", False),
        ("draft2-1#0", "draft2-1", False),
        ("client", "client", False),
        ("client/out", "client", False),
        ("client:alice", "client:alice", True),
        ("client:alice/out", "client:alice", True),
        ("client:alice:5f", "client:alice", True),
        ("client:alice:5f/out", "client:alice", True),
        ("client:alice:5f:6a#1", "client:alice", True),
        ("clients", "clients", False),
    ],
)
def test_a_link_belongs_to_its_peer(link, peer, of_client):
    assert peer_of(link) == peer and is_client(link) == of_client


HEX = "0123456789abcdef" * 8
"""Both halves of a pair, 32 bytes each."""


@pytest.mark.parametrize("name", ["a", "a-b_C9", "x" * 40])
def test_a_clients_key_is_a_word(name):
    key = LinkKey.read(f"  {name}.{HEX}\n")
    assert (key.peer, key.hub, key.private) == (f"client:{name}", bytes.fromhex(HEX[:64]), bytes.fromhex(HEX[64:]))
    assert key.text == f"{name}.{HEX}" and LinkKey.read(key.text) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEX,
        f".{HEX}",
        f"a.{HEX[1:]}",
        f"a.{HEX}0",
        f"{'x' * 41}.{HEX}",
        f"a:b.{HEX}",
        f"a.{HEX.upper()}",
        f"ä.{HEX}",
        f"a.{HEX} b",
    ],
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="not a key"):
        LinkKey.read(text)


def test_keys_follow_from_the_secret_and_the_peer():
    keys = HubKeys(b"s" * 32, ("target-0", "draft-0"))
    assert keys.admitted == ("target-0", "draft-0", OWNER, FIRST_CLIENT)
    made = [keys.of(peer) for peer in keys.admitted]
    privates = {keys.private, *(key.private for key in made)}
    assert len(privates) == 5 and all(len(one) == 32 for one in privates)
    assert all(key.hub == public_half(keys.private) and key.public == public_half(key.private) for key in made)
    assert keys.of("target-0") == HubKeys(b"s" * 32).of("target-0") != HubKeys(b"t" * 32).of("target-0")


def test_a_new_key_is_like_no_other_and_is_not_shown():
    one, other = (LinkKey.made_for("alice", b"h" * 32) for _ in range(2))
    assert one.peer == "client:alice" and one.hub == b"h" * 32 and len(one.private) == 32
    assert one.private != other.private and one.private.hex() not in repr(one) and repr(one.private) not in repr(one)
    secret = HubKeys(b"secret" * 6, ())
    assert "secret" not in repr(secret)
