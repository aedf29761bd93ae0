"""`python -m serve`."""

import os
import sys

from serve.cli import INTERRUPTED, main

code = main(sys.argv[1:])
if code == INTERRUPTED:
    # What was interrupted still computes, and JAX does not survive a shutdown meanwhile.
    os._exit(code)
sys.exit(code)
