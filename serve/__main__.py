"""`python -m serve`."""

import sys

from serve.cli import main

sys.exit(main(sys.argv[1:]))
