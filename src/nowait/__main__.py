"""`python -m nowait` is the command `nowait`."""

import sys

from nowait.cli import main

sys.exit(main())
