"""Every tolerance of the core tests, with its reason. None is ever widened to make a test pass."""

# float32 log-probabilities against float64, absolute; relative where the value itself is beyond 1.
LOGPROB = 1e-5

# A cumulative mass this close to top_p (relative), or a z this close to ln(min_p), is decided by float32 rounding.
EDGE = 1e-5

# float32 gradients against closed forms in float64, relative to the largest entry.
GRADIENT = 1e-5

# bfloat16 inputs are exact in float32; what is left is the rounding of a bfloat16 gradient (8 bits).
BFLOAT16_GRADIENT = 2.0**-8

# float32 edits against hand-computed values.
EDIT = 1e-6

# Chance that a statistical test of correct code fails. Seeds are fixed, so a passing test keeps passing.
FALSE_ALARM = 1e-6
