"""`python -m look RUN`: see look/show.py."""

import sys

from host.console import printable
from look.show import main

try:
    main(sys.argv[1:])
except BrokenPipeError:  # | head
    sys.exit(0)
except (ValueError, OSError) as error:
    sys.exit(f"error: {printable(str(error))}")
