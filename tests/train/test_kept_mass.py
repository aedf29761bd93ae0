import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, TASK, make_model, rollout_of

from train.kept_mass import kept_mass
from train.rows import learner_rows


@pytest.mark.slow
def test_the_kept_mass_is_that_of_the_whole_softmax_over_the_support(state):
    """Against a float64 softmax of all logits, summed over each token's ids; the policy need not be the sampler's."""
    rollout = rollout_of(state)
    model = make_model(seed=1)
    sampled_mask = jnp.ones((16, 3), bool).at[3].set(False)
    rollout = dataclasses.replace(rollout, sampled_mask=sampled_mask)
    rows = jax.jit(learner_rows)(rollout, jnp.zeros(16))
    first = int(rollout.prompt_lengths[0]) - 1
    logits = jax.jit(lambda model, ids: model.logits(ids))(model, rows.token_ids)[:, first : first + 3]
    wanted = np.asarray(logits, np.float64)[..., : TASK.vocab_size] / CONFIG.temperature
    shares = np.exp(wanted - wanted.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    masses = (shares * np.asarray(rollout.support.to_mask())).sum(axis=-1)[np.asarray(rollout.loss_mask)]
    assert masses.min() < 0.9
    parts = dataclasses.replace(CONFIG, num_micro_batches=2)
    assert float(kept_mass(model, rollout, parts)) == pytest.approx(masses.mean(), abs=1e-5)
    nothing = dataclasses.replace(rollout, sampled_mask=jnp.zeros((16, 3), bool))
    assert float(kept_mass(model, nothing, parts)) == 0
