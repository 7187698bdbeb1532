# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reference applications: the only place that knows all six wheels."""

import time

STARTED_AT = time.time()
"""When this process began to import an application, in seconds since the epoch."""
