import collections
import time
from types import SimpleNamespace

import pytest

from jaxmask import SamplingParams
from serve.completions import Completion
from serve.config import EngineConfig
from serve.requests import Limits, Request
from serve.waiting import Waiting

LIMITS = Limits(EngineConfig(), 40, 64, None, False)


def completions(name, count, num_tokens=10):
    request = Request.of(name, [3] * (num_tokens - 1), SamplingParams(max_tokens=1, n=count), LIMITS)
    return [Completion(index, request, request.params, LIMITS) for index in range(count)]


def waiting(max_num_seqs, **counts):
    queue = Waiting(max_num_seqs)
    for name, count in counts.items():
        queue.add(completions(name, count))
    return queue


def names(taken):
    return "".join(one.request.request_id for one in taken)


def test_single_requests_go_as_they_came():
    queue = waiting(4, a=1, b=1, c=1, d=1)
    assert names(queue.take(3)) == "abc"
    queue.add(completions("e", 1))
    assert (len(queue), names(queue.take(5)), len(queue)) == (2, "de", 0)


def test_slots_go_to_the_request_with_the_fewest():
    queue = waiting(4, a=64, b=1, c=2)
    assert names(queue.take(4)) == "abca"
    # a has two, c one.
    taken = queue.take(1)
    assert names(taken) == "c"
    queue.add(completions("d", 1))
    assert names(queue.take(2)) == "da"


def test_a_request_of_many_completions_gives_way_to_one_that_comes_later():
    queue = waiting(4, a=64)
    running = collections.deque(queue.take(4))
    assert names(running) == "aaaa"
    queue.add(completions("b", 1))
    queue.ended(running.popleft())
    assert names(queue.take(1)) == "b"
    for _ in range(60):
        queue.ended(running.popleft())
        running += queue.take(1)
    assert names(running) == "aaa"
    assert len(queue) == 0


def test_a_group_gets_its_slots_together_where_there_are_some():
    queue = waiting(32, a=8, b=8, c=12, d=1)
    taken = queue.take(32)
    assert names(taken[:25]) == "a" * 8 + "b" * 8 + "c" * 8 + "d"
    assert names(taken[25:]) == "cccc"


def test_one_that_lost_its_completions_is_first_again():
    queue = waiting(4, a=3, b=3)
    first = queue.take(4)
    assert names(first) == "abab"
    for one in first:
        if one.request.request_id == "b":
            queue.ended(one)
    assert names(queue.take(2)) == "ba"


def test_what_is_dropped_waits_no_more():
    queue = waiting(4, a=3, b=2, c=1)
    queue.take(1)
    queue.drop("a")
    queue.drop("nobody")
    assert len(queue) == 3
    queue.add(completions("a", 1))
    assert names(queue.take(9)) == "bcab"
    queue.clear()
    assert (len(queue), queue.most_tokens, queue.take(1)) == (0, 0, [])


def test_the_longest_that_waits():
    queue = Waiting(4)
    for name, num_tokens in (("a", 20), ("b", 50), ("c", 30)):
        queue.add(completions(name, 2, num_tokens))
    assert queue.most_tokens == 50
    queue.drop("b")
    assert queue.most_tokens == 30
    queue.take(6)
    assert queue.most_tokens == 0


@pytest.mark.parametrize("is_dropped", [False, True])
def test_thousands_wait_at_little_cost(is_dropped, unchecked):
    """20,000 requests, of which some are taken and end; or all are dropped while none is taken."""
    requests = [SimpleNamespace(request_id=str(number), num_tokens=number % 50) for number in range(20_000)]
    groups = [[SimpleNamespace(request=request)] * (1 + number % 2) for number, request in enumerate(requests)]
    queue = Waiting(8)
    started = time.perf_counter()
    for each in groups:
        queue.add(each)
    if is_dropped:
        for each in groups[:-1]:
            queue.drop(each[0].request.request_id)
        assert len(queue) == 2
        assert len(queue._turns) <= 2 + 64
    else:
        running = queue.take(8)
        while running:
            for one in running:
                queue.ended(one)
            running = queue.take(8)
        assert len(queue) == 0
    # A look at the whole queue for each would take minutes.
    assert time.perf_counter() - started < 10
    assert len(queue._groups) == is_dropped
