# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``python -m mcore_tools.rl``: `mcore rl`, by its own name."""

import sys

from mcore_tools.reinforce import main

if __name__ == "__main__":
    sys.exit(main())
