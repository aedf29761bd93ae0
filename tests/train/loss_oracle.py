"""Losses and their gradients in float64 NumPy, token by token, from the papers' formulas. For the tests alone."""

import numpy as np


def clip_term(ratio, advantage, low, high):
    """-min(ratio A, clip(ratio) A), and whether its gradient is there."""
    unclipped, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    return -min(unclipped, clipped), unclipped <= clipped


def grpo(row, low, high):
    for t in row.tokens:
        ratio = np.exp(row.logprobs[t] - row.old[t])
        value, is_free = clip_term(ratio, row.advantages[t], low, high)
        yield t, value, {t: -ratio * row.advantages[t] if is_free else 0.0}


def gspo(row, low, high):
    ratio = np.exp(np.mean([row.logprobs[t] - row.old[t] for t in row.tokens]))
    advantage = np.mean([row.advantages[t] for t in row.tokens])
    value, is_free = clip_term(ratio, advantage, low, high)
    slope = -ratio * advantage / len(row.tokens) if is_free else 0.0
    for t in row.tokens:
        yield t, value, dict.fromkeys(row.tokens, slope)


def gspo_token(row, low, high):
    ratio = np.exp(np.mean([row.logprobs[t] - row.old[t] for t in row.tokens]))
    for t in row.tokens:
        value, is_free = clip_term(ratio, row.advantages[t], low, high)
        yield t, value, {t: -ratio * row.advantages[t] if is_free else 0.0}


def cispo(row, low, high):
    for t in row.tokens:
        weight = min(np.exp(row.logprobs[t] - row.old[t]), high)
        yield t, -weight * row.advantages[t] * row.logprobs[t], {t: -weight * row.advantages[t]}


def reinforce(row, low, high):
    for t in row.tokens:
        yield t, -row.advantages[t] * row.logprobs[t], {t: -row.advantages[t]}


class Row:
    """One sequence: the places of its sampled tokens, and float64 values at all places."""

    def __init__(self, inputs, index):
        def values(field, default):
            array = getattr(inputs, field)
            array = np.full(inputs.loss_mask.shape, default) if array is None else np.asarray(array, np.float64)
            return array[index] if array.ndim == 2 else np.full(inputs.loss_mask.shape[1], array[index])

        self.tokens = np.flatnonzero(np.asarray(inputs.loss_mask)[index]).tolist()
        self.logprobs = values("logprobs", 0.0)
        self.old = values("behaviour_logprobs" if inputs.old_logprobs is None else "old_logprobs", 0.0)
        self.advantages = values("advantages", 0.0)
        self.factors = values("weights", 1.0) * values("correction", 1.0)


def total_and_gradient(formula, inputs, low, high):
    """Weighted sum of a formula's terms, and its gradient with respect to `logprobs`."""
    total, gradient = 0.0, np.zeros(inputs.loss_mask.shape)
    for index in range(inputs.loss_mask.shape[0]):
        row = Row(inputs, index)
        if row.tokens:
            for t, value, slopes in formula(row, low, high):
                total += row.factors[t] * value
                for place, slope in slopes.items():
                    gradient[index, place] += row.factors[t] * slope
    return total, gradient
