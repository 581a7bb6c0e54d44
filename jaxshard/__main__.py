"""`python -m jaxshard` is the command `jaxshard`."""

import sys

from jaxshard.cli import main

sys.exit(main())
