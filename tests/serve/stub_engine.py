"""An engine without a model: one token for each request in every step."""

import threading
import time

from jaxmask import SamplingParams
from serve.config import EngineConfig
from serve.engine import Engine
from serve.outputs import CompletionOutput, RequestOutput
from serve.requests import Request


def request(name, max_tokens=3, n=1):
    return Request(name, None, (1, 2), SamplingParams(max_tokens=max_tokens, n=n), False)


class StubEngine(Engine):
    """Draws 0, 1, 2, ... A step waits while `is_held` (then it `waits`), and raises `error` once where there is one."""

    def __init__(self, max_num_seqs=2):
        self.config = EngineConfig(max_num_seqs=max_num_seqs)
        self.requests, self.drawn, self.outputs = {}, {}, []
        self.is_held, self.error, self.num_steps = threading.Event(), None, 0
        self.submitted, self.waits = [], False

    def has_unfinished_requests(self):
        return bool(self.requests or self.outputs)

    def submit(self, request):
        if request.request_id in self.requests:
            raise ValueError(f"request_id must be new, got {request.request_id!r}, which is being answered.")
        self.submitted.append(request.request_id)
        self.requests[request.request_id], self.drawn[request.request_id] = request, 0

    def abort_request(self, names):
        for name in names:
            if name in self.requests:
                self._finish(name, "abort")

    def reset(self):
        self.requests.clear()
        self.outputs.clear()

    def take_outputs(self):
        outputs, self.outputs = self.outputs, []
        return outputs

    def step(self):
        while self.is_held.is_set():
            self.waits = True
            time.sleep(0.001)
        self.num_steps += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        time.sleep(0.001)
        for name, one in list(self.requests.items()):
            self.drawn[name] += 1
            if self.drawn[name] == one.params.max_tokens:
                self._finish(name, "length")
        return self.take_outputs()

    def _finish(self, name, reason):
        one = self.requests.pop(name)
        token_ids = list(range(self.drawn[name]))
        outputs = [CompletionOutput(index, "", token_ids, finish_reason=reason) for index in range(one.params.n)]
        self.outputs.append(RequestOutput(name, None, [1, 2], None, outputs, True))
