"""Kernels, one folder an operation: `api` picks an implementation, `reference` is plain JAX."""
