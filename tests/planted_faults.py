"""Faults to plant in good rollouts, each with what an audit must say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tests.rollout_files import VOCAB_SIZE, GoodRow, Variant

# Where most faults are planted: a row and a position that every set of rows has.
ROW, POSITION = 3, 5
# Drawn by no row of `good_rows()`, and of one prompt neither.
STOP = 8


# Of some forms: supports stand as arrays of integers; an empty one says that there is none; log-probabilities are taken
# from those of the whole supports; the numbers of supports and tokens are one; settings are those of a whole group.
ARRAYS = {"vllm-base64", "answer", "rollout"} | {f"prime-rl{end}" for end in ("", "-fields", "-npz")}
ARRAYS |= {f"miles{end}" for end in ("", "-base64", "-batch", "-npz")}
EMPTY_IS_NONE = {"prime-rl", "prime-rl-fields", "prime-rl-npz"}
OF_KEPT = {"sglang-batch"}
ONE_NUMBER = {"rollout"}
OF_GROUP = {"vllm-groups", "sglang-chat", "sglang-batch"}
# Forms that know the prompt beside a completion's supports.
WITH_PROMPT = {"vllm", "vllm-gz", "vllm-groups", "vllm-bare", "vllm-base64", "vllm-kept", "sglang", "sglang-batch"}
WITH_PROMPT |= {"miles", "miles-base64", "miles-batch", "miles-npz"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
      code: what it is to be called.
      plant: changes rows in place; may return places itself.
      places: rows and positions that are to be named, -1 for whole rows.
      fits: whether a variant of that name can express it.
      options: of the audit.
    """

    code: str
    plant: Callable[[list[GoodRow]], object]
    places: tuple[tuple[int, int], ...] = ((ROW, POSITION),)
    fits: Callable[[str, Variant], bool] = lambda name, variant: True
    options: tuple[tuple[str, object], ...] = ()


def change(rows: list[GoodRow], row: int = ROW, **parts: object) -> None:
    rows[row] = dataclasses.replace(rows[row], **parts)


def put(values: list, position: int, value: object) -> list:
    return [*values[:position], value, *values[position + 1 :]]


def in_support(edit: Callable[[list[int], int], list[int] | None]) -> Callable[[list[GoodRow]], None]:
    """Edits one support, given its ids and the drawn one; what is kept of its log-probabilities stays as long."""

    def plant(rows: list[GoodRow]) -> None:
        row = rows[ROW]
        ids = edit(list(row.supports[POSITION]), row.token_ids[POSITION])
        old = dict(zip(row.supports[POSITION], row.kept_logprobs[POSITION], strict=True))
        kept = None if ids is None else [old.get(token_id, -5.0) for token_id in ids]
        change(rows, supports=put(row.supports, POSITION, ids), kept_logprobs=put(row.kept_logprobs, POSITION, kept))

    return plant


def in_logprob(edit: Callable[[GoodRow], object], position: int = POSITION) -> Callable[[list[GoodRow]], None]:
    return lambda rows: change(rows, logprobs=put(rows[ROW].logprobs, position, edit(rows[ROW])))


def shift(step: int) -> Callable[[list[GoodRow]], None]:
    def plant(rows: list[GoodRow]) -> None:
        def moved(values: list) -> list:
            return values[-step:] + values[:-step]

        change(rows, supports=moved(rows[ROW].supports), kept_logprobs=moved(rows[ROW].kept_logprobs))

    return plant


def swap(rows: list[GoodRow]) -> None:
    one, other = rows[1], rows[ROW]
    change(rows, 1, supports=other.supports, kept_logprobs=other.kept_logprobs)
    change(rows, ROW, supports=one.supports, kept_logprobs=one.kept_logprobs)


def renumber(step: int) -> Callable[[list[GoodRow]], None]:
    # Also to -1 or V: the cause is one, whatever else it brings about.
    return lambda rows: change(rows, supports=[[token_id + step for token_id in ids] for ids in rows[ROW].supports])


def with_prompt(rows: list[GoodRow]) -> None:
    num = len(rows[ROW].prompt_ids)
    change(
        rows,
        supports=[[1, 2, 3]] * num + rows[ROW].supports,
        kept_logprobs=[[-1.0986122886681098] * 3] * num + rows[ROW].kept_logprobs,
    )


def certain_but_raw(rows: list[GoodRow]) -> None:
    row = rows[ROW]
    in_support(lambda ids, drawn: [drawn])(rows)
    change(
        rows,
        logprobs=put(row.logprobs, POSITION, row.full_logprobs[POSITION] - 0.1),
        kept_logprobs=put(row.kept_logprobs, POSITION, [row.full_logprobs[POSITION] - 0.1]),
        full_logprobs=put(row.full_logprobs, POSITION, row.full_logprobs[POSITION] - 0.1),
    )


def stop_at(rows: list[GoodRow]) -> None:
    """The token before the place becomes a stop id, in its own support."""
    row, before = rows[ROW], POSITION - 1
    drawn = row.token_ids[before]
    ids = [STOP if token_id == drawn else token_id for token_id in row.supports[before]]
    order = np.argsort(ids)
    change(
        rows,
        token_ids=put(row.token_ids, before, STOP),
        supports=put(row.supports, before, [ids[place] for place in order]),
        kept_logprobs=put(row.kept_logprobs, before, [row.kept_logprobs[before][place] for place in order]),
    )
    assert sum(one.token_ids.count(STOP) for one in rows) == 1


def kept_too_high(rows: list[GoodRow]) -> None:
    row = rows[ROW]
    ids, drawn = row.supports[POSITION], row.token_ids[POSITION]
    place = next(place for place, token_id in enumerate(ids) if token_id != drawn)
    change(rows, kept_logprobs=put(row.kept_logprobs, POSITION, put(row.kept_logprobs[POSITION], place, -0.01)))


def one_more(value: float) -> Callable[[list[GoodRow]], None]:
    """An id more in one support, with this for its log-probability."""

    def plant(rows: list[GoodRow]) -> None:
        row = rows[ROW]
        kept = {outside_id(row): value} | dict(zip(row.supports[POSITION], row.kept_logprobs[POSITION], strict=True))
        change(
            rows,
            supports=put(row.supports, POSITION, sorted(kept)),
            kept_logprobs=put(row.kept_logprobs, POSITION, [kept[token_id] for token_id in sorted(kept)]),
        )

    return plant


def at_temperature(row: GoodRow, temperature: float) -> float:
    values = row.logits[POSITION, row.supports[POSITION]].astype(np.float64) / temperature
    return float(row.logits[POSITION, row.token_ids[POSITION]] / temperature - np.logaddexp.reduce(values))


def in_logits(edit: Callable[[np.ndarray, GoodRow], None]) -> Callable[[list[GoodRow]], None]:
    def plant(rows: list[GoodRow]) -> None:
        logits = rows[ROW].logits.copy()
        edit(logits[POSITION], rows[ROW])
        change(rows, logits=logits)

    return plant


def outside_id(row: GoodRow) -> int:
    return next(token_id for token_id in range(VOCAB_SIZE) if token_id not in row.supports[POSITION])


def raise_outside(logits: np.ndarray, row: GoodRow) -> None:
    logits[outside_id(row)] = logits[row.supports[POSITION]].min() + 0.5


def make_impossible(logits: np.ndarray, row: GoodRow) -> None:
    logits[next(one for one in row.supports[POSITION] if one != row.token_ids[POSITION])] = -np.inf


WHOLE = ((ROW, -1),)
# The rows of the prompt.
BOTH = ((ROW - 1, -1), (ROW, -1))


def lower_top_k(rows: list[GoodRow]) -> list[tuple[int, int]]:
    """One less than the widest support of the two has; returns where those are."""
    widest = max(len(ids) for row in rows[ROW - 1 : ROW + 1] for ids in row.supports)
    both(rows, top_k=widest - 1)
    places = [(row, position) for row in (ROW - 1, ROW) for position in range(len(rows[row].supports))]
    return [(row, position) for row, position in places if len(rows[row].supports[position]) == widest]


def has_lists(name: str, variant: Variant) -> bool:
    return name not in ARRAYS


def has_own_logprobs(name: str, variant: Variant) -> bool:
    return name not in OF_KEPT


def has_kept(name: str, variant: Variant) -> bool:
    return variant.has_kept


def has_logits(name: str, variant: Variant) -> bool:
    return variant.has_logits


def both(rows: list[GoodRow], **parts: object) -> None:
    """Changes both rows of the prompt."""
    change(rows, ROW - 1, **parts)
    change(rows, ROW, **parts)


def in_prompt(edit: Callable[[list], list]) -> Callable[[list[GoodRow]], None]:
    return lambda rows: both(rows, prompt_ids=edit(rows[ROW].prompt_ids))


def knows_prompt(name: str, variant: Variant) -> bool:
    return name in WITH_PROMPT or name in {"prime-rl", "prime-rl-fields", "prime-rl-npz", "rollout"}


def allow_all_but_one(rows: list[GoodRow]) -> list[tuple[int, int]]:
    """Of both rows, as settings of a group are one; returns where the id is."""
    row = rows[ROW]
    other = next(one for one in row.supports[POSITION] if one != row.token_ids[POSITION])
    both(rows, more_params={"allowed_token_ids": [one for one in range(VOCAB_SIZE) if one != other]})
    places = [(row, position) for row in (ROW - 1, ROW) for position in range(len(rows[row].supports))]
    return [(row, position) for row, position in places if other in rows[row].supports[position]]


def with_tool(rows: list[GoodRow]) -> None:
    """The token before the place is of others, and all before it are; then two that train, and none behind them."""
    num = len(rows[ROW].token_ids)
    both(rows, more_params={"repetition_penalty": 1.1})
    change(rows, loss_mask=[POSITION <= position < POSITION + 2 for position in range(num)])


FAULTS: dict[str, Fault] = {
    "a token id is a string": Fault(
        "malformed-value", lambda rows: change(rows, token_ids=put(rows[ROW].token_ids, POSITION, "x")),
        fits=has_lists),
    "a support id is a float": Fault(
        "malformed-value", in_support(lambda ids, drawn: [*ids[:-1], 3.5]), fits=has_lists),
    "a token id is V": Fault(
        "token-outside-vocabulary",
        lambda rows: change(rows, token_ids=put(rows[ROW].token_ids, POSITION, VOCAB_SIZE))),
    "a prompt id is V": Fault(
        "prompt-outside-vocabulary", in_prompt(lambda ids: [*ids[:-1], VOCAB_SIZE]), BOTH, knows_prompt),
    "a prompt id is -1": Fault("prompt-outside-vocabulary", in_prompt(lambda ids: [-1, *ids]), BOTH, knows_prompt),
    "a prompt id is a string": Fault(
        "malformed-value", in_prompt(lambda ids: [*ids, "x"]), BOTH,
        lambda name, variant: knows_prompt(name, variant) and has_lists(name, variant)),
    "a prompt without ids": Fault(
        "prompt-empty", in_prompt(lambda ids: []), BOTH,
        # Of these two it cannot be told from a file without prompts.
        lambda name, variant: knows_prompt(name, variant) and variant.form not in {"prime-rl", "miles"}),
    "supports of what it was asked in front": Fault(
        "supports-of-prompt", with_prompt, WHOLE, lambda name, variant: name in WITH_PROMPT),
    "supports one token late": Fault("supports-shifted", shift(1), WHOLE),
    "supports one token early": Fault("supports-shifted", shift(-1), WHOLE),
    "ids plus one": Fault("ids-off-by-one", renumber(1), WHOLE),
    "ids minus one": Fault("ids-off-by-one", renumber(-1), WHOLE),
    "supports of two rows exchanged": Fault("supports-of-other-row", swap, ((1, -1), (ROW, -1))),
    "a support too few": Fault(
        "support-count",
        lambda rows: change(rows, supports=rows[ROW].supports[:-1], kept_logprobs=rows[ROW].kept_logprobs[:-1]), WHOLE,
        lambda name, variant: name not in ONE_NUMBER),
    "a support too many": Fault(
        "support-count",
        lambda rows: change(
            rows, supports=[*rows[ROW].supports, [1]], kept_logprobs=[*rows[ROW].kept_logprobs, [0.0]]), WHOLE,
        lambda name, variant: name not in ONE_NUMBER),
    "a support is null": Fault("support-missing", in_support(lambda ids, drawn: None), fits=has_lists),
    "a support of no ids is none": Fault(
        "support-missing", in_support(lambda ids, drawn: []), fits=lambda name, variant: name in EMPTY_IS_NONE),
    "all supports are null": Fault(
        "support-missing", lambda rows: change(rows, supports=None, kept_logprobs=None), WHOLE,
        lambda name, variant: has_lists(name, variant) and name not in {"vllm-stream", "sglang-batch"}),
    "a support is empty": Fault(
        "support-empty", in_support(lambda ids, drawn: []), fits=lambda name, variant: name not in EMPTY_IS_NONE),
    "a support id is V": Fault("support-outside-vocabulary", in_support(lambda ids, drawn: [*ids, VOCAB_SIZE])),
    "a support id is -1": Fault("support-outside-vocabulary", in_support(lambda ids, drawn: [-1, *ids])),
    "an id twice in a support": Fault("support-id-twice", in_support(lambda ids, drawn: sorted([*ids, ids[0]]))),
    "the drawn id taken out": Fault(
        "sampled-outside", in_support(lambda ids, drawn: [one for one in ids if one != drawn])),
    "an id that is not allowed": Fault(
        "support-id-not-allowed", allow_all_but_one, (),
        # SGLang has no such setting, and neither have those who train with its samples.
        lambda name, variant: variant.has_settings and variant.form in {"vllm", "rollout"}),
    "tokens behind a tool's with a penalty": Fault(
        "trains-behind-others", with_tool, ((ROW, POSITION), (ROW, POSITION + 1)),
        lambda name, variant: variant.form == "miles" and variant.has_settings),
    "an id with logit -inf": Fault("support-id-impossible", in_logits(make_impossible), fits=has_logits),
    "an id kept at minus infinity": Fault(
        "support-id-impossible", one_more(-9999.0), fits=lambda name, variant: variant.has_kept),
    "an id below min-p": Fault(
        "support-past-filters", one_more(-30.0),
        fits=lambda name, variant: variant.has_kept and variant.has_settings and not variant.has_logits),
    "a larger logit left out": Fault("support-not-largest", in_logits(raise_outside), fits=has_logits),
    "a token behind the stop id": Fault(
        "trains-behind-stop", stop_at, fits=lambda name, variant: not variant.has_logits,
        options=(("eos_token_ids", (STOP,)),)),
    "temperature 0": Fault(
        "temperature-zero", lambda rows: both(rows, temperature=0.0), BOTH,
        # SGLang takes it for top-k 1.
        lambda name, variant: variant.has_settings and variant.form != "sglang"),
    "a log-probability is null": Fault(
        "logprob-missing", in_logprob(lambda row: None),
        fits=lambda name, variant: has_lists(name, variant) and name not in OF_KEPT),
    "all log-probabilities are null": Fault(
        "logprob-missing", lambda rows: change(rows, logprobs=None), WHOLE,
        lambda name, variant: has_lists(name, variant) and name not in OF_KEPT | {"vllm-stream"}),
    "a log-probability too few": Fault(
        "logprob-count", lambda rows: change(rows, logprobs=rows[ROW].logprobs[:-1]), WHOLE,
        lambda name, variant: name not in OF_KEPT | ONE_NUMBER),
    "a log-probability of -9999": Fault(
        "logprob-not-finite", in_logprob(lambda row: -9999.0), fits=has_own_logprobs),
    "a log-probability of NaN": Fault(
        "logprob-not-finite", in_logprob(lambda row: float("nan")), fits=has_own_logprobs),
    "a log-probability above 0": Fault("logprob-above-zero", in_logprob(lambda row: 0.25), fits=has_own_logprobs),
    "a certain token that is not": Fault(
        "logprob-not-over-support", certain_but_raw, fits=lambda name, variant: not variant.has_logits),
    "log-probability over the vocabulary": Fault(
        "logprob-not-over-support", in_logprob(lambda row: row.full_logprobs[POSITION]), fits=has_logits),
    "temperature not applied": Fault(
        "temperature-not-applied", in_logprob(lambda row: at_temperature(row, 1.0)), fits=has_logits),
    "log-probability over temperature": Fault(
        "temperature-on-logprob", in_logprob(lambda row: at_temperature(row, 1.0) / row.temperature),
        fits=has_logits),
    "kept log-probabilities sum to more": Fault("kept-sum", kept_too_high, fits=has_kept),
    "not what was kept for its id": Fault(
        "kept-differs", in_logprob(lambda row: row.logprobs[POSITION] - 0.5),
        fits=lambda name, variant: variant.has_kept and name not in OF_KEPT),
    "more over the vocabulary": Fault(
        "full-above-support",
        lambda rows: change(
            rows, full_logprobs=put(rows[ROW].full_logprobs, POSITION, rows[ROW].logprobs[POSITION] + 0.1)),
        fits=lambda name, variant: variant.has_full),
    "ids not in order": Fault("ids-not-ascending", in_support(lambda ids, drawn: ids[::-1])),
    "more ids than top-k": Fault(
        "wider-than-top-k", lower_top_k, (),
        lambda name, variant: variant.has_settings and not (variant.has_kept or variant.has_logits)),
    "more ids than top-k that do not tie": Fault(
        "support-past-filters", lower_top_k, (),
        lambda name, variant: variant.has_settings and (variant.has_kept or variant.has_logits)),
    "a completion twice": Fault("duplicate-completion", lambda rows: rows.__setitem__(ROW, rows[ROW - 1]), WHOLE),
    "another top-p in a group": Fault(
        "group-settings-differ", lambda rows: change(rows, top_p=0.91), WHOLE,
        lambda name, variant: variant.has_settings and variant.has_groups and name not in OF_GROUP),
}  # fmt: skip
