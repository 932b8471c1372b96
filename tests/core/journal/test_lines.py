"""Keyed hashes: the same for the same, under one salt."""

import hashlib
import shutil
import subprocess
from array import array

import pytest

from epp.core.journal.lines import NAMES_MAX, Salt, pack_blocks, packed_chain

ONE, OTHER = Salt(b"one key of many bytes"), Salt(b"another key of bytes")


def test_blocks_are_hashed_as_each_alone_would_be():
    blocks = [*range(3_000), 2**64 - 1]
    packed = pack_blocks(blocks)
    assert ONE.blocks(packed) == pack_blocks(map(ONE.block, blocks))
    assert ONE.blocks(packed) == ONE.blocks(packed)
    assert ONE.blocks(b"") == b""


def test_blocks_are_hashed_as_the_documentation_says():
    """By OpenSSL's own command the same: what is written stays readable with the salt."""
    key = hashlib.blake2b(
        b"", digest_size=16, key=b"one key of many bytes", person=b"homing blocks"
    ).hexdigest()
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine to compare with")
    asked = [openssl, "enc", "-aes-128-ecb", "-nopad", "-K", key]
    wide = b"".join(block.to_bytes(8, "little") + bytes(8) for block in (1, 2**63 + 5))
    told = subprocess.run(asked, input=wide, capture_output=True, check=True).stdout
    assert ONE.blocks(pack_blocks([1, 2**63 + 5])) == told[:8] + told[16:24]


def test_under_another_salt_no_block_and_no_name_is_the_same():
    blocks = range(1_000)
    assert not {*map(ONE.block, blocks)} & {*map(OTHER.block, blocks)}
    assert len({*map(ONE.block, blocks)}) == 1_000
    assert not {*map(ONE.block, blocks)} & {*blocks}


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


def test_of_names_no_more_are_kept_than_are_bounded():
    """And each is hashed alike, kept or not."""
    salt = Salt(b"one key of many bytes")
    hashed = [salt.name(f"session-{number}") for number in range(3 * NAMES_MAX)]
    assert len(salt._names) <= NAMES_MAX
    assert [salt.name(f"session-{number}") for number in range(3 * NAMES_MAX)] == hashed
    assert len({*hashed}) == len(hashed)
