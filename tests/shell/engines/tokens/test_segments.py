from epp.core.prompt.token_ids import packed
from epp.shell.engines.tokens.segments import ENTRY_BYTES, PART_CHARACTERS_MIN, SegmentCache

LONG = "x" * PART_CHARACTERS_MIN


class Encoder:
    """Cuts at bars; a character is a token."""

    def __init__(self):
        self.encoded = []

    def parts_of(self, text):
        return text.split("|")

    def encode(self, part):
        self.encoded.append(part)
        return packed(map(ord, part))


def test_a_part_is_encoded_once():
    """In whatever text it comes again."""
    cache, encoder = SegmentCache(), Encoder()
    first = cache.ids_of("m", encoder, f"{LONG}|a{LONG}")
    again = cache.ids_of("m", encoder, f"{LONG}|b{LONG}|a{LONG}")
    assert first == packed(map(ord, f"{LONG}a{LONG}"))
    assert again == packed(map(ord, f"{LONG}b{LONG}a{LONG}"))
    assert encoder.encoded == [LONG, f"a{LONG}", f"b{LONG}"]
    assert (cache.hits, cache.misses) == (2, 3)


def test_models_share_nothing():
    """Their ids differ."""
    cache, one, other = SegmentCache(), Encoder(), Encoder()
    cache.ids_of("one", one, LONG)
    cache.ids_of("other", other, LONG)
    assert other.encoded == [LONG]


def test_a_short_part_is_not_kept():
    """It takes no longer to encode it again."""
    cache, encoder = SegmentCache(), Encoder()
    cache.ids_of("m", encoder, LONG[1:])
    assert (len(cache), cache.held_bytes) == (0, 0)


def test_memory_is_bounded():
    """The one that was not used for longest goes."""
    size = 4 * len(LONG) + 4 + ENTRY_BYTES
    cache, encoder = SegmentCache(2 * size), Encoder()
    for part in ("a", "b", "a", "c"):
        cache.ids_of("m", encoder, part + LONG)
    assert (len(cache), cache.held_bytes) == (2, 2 * size)
    encoder.encoded.clear()
    cache.ids_of("m", encoder, "a" + LONG)
    cache.ids_of("m", encoder, "b" + LONG)
    assert encoder.encoded == ["b" + LONG]


def test_a_part_that_is_larger_than_all_is_not_kept():
    """It would push out everything."""
    cache, encoder = SegmentCache(1_000), Encoder()
    cache.ids_of("m", encoder, LONG)
    cache.ids_of("m", encoder, LONG * 100)
    assert len(cache) == 1
