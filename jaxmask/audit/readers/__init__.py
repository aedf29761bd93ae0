"""One module for each form of rollouts: what it looks like, and what of it is which part of a completion.

Each has `knows(answer)`, whether a value looks like its form, and `completions(exchange)`, the rows of one. Nothing is
checked here; a value of the wrong kind becomes a problem of its row.
"""
