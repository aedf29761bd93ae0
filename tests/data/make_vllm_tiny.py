"""Make the tiny Qwen 3 of demos/interop, or ask a running vLLM for completions of it, with their masks.

    python tests/data/make_vllm_tiny.py model                        # writes the checkpoint
    vllm serve demos/interop/vllm_tiny --skip-tokenizer-init --enable-scale-out --dtype float32 \
        --return-sampling-mask --logprobs-mode processed_logprobs
    python tests/data/make_vllm_tiny.py http://127.0.0.1:8000      # records responses.jsonl and vllm_edited.jsonl

The recorded exchanges are those of vLLM 0.32's CPU build, its newer runner with Triton's interpreter.
"""

import json
import sys
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import models

EDITED = Path(__file__).parent / "vllm_edited.jsonl"
FOLDER = Path(__file__).parents[2] / "demos" / "interop" / "vllm_tiny"
SHAPE = models.DecoderConfig(
    vocab_size=512,
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,  # the least that vLLM's attention on a CPU can do
    mlp_width=64,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
)
GAIN, SHARPNESS = 5.0, 26.0  # new weights give nearly flat logits; these give supports of about 7 ids
PROMPTS = ([5, 6, 7, 8], [100, 200, 300], [17, 4, 250, 33, 91, 480], [411])
SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "max_tokens": 20, "n": 4, "logprobs": 0}
# What the learner has to replay: edits, a stop id, and answers in pieces.
OTHERS = (
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3, "min_p": 0.02},
    {"logit_bias": {"410": -3.0, "7": 2.5}, "allowed_token_ids": list(range(3, 512, 2)), "temperature": 1.3},
    {"stop_token_ids": [410, 424, 497], "min_tokens": 3, "top_k": 512, "top_p": 0.8},
    {"stream_interval": 3, "temperature": 0.6},
)


def make_model() -> None:
    graph, state = nnx.split(models.Decoder(SHAPE, rngs=nnx.Rngs(0)))
    is_layer = lambda leaf: leaf.ndim == 2 and leaf.shape[0] != SHAPE.vocab_size  # noqa: E731
    decoder = nnx.merge(graph, jax.tree.map(lambda leaf: leaf * GAIN if is_layer(leaf) else leaf, state))
    decoder.final_norm.value = jnp.full(SHAPE.width, SHARPNESS)
    models.save(decoder, FOLDER, dtype=jnp.bfloat16)


def ask(url: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        if not body.get("stream"):
            return {"request": body, "status": answer.status, "response": json.load(answer)}
        texts = [line.decode()[len("data: ") :].strip() for line in answer if line.startswith(b"data: ")]
        events = [text if text == "[DONE]" else json.loads(text) for text in texts]
        return {"request": body, "status": answer.status, "stream": events}


def record(url: str) -> None:
    plain = [{"token_ids": prompt, "sampling_params": {**SAMPLING, "seed": 10 * i}} for i, prompt in enumerate(PROMPTS)]
    edited = [
        {
            "token_ids": prompt,
            "sampling_params": {**SAMPLING, **other, "seed": 10 * i},
            "stream": "stream_interval" in other,
        }
        for i, (prompt, other) in enumerate(zip(PROMPTS, OTHERS, strict=True))
    ]
    for path, bodies in ((FOLDER / "responses.jsonl", plain), (EDITED, edited)):
        path.write_text("".join(json.dumps(ask(url, body)) + "\n" for body in bodies))


if __name__ == "__main__":
    make_model() if sys.argv[1] == "model" else record(sys.argv[1])
