"""What a chunk of steps drew, to the completions that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmask.rollout import Finish
from serve.completions import Completion
from serve.report import Reading
from serve.slots import Chunk


def deliver(reading: Reading, chunk: Chunk) -> Iterator[tuple[Completion, bool]]:
    """Each completion that had a row of the chunk and went on, once it has what is its own.

    With each comes whether the device would go on with it, of which it knows nothing that it has ended, if it has.
    """
    for slot, completion in enumerate(chunk.owners):
        finish = Finish(int(reading.finish[slot]))
        count = int(reading.counts[slot])
        if completion is None or completion.finish_reason is not None or (count, finish) == (0, Finish.RUNNING):
            continue
        request = completion.request
        completion.take(
            reading.token_ids[slot, :count].tolist(),
            finish,
            reading.mask(slot) if request.returns_mask else None,
            reading.logprobs(slot) if request.params.logprobs is not None else None,
            chunk.weight_version,
        )
        yield completion, finish == Finish.RUNNING
