"""Support-exact sampling and learning for LLM reinforcement learning in JAX."""
