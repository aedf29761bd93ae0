"""A bar that shows how far a call has come; nothing where nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Prompts answered, tokens of these prompts, tokens of their completions.
Advance = Callable[[int, int, int], None]


@contextlib.contextmanager
def progress_bar(num_prompts: int, is_shown: bool | Console) -> Iterator[Advance]:
    """A function to call with what has been done since the last call; a bar shows it on terminals.

    Args:
      num_prompts: how many there are.
      is_shown: False for none; True for one on standard error, where that is a terminal; or the console to write to.
    """
    console = is_shown if isinstance(is_shown, Console) else Console(stderr=True)
    if is_shown is False or not console.is_terminal:
        yield lambda *_: None
        return
    rates = TextColumn("{task.fields[rates]}")
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), rates, *times)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=num_prompts, rates="")
        num_in = num_out = 0

        def advance(prompts: int, tokens_in: int, tokens_out: int) -> None:
            nonlocal num_in, num_out
            num_in, num_out = num_in + tokens_in, num_out + tokens_out
            seconds = max(progress.tasks[0].elapsed or 0.0, 1e-9)
            rates = f"{num_in / seconds:.0f} tokens/s in, {num_out / seconds:.0f} out"
            progress.update(task, advance=prompts, rates=rates)

        yield advance
