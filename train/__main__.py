"""`python -m train`."""

import os
import sys

from train.cli import main

code = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
if code:
    # At once: threads of a failed checkpoint read outlive it, and would put a traceback under the error's one line.
    os._exit(code)
