"""Keyed hashes: the same for the same, under one salt."""

from array import array

from epp.core.capture.lines import HASHES_KEPT_MAX, Salt, pack_blocks, packed_chain

ONE, OTHER = Salt(b"one key of many bytes"), Salt(b"another key of bytes")


def test_blocks_are_hashed_as_each_alone_would_be():
    """Also when what is remembered was dropped twice over."""
    blocks = list(range(HASHES_KEPT_MAX + 100))
    packed = pack_blocks(blocks)
    assert ONE.blocks(packed) == pack_blocks(map(ONE.block, blocks))
    assert ONE.blocks(packed[:80]) == pack_blocks(map(ONE.block, blocks[:10]))
    for start in range(0, 3 * HASHES_KEPT_MAX, 1000):
        ONE.blocks(pack_blocks(range(start, start + 1000)))
    assert len(ONE._known) + len(ONE._before) <= HASHES_KEPT_MAX + 2000
    assert ONE.blocks(packed[:80]) == pack_blocks(map(ONE.block, blocks[:10]))


def test_salts_are_told_apart_by_their_identity():
    """It is neither the key nor what picks the sample."""
    assert ONE.identity == Salt(b"one key of many bytes").identity != OTHER.identity
    assert ONE.secret() != OTHER.secret()
    assert int(ONE.identity, 16) != ONE.secret()
    assert ONE.name("me") != OTHER.name("me")


def test_a_chain_and_its_packed_form_are_inverse():
    """Whatever the byte order of this machine."""
    chain = array("Q", [1, 2**63, 7]).tobytes()
    assert packed_chain(chain) == pack_blocks([1, 2**63, 7])
    assert packed_chain(packed_chain(chain)) == chain
