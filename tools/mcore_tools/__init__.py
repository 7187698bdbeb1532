# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The applications: train, distill, post-train and serve models with the six wheels, which know nothing of this package."""

import time

STARTED_AT = time.time()
"""When this process began to import an application, in seconds since the epoch."""
