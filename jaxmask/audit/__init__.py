"""Checks on anyone's rollouts, and what truncation did to them: `jaxmask audit FILE`.

On the host, with NumPy alone, block by block: a file may be larger than the memory.
"""
