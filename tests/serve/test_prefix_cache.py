import numpy as np

from serve.prefix_cache import BLOCK, Entry, PrefixCache

A, B = tuple(range(100)), tuple(range(1000, 1100))


def entry(token_ids, salt=None, width=64, can_be_cut=True):
    return Entry(salt, tuple(token_ids), f"row of {len(token_ids)}", width, can_be_cut)


def kept(*entries, max_tokens=1000):
    cache = PrefixCache(max_tokens)
    for one in entries:
        cache.store(one)
    return cache


def shared(cache, token_ids, salt=None, most_width=1000):
    found = cache.find(salt, tuple(token_ids), most_width)
    return None if found is None else (len(found[0].token_ids), found[1])


def test_the_longest_common_beginning_is_found():
    cache = kept(entry(A[:40] + B[:20]), entry(A[:30] + B[:5]), entry(B[:50]))
    assert shared(cache, A[:40]) == (60, 40)
    assert shared(cache, A[:37] + B[:9]) == (60, 37)
    assert shared(cache, A[:30] + B[:9]) == (35, 35)
    assert shared(cache, A[:30] + B[:3]) == (35, 33)
    assert shared(cache, B) == (50, 50)
    assert shared(cache, A[1:]) is None
    assert shared(cache, A[: BLOCK - 1]) is None
    assert shared(cache, A[:BLOCK]) == (60, 16)
    assert shared(cache, ()) is None


def test_what_cannot_be_cut_is_of_use_whole():
    cache = kept(entry(A[:20], can_be_cut=False), entry(A[:36], can_be_cut=False), entry(A[:70], can_be_cut=False))
    assert len(cache) == 3
    assert [shared(cache, A[:size]) for size in (19, 20, 35, 36, 69, 70, 90)] == [
        None,
        (20, 20),
        (20, 20),
        (36, 36),
        (36, 36),
        (70, 70),
        (70, 70),
    ]


def test_salts_and_widths_keep_apart():
    cache = kept(entry(A[:40], "a"), entry(A[:50], None, width=256))
    assert shared(cache, A, "a") == (40, 40)
    assert shared(cache, A) == (50, 50)
    assert shared(cache, A, most_width=255) is None
    assert shared(cache, A, "b") is None


def test_what_others_hold_is_not_kept_twice():
    cache = kept(entry(A[:40]))
    cache.store(entry(A[:30]))
    cache.store(entry(A[:40]))
    assert (len(cache), cache.num_tokens) == (1, 64)
    cache.store(entry(A[:60]))
    assert (len(cache), shared(cache, A[:50])) == (1, (60, 50))
    # Too wide for those who ask: the same is kept in a narrow row.
    cache.store(entry(A[:20], width=16))
    assert (len(cache), shared(cache, A, most_width=16)) == (2, (20, 20))
    cache.store(entry(A[:60], width=16))
    assert (len(cache), cache.num_tokens) == (1, 16)


def test_the_least_recently_used_goes_first():
    first, second, third = (entry((number, *A[:40])) for number in range(3))
    cache = kept(first, second, max_tokens=128)
    assert shared(cache, first.token_ids) == (41, 41)
    cache.store(third)
    assert shared(cache, second.token_ids) is None
    assert shared(cache, first.token_ids) == shared(cache, third.token_ids) == (41, 41)
    assert (len(cache), cache.num_tokens) == (2, 128)


def test_what_is_short_or_larger_than_all_room_is_not_kept():
    cache = kept(entry(A[: BLOCK - 1]), entry(A[:40], width=256), max_tokens=255)
    assert (len(cache), cache.takes(15, 64), cache.takes(16, 64), cache.takes(200, 256)) == (0, False, True, False)


def test_nothing_is_left_of_what_went():
    """Random entries come, are found as a plain search finds them, and go; at the end the tree is empty."""
    random = np.random.default_rng(0)
    cache, alive = PrefixCache(6 * 64), []
    for number in range(400):
        ids = tuple(random.integers(0, 2, random.integers(16, 60)).tolist())
        salt = "s" if number % 5 == 0 else None
        expected = max((one.num_shared(ids) for one in cache._entries.values() if one.salt == salt), default=0)
        found = cache.find(salt, ids, 64)
        assert (found[1] if found else 0) == (expected if expected >= BLOCK else 0)
        alive.append(entry(ids, salt, can_be_cut=bool(number % 3)))
        cache.store(alive[-1])
        assert len(cache) * 64 == cache.num_tokens <= 6 * 64
    for one in list(cache._entries.values()):
        cache._drop(one)
    assert cache._roots == {}
    assert cache.num_tokens == 0
