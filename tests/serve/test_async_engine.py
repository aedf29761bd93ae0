import asyncio
import contextlib
import functools
import time

import pytest
from stub_engine import StubEngine, request

from serve.async_engine import AsyncEngine
from serve.tickets import ConflictError, EngineError, OverloadedError, UnavailableError

FOREVER = 10**9


class Watch:
    def __init__(self):
        self.names, self.num_failed = [], 0

    def delivered(self, output):
        self.names.append(output.request_id)

    def failed(self, request_id):
        self.num_failed += 1


def on_a_loop(test):
    """Runs a test on a loop of its own, with an engine that is stopped at its end; 20 seconds at most."""

    @functools.wraps(test)
    def run():
        async def whole():
            stub = StubEngine()
            engine = AsyncEngine(stub, max_waiting=3, observer=Watch())
            await engine.start()
            try:
                await asyncio.wait_for(test(engine, stub), 20)
            finally:
                stub.is_held.clear()
                await engine.stop()

        asyncio.run(whole())

    # pytest would take the arguments of the test itself for fixtures.
    del run.__wrapped__
    return run


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def answer(engine, *arguments, **options):
    (ticket,) = engine.submit([request(*arguments, **options)])
    return (await ticket.result()).outputs[0]


def started(coroutine):
    return asyncio.ensure_future(coroutine)


async def begun(engine, stub, name="long", max_tokens=FOREVER):
    """A request of which something was drawn."""
    (ticket,) = engine.submit([request(name, max_tokens)])
    await until(lambda: stub.drawn.get(name, 0) > 1)
    return ticket


@on_a_loop
async def test_requests_are_answered_and_observed(engine, stub):
    tickets = engine.submit([request("a", 2), request("b", 5, n=2)])
    assert engine.num_open == 3
    assert engine.request_ids == ["a", "b"]
    results = [await ticket.result() for ticket in tickets]
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 5]
    assert engine.num_open == 0
    assert engine.observer.names == ["a", "b"]


@on_a_loop
async def test_names_are_answered_once_at_a_time(engine, stub):
    await begun(engine, stub, "a")
    for names in (["a"], ["b", "b"]):
        with pytest.raises(ValueError, match="request_id must be new"):
            engine.submit([request(name) for name in names])
    assert engine.num_open == 1
    assert engine.abort(["a", "unknown"]) == 1
    await until(lambda: not engine.num_open)
    assert len((await answer(engine, "a")).token_ids) == 3


@on_a_loop
async def test_what_is_too_much_is_refused_whole(engine, stub):
    """2 slots and 3 that wait."""
    stub.is_held.set()
    engine.submit([request("a", n=4)])
    with pytest.raises(OverloadedError, match="4 completions are running or waiting, of 5") as refusal:
        engine.submit([request("b"), request("c")])
    assert 1 <= refusal.value.retry_after <= 60
    assert engine.request_ids == ["a"]
    engine.submit([request("b")])
    with pytest.raises(ValueError, match="n must be at most 5"):
        engine.submit([request("c", n=6)])


@on_a_loop
async def test_a_deadline_ends_a_request_with_what_it_has(engine, stub):
    (ticket,) = engine.submit([request("a", FOREVER)], deadline=time.monotonic() + 0.1)
    output = (await ticket.result()).outputs[0]
    assert ticket.is_late
    assert output.finish_reason == "abort"
    assert output.token_ids


@on_a_loop
async def test_a_ticket_that_is_left_ends_its_request(engine, stub):
    waiting = started((await begun(engine, stub)).result())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await until(lambda: not engine.num_open)
    assert not stub.requests


@on_a_loop
async def test_a_step_that_fails_tells_everyone_and_the_next_request_works(engine, stub):
    tickets = [await begun(engine, stub, name) for name in "ab"]
    stub.error = RuntimeError("broken")
    for ticket in tickets:
        with pytest.raises(EngineError):
            await ticket.result()
    assert engine.is_alive
    assert engine.num_open == 0
    assert engine.observer.num_failed == 2
    assert len((await answer(engine, "a")).token_ids) == 3


@on_a_loop
async def test_a_failed_step_leaves_those_alone_that_came_after_it(engine, stub):
    """The loop hears of the failure when further requests have been taken."""
    first = await begun(engine, stub)
    stub.error = RuntimeError("broken")
    time.sleep(0.05)  # the loop hears nothing meanwhile
    second = engine.submit([request("later")])[0]
    with pytest.raises(EngineError):
        await first.result()
    assert len((await second.result()).outputs[0].token_ids) == 3
    assert stub.submitted == ["long", "later"]


@on_a_loop
async def test_the_death_of_the_thread_is_told_to_everyone(engine, stub):
    ticket = await begun(engine, stub)
    stub.is_held.set()
    await until(lambda: stub.waits)
    stub.error = SystemExit("the thread ends")
    # Of two that wait for the thread, one has been given up: that must not keep the other from being told.
    calls = [started(engine.call(lambda _: None)) for _ in range(2)]
    await asyncio.sleep(0.01)
    calls[0].cancel()
    stub.is_held.clear()
    with pytest.raises(EngineError):
        await ticket.result()
    with pytest.raises(EngineError):
        await calls[1]
    await until(lambda: not engine.is_alive)
    for refused in (lambda: answer(engine, "a"), engine.pause, engine.resume):
        with pytest.raises(UnavailableError, match="does not run"):
            await refused()
    await engine.drain(5)
    assert engine.num_open == 0


@on_a_loop
async def test_work_that_ends_the_thread_is_told_so(engine, stub):
    def end(_):
        raise SystemExit("the thread ends")

    ticket = await begun(engine, stub)
    with pytest.raises(SystemExit):
        await engine.call(end)
    with pytest.raises(EngineError):
        await ticket.result()


@on_a_loop
async def test_work_on_the_thread_returns_and_raises(engine, stub):
    assert await engine.call(lambda same: same is stub)
    with pytest.raises(ZeroDivisionError):
        await engine.call(lambda _: 1 / 0)
    assert engine.is_alive


@on_a_loop
async def test_pause_by_abort(engine, stub):
    ticket = await begun(engine, stub)
    await engine.pause("abort")
    assert (await ticket.result()).outputs[0].finish_reason == "abort"
    with pytest.raises(UnavailableError, match="paused"):
        engine.submit([request("a")])
    await engine.resume()
    assert len((await answer(engine, "a")).token_ids) == 3


@on_a_loop
async def test_pause_by_waiting(engine, stub):
    ticket = await begun(engine, stub, max_tokens=30)
    await engine.pause("wait")
    assert len((await ticket.result()).outputs[0].token_ids) == 30
    with pytest.raises(UnavailableError, match="paused"):
        engine.submit([request("a")])


@on_a_loop
async def test_pause_that_keeps(engine, stub):
    ticket = await begun(engine, stub, max_tokens=100)
    await engine.pause("keep")
    num_steps = stub.num_steps
    waiting = started(answer(engine, "a"))
    gone = engine.submit([request("b")])[0]
    gone.cancel()
    # What is given up while nothing runs is told so.
    assert (await gone.result()).outputs[0].token_ids == []
    await asyncio.sleep(0.05)
    assert stub.num_steps == num_steps
    assert not waiting.done()
    await engine.resume()
    assert len((await ticket.result()).outputs[0].token_ids) == 100
    assert len((await waiting).token_ids) == 3


@on_a_loop
async def test_requests_that_a_pause_kept_end_in_one_that_waits(engine, stub):
    ticket = await begun(engine, stub, max_tokens=20)
    await engine.pause("keep")
    await engine.pause("wait")
    assert len((await ticket.result()).outputs[0].token_ids) == 20
    assert engine.gate.state == "closed"


@pytest.mark.parametrize("end", ["resume", "keep", "drain"])
def test_a_pause_that_waits_can_be_overtaken(end):
    @on_a_loop
    async def test(engine, stub):
        ticket = await begun(engine, stub)
        pause = started(engine.pause("wait"))
        await asyncio.sleep(0.01)
        ends = {"resume": engine.resume, "keep": lambda: engine.pause("keep"), "drain": lambda: engine.drain(0.1)}
        await ends[end]()
        with pytest.raises(ConflictError):
            await pause
        if end == "resume":
            # It does not stop what was resumed once all is quiet.
            ticket.cancel()
            await until(lambda: not engine.num_open)
            assert len((await answer(engine, "a")).token_ids) == 3

    test()


@on_a_loop
async def test_a_pause_that_is_given_up_can_be_resumed(engine, stub):
    ticket = await begun(engine, stub)
    pause = started(engine.pause("wait"))
    await asyncio.sleep(0.01)
    pause.cancel()
    await asyncio.sleep(0.01)
    with pytest.raises(UnavailableError):
        engine.submit([request("a")])
    await engine.resume()
    ticket.cancel()
    assert len((await answer(engine, "a")).token_ids) == 3


@on_a_loop
async def test_many_pauses_and_resumes_at_once_leave_the_last(engine, stub):
    calls = [engine.pause(mode) if mode else engine.resume() for mode in ("abort", "", "keep", "", "wait", "") * 5]
    await asyncio.gather(*map(started, calls), return_exceptions=True)
    assert engine.gate.state == "open"
    assert len((await answer(engine, "a")).token_ids) == 3


@on_a_loop
async def test_drain_answers_what_was_taken(engine, stub):
    ticket = await begun(engine, stub, max_tokens=50)
    drain = started(engine.drain(10))
    await asyncio.sleep(0.005)
    with pytest.raises(UnavailableError, match="shutting down"):
        engine.submit([request("a")])
    for refused in (engine.pause, engine.resume):
        with pytest.raises(UnavailableError, match="shutting down"):
            await refused()
    await drain
    assert len((await ticket.result()).outputs[0].token_ids) == 50


@on_a_loop
async def test_drain_ends_what_takes_too_long_also_of_a_paused_server(engine, stub):
    ticket = await begun(engine, stub)
    await engine.pause("keep")
    await engine.drain(0.05)
    output = (await ticket.result()).outputs[0]
    assert output.finish_reason == "abort"
    assert output.token_ids


def test_a_step_that_never_ends_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("serve.async_engine._GRACE", 0.1)

    @on_a_loop
    async def test(engine, stub):
        ticket = await begun(engine, stub)
        stub.is_held.set()
        await engine.drain(0.05)
        with pytest.raises(UnavailableError, match="shutting down"):
            await ticket.result()
        assert engine.num_open == 0
        await engine.stop()

    test()


@on_a_loop
async def test_stop_tells_whoever_waits(engine, stub):
    ticket = await begun(engine, stub)
    await engine.stop()
    with pytest.raises(UnavailableError, match="shutting down"):
        await ticket.result()
    with pytest.raises(EngineError):
        await engine.call(lambda _: None)


def test_an_engine_that_was_not_started_refuses():
    async def test():
        engine = AsyncEngine(StubEngine())
        with contextlib.suppress(UnavailableError):
            engine.submit([request("a")])
            raise AssertionError("it was taken")

    asyncio.run(test())
