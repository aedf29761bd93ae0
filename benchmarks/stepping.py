"""A training loop that others own, run a step at a time."""

import queue
import threading
from collections.abc import Callable


class Stepper:
    """Runs `train` in a thread; it must call `wait` before each of its steps, and is held there until `step`.

    In: train calls wait, step 1, wait, step 2, ...  Out: each `step` returns when the next wait is reached.
    """

    def __init__(self, train: Callable[[], object]):
        """The thread is started by the first `step`, so `train` may refer to this object's `wait`."""
        self._reached: queue.Queue[BaseException | None] = queue.Queue()
        self._permits: queue.Queue[None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)

    def wait(self) -> None:
        """Called by the loop: here a step would begin."""
        self._reached.put(None)
        self._permits.get()

    def step(self) -> None:
        """One step; what the loop raises is raised here."""
        if not self._thread.ident:
            self._thread.start()
            self._until_reached()
        self._permits.put(None)
        self._until_reached()

    def _until_reached(self) -> None:
        error = self._reached.get()
        if error is not None:
            raise error

    def _run(self, train: Callable[[], object]) -> None:
        try:
            train()
            self._reached.put(RuntimeError("training ended"))
        except BaseException as error:
            self._reached.put(error)
